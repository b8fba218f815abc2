// The tables of the AVX-512 ops (BF16 and VNNI: Zen 4, Cooper Lake, Sapphire Rapids and newer): products of
// bf16 by AVX-512's own instruction, or as fp32.

#include "attention.h"
#include "linear.h"
#include "linear_int.h"
#include "ops.h"

namespace xs {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
namespace {

void linear(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
            const bf16* add, int64_t add_stride) {
  const auto run = linear.format == Format::bf16 ? avx512_linear_bf16 : avx512_linear_int;
  run(worker, linear, x, rows, y, y_stride, add, add_stride);
}

const Ops kOps = {"avx512",        "avx512",          linear,        avx512_quantise, avx512_rms_norm,
                  avx512_norm_sum, avx512_rope_store, avx512_attend, avx512_argmax,   avx512_logsumexp};

void fma_linear(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                const bf16* add, int64_t add_stride) {
  const auto run = linear.format == Format::bf16 ? fma512_linear_bf16 : avx512_linear_int;
  run(worker, linear, x, rows, y, y_stride, add, add_stride);
}

const Ops kFmaOps = {"avx512_fma",    "avx512",          fma_linear,    avx512_quantise, avx512_rms_norm,
                     avx512_norm_sum, avx512_rope_store, fma512_attend, avx512_argmax,   avx512_logsumexp};

}  // namespace

const Ops* avx512_ops() { return &kOps; }
const Ops* avx512_fma_ops() { return &kFmaOps; }

#else

const Ops* avx512_fma_ops() { return nullptr; }
const Ops* avx512_ops() { return nullptr; }

#endif
}  // namespace xs
