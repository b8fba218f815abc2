#include "linear_int.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <algorithm>
#include <cstring>

#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx2.inc"
#include "exp2.inc"
#include "linear_bf16_share.inc"
#include "linear_int_share.inc"

constexpr int kGroup = 4;  // rows a kernel takes at most
constexpr int kParts = kPanel / kLanes;  // registers of sums a row of a panel has

// Quantised rows of one kernel call, the first one's group 0.
struct Lines {
  const int8_t* q;
  const float* scale;
  const float* sum;
  int64_t in, groups;
};

inline __m256i load_bytes(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

inline __m256i broadcast(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm256_set1_epi32(four);
}

// dot [R] of R rows with 8 outputs whose weights begin at `weights`, 64 bytes (int8: 128) from step to step.
// Sixteen products of nibbles and int8 fit 16 bits: 8 * 2 * 15 * 127 < 2^15.
template <int R>
inline void dot_nibbles(const uint8_t* weights, const int8_t* q, int64_t in, __m256i* dot) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i sum[R];
  for (int row = 0; row < R; ++row) sum[row] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int step = 0; step < kIntSteps / 2; ++step) {
    const __m256i both = load_bytes(weights + step * kPanel * 4);
    const __m256i low = _mm256_and_si256(both, mask);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    for (int row = 0; row < R; ++row) {
      const int8_t* x = q + row * in + step * 4;
      sum[row] = _mm256_add_epi16(sum[row], _mm256_maddubs_epi16(low, broadcast(x)));
      sum[row] = _mm256_add_epi16(sum[row], _mm256_maddubs_epi16(high, broadcast(x + 16)));
    }
  }
  for (int row = 0; row < R; ++row) dot[row] = _mm256_madd_epi16(sum[row], ones);
}

// The same for bytes, taken as q - 128: magnitudes of at most 128 times +-127 in pairs fit 16 bits.
template <int R>
inline void dot_bytes(const uint8_t* weights, const int8_t* q, int64_t in, __m256i* dot) {
  const __m256i sign = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
  for (int row = 0; row < R; ++row) dot[row] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int step = 0; step < kIntSteps; ++step) {
    const __m256i weight = _mm256_xor_si256(load_bytes(weights + step * kPanel * 4), sign);
    const __m256i magnitude = _mm256_abs_epi8(weight);
    for (int row = 0; row < R; ++row) {
      const __m256i x = _mm256_sign_epi8(broadcast(q + row * in + step * 4), weight);
      dot[row] = _mm256_add_epi32(dot[row], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, x), ones));
    }
  }
}

inline Floats half_floats(const char* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// 128 times the sum of a group of a row: what a product with q has over one with q - 128.
inline __m256i excess(const int8_t* q) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
  const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(x, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  const int total = _mm_cvtsi128_si32(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two)));
  return _mm256_set1_epi32(128 * (total - 128 * static_cast<int>(kIntGroup)));
}

// Scale and minimum of lanes [8 part, 8 part + 8) of a panel.
template <Format F>
inline void load_scales(const char* group, int part, Floats& scale, Floats& minimum) {
  constexpr int kKinds = F == Format::int8 ? 1 : 2, kSize = wide(F) ? 4 : 2;
  const char* from = group + (part / 2 * kKinds * 16 + part % 2 * kLanes) * kSize;
  if (wide(F)) {
    scale = _mm256_loadu_ps(reinterpret_cast<const float*>(from));
    minimum = _mm256_loadu_ps(reinterpret_cast<const float*>(from) + 16);
  } else {
    scale = half_floats(from);
    minimum = F == Format::int4 ? half_floats(from + 32) : _mm256_setzero_ps();
  }
}

// sums [R, 32] = R rows times one panel, 8 outputs at a time.
template <int R, Format F>
void products(const Lines& x, const uint8_t* weights, const char* scales, float* sums) {
  std::fill(sums, sums + R * kPanel, 0.0f);
  for (int64_t group = 0; group < x.groups; ++group) {
    const int8_t* q = x.q + group * kIntGroup;
    __m256i more[R];
    if (F == Format::int8_wide) {
      for (int row = 0; row < R; ++row) more[row] = excess(q + row * x.in);
    }
    for (int part = 0; part < kParts; ++part) {
      __m256i dot[R];
      if (nibbles(F)) {
        dot_nibbles<R>(weights + part * kLanes * 4, q, x.in, dot);
      } else {
        dot_bytes<R>(weights + part * kLanes * 4, q, x.in, dot);
      }
      Floats scale, minimum;
      load_scales<F>(scales, part, scale, minimum);
      for (int row = 0; row < R; ++row) {
        const int64_t at = row * x.groups + group;
        float* to = sums + row * kPanel + part * kLanes;
        if (F == Format::int8_wide) dot[row] = _mm256_add_epi32(dot[row], more[row]);
        const Floats product = _mm256_mul_ps(_mm256_cvtepi32_ps(dot[row]), scale);
        Floats sum = _mm256_fmadd_ps(product, splat(x.scale[at]), load(to));
        if (F != Format::int8) sum = _mm256_fmadd_ps(minimum, splat(x.sum[at]), sum);
        store(to, sum);
      }
    }
    weights += weight_bytes(F);
    scales += scale_bytes(F);
  }
}

using Products = void (*)(const Lines&, const uint8_t*, const char*, float*);

template <Format F>
constexpr Products kProducts[kGroup + 1] = {nullptr, products<1, F>, products<2, F>, products<3, F>,
                                            products<4, F>};

const Products* kernels_of(Format format) {
  switch (format) {
    case Format::int8: return kProducts<Format::int8>;
    case Format::int4: return kProducts<Format::int4>;
    case Format::int8_wide: return kProducts<Format::int8_wide>;
    default: return kProducts<Format::int4_wide>;
  }
}

inline Floats silu(Floats x) {
  const Floats sign = splat(-0.0f), one = splat(1.0f);
  const Floats power = exp2_falling(multiply(_mm256_or_ps(x, sign), splat(1.44269504f)));  // e^-|x|
  const Floats share = divide(_mm256_blendv_ps(one, power, x), add(one, power));
  return multiply(x, share);
}

struct Target {
  bf16* y;
  int64_t y_stride;
  const bf16* add;
  int64_t add_stride;
};

inline void put(Floats value, int count, const Target& to, int64_t row, int64_t column) {
  if (to.add != nullptr) value = add(value, load_bf16(to.add + row * to.add_stride + column, count));
  if (count == kLanes) {
    store_bf16(to.y + row * to.y_stride + column, value);
  } else {
    store_bf16(to.y + row * to.y_stride + column, value, count);
  }
}

// Adds the bias, gates, adds the residual, rounds and stores `rows` rows from `row` on. Padding has no bias:
// the last gated panel's ups follow its gates at once.
void finish(const Linear& linear, float* sums, int64_t panel, int64_t row, int64_t rows, const Target& to) {
  const int64_t lanes = linear.gated ? kPanel / 2 : kPanel, column = panel * lanes;
  const int64_t count = std::min(lanes, (linear.gated ? linear.out / 2 : linear.out) - column);
  for (int64_t i = 0; i < rows; ++i, sums += kPanel) {
    if (linear.bias != nullptr) {
      const float* bias = linear.bias + panel * kPanel;
      for (int64_t lane = 0; lane < count; ++lane) sums[lane] += bias[lane];
      if (linear.gated) {
        for (int64_t lane = 0; lane < count; ++lane) sums[kPanel / 2 + lane] += bias[count + lane];
      }
    }
    for (int64_t lane = 0; lane < count; lane += kLanes) {
      Floats value = load(sums + lane);
      if (linear.gated) value = multiply(silu(value), load(sums + kPanel / 2 + lane));
      put(value, static_cast<int>(std::min<int64_t>(kLanes, count - lane)), to, row + i, column + lane);
    }
  }
}

void quantise_row(const bf16* x, int64_t groups, int8_t* q, float* scale, float* sum) {
  for (int64_t group = 0; group < groups; ++group, x += kIntGroup, q += kIntGroup) {
    __m128i high = _mm_setzero_si128();  // bits of |x|: a NaN is above infinity, which is above every number
    for (int64_t i = 0; i < kIntGroup; i += kLanes) {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i));
      high = _mm_max_epu16(high, _mm_and_si128(bits, _mm_set1_epi16(0x7fff)));
    }
    const __m128i below = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(0x7fff), high));
    const int bits = (0x7fff - (_mm_cvtsi128_si32(below) & 0xffff)) << 16;
    const float most = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits)));
    const bool nothing = most < kLeast;  // false for NaN
    const Floats inverse = splat(nothing ? 0.0f : 127.0f / most);
    __m256i total = _mm256_setzero_si256();
    for (int64_t i = 0; i < kIntGroup; i += kLanes) {
      const __m256i values = _mm256_cvtps_epi32(multiply(load_bf16(x + i), inverse));
      total = _mm256_add_epi32(total, values);
      const __m128i upper = _mm256_extracti128_si256(values, 1);
      const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(values), upper);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(q + i), _mm_packs_epi16(shorts, shorts));
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    scale[group] = nothing ? 0.0f : most / 127.0f;
    sum[group] = scale[group] * static_cast<float>(_mm_cvtsi128_si32(four));
  }
}

}  // namespace

void avx2_linear_int(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y,
                     int64_t y_stride, const bf16* add, int64_t add_stride) {
  const Plan plan = plan_work(linear, rows, kGroup);
  const int64_t groups = linear.in / kIntGroup;
  const Products* kernels = kernels_of(linear.format);
  const Target to{y, y_stride, add, add_stride};
  Shares shares(plan, worker.count);
  float sums[kGroup * kPanel];
  while (true) {
    const Range range = shares.take(worker.next());
    if (range.first >= range.last) return;
    for (int64_t unit = range.first; unit < range.last; ++unit) {
      const int64_t panel = unit % plan.panels, start = unit / plan.panels * plan.block, at = panel * groups;
      const auto* weights = static_cast<const uint8_t*>(linear.weights) + at * weight_bytes(linear.format);
      const char* scales = static_cast<const char*>(linear.scales) + at * scale_bytes(linear.format);
      const int64_t end = std::min(rows, start + plan.block);
      for (int64_t row = start; row < end; row += kGroup) {
        const int64_t size = std::min<int64_t>(kGroup, end - row);
        const float* row_scale = x.scale + row * groups;
        const Lines lines{x.q + row * linear.in, row_scale, x.sum + row * groups, linear.in, groups};
        kernels[size](lines, weights, scales, sums);
        finish(linear, sums, panel, row, size, to);
      }
    }
  }
}

void avx2_quantise(Worker& worker, const bf16* x, int64_t stride, int64_t rows, int64_t in, Quantised to) {
  const int64_t groups = in / kIntGroup;
  for (int64_t row; (row = worker.next()) < rows;) {
    quantise_row(x + row * stride, groups, to.q + row * in, to.scale + row * groups, to.sum + row * groups);
  }
}

}  // namespace xs

#endif
