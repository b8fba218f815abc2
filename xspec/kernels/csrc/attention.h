// How keys and values lie inside a page, and the ops over rows and pages of the vector instruction sets.
//
// A slab is [2 * G, pages, block, D] bf16: keys of KV heads 0 .. G - 1, then their values. The block * D
// elements of a (head, page) chunk are permuted, 16 tokens at a time:
//
//   keys    [block / 16][D / 2][16][2]  a 64-byte line holds one pair of dims of 16 tokens
//   values  [block / 2][D][2]           a 64-byte line holds 16 dims of one pair of tokens
//
// so both products run down whole lines with an instruction that multiplies pairs. Tokens [16 n, 16 n + 16)
// of a chunk are the elements [16 n D, 16 (n + 1) D) in both: a page stays an opaque run of bytes.
#pragma once

#include "ops.h"

namespace xs {

constexpr int64_t kKeyBlock = 16;     // tokens whose keys are interleaved; a page holds whole ones
constexpr int64_t kMaxHeadDim = 256;  // of the vector ops' attention, whose state is of fixed size

// Element of a chunk that holds dim `d` of the key, or of the value, at `token` of the page.
static constexpr int64_t key_index(int64_t dim, int64_t token, int64_t d) {
  return token / 16 * 16 * dim + d / 2 * 32 + token % 16 * 2 + d % 2;
}

static constexpr int64_t value_index(int64_t dim, int64_t token, int64_t d) {
  return token / 2 * 2 * dim + 2 * d + token % 2;
}

// Keys that a row sees. Drafts past a sequence's end may ask for more than its pages hold: nobody will
// look at what such rows yield, but no page past the table may be looked up.
static inline int64_t keys_seen(const Attend& step, int64_t row) {
  const int64_t most = step.table_stride * step.cache.block, asked = step.kv_lens[row];
  return asked < 1 ? 1 : asked < most ? asked : most;
}

// See Ops. `attend` takes heads up to kMaxHeadDim; D is a multiple of 32, rows and columns of the others
// may have any length. Denormal results are 0 in the AVX-512 ops.
void avx512_rms_norm(Worker&, const bf16* x, int64_t x_stride, const bf16* weight, float eps, bf16* y,
                     int64_t y_stride, int64_t rows, int64_t cols);
void avx512_norm_sum(Worker&, const NormSum&);
void avx512_rope_store(Worker&, const RopeStore&);
void avx512_attend(Worker&, const Attend&);
void fma512_attend(Worker&, const Attend&);
void amx_attend(Worker&, const Attend&);
void avx512_argmax(Worker&, const bf16* x, int64_t stride, int64_t rows, int64_t cols, int64_t* index,
                   float* value);
void avx512_logsumexp(Worker&, const bf16* x, int64_t stride, int64_t rows, int64_t cols, float* out);

void avx2_rms_norm(Worker&, const bf16* x, int64_t x_stride, const bf16* weight, float eps, bf16* y,
                   int64_t y_stride, int64_t rows, int64_t cols);
void avx2_norm_sum(Worker&, const NormSum&);
void avx2_rope_store(Worker&, const RopeStore&);
void avx2_attend(Worker&, const Attend&);
void avx2_argmax(Worker&, const bf16* x, int64_t stride, int64_t rows, int64_t cols, int64_t* index,
                 float* value);
void avx2_logsumexp(Worker&, const bf16* x, int64_t stride, int64_t rows, int64_t cols, float* out);

}  // namespace xs
