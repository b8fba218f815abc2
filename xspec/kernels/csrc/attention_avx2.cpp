#include "attention.h"

#include <utility>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx2.inc"
#include "exp2.inc"

constexpr int kMaxPairs = 6;  // (row, head) pairs that read keys together; 8 to 12 of 16 registers hold sums
constexpr int kSums = 8;

#include "attention_unit.inc"
#include "attention_dots.inc"
#include "attention.inc"

}  // namespace

void avx2_attend(Worker& worker, const Attend& step) { attend_all(worker, step); }

}  // namespace xs

#endif
