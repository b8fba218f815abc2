// A DSpark block as one call: one pass over a token and masks, then a slot after the other its Markov bias and
// the likeliest token. draft/dspark.py is the same op by op and says what every part is for.
#pragma once

#include <cstdint>

#include "ops.h"
#include "sequences.h"

namespace xs {

// The weights; all outlive what is made of them. The layers are a stack with its norm.
struct BlockParts {
  const bf16* embedding;  // [vocab, hidden]
  int64_t vocab;
  const bf16* mask;  // [hidden]
  int64_t slots;     // of a block
  Linear head;       // [D, hidden]
  const int64_t* ids;  // [D] token of each column; null: the column
  const bf16* markov_table;  // [vocab, rank]; null: slots do not know each other's tokens
  int64_t rank;
  Linear markov;  // [D, rank]
  // sigmoid((w . [hidden ; markov] + b) / T + o); `confidence` null: the softmax probability instead.
  const float* confidence;    // [hidden] or, `with_markov`, [hidden + rank]
  float confidence_bias;
  int32_t with_markov;
  const float* temperatures;  // [2, slots] of greedy lanes and of sampled ones
  const float* offsets;       // [2, slots]
  // What is kept of a pass of the target: kv norm(fc [taps]), of all layers.
  int64_t taps;
  Linear context;  // [hidden, taps * hidden]
  const bf16* context_norm;  // [hidden]
  float eps;
  Linear kv;  // [layers * 2 G D, hidden], keys of a layer, then its values
};

// A block for each lane.
struct BlockDraft {
  PassRows rows;  // of `slots` rows a lane
  int64_t pages;  // that the lanes' tables are granted at most
  bf16* const* slabs;  // [layers]
  int64_t slab_pages, block;
  const bool* sampled;  // [lanes] or null: none is
  int64_t* tokens;  // [lanes, slots] out
  float* signals;   // [lanes, slots] out
};

// A pass of the target. Slots of rows that do not stay are the sink's.
struct BlockPublish {
  int64_t rows;
  const bf16* const* taps;  // [taps] of [rows, hidden]
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows]
  bf16* const* slabs;  // [layers]
  int64_t slab_pages, block;
};

}  // namespace xs
