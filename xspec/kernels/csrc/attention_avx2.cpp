#include "attention.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx2.inc"
#include "exp2.inc"
#include "attention.inc"

}  // namespace

void avx2_attend(Worker& worker, const Attend& step) { attend_all(worker, step); }

}  // namespace xs

#endif
