// The bf16 linear: its packed weights, and one kernel for each instruction set that has one.
//
// Packed weights are panels of 32 outputs, padded with zero outputs: [panels][in / 2][2][16][2], so for
// each pair of inputs a panel has two 64-byte registers of 16 outputs. A gated panel has 16 rows of gate,
// then the same 16 of up. `in` is a multiple of 32; `out` is anything (even where gated).
//
// The sum of an output runs over the inputs in order, pair by pair, in one chain; bias and residual are
// added to it in fp32, and it is rounded once.
#pragma once

#include <cstdint>

#include "ops.h"

namespace xs {

constexpr int64_t kPanel = 32;  // outputs, gate and up together

int64_t panels_of(int64_t out, bool gated);

// The row of the weight that is lane 0 .. 31 of a panel, or -1 for padding.
int64_t source_row(int64_t panel, int64_t lane, int64_t out, bool gated);

int64_t packed_bytes_bf16(int64_t out, int64_t in, bool gated);

// weight [out, in], where gated all gates first, then all ups. `to`: packed_bytes_bf16 bytes.
void pack_bf16(const bf16* weight, int64_t out, int64_t in, bool gated, void* to);

// bias [out] in the order of weight's rows -> to [out] in packed order, as Linear::bias wants it.
void pack_bias(const float* bias, int64_t out, bool gated, float* to);

// Ops::linear for Format::bf16. Only in builds that have the instruction set.
void amx_linear_bf16(Worker&, const Linear&, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                     const bf16* add, int64_t add_stride);
void avx512_linear_bf16(Worker&, const Linear&, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                        const bf16* add, int64_t add_stride);
void fma512_linear_bf16(Worker&, const Linear&, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                        const bf16* add, int64_t add_stride);
void avx2_linear_bf16(Worker&, const Linear&, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                      const bf16* add, int64_t add_stride);

}  // namespace xs
