#include "linear.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <algorithm>

#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx2.inc"
#include "exp2.inc"
#include "linear_bf16_share.inc"
#include "linear_finish_avx2.inc"

constexpr int kGroup = 5;         // rows a kernel takes at most: gcc spills sums of 6
constexpr int64_t kAhead = 4096;  // bytes of the panel fetched ahead

// First (0) or second (1) of eight pairs of bf16, as fp32.
template <int Which>
inline __m256 half_of_pairs(const char* from) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm256_castsi256_ps(Which == 0 ? _mm256_slli_epi32(pairs, 16)
                                        : _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}

// Adds one input of each row to the sums of V * 8 outputs.
template <int Which, int R, int V>
inline void add_input(const float* x, int64_t in, const char* weights, __m256 (&sum)[R][V]) {
  if constexpr (R < V) {
    __m256 value[R];
#pragma GCC unroll 5
    for (int row = 0; row < R; ++row) value[row] = _mm256_broadcast_ss(x + row * in + Which);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const __m256 weight = half_of_pairs<Which>(weights + v * 32);
#pragma GCC unroll 5
      for (int row = 0; row < R; ++row) sum[row][v] = _mm256_fmadd_ps(weight, value[row], sum[row][v]);
    }
  } else {
    __m256 weight[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) weight[v] = half_of_pairs<Which>(weights + v * 32);
#pragma GCC unroll 5
    for (int row = 0; row < R; ++row) {
      const __m256 value = _mm256_broadcast_ss(x + row * in + Which);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[row][v] = _mm256_fmadd_ps(weight[v], value, sum[row][v]);
    }
  }
}

// sums [R, 32], V * 8 columns of it: x [R, in] times as many outputs of a panel, inputs in order.
template <int R, int V>
void multiply_part(const float* x, int64_t in, const char* weights, float* sums) {
  __m256 sum[R][V];
#pragma GCC unroll 5
  for (int row = 0; row < R; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[row][v] = _mm256_setzero_ps();
  }
  for (int64_t pair = 0; pair < in / 2; ++pair, weights += 128, x += 2) {
    _mm_prefetch(weights + kAhead, _MM_HINT_T0);
    _mm_prefetch(weights + kAhead + 64, _MM_HINT_T0);
    add_input<0>(x, in, weights, sum);
    add_input<1>(x, in, weights, sum);
  }
#pragma GCC unroll 5
  for (int row = 0; row < R; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) _mm256_store_ps(sums + row * kPanel + v * 8, sum[row][v]);
  }
}

// Few rows take a panel at once; more rows take it in two halves, so that their sums fit the registers.
template <int R>
void multiply(const float* x, int64_t in, const char* panel, float* sums) {
  if constexpr (R <= 2) {
    multiply_part<R, 4>(x, in, panel, sums);
  } else {
    multiply_part<R, 2>(x, in, panel, sums);
    multiply_part<R, 2>(x, in, panel + 64, sums + 16);
  }
}

using Multiply = void (*)(const float*, int64_t, const char*, float*);

constexpr Multiply kMultiply[kGroup + 1] = {
    nullptr, multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>,
};

void multiply_group(int64_t size, int64_t, int64_t, const float* x, int64_t in, const char* panel, float* sums) {
  kMultiply[size](x, in, panel, sums);
}

#include "linear_bf16_wide.inc"

}  // namespace

void avx2_linear_bf16(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y,
                      int64_t y_stride, const bf16* add, int64_t add_stride) {
  linear_of_wide_rows(worker, linear, x, rows, Target{y, y_stride, add, add_stride});
}

}  // namespace xs

#endif
