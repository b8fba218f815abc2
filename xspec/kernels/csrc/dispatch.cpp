// Which instruction set's ops run: asked by name, or the best this machine has.

#include <cstring>

#include "linear.h"
#include "linear_int.h"
#include "ops.h"

namespace xs {
namespace {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#else
bool has_avx512() { return false; }
bool has_avx2() { return false; }
#endif

}  // namespace

int64_t packed_bytes(Format format, int64_t out, int64_t in, bool gated) {
  if (format == Format::bf16) return packed_bytes_bf16(out, in, gated);
  return packed_bytes_int(format, out, in, gated);
}

const Ops* choose_ops(const char* name) {
  const bool any = name == nullptr || *name == '\0';
  const Ops* wide = has_avx512() ? avx512_ops() : nullptr;
  if (wide != nullptr && (any || std::strcmp(name, wide->name) == 0)) return wide;
  const Ops* middle = has_avx2() ? avx2_ops() : nullptr;
  if (middle != nullptr && (any || std::strcmp(name, middle->name) == 0)) return middle;
  const Ops& plain = portable_ops();
  return any || std::strcmp(name, plain.name) == 0 ? &plain : nullptr;
}

}  // namespace xs
