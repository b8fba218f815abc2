// Which instruction set's ops run: asked by name, or the best this machine has.

#include <cstring>
#include <utility>

#include "linear.h"
#include "linear_int.h"
#include "ops.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace xs {
namespace {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

// Measured: Emerald Rapids takes pairs of bf16 at half the rate of fp32. AMD's keep what Zen 4 was tuned with.
bool is_intel() { return __builtin_cpu_is("intel"); }

// AMX with BF16 and INT8, and leave of the system to use its registers: Linux gives it to those who ask.
bool has_amx() {
#if defined(__linux__) && __GNUC__ >= 11
  constexpr long kAskForState = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  constexpr unsigned kAll = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, tiles, INT8
  unsigned a, b, c, d = 0;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & kAll) != kAll) return false;
  static const bool granted = syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#else
bool has_amx() { return false; }
bool is_intel() { return false; }
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
  const auto asked = [&](const Ops* ops) {
    return ops != nullptr && (any || std::strcmp(name, ops->name) == 0);
  };
  const Ops* tiles = has_amx() ? amx_ops() : nullptr;
  if (asked(tiles)) return tiles;
  const Ops* first = has_avx512() ? avx512_ops() : nullptr;
  const Ops* second = has_avx512() ? avx512_fma_ops() : nullptr;
  if (is_intel()) std::swap(first, second);
  if (asked(first)) return first;
  if (asked(second)) return second;
  const Ops* middle = has_avx2() ? avx2_ops() : nullptr;
  if (asked(middle)) return middle;
  return asked(&portable_ops()) ? &portable_ops() : nullptr;
}

}  // namespace xs
