// Multi-token prediction as one call: the drafts of all steps, each from the token and the state before it.
// draft/mtp.py is the same op by op and says what every part is for.
#pragma once

#include <cstdint>

#include "ops.h"
#include "sequences.h"

namespace xs {

// The weights; all outlive what is made of them. The layers are a stack of one, with its norm.
struct MtpParts {
  const bf16* embedding;  // [vocab, hidden]
  int64_t vocab;
  const bf16* pair_norm;  // [2, hidden]
  float eps;
  Linear join;         // [hidden, 2 hidden]
  Linear head;         // [D, hidden]
  const int64_t* ids;  // [D] token of each column; null: the column
  int32_t of_normed;   // which state goes on to the next step: 1 after the norm, 0 before it
};

// `steps` drafts of each lane.
struct MtpDraft {
  PassRows rows;         // of one row a lane
  int64_t pages;         // that the lanes' tables are granted at most
  const bf16* boundary;  // [table rows, hidden] the state before each row's last token
  bf16* slab;
  int64_t slab_pages, block;
  int64_t steps;
  int64_t* tokens;  // [lanes, steps] out
  float* signals;   // [lanes, steps] out: softmax probability of each
};

// A pass of the target. Where the states before its rows go, and the slots, is not for the caller to say.
struct MtpPublish {
  Carry carry;
  const int64_t* tokens;  // [rows] what each row was fed
  bf16* slab;
  int64_t slab_pages, block;
};

}  // namespace xs
