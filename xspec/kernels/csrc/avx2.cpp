// The table of the AVX2 ops (with FMA: most x86 machines since 2013).

#include "attention.h"
#include "linear.h"
#include "linear_int.h"
#include "ops.h"

namespace xs {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
namespace {

void linear(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
            const bf16* add, int64_t add_stride) {
  const auto run = linear.format == Format::bf16 ? avx2_linear_bf16 : avx2_linear_int;
  run(worker, linear, x, rows, y, y_stride, add, add_stride);
}

const Ops kOps = {"avx2",        "avx2",          linear,      avx2_quantise, avx2_rms_norm,
                  avx2_norm_sum, avx2_rope_store, avx2_attend, avx2_argmax,   avx2_logsumexp};

}  // namespace

const Ops* avx2_ops() { return &kOps; }

#else

const Ops* avx2_ops() { return nullptr; }

#endif
}  // namespace xs
