#include "linear_int.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11

#include <algorithm>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,amx-tile,amx-int8")
#include <immintrin.h>

namespace xs {
namespace {

#include "linear_bf16_share.inc"
#include "linear_int_share.inc"
#include "linear_finish_avx512.inc"
#include "linear_int_avx512.inc"
#include "tiles.inc"

constexpr int64_t kLine = 64;                            // a step of 16 outputs
constexpr int64_t kGroupBytes = 2 * kIntSteps * kLine;  // of both halves, a byte a weight

// Tiles 0 and 1 are dot products [16 rows, 16 outputs] of one group, 2 and 3 rows of x [16, 32], 4 and 5
// weights [8 steps, 16 outputs x 4 inputs].
void shape_tiles() {
  TileShapes shapes;
  for (const int tile : {0, 1}) shapes.set(tile, kTileRows, kTileBytes);
  for (const int tile : {2, 3}) shapes.set(tile, kTileRows, kIntGroup);
  for (const int tile : {4, 5}) shapes.set(tile, kIntSteps, kTileBytes);
  shapes.load();
}

// A panel's weights a byte each, [groups][8 steps][2 halves][16][4] as int8 has them.
void widen_nibbles(const char* from, int64_t groups, char* to) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (int64_t group = 0; group < groups; ++group, to += kGroupBytes) {
    for (int64_t at = 0; at < kGroupBytes / 2; at += kLine, from += kLine) {
      const __m512i both = _mm512_loadu_si512(from);
      _mm512_store_si512(to + at, _mm512_and_si512(both, mask));
      _mm512_store_si512(to + kGroupBytes / 2 + at, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask));
    }
  }
}

// 16 rows times one half of a panel.
struct Product {
  const Lines& x;
  const char* weights;  // of the half, group 0
  const char* scales;   // of the panel
  int half;
};

// What a group adds to the sums of 16 rows: the very steps of the vector kernel.
template <Format F>
inline void add_group(const Product& of, int64_t group, const int32_t* dots, __m512 sum[kTileRows]) {
  const Lines& x = of.x;
  __m512 factor, minimum;
  load_scales<F>(of.scales + group * scale_bytes(F), of.half, factor, minimum);
  const float *scale = x.scale + group, *total = x.sum + group;
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) {
    __m512i dot = _mm512_load_si512(dots + row * 16);
    if (F == Format::int8) dot = _mm512_add_epi32(dot, _mm512_set1_epi32(x.start[row * x.groups + group]));
    const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), factor);
    sum[row] = _mm512_fmadd_ps(product, _mm512_set1_ps(scale[row * x.groups]), sum[row]);
    if (F == Format::int8) continue;
    sum[row] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(total[row * x.groups]), sum[row]);
  }
}

// sums [16, 32], of which it writes the half. The dot products of the next group are on their way while those
// of this one are scaled.
template <Format F>
void multiply_half(const Product& of, float* sums) {
  alignas(64) int32_t dots[2][kTileRows * 16];
  __m512 sum[kTileRows];
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) sum[row] = _mm512_setzero_ps();
  const Lines& x = of.x;
  const auto even = [&](int64_t group) {
    _tile_zero(0);
    _tile_loadd(2, x.q + group * kIntGroup, x.in);
    _tile_loadd(4, of.weights + group * kGroupBytes, 2 * kLine);
    _tile_dpbsud(0, 2, 4);
    _tile_stored(0, dots[0], kTileBytes);
  };
  const auto odd = [&](int64_t group) {
    _tile_zero(1);
    _tile_loadd(3, x.q + group * kIntGroup, x.in);
    _tile_loadd(5, of.weights + group * kGroupBytes, 2 * kLine);
    _tile_dpbsud(1, 3, 5);
    _tile_stored(1, dots[1], kTileBytes);
  };
  written();
  even(0);
  int64_t group = 0;
  for (; group + 1 < x.groups; group += 2) {
    odd(group + 1);
    add_group<F>(of, group, dots[0], sum);
    if (group + 2 < x.groups) even(group + 2);
    add_group<F>(of, group + 1, dots[1], sum);
  }
  if (group < x.groups) add_group<F>(of, group, dots[0], sum);
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) _mm512_store_ps(sums + row * kPanel + of.half * 16, sum[row]);
}

template <Format F>
void run(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, const Target& to) {
  const Plan plan = plan_work(linear, rows, kTileRows);
  const int64_t groups = linear.in / kIntGroup;
  const int32_t* start = nullptr;
  char* widened = nullptr;
  if (F == Format::int8) start = starts(worker, x, rows * groups);
  if (nibbles(F)) widened = static_cast<char*>(worker.scratch(static_cast<size_t>(groups * kGroupBytes)));
  Shares shares(plan, worker.count);
  alignas(64) float sums[kTileRows * kPanel];
  int64_t wide = -1;  // the panel that is widened
  shape_tiles();
  while (true) {
    const Range range = shares.take(worker.next());
    if (range.first >= range.last) break;
    for (int64_t unit = range.first; unit < range.last; ++unit) {
      const int64_t panel = unit % plan.panels, first = unit / plan.panels * plan.block;
      const int64_t end = std::min(first + plan.block, rows), at = panel * groups;
      const char* weights = static_cast<const char*>(linear.weights) + at * weight_bytes(F);
      const char* scales = static_cast<const char*>(linear.scales) + at * scale_bytes(F);
      if (nibbles(F)) {
        if (panel != wide) widen_nibbles(weights, groups, widened);
        wide = panel;
        weights = widened;
      }
      for (int64_t row = first; row < end; row += kTileRows) {
        // The last tile of all begins early enough to be full; only its new rows are stored.
        const int64_t begin = std::min(row, rows - kTileRows), from = begin * groups;
        const int32_t* own = start == nullptr ? nullptr : start + from;
        const Lines lines{x.q + begin * linear.in, x.scale + from, x.sum + from, own, linear.in, groups};
        for (int half = 0; half < 2; ++half) {
          multiply_half<F>(Product{lines, weights + half * kLine, scales, half}, sums);
        }
        finish(linear, sums + (row - begin) * kPanel, panel, row, std::min(end - row, kTileRows), to);
      }
    }
  }
  _tile_release();
}

}  // namespace

// Dot products of a group are exact integers and all that follows is as with vectors, so both give the same
// bits: fewer rows than a tile has are left to them.
void amx_linear_int(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y,
                    int64_t y_stride, const bf16* add, int64_t add_stride) {
  if (rows < kTileRows) return avx512_linear_int(worker, linear, x, rows, y, y_stride, add, add_stride);
  const Target to{y, y_stride, add, add_stride};
  switch (linear.format) {
    case Format::int8: return run<Format::int8>(worker, linear, x, rows, to);
    case Format::int4: return run<Format::int4>(worker, linear, x, rows, to);
    case Format::int8_wide: return run<Format::int8_wide>(worker, linear, x, rows, to);
    default: return run<Format::int4_wide>(worker, linear, x, rows, to);
  }
}

}  // namespace xs

#endif
