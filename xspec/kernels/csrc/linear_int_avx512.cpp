#include "linear_int.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <algorithm>
#include <cstring>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")
#include <immintrin.h>

namespace xs {
namespace {

#include "linear_bf16_share.inc"
#include "linear_int_share.inc"
#include "linear_finish_avx512.inc"
#include "linear_int_avx512.inc"

constexpr int kGroup = 8;         // rows a kernel takes at most
constexpr int64_t kAhead = 2048;  // bytes of weights prefetched ahead

struct Panel {
  const char* weights;
  const char* scales;
};

// Weights of all steps of one group: step s, half h.
template <Format F>
inline void load_steps(const char* from, int step, __m512i low[2], __m512i high[2]) {
  if (nibbles(F)) {
    const __m512i mask = _mm512_set1_epi8(15);
    for (int half = 0; half < 2; ++half) {
      const __m512i both = _mm512_loadu_si512(from + step * 128 + half * 64);
      low[half] = _mm512_and_si512(both, mask);
      high[half] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    }
  } else {
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_loadu_si512(from + step * 128 + half * 64);
      high[half] = _mm512_loadu_si512(from + (step + kIntSteps / 2) * 128 + half * 64);
    }
  }
}

inline __m512i broadcast(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}

// sums [R, 32] = R rows times one panel.
template <int R, Format F>
void multiply(const Lines& x, const Panel& panel, float* sums) {
  __m512 sum[R][2];
#pragma GCC unroll 8
  for (int row = 0; row < R; ++row) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
  const char* weights = panel.weights;
  const char* scales = panel.scales;
  for (int64_t group = 0; group < x.groups; ++group) {
    __m512i dot[R][2];
#pragma GCC unroll 8
    for (int row = 0; row < R; ++row) {
      const int32_t start = F == Format::int8 ? x.start[row * x.groups + group] : 0;
      dot[row][0] = dot[row][1] = _mm512_set1_epi32(start);
    }
    const int8_t* q = x.q + group * kIntGroup;
#pragma GCC unroll 4
    for (int step = 0; step < kIntSteps / 2; ++step) {
      __m512i low[2], high[2];
      load_steps<F>(weights, step, low, high);
      _mm_prefetch(weights + kAhead + step * 128, _MM_HINT_T0);
      _mm_prefetch(weights + kAhead + step * 128 + 64, _MM_HINT_T0);
      if (!nibbles(F)) {
        _mm_prefetch(weights + kAhead + step * 128 + 512, _MM_HINT_T0);
        _mm_prefetch(weights + kAhead + step * 128 + 576, _MM_HINT_T0);
      }
#pragma GCC unroll 8
      for (int row = 0; row < R; ++row) {
        const __m512i value = broadcast(q + row * x.in + step * 4);
        dot[row][0] = _mm512_dpbusd_epi32(dot[row][0], low[0], value);
        dot[row][1] = _mm512_dpbusd_epi32(dot[row][1], low[1], value);
      }
#pragma GCC unroll 8
      for (int row = 0; row < R; ++row) {
        const __m512i value = broadcast(q + row * x.in + step * 4 + 16);
        dot[row][0] = _mm512_dpbusd_epi32(dot[row][0], high[0], value);
        dot[row][1] = _mm512_dpbusd_epi32(dot[row][1], high[1], value);
      }
    }
    const float* scale = x.scale + group;
    const float* total = x.sum + group;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m512 factor, minimum;
      load_scales<F>(scales, half, factor, minimum);
#pragma GCC unroll 8
      for (int row = 0; row < R; ++row) {
        const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[row][half]), factor);
        sum[row][half] = _mm512_fmadd_ps(product, _mm512_set1_ps(scale[row * x.groups]), sum[row][half]);
        if (F == Format::int8) continue;
        sum[row][half] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(total[row * x.groups]), sum[row][half]);
      }
    }
    weights += weight_bytes(F);
    scales += scale_bytes(F);
  }
#pragma GCC unroll 8
  for (int row = 0; row < R; ++row) {
    _mm512_store_ps(sums + row * kPanel, sum[row][0]);
    _mm512_store_ps(sums + row * kPanel + 16, sum[row][1]);
  }
}

using Multiply = void (*)(const Lines&, const Panel&, float*);

template <Format F>
constexpr Multiply kMultiply[kGroup + 1] = {
    nullptr,        multiply<1, F>, multiply<2, F>, multiply<3, F>, multiply<4, F>,
    multiply<5, F>, multiply<6, F>, multiply<7, F>, multiply<8, F>,
};

// Bits of |x|: a NaN is above infinity, which is above every number.
inline __m512i magnitude(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

inline __m512 half_row(const bf16* from) {
  const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

void quantise_row(const bf16* x, int64_t groups, int8_t* q, float* scale, float* sum) {
  for (int64_t group = 0; group < groups; ++group, x += kIntGroup, q += kIntGroup) {
    const __m512 low = half_row(x), high = half_row(x + 16);
    const uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(magnitude(low), magnitude(high)));
    float most;
    std::memcpy(&most, &bits, sizeof most);
    const bool nothing = most < kLeast;  // false for NaN
    const __m512 inverse = _mm512_set1_ps(nothing ? 0.f : 127.f / most);
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtsepi32_epi8(first));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtsepi32_epi8(second));
    scale[group] = nothing ? 0.f : most / 127.f;
    const int total = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    sum[group] = scale[group] * static_cast<float>(total);
  }
}

const Multiply* kernels_of(Format format) {
  switch (format) {
    case Format::int8: return kMultiply<Format::int8>;
    case Format::int4: return kMultiply<Format::int4>;
    case Format::int8_wide: return kMultiply<Format::int8_wide>;
    default: return kMultiply<Format::int4_wide>;
  }
}

}  // namespace

void avx512_linear_int(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y,
                       int64_t y_stride, const bf16* add, int64_t add_stride) {
  const Plan plan = plan_work(linear, rows, kGroup);
  const int64_t groups = linear.in / kIntGroup;
  const Multiply* kernels = kernels_of(linear.format);
  const Target to{y, y_stride, add, add_stride};
  const int32_t* start = linear.format == Format::int8 ? starts(worker, x, rows * groups) : nullptr;
  Shares shares(plan, worker.count);
  alignas(64) float sums[kGroup * kPanel];
  while (true) {
    const Range range = shares.take(worker.next());
    if (range.first >= range.last) return;
    for (int64_t unit = range.first; unit < range.last; ++unit) {
      const int64_t panel = unit % plan.panels, first = unit / plan.panels * plan.block;
      const int64_t count = std::min(plan.block, rows - first), passes = (count + kGroup - 1) / kGroup;
      const int64_t at = panel * groups;
      const Panel part{static_cast<const char*>(linear.weights) + at * weight_bytes(linear.format),
                       static_cast<const char*>(linear.scales) + at * scale_bytes(linear.format)};
      int64_t row = first;
      for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t size = (count - (row - first)) / (passes - pass);
        const int64_t from = row * groups;
        const int32_t* begin = start == nullptr ? nullptr : start + from;
        const Lines lines{x.q + row * linear.in, x.scale + from, x.sum + from, begin, linear.in, groups};
        kernels[size](lines, part, sums);
        finish(linear, sums, panel, row, size, to);
        row += size;
      }
    }
  }
}

void avx512_quantise(Worker& worker, const bf16* x, int64_t stride, int64_t rows, int64_t in, Quantised to) {
  const int64_t groups = in / kIntGroup;
  for (int64_t row; (row = worker.next()) < rows;) {
    quantise_row(x + row * stride, groups, to.q + row * in, to.scale + row * groups, to.sum + row * groups);
  }
}

}  // namespace xs

#endif
