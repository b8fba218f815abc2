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

void multiply_group(int64_t size, int64_t group, int64_t groups, const float* x, int64_t in, const char* panel,
                    float* sums) {
  kMultiply[size](x, in, panel, prefetch_for(panel, in * kPanel * 2, group, groups), sums);
}

#include "linear_bf16_wide.inc"

}  // namespace

void fma512_linear_bf16(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y,
                        int64_t y_stride, const bf16* add, int64_t add_stride) {
  linear_of_wide_rows(worker, linear, x, rows, Target{y, y_stride, add, add_stride});
}

}  // namespace xs

#endif
