// A stack of decoder layers as one call: every worker runs the whole sequence of ops, barriers between.
#pragma once

#include <cstddef>
#include <vector>

#include "ops.h"

namespace xs {

// Pre-norm decoder layer: x += output(attend(qkv(norm(x)))); x += down(silu_gate_up(norm(x))).
// With norms behind the sublayers: x += norm(output(..)), or with `of_sums` x = norm(x + output(..)).
struct Layer {
  Linear qkv;     // [(H + 2 G) D, hidden]
  Linear output;  // [hidden, H D]
  Linear gate_up; // gated, [2 inner, hidden]
  Linear down;    // [hidden, inner]
  const bf16* input_norm;  // [hidden]
  const bf16* mlp_norm;    // [hidden]
  const bf16* head_norm;   // [H + G, D] or null
  const bf16* attention_out_norm;  // [hidden] or null
  const bf16* mlp_out_norm;        // [hidden], null where the other is
  bool of_sums;
  float eps;
};

struct StackShape {
  int64_t hidden, inner;
  int64_t heads, kv_heads, dim;
  int64_t first_key;  // see Attend
  float scale;
  float norm_eps;            // of final_norm
  const bf16* final_norm;    // [hidden] or null
  const float* frequencies;  // [D / 2] radians a position; null: the tables say how far a position turns
  const float* cos;          // [positions, D], as RopeStore reads them, or null
  const float* sin;
  int64_t positions;         // later ones turn as the last
};

// N rows of one forward pass: the layers `loops` times over, each loop after the first reading what the final
// norm made of the one before. Nothing here is kept.
struct Pass {
  int64_t rows;
  int64_t loops;           // 1 where there is no final norm
  const bf16* residual;    // [rows, hidden], not written
  bf16* const* outputs;    // [layers] or null: where a layer's residual goes, or null; the last loop's stay
  bf16* normed;            // [loops, rows, hidden] after the final norm; null where there is none
  const int64_t* positions;   // [rows] of the rotation
  const int64_t* slots;       // [rows]
  const int64_t* sequences;   // [rows]
  const int64_t* kv_lens;     // [rows]
  const int64_t* page_table;  // [sequences, table_stride]
  int64_t table_stride;
  bf16* const* slabs;  // [loops * layers]
  int64_t pages, block;
  int64_t finite;  // 1: keys and values that are not finite are stored as 0
};

// Owns the buffers between ops; they grow with the widest pass. One pass at a time.
class Stack {
 public:
  Stack(const StackShape& shape, const Layer* layers, int64_t count);
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  void forward(Team& team, const Ops& ops, const Pass& pass);
  // Only layer 0's norm, keys and values of pass.residual, stored at pass.slots: nothing is attended to.
  void publish(Team& team, const Ops& ops, const Pass& pass);
  // Keys and values of every layer as they come from outside, kv [rows, layers, 2 G, D] before norm and
  // rotation, which are done in place; stored at pass.slots.
  void store_context(Team& team, const Ops& ops, const Pass& pass, bf16* kv);

 private:
  struct Buffers;
  struct Steps;
  Buffers reserve(int64_t rows);

  const StackShape shape_;
  const std::vector<Layer> layers_;
  const int64_t quantised_in_;  // widest input of an int linear, 0 without one
  char* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace xs
