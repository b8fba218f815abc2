// Noise and scores one at a time, with the same roundings as the vector units have.

#include <cmath>
#include <cstring>

#include "sample.h"

namespace xs {
namespace {

constexpr int kLanes = 1;

using Floats = float;
using Ints = uint32_t;
using Mask = bool;

inline Floats splat(float x) { return x; }
inline void store(float* to, Floats x) { *to = x; }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Floats subtract(Floats a, Floats b) { return a - b; }
inline Floats multiply(Floats a, Floats b) { return a * b; }
inline Floats divide(Floats a, Floats b) { return a / b; }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return std::fma(a, b, c); }
inline Ints splat_int(uint32_t x) { return x; }
inline Ints lane_numbers() { return 0; }
inline Ints load_ints(const uint32_t* from) { return *from; }
inline void store_ints(uint32_t* to, Ints x) { *to = x; }
inline Ints plus(Ints a, Ints b) { return a + b; }
inline Ints minus(Ints a, Ints b) { return a - b; }
inline Ints times(Ints a, Ints b) { return a * b; }
inline Ints flip(Ints a, Ints b) { return a ^ b; }
inline Ints both(Ints a, Ints b) { return a & b; }
template <int N>
inline Ints shift_right(Ints x) {
  return x >> N;
}
template <int N>
inline Ints shift_right_signed(Ints x) {
  return static_cast<uint32_t>(static_cast<int32_t>(x) >> N);
}
template <int N>
inline Ints shift_left(Ints x) {
  return x << N;
}
inline Floats to_floats(Ints x) { return static_cast<float>(static_cast<int32_t>(x)); }
inline Floats as_floats(Ints x) {
  float out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}
inline Ints as_ints(Floats x) {
  uint32_t out;
  std::memcpy(&out, &x, sizeof out);
  return out;
}
inline bool all_less(Floats a, Floats b) { return a < b; }
inline Mask greater(Floats a, Floats b) { return a > b; }
template <typename T>
inline T choose(Mask mask, T a, T b) {
  return mask ? a : b;
}
inline Floats load_bf16(const bf16* from) { return as_floats(static_cast<uint32_t>(*from) << 16); }
inline Floats load_bf16(const bf16* from, int) { return load_bf16(from); }
inline Floats keep(Floats x, int, int) { return x; }

#include "sample.inc"

const SampleOps kOps = {"portable", gumbel, scores};

}  // namespace

const SampleOps& portable_sample_ops() { return kOps; }

}  // namespace xs
