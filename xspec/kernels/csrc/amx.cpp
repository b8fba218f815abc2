// The table for machines with tiles (AMX with BF16 and INT8: Sapphire Rapids and newer). They have all of
// AVX-512, which does the rest.

#include "attention.h"
#include "linear.h"
#include "linear_int.h"
#include "ops.h"

namespace xs {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
namespace {

void linear(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
            const bf16* add, int64_t add_stride) {
  const auto run = linear.format == Format::bf16 ? amx_linear_bf16 : amx_linear_int;
  run(worker, linear, x, rows, y, y_stride, add, add_stride);
}

const Ops kOps = {"amx",           "avx512",          linear,        avx512_quantise, avx512_rms_norm,
                  avx512_norm_sum, avx512_rope_store, amx_attend,      avx512_argmax,   avx512_logsumexp};

}  // namespace

const Ops* amx_ops() { return &kOps; }

#else

const Ops* amx_ops() { return nullptr; }

#endif
}  // namespace xs
