// Noise and scores, sixteen at a time.

#include "sample.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx512.inc"

using Ints = __m512i;
using Mask = __mmask16;

inline Ints splat_int(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline Ints lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Ints load_ints(const uint32_t* from) { return _mm512_load_si512(from); }
inline void store_ints(uint32_t* to, Ints x) { _mm512_store_si512(to, x); }
inline Ints plus(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints minus(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints times(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints flip(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
template <int N>
inline Ints shift_right(Ints x) {
  return _mm512_srli_epi32(x, N);
}
template <int N>
inline Ints shift_right_signed(Ints x) {
  return _mm512_srai_epi32(x, N);
}
template <int N>
inline Ints shift_left(Ints x) {
  return _mm512_slli_epi32(x, N);
}
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
inline bool all_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) == 0xFFFF; }
inline Mask greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Floats choose(Mask mask, Floats a, Floats b) { return _mm512_mask_blend_ps(mask, b, a); }
inline Ints choose(Mask mask, Ints a, Ints b) { return _mm512_mask_blend_epi32(mask, b, a); }

#include "sample.inc"

const SampleOps kOps = {"avx512", gumbel, scores};

}  // namespace

const SampleOps* avx512_sample_ops() { return &kOps; }

}  // namespace xs

#else

namespace xs {

const SampleOps* avx512_sample_ops() { return nullptr; }

}  // namespace xs

#endif
