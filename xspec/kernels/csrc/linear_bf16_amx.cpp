#include "linear.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11

#include <algorithm>
#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-bf16")
#include <immintrin.h>

namespace xs {
namespace {

#include "linear_bf16_share.inc"
#include "linear_finish_avx512.inc"
#include "tiles.inc"

// Of x a tile holds 16 rows x 32 inputs, of a panel 16 pairs of inputs x 16 outputs, which are every other
// line of it, of sums 16 rows x 16 outputs.
constexpr int64_t kStepBytes = 32 * kPanel * sizeof(bf16);
constexpr int64_t kGroup = 2 * kTileRows;  // rows a kernel takes at most

// Tiles 0 to 3 are sums, 4 and 5 are x, 6 and 7 weights.
void shape_tiles(int64_t rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, tile < 6 ? rows : kTileRows, kTileBytes);
  shapes.load();
}

// What a kernel fetches into the second-level cache with each step: `lines` cache lines from `at` on.
struct Prefetch {
  const char* at;
  int lines;
};

// For pass `pass` of `passes` over a part of a panel. Measured on Sapphire Rapids: a lone pass fetches a
// little ahead of itself; several fetch the next part between them, evenly.
Prefetch prefetch_for(const char* part, int64_t part_bytes, int64_t pass, int64_t passes) {
  if (passes == 1) return {part + 8192, kStepBytes / 64};
  return {part + part_bytes + part_bytes * pass / passes, static_cast<int>(kStepBytes / 64 / passes)};
}

inline void fetch(Prefetch& next) {
  for (int line = 0; line < next.lines; ++line) _mm_prefetch(next.at + line * 64, _MM_HINT_T1);
  next.at += next.lines * 64;
}

// sums [Tiles * 16, 32] = Tiles x 16 rows times part of a panel, added to what is there unless it is the
// first part. Every sum is one chain over the inputs in order.
template <int Tiles>
void multiply(const char* x, const char* second, int64_t stride, const char* panel, int64_t steps, bool first,
              Prefetch next, float* sums) {
  constexpr int64_t kSumBytes = kPanel * sizeof(float), kTileSums = kTileRows * kPanel;
  written();
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if (Tiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, kSumBytes);
    _tile_loadd(1, sums + 16, kSumBytes);
    if (Tiles == 2) {
      _tile_loadd(2, sums + kTileSums, kSumBytes);
      _tile_loadd(3, sums + kTileSums + 16, kSumBytes);
    }
  }
  for (int64_t step = 0; step < steps; ++step, panel += kStepBytes, x += kTileBytes, second += kTileBytes) {
    _tile_loadd(6, panel, 128);
    _tile_loadd(4, x, stride);
    fetch(next);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 64, 128);
    _tile_dpbf16ps(1, 4, 7);
    if (Tiles == 2) {
      _tile_loadd(5, second, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + 16, kSumBytes);
  if (Tiles == 2) {
    _tile_stored(2, sums + kTileSums, kSumBytes);
    _tile_stored(3, sums + kTileSums + 16, kSumBytes);
  }
}

// The rows of a block as tiles of one height, 16 or all rows there are. The last one of all begins early
// enough to be full: of what it shares with the one before, only the new rows are stored.
struct Tiles {
  int64_t start, end;  // rows of the block
  int64_t latest;      // where a tile may begin at most

  int64_t count() const { return (end - start + kTileRows - 1) / kTileRows; }
  int64_t wanted(int64_t tile) const { return start + tile * kTileRows; }
  int64_t begin(int64_t tile) const { return std::min(wanted(tile), latest); }
};

// sums [tiles * 16, 32] = the block times one panel. Where several passes read the panel it is taken in parts
// that stay in the first-level cache.
void multiply_block(const Tiles& tiles, const char* x, int64_t stride, const char* panel, int64_t steps,
                    float* sums) {
  constexpr int64_t kPartSteps = 6;
  const int64_t count = tiles.count(), passes = (count + 1) / 2;
  const int64_t parts = passes == 1 ? 1 : (steps + kPartSteps - 1) / kPartSteps;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = steps * part / parts, size = steps * (part + 1) / parts - from;
    const char* weights = panel + from * kStepBytes;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const Prefetch next = prefetch_for(weights, size * kStepBytes, pass, passes);
      const int64_t tile = 2 * pass;
      const char* first = x + tiles.begin(tile) * stride + from * kTileBytes;
      const char* second = x + tiles.begin(tile + 1) * stride + from * kTileBytes;
      const auto run = tile + 1 < count ? multiply<2> : multiply<1>;
      run(first, second, stride, weights, size, part == 0, next, sums + tile * kTileRows * kPanel);
    }
  }
}

}  // namespace

void amx_linear_bf16(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y,
                     int64_t y_stride, const bf16* add, int64_t add_stride) {
  if (rows == 0) return;
  const Plan plan = plan_work(linear, rows, kGroup);
  const int64_t height = std::min(rows, kTileRows);
  const Target to{y, y_stride, add, add_stride};
  const auto* values = reinterpret_cast<const char*>(x.values);
  Shares shares(plan, worker.count);
  alignas(64) float sums[kBlockRows * kPanel];
  shape_tiles(height);
  while (true) {
    const Range range = shares.take(worker.next());
    if (range.first >= range.last) break;
    for (int64_t unit = range.first; unit < range.last; ++unit) {
      const int64_t panel = unit % plan.panels, start = unit / plan.panels * plan.block;
      const Tiles tiles{start, std::min(start + plan.block, rows), rows - height};
      const char* weights = static_cast<const char*>(linear.weights) + panel * linear.in * 64;
      multiply_block(tiles, values, x.stride * 2, weights, linear.in / 32, sums);
      for (int64_t tile = 0; tile < tiles.count(); ++tile) {
        const int64_t row = tiles.wanted(tile), skipped = row - tiles.begin(tile);
        finish(linear, sums + (tile * kTileRows + skipped) * kPanel, panel, row,
               std::min(tiles.end - row, kTileRows), to);
      }
    }
  }
  _tile_release();
}

}  // namespace xs

#endif
