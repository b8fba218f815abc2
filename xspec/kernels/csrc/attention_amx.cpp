#include "attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-bf16")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx512.inc"
#include "lanes_dot512.inc"
#include "exp2.inc"
#include "tiles.inc"

constexpr int kMaxPairs = 16;  // (row, head) pairs that read keys together: the rows of a tile

#include "attention_unit.inc"

constexpr int kTogether = 4;  // tiles of sums
static_assert(kKeyBlock == kTileRows && kLines == 1);

// Tiles 0 to 3 are sums [pairs, 16]. 4 is queries [pairs, 32 dims], 6 keys [16 pairs of dims, 16 keys];
// 5 is weights [pairs, 16 keys], 7 values [8 pairs of keys, 16 dims].
void begin_products(int pairs) {
  TileShapes shapes;
  for (const int tile : {0, 1, 2, 3, 4}) shapes.set(tile, pairs, kTileBytes);
  shapes.set(5, pairs, kTileBytes / 2);
  shapes.set(6, kTileRows, kTileBytes);
  shapes.set(7, kTileRows / 2, kTileBytes);
  shapes.load();
}

// The 16 lines at `at` and on, `stride` bytes apart.
inline void prefetch_tile(const bf16* at, int64_t stride) {
  for (int line = 0; line < 16; ++line) {
    _mm_prefetch(reinterpret_cast<const char*>(at) + line * stride, _MM_HINT_T1);
  }
}

// score[pair][...] = q . k of N blocks of keys from `block` on.
template <int N>
void score_blocks(State& state, const Blocks& blocks, int block, int64_t dim) {
  constexpr int64_t kQueryBytes = sizeof state.query[0], kScoreBytes = sizeof state.score[0];
  written();
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (N > 2) _tile_zero(2);
  if constexpr (N > 3) _tile_zero(3);
  for (int64_t d = 0; d < dim; d += 32) {
    _tile_loadd(4, state.query[0] + d / 2, kQueryBytes);
    const auto multiply = [&](int n) {
      _tile_loadd(6, blocks.keys[block + n] + d * kKeyBlock, kTileBytes);
      prefetch_tile(blocks.values[block + n] + d * kKeyBlock, kTileBytes);
    };
    multiply(0);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N > 1) {
      multiply(1);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (N > 2) {
      multiply(2);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (N > 3) {
      multiply(3);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  float* score = state.score[0] + block * kKeyBlock;
  _tile_stored(0, score, kScoreBytes);
  if constexpr (N > 1) _tile_stored(1, score + kKeyBlock, kScoreBytes);
  if constexpr (N > 2) _tile_stored(2, score + 2 * kKeyBlock, kScoreBytes);
  if constexpr (N > 3) _tile_stored(3, score + 3 * kKeyBlock, kScoreBytes);
}

void score_tile(State& state, int, const Blocks& blocks, int64_t dim) {
  int block = 0;
  for (; block + kTogether <= blocks.count; block += kTogether) {
    score_blocks<kTogether>(state, blocks, block, dim);
  }
  for (; block < blocks.count; ++block) score_blocks<1>(state, blocks, block, dim);
}

// Adds weight * value of the tile to N vectors of dims from `d` on.
template <int N>
void mix_dims(State& state, const Blocks& blocks, const Blocks& next, int64_t d, int64_t dim) {
  constexpr int64_t kMixedBytes = sizeof state.mixed[0], kWeightBytes = sizeof state.weight[0];
  float* mixed = state.mixed[0] + d;
  written();
  _tile_loadd(0, mixed, kMixedBytes);
  if constexpr (N > 1) _tile_loadd(1, mixed + 16, kMixedBytes);
  if constexpr (N > 2) _tile_loadd(2, mixed + 32, kMixedBytes);
  if constexpr (N > 3) _tile_loadd(3, mixed + 48, kMixedBytes);
  const int64_t line = dim * 4;  // bytes of a pair of keys
  for (int block = 0; block < blocks.count; ++block) {
    const bf16* at = blocks.values[block] + 2 * d;
    // Without a next block, the one at hand: fetching it again costs nothing.
    const bf16* then = block < next.count ? next.keys[block] + 2 * d : at;
    _tile_loadd(5, state.weight[0] + block * (kKeyBlock / 2), kWeightBytes);
    _tile_loadd(7, at, line);
    _tile_dpbf16ps(0, 5, 7);
    if constexpr (N > 1) {
      _tile_loadd(7, at + 32, line);
      _tile_dpbf16ps(1, 5, 7);
    }
    if constexpr (N > 2) {
      _tile_loadd(7, at + 64, line);
      _tile_dpbf16ps(2, 5, 7);
    }
    if constexpr (N > 3) {
      _tile_loadd(7, at + 96, line);
      _tile_dpbf16ps(3, 5, 7);
    }
    for (int pair = 0; pair < 8; ++pair) {
      for (int n = 0; n < N; ++n) prefetch(then + pair * 2 * dim + n * 32);
    }
  }
  _tile_stored(0, mixed, kMixedBytes);
  if constexpr (N > 1) _tile_stored(1, mixed + 16, kMixedBytes);
  if constexpr (N > 2) _tile_stored(2, mixed + 32, kMixedBytes);
  if constexpr (N > 3) _tile_stored(3, mixed + 48, kMixedBytes);
}

void mix_tile(State& state, int pairs, const Blocks& blocks, const Blocks& next, int64_t dim) {
  for (int pair = 0; pair < pairs; ++pair) {
    const Floats shrink = splat(state.shrink[pair]);
    for (int64_t d = 0; d < dim; d += kLanes) {
      store(state.mixed[pair] + d, multiply(load(state.mixed[pair] + d), shrink));
    }
  }
  int64_t d = 0;
  for (; d + kTogether * kLanes <= dim; d += kTogether * kLanes) {
    mix_dims<kTogether>(state, blocks, next, d, dim);
  }
  for (; d < dim; d += kLanes) mix_dims<1>(state, blocks, next, d, dim);
  for (int block = blocks.count; block < next.count; ++block) {
    for (int64_t i = 0; i < dim / 2; ++i) prefetch(next.keys[block] + i * 2 * kKeyBlock);
  }
}

#include "attention.inc"

}  // namespace

void amx_attend(Worker& worker, const Attend& step) {
  attend_all(worker, step);
  _tile_release();
}

}  // namespace xs

#endif
