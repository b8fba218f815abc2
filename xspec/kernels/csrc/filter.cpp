#include "filter.h"

#include <cmath>
#include <cstring>

namespace xs {
namespace {

// A bfloat16 has few values: counted instead of sorted, a row of any length is a short list of them.
constexpr int kValues = 1 << 16;
constexpr int kBlock = 16;
constexpr uint32_t kSign = 0x8000;
// exp() of less is nothing beside the 1 of the highest.
constexpr float kNoMass = -104.0f;

// Logits that are equal once tempered.
struct Group {
  float x, lowest;  // (logit - high) / heat, and the lowest of the logits
  uint32_t count;
};

struct Memory {
  uint32_t counts[kValues];  // by rank
  Group groups[kValues];
};

// Ranks ascend with the value; -0 comes right before 0.
uint32_t rank_of(uint32_t bits) { return bits ^ ((bits & kSign) != 0 ? 0xffffu : kSign); }

float value_of(uint32_t rank) {
  const uint32_t bits = ((rank & kSign) != 0 ? rank ^ kSign : rank ^ 0xffffu) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

bool occupied(const uint32_t* block) {
  uint32_t any = 0;
  for (int i = 0; i < kBlock; ++i) any |= block[i];
  return any != 0;
}

// What min-p and top-k leave, highest first; none that could not count for anything.
int64_t survivors(Memory& memory, float high, float heat, const Filter& filter) {
  const float floor = std::log(filter.min_p);
  int64_t groups = 0, taken = 0;
  for (int block = kValues - kBlock; block >= 0; block -= kBlock) {
    if (!occupied(memory.counts + block)) continue;
    for (int rank = block + kBlock - 1; rank >= block; --rank) {
      const uint32_t count = memory.counts[rank];
      if (count == 0) continue;
      const float value = value_of(static_cast<uint32_t>(rank)), x = (value - high) / heat;
      const bool tied = groups > 0 && memory.groups[groups - 1].x == x;
      if (!tied && ((filter.top_k > 0 && taken >= filter.top_k) || x < floor ||
                    (filter.top_p < 1.0f && x < kNoMass))) {
        return groups;
      }
      if (!tied) memory.groups[groups++] = {x, value, 0};
      memory.groups[groups - 1].lowest = value;
      memory.groups[groups - 1].count += count;
      taken += count;
    }
  }
  return groups;
}

double mass_of(const Group& group) { return static_cast<double>(std::exp(group.x)) * group.count; }

// Those of which likelier ones leave a part of the mass open: the first always.
int64_t nucleus(const Group* groups, int64_t count, float top_p) {
  double total = 0.0, before = 0.0;
  for (int64_t i = 0; i < count; ++i) total += mass_of(groups[i]);
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0 && !(before < top_p * total)) return i;
    before += mass_of(groups[i]);
  }
  return count;
}

}  // namespace

float lowest_kept(Worker& worker, const bf16* x, int64_t cols, float high, float heat, const Filter& filter) {
  if (filter.neutral()) return -INFINITY;
  Memory& memory = *static_cast<Memory*>(worker.scratch(sizeof(Memory)));
  std::memset(memory.counts, 0, sizeof memory.counts);
  for (int64_t i = 0; i < cols; ++i) ++memory.counts[rank_of(x[i])];
  int64_t kept = survivors(memory, high, heat, filter);
  if (filter.top_p < 1.0f) kept = nucleus(memory.groups, kept, filter.top_p);
  return memory.groups[kept - 1].lowest;
}

}  // namespace xs
