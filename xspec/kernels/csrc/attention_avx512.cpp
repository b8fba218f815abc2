#include "attention.h"

#include <utility>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")
#include <immintrin.h>

namespace xs {
namespace {

#include "lanes_avx512.inc"
#include "lanes_dot512.inc"
#include "exp2.inc"

constexpr int kMaxPairs = 12;  // (row, head) pairs that read keys together; 24 of 32 registers hold sums
constexpr int kSums = 24;

#include "attention_unit.inc"
#include "attention_dots.inc"
#include "attention.inc"

}  // namespace

void avx512_attend(Worker& worker, const Attend& step) { attend_all(worker, step); }

}  // namespace xs

#endif
