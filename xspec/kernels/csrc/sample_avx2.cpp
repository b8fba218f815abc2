// Noise and scores, eight at a time.

#include "sample.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx2.inc"

using Ints = __m256i;
using Mask = __m256;

inline Ints splat_int(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline Ints lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline Ints load_ints(const uint32_t* from) { return _mm256_load_si256(reinterpret_cast<const Ints*>(from)); }
inline void store_ints(uint32_t* to, Ints x) { _mm256_store_si256(reinterpret_cast<Ints*>(to), x); }
inline Ints plus(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints minus(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints times(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Ints flip(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
inline Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
template <int N>
inline Ints shift_right(Ints x) {
  return _mm256_srli_epi32(x, N);
}
template <int N>
inline Ints shift_right_signed(Ints x) {
  return _mm256_srai_epi32(x, N);
}
template <int N>
inline Ints shift_left(Ints x) {
  return _mm256_slli_epi32(x, N);
}
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }
inline Ints as_ints(Floats x) { return _mm256_castps_si256(x); }
inline bool all_less(Floats a, Floats b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) == 0xFF;
}
inline Mask greater(Floats a, Floats b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Floats choose(Mask mask, Floats a, Floats b) { return _mm256_blendv_ps(b, a, mask); }
inline Ints choose(Mask mask, Ints a, Ints b) {
  return _mm256_blendv_epi8(b, a, _mm256_castps_si256(mask));
}

#include "sample.inc"

const SampleOps kOps = {"avx2", gumbel, scores};

}  // namespace

const SampleOps* avx2_sample_ops() { return &kOps; }

}  // namespace xs

#else

namespace xs {

const SampleOps* avx2_sample_ops() { return nullptr; }

}  // namespace xs

#endif
