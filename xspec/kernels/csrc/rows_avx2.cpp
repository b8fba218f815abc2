#include "attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx2.inc"
#include "exp2.inc"
#include "rows.inc"

}  // namespace

void avx2_rms_norm(Worker& worker, const bf16* x, int64_t x_stride, const bf16* weight, float eps, bf16* y,
                   int64_t y_stride, int64_t rows, int64_t cols) {
  rms_norm_rows(worker, x, x_stride, weight, eps, y, y_stride, rows, cols);
}

void avx2_norm_sum(Worker& worker, const NormSum& step) { norm_sum_rows(worker, step); }

void avx2_rope_store(Worker& worker, const RopeStore& step) { rope_store_rows(worker, step); }

void avx2_argmax(Worker& worker, const bf16* x, int64_t stride, int64_t rows, int64_t cols, int64_t* index,
                 float* value) {
  argmax_rows(worker, x, stride, rows, cols, index, value);
}

void avx2_logsumexp(Worker& worker, const bf16* x, int64_t stride, int64_t rows, int64_t cols, float* out) {
  logsumexp_rows(worker, x, stride, rows, cols, out);
}

}  // namespace xs

#endif
