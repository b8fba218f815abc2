#include "linear.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <algorithm>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx512.inc"
#include "lanes_fma512.inc"
#include "linear_bf16_share.inc"
#include "linear_finish_avx512.inc"

constexpr int kGroup = 12;  // rows a kernel takes at most: 24 of the 32 registers are sums

// What a kernel fetches into the second-level cache while it multiplies: a line from `at` on for each pair
// of inputs, `step` bytes on each time, and with `both` the line after it too.
struct Prefetch {
  const char* at;
  int64_t step;
  bool both;
};

// For pass `group` of `groups` over a panel: a lone pass fetches a little ahead of itself, several fetch the
// next panel between them, evenly.
Prefetch prefetch_for(const char* panel, int64_t panel_bytes, int64_t group, int64_t groups) {
  if (groups == 1) return {panel + 8192, 128, true};
  return {panel + panel_bytes + panel_bytes * group / groups, 128 / groups, false};
}

// sums [R, 32] = x [R, in] times one panel. Every sum is one chain over the inputs in order.
template <int R>
void multiply(const float* x, int64_t in, const char* panel, Prefetch fetch, float* sums) {
  __m512 sum[R][2];
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
  // A pointer for every three rows: the processor adds once and twice the stride by itself.
  const float* third[(R + 2) / 3];
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; ++i) third[i] = x + 3 * i * in;
  for (int64_t i = 0; i < in; i += 4) {
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair, panel += 128) {
      const Line low = load_line(reinterpret_cast<const bf16*>(panel));
      const Line high = load_line(reinterpret_cast<const bf16*>(panel + 64));
      _mm_prefetch(fetch.at, _MM_HINT_T1);
      if (fetch.both) _mm_prefetch(fetch.at + 64, _MM_HINT_T1);
      fetch.at += fetch.step;
#pragma GCC unroll 12
      for (int row = 0; row < R; ++row) {
        const __m512 value = _mm512_set1_ps(third[row / 3][row % 3 * in + i + 2 * pair]);
        sum[row][0] = _mm512_fmadd_ps(low.even, value, sum[row][0]);
        sum[row][1] = _mm512_fmadd_ps(high.even, value, sum[row][1]);
      }
#pragma GCC unroll 12
      for (int row = 0; row < R; ++row) {
        const __m512 value = _mm512_set1_ps(third[row / 3][row % 3 * in + i + 2 * pair + 1]);
        sum[row][0] = _mm512_fmadd_ps(low.odd, value, sum[row][0]);
        sum[row][1] = _mm512_fmadd_ps(high.odd, value, sum[row][1]);
      }
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row) {
    _mm512_store_ps(sums + row * kPanel, sum[row][0]);
    _mm512_store_ps(sums + row * kPanel + 16, sum[row][1]);
  }
}

using Multiply = void (*)(const float*, int64_t, const char*, Prefetch, float*);

constexpr Multiply kMultiply[kGroup + 1] = {
    nullptr,     multiply<1>, multiply<2>, multiply<3>,  multiply<4>,  multiply<5>,  multiply<6>,
    multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>,
};

// Rows as fp32, [rows, in]: the kernels broadcast single values of them.
void widen_rows(const Rows& x, int64_t first, int64_t rows, int64_t in, float* to) {
  for (int64_t row = 0; row < rows; ++row) {
    const bf16* from = x.values + (first + row) * x.stride;
    for (int64_t i = 0; i < in; i += kLanes, to += kLanes) store(to, load_bf16(from + i));
  }
}

}  // namespace

void fma512_linear_bf16(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y,
                        int64_t y_stride, const bf16* add, int64_t add_stride) {
  const Plan plan = plan_work(linear, rows, kGroup);
  const int64_t in = linear.in, panel_bytes = in * kPanel * 2;
  const Target to{y, y_stride, add, add_stride};
  Shares shares(plan, worker.count);
  alignas(64) float sums[kGroup * kPanel];
  float* values = nullptr;
  int64_t start = -1;  // first row of the block that is in `values`
  while (true) {
    const Range range = shares.take(worker.next());
    if (range.first >= range.last) return;
    for (int64_t unit = range.first; unit < range.last; ++unit) {
      const int64_t panel = unit % plan.panels, block = unit / plan.panels * plan.block;
      const int64_t count = std::min(plan.block, rows - block);
      if (block != start) {
        start = block;
        values = static_cast<float*>(worker.scratch(std::min(plan.block, rows) * in * sizeof(float)));
        widen_rows(x, block, count, in, values);
      }
      const char* weights = static_cast<const char*>(linear.weights) + panel * panel_bytes;
      const int64_t groups = (count + kGroup - 1) / kGroup;
      for (int64_t group = 0, row = 0; group < groups; ++group) {
        const int64_t size = (count - row) / (groups - group);
        const Prefetch fetch = prefetch_for(weights, panel_bytes, group, groups);
        kMultiply[size](values + row * in, in, weights, fetch, sums);
        finish(linear, sums, panel, block + row, size, to);
        row += size;
      }
    }
  }
}

}  // namespace xs

#endif
