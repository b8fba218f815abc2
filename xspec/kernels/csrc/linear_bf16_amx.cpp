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

// For pass `group` of `groups` over a panel. Measured on Sapphire Rapids: a lone pass fetches a little ahead of
// itself; several fetch the next panel between them, evenly.
Prefetch prefetch_for(const char* panel, int64_t panel_bytes, int64_t group, int64_t groups) {
  if (groups == 1) return {panel + 8192, kStepBytes / 64};
  return {panel + panel_bytes + panel_bytes * group / groups, static_cast<int>(kStepBytes / 64 / groups)};
}

inline void fetch(Prefetch& next) {
  for (int line = 0; line < next.lines; ++line) _mm_prefetch(next.at + line * 64, _MM_HINT_T1);
  next.at += next.lines * 64;
}

// sums [Tiles * 16, 32] = Tiles x 16 rows times one panel. Every sum is one chain over the inputs in order.
template <int Tiles>
void multiply(const char* x, const char* second, int64_t stride, const char* panel, int64_t steps,
              Prefetch next, float* sums) {
  written();
  _tile_zero(0);
  _tile_zero(1);
  if (Tiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
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
  constexpr int64_t kSumBytes = kPanel * sizeof(float);
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + 16, kSumBytes);
  if (Tiles == 2) {
    _tile_stored(2, sums + kTileRows * kPanel, kSumBytes);
    _tile_stored(3, sums + kTileRows * kPanel + 16, kSumBytes);
  }
}

}  // namespace

// Tiles have the same height in the whole call: 16, or all rows. The last one of a block begins early enough
// to be full, and of what it shares with the one before only the new rows are stored.
void amx_linear_bf16(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y,
                     int64_t y_stride, const bf16* add, int64_t add_stride) {
  if (rows == 0) return;
  const Plan plan = plan_work(linear, rows, kGroup);
  const int64_t steps = linear.in / 32, panel_bytes = linear.in * 64, stride = x.stride * 2;
  const int64_t height = std::min(rows, kTileRows);
  const Target to{y, y_stride, add, add_stride};
  const auto* values = reinterpret_cast<const char*>(x.values);
  Shares shares(plan, worker.count);
  alignas(64) float sums[kGroup * kPanel];
  shape_tiles(height);
  while (true) {
    const Range range = shares.take(worker.next());
    if (range.first >= range.last) break;
    for (int64_t unit = range.first; unit < range.last; ++unit) {
      const int64_t panel = unit % plan.panels, start = unit / plan.panels * plan.block;
      const int64_t end = std::min(start + plan.block, rows);
      const char* weights = static_cast<const char*>(linear.weights) + panel * panel_bytes;
      const int64_t groups = (end - start + kGroup - 1) / kGroup;
      for (int64_t row = start, group = 0; row < end; row += kGroup, ++group) {
        const Prefetch next = prefetch_for(weights, panel_bytes, group, groups);
        const int64_t at[2] = {std::min(row, rows - height), std::min(row + kTileRows, rows - height)};
        const bool both = row + kTileRows < end;
        const auto run = both ? multiply<2> : multiply<1>;
        run(values + at[0] * stride, values + at[1] * stride, stride, weights, steps, next, sums);
        finish(linear, sums + (row - at[0]) * kPanel, panel, row, std::min(end, row + kTileRows) - row, to);
        if (!both) continue;
        const int64_t then = row + kTileRows;
        finish(linear, sums + (kTileRows + then - at[1]) * kPanel, panel, then,
               std::min(end, then + kTileRows) - then, to);
      }
    }
  }
  _tile_release();
}

}  // namespace xs

#endif
