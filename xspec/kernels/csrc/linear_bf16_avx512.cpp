#include "linear.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <algorithm>
#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")
#include <immintrin.h>

namespace xs {
namespace {

#include "linear_bf16_share.inc"
#include "linear_finish_avx512.inc"

constexpr int kGroup = 12;  // rows a kernel takes at most: 24 of the 32 registers are sums

// What a kernel fetches into the second-level cache while it multiplies: `lines` cache lines, 1 or 2,
// for each pair of inputs, `step` bytes on each time.
struct Prefetch {
  const char* at;
  int64_t step;
  int lines;
};

// For pass `group` of `groups` over a panel. Measured on Zen 4: where a lone pass is short of arithmetic,
// every other line leaves the hardware's own prefetcher room and is the fastest; where arithmetic and
// reading take alike, all lines far ahead. Several passes fetch the next panel between them, evenly.
Prefetch prefetch_for(const char* panel, int64_t panel_bytes, int64_t group, int64_t groups, int64_t rows) {
  if (groups == 1) return rows <= 4 ? Prefetch{panel + 4096, 128, 1} : Prefetch{panel + 8192, 128, 2};
  return {panel + panel_bytes + panel_bytes * group / groups, 128 / groups, 1};
}

inline __m512bh load_pairs(const void* from) {
  return (__m512bh)_mm512_loadu_si512(from);
}

inline __m512bh broadcast_pair(const char* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// sums [R, 32] = x [R, 2 * pairs] times one panel. Every sum is one chain over the pairs in order.
template <int R>
void multiply(const char* x, int64_t stride, const char* panel, int64_t pairs, Prefetch fetch, float* sums) {
  __m512 sum[R][2];
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
  // A pointer for every three rows: the processor adds once and twice the stride by itself.
  const char* third[(R + 2) / 3];
#pragma GCC unroll 4
  for (int i = 0; i < (R + 2) / 3; ++i) third[i] = x + 3 * i * stride;
  for (int64_t pair = 0; pair < pairs; pair += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, panel += 128) {
      const __m512bh low = load_pairs(panel), high = load_pairs(panel + 64);
      _mm_prefetch(fetch.at, _MM_HINT_T1);
      if (fetch.lines == 2) _mm_prefetch(fetch.at + 64, _MM_HINT_T1);
      fetch.at += fetch.step;
#pragma GCC unroll 12
      for (int row = 0; row < R; ++row) {
        const __m512bh value = broadcast_pair(third[row / 3] + row % 3 * stride + (pair + i) * 4);
        sum[row][0] = _mm512_dpbf16_ps(sum[row][0], low, value);
        sum[row][1] = _mm512_dpbf16_ps(sum[row][1], high, value);
      }
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < R; ++row) {
    _mm512_store_ps(sums + row * kPanel, sum[row][0]);
    _mm512_store_ps(sums + row * kPanel + 16, sum[row][1]);
  }
}

using Multiply = void (*)(const char*, int64_t, const char*, int64_t, Prefetch, float*);

constexpr Multiply kMultiply[kGroup + 1] = {
    nullptr,     multiply<1>, multiply<2>, multiply<3>,  multiply<4>,  multiply<5>,  multiply<6>,
    multiply<7>, multiply<8>, multiply<9>, multiply<10>, multiply<11>, multiply<12>,
};

}  // namespace

void avx512_linear_bf16(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y,
                        int64_t y_stride, const bf16* add, int64_t add_stride) {
  const Plan plan = plan_work(linear, rows, kGroup);
  const int64_t pairs = linear.in / 2, panel_bytes = linear.in * 64, stride = x.stride * 2;
  const Target to{y, y_stride, add, add_stride};
  Shares shares(plan, worker.count);
  alignas(64) float sums[kGroup * kPanel];
  while (true) {
    const Range range = shares.take(worker.next());
    if (range.first >= range.last) return;
    for (int64_t unit = range.first; unit < range.last; ++unit) {
      const int64_t panel = unit % plan.panels, start = unit / plan.panels * plan.block;
      const int64_t count = std::min(plan.block, rows - start);
      const int64_t groups = (count + kGroup - 1) / kGroup;
      const char* weights = static_cast<const char*>(linear.weights) + panel * panel_bytes;
      int64_t row = start;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t size = (count - (row - start)) / (groups - group);
        const char* values = reinterpret_cast<const char*>(x.values) + row * stride;
        const Prefetch fetch = prefetch_for(weights, panel_bytes, group, groups, size);
        kMultiply[size](values, stride, weights, pairs, fetch, sums);
        finish(linear, sums, panel, row, size, to);
        row += size;
      }
    }
  }
}

}  // namespace xs

#endif
