#include "attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx512.inc"
#include "exp2.inc"
#include "attention.inc"

}  // namespace

void avx512_attend(Worker& worker, const Attend& step) { attend_all(worker, step); }

}  // namespace xs

#endif
