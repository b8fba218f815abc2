// The int linears: packed weights in groups of 32 inputs, w = scale * q + minimum, times int8 activations.
//
// Panels of 32 outputs as in linear.h (gated: 16 of gate, then the same 16 of up), padded with zeros. A
// register of weights is 16 outputs x 4 inputs of one byte each, so a group has 8 steps of 4 inputs:
//   int8, int8_wide: weights [panels][in / 32][8 steps][2 halves][16][4]
//   int4, int4_wide: weights [panels][in / 32][4][2 halves][16][4], a byte being step j (low nibble) and
//                    step j + 4 (high nibble)
//   scales: [panels][in / 32][2 halves][scale 16, then minimum 16 unless int8], fp16 or (wide) fp32
//
// Within a group sums are exact integers. Over the groups, in order and in one fp32 chain an output:
//   sum = fma(scale * dot, row's scale, sum), then sum = fma(minimum, row's sum, sum)
// For int8 the dot product is that with q - 128, which leaves no minimum. (The portable op fuses nothing.)
#pragma once

#include <cstdint>

#include "linear.h"

namespace xs {

constexpr int64_t kIntGroup = 32;    // inputs that share a scale
constexpr float kLeast = 0x1p-100f;  // a group of activations that stays below it is all zero

// Bytes of the packed weights and of the packed scales. `in` is a multiple of 32.
int64_t packed_bytes_int(Format format, int64_t out, int64_t in, bool gated);
int64_t scale_bytes_int(Format format, int64_t out, int64_t in, bool gated);

// q [out, in], scale and minimum [out, in / 32] in fp16, or fp32 for wide formats; minimum is not read for
// int8. Where gated all gates come first, then all ups. To `weights` and `scales`, sized as above.
void pack_int(Format format, int64_t out, int64_t in, bool gated, const uint8_t* q, const void* scale,
              const void* minimum, void* weights, void* scales);

// Ops::linear for the int formats, and Ops::quantise: bf16 rows to int8, scale = max|x| / 127 of each group
// (0 below kLeast), rounded to nearest even. A group with a NaN or infinity gets a scale that is not finite.
void portable_linear_int(Worker&, const Linear&, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                         const bf16* add, int64_t add_stride);
void portable_quantise(Worker&, const bf16* x, int64_t stride, int64_t rows, int64_t in, Quantised to);

// Only in builds that have the instruction set.
void amx_linear_int(Worker&, const Linear&, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                    const bf16* add, int64_t add_stride);
void avx512_linear_int(Worker&, const Linear&, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                       const bf16* add, int64_t add_stride);
void avx512_quantise(Worker&, const bf16* x, int64_t stride, int64_t rows, int64_t in, Quantised to);
void avx2_linear_int(Worker&, const Linear&, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                     const bf16* add, int64_t add_stride);
void avx2_quantise(Worker&, const bf16* x, int64_t stride, int64_t rows, int64_t in, Quantised to);

}  // namespace xs
