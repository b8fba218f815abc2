// Drafting by the first loops of a looped target as one call. draft/looped.py is the same op by op and says
// what every part is for.
#pragma once

#include <cstdint>

#include "ops.h"
#include "sequences.h"

namespace xs {

// The weights; all outlive what is made of them. The layers of a loop are a stack with its norm, and what a
// loop yields is what the next one reads.
struct LoopParts {
  const bf16* embedding;  // [vocab, hidden]
  int64_t vocab;
  Linear head;  // [vocab, hidden]
};

// `steps` drafts of each lane, and the states of `steps` + 1 positions.
struct LoopDraft {
  PassRows rows;  // of one row a lane
  int64_t pages;  // that the lanes' tables are granted at most
  bf16* const* slabs;  // [loops * layers]
  int64_t slab_pages, block;
  int64_t loops;  // that draft
  int64_t steps;
  // States after `depths[i]` loops, of lane l at step s: to states[i] + row * state_row + s * hidden.
  const int64_t* depths;  // [kept], 1 .. loops
  bf16* const* states;    // [kept]
  int64_t kept, state_row;
  int64_t* tokens;  // [lanes, steps] out
  float* signals;   // [lanes, steps] out: softmax probability of each
};

}  // namespace xs
