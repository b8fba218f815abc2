// What a forward pass is made of, for one instruction set. All workers of a team call an op with the same
// arguments; it hands its work out by ticket and ends without a barrier: the caller puts one before what
// was written is read, and before the next op that takes tickets.
//
// A row's result never depends on which or how many other rows run beside it, bit for bit: sums run in
// one fixed order, whatever the block a row falls in. (--batch_invariant rests on this.)
#pragma once

#include <cstdint>

#include "team.h"

namespace xs {

using bf16 = uint16_t;

enum class Format : int32_t {
  bf16 = 0,   // two bf16 products at a time, fp32 sums
  // Groups of 32 inputs, w = scale * q + minimum; int8 activations (one scale per row and group), VNNI.
  int8 = 1,       // scale, minimum = -128 * scale; q in 0 .. 255, scales fp16
  int4 = 2,       // scale and minimum, fp16; q in 0 .. 15
  int8_wide = 3,  // scale and minimum, fp32; q in 0 .. 255
  int4_wide = 4,  // scale and minimum, fp32; q in 0 .. 15
};

// y = x W^T + bias. Layouts: docs in the file of the format's kernel. `gated`: rows of gate and up are
// interleaved by 16 when packed, and the op yields silu(gate) * up, [out / 2] a row.
struct Linear {
  Format format = Format::bf16;
  bool gated = false;
  int64_t out = 0;  // rows of W, gate and up together
  int64_t in = 0;
  const void* weights = nullptr;  // 64-byte aligned, packed, padded to whole panels
  const void* scales = nullptr;   // int formats, else null
  const float* bias = nullptr;    // [out] in packed order, or null
};

// Rows as a linear reads them. bf16 formats read `values`, int formats `q`, `scale` and `sum`.
struct Rows {
  const bf16* values = nullptr;  // [rows, stride]
  int64_t stride = 0;
  const int8_t* q = nullptr;     // [rows, in]
  const float* scale = nullptr;  // [rows, in / 32]
  const float* sum = nullptr;    // [rows, in / 32] scale * sum of the group's q
};

struct Quantised {
  int8_t* q;
  float* scale;
  float* sum;
};

// Keys and values of one plane. See attention.h for the layout inside a page.
struct Cache {
  bf16* slab = nullptr;
  int64_t pages = 0;
  int64_t block = 0;  // tokens a page, a multiple of 16
  int64_t kv_heads = 0;
  int64_t dim = 0;  // a multiple of 32
};

// Rotates query and key heads of qkv [rows, (H + 2 G) * D] in place and stores keys and values.
struct RopeStore {
  bf16* qkv;
  int64_t stride;  // numbers from row to row
  int64_t rows, heads;
  const float* cos;  // [rows, D]; both halves alike
  const float* sin;  // [rows, D]; first half negated
  const bf16* head_norm;  // [H + G, D] weights of qk-norm, before rotation; or null
  float eps;
  const int64_t* slots;  // [rows] flat slot: page * block + offset
  bool finite;           // store 0 for what is not finite
  bool store_queries;    // false: only keys and values are wanted (queries need not be rotated)
  Cache cache;
};

struct Attend {
  const bf16* q;  // [rows, q_stride], heads side by side, rotated
  int64_t q_stride;
  int64_t rows, heads;
  const int64_t* sequences;   // [rows] row of the page table; rows of a sequence need not be neighbours
  const int64_t* kv_lens;     // [rows] keys a row sees; 0 counts as 1, more than the table has as all
  const int64_t* page_table;  // [sequences, table_stride]
  int64_t table_stride;
  int64_t first_key;  // keys before min(first_key, kv_len - 1) are not seen
  float scale;
  bf16* out;  // [rows, heads * D]
  Cache cache;
};

// What a sublayer yields, normalised: sum = add + norm(x); then next = norm(sum).
struct NormSum {
  const bf16* x;       // [rows, cols]
  const bf16* weight;  // [cols]
  const bf16* add;     // [rows, cols], or null: nothing is added
  bf16* sum;           // [rows, cols]; may be x or add
  const bf16* next_weight;  // [cols], or null: there is no next
  bf16* next;               // [rows, cols]; may be x where sum is not
  float eps, next_eps;
  int64_t rows, cols;
};

// One instruction set's ops.
struct Ops {
  const char* name;
  const char* lanes;  // the set whose vector code draws tokens (SampleOps)
  // y [rows, y_stride] = linear(x) (+ add [rows, add_stride]); add may be y.
  void (*linear)(Worker&, const Linear&, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                 const bf16* add, int64_t add_stride);
  void (*quantise)(Worker&, const bf16* x, int64_t stride, int64_t rows, int64_t in, Quantised to);
  // Normalised in fp32, rounded, multiplied by weight, rounded. weight [cols].
  void (*rms_norm)(Worker&, const bf16* x, int64_t x_stride, const bf16* weight, float eps, bf16* y,
                   int64_t y_stride, int64_t rows, int64_t cols);
  // Norms as above; the sum is rounded again.
  void (*norm_sum)(Worker&, const NormSum&);
  void (*rope_store)(Worker&, const RopeStore&);
  void (*attend)(Worker&, const Attend&);
  // Highest value of each row and its lowest index; NaN counts as highest. values [rows] as fp32.
  void (*argmax)(Worker&, const bf16* x, int64_t stride, int64_t rows, int64_t cols, int64_t* index,
                 float* value);
  // log(sum(exp(x))) of each row in fp32.
  void (*logsumexp)(Worker&, const bf16* x, int64_t stride, int64_t rows, int64_t cols, float* out);
};

// Sizes and packing, the same for every instruction set. Defined beside the formats' kernels.
int64_t packed_bytes(Format, int64_t out, int64_t in, bool gated);

const Ops& portable_ops();
const Ops* amx_ops();     // null where it was not built; needs what avx512_ops() does, and AMX, BF16 and INT8
const Ops* avx512_ops();  // null where it was not built; needs AVX-512 F, BW, VL, DQ, BF16 and VNNI
const Ops* avx512_fma_ops();  // the same needs; multiplies bf16 as fp32
const Ops* avx2_ops();    // null where it was not built; needs AVX2 and FMA

// The best ops this machine runs, or those `name` says ("portable", "avx2", "avx512", "avx512_fma", "amx");
// null: not available.
const Ops* choose_ops(const char* name);

}  // namespace xs
