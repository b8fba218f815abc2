// Tokens drawn from rows of logits: the noise of verify/noise.py, and the argmax of logits with it.
//
// The noise is a function of (key, position, id) alone, the same bits in every instruction set: whoever
// computes it, for a whole row or for a few ids, draws the same token.
#pragma once

#include <cstdint>
#include <vector>

#include "filter.h"
#include "ops.h"
#include "team.h"

namespace xs {

// Gumbel noise of `rows` rows over `cols` ids each.
struct Noise {
  const int32_t* keys;       // [*, 2]
  const int64_t* owners;     // [rows] row of `keys`; null: the row itself
  const int64_t* positions;  // [rows]
  const int64_t* ids;        // [rows, id_stride] token ids; null: 0, 1, 2, ...
  int64_t id_stride;         // 0: all rows share their ids
  int64_t rows, cols;
};

// How owners draw: that of owner o is at o * stride. Neutral: temperature 0, top_k 0, top_p 1, min_p 0.
struct Settings {
  const float* temperature;  // null: 0 for all
  const float *top_p, *min_p;  // null, as top_k: nobody's rows are filtered
  int64_t stride;
  const int64_t* top_k;
  int64_t top_k_stride;
};

// Rows that stand on guesses: one with an offset above 0 was fed `fed` as what the row before it draws.
struct Chain {
  const int64_t* fed;      // [rows]; null: every row is drawn
  const int64_t* offsets;  // [rows]
};

// A call of Sampler::draw.
struct Draw {
  Noise noise;
  Settings settings;
  Chain chain;
  const bf16* logits;  // [noise.rows, stride]
  int64_t stride;
  int64_t* columns;  // [noise.rows] out; kNotDrawn: stands on a guess that was wrong
  bool* bad;         // [noise.rows] out: drawn, but the highest logit is not finite
};

constexpr int64_t kNotDrawn = -1;

// A row that is drawn with noise.
struct Drawn {
  int64_t row;
  const bf16* logits;
  float high, heat;
  int64_t highest;  // column of `high`
  Filter filter;
  float lowest;  // logits below are cut
};

// The highest score of some columns of a row; of equal ones the lowest column.
struct Best {
  float score;
  int64_t column;
};

// Columns of a row that a worker takes at a time.
constexpr int64_t kSampleColumns = 4096;

// What is written in vectors. Both hand their work out by ticket and end without a barrier.
struct SampleOps {
  const char* name;
  // out [rows, cols]
  void (*gumbel)(Worker&, const Noise&, float* out);
  // score = (logit - high) / heat + noise of columns that are not cut. The best of each piece of a row:
  // parts [count, pieces] with pieces = cols / kSampleColumns, rounded up.
  void (*scores)(Worker&, const Noise&, const Drawn* drawn, int64_t count, Best* parts);
};

const SampleOps& portable_sample_ops();
const SampleOps* avx512_sample_ops();  // null where it was not built
const SampleOps* avx2_sample_ops();

// Those of the lanes of `ops`.
const SampleOps& sample_ops(const Ops& ops);

// Draws tokens for whole passes. Owns the buffers between the phases of one; one call at a time.
class Sampler {
 public:
  // Rows with temperature 0, and bad rows, take the lowest column that has the highest logit. What stands on
  // guesses is drawn in waves, a row of every lane that is right so far at a time: noise is dear.
  void draw(Team& team, const Ops& ops, const Draw& draw);
  // exp(logit - logsumexp of its row) of one column a row, out [rows].
  void probability(Team& team, const Ops& ops, const bf16* logits, int64_t stride, int64_t rows, int64_t cols,
                   const int64_t* columns, float* out);
  void gumbel(Team& team, const Ops& ops, const Noise& noise, float* out);

 private:
  // Waking the others takes longer than a little work: that the caller does alone.
  Team& hands(Team& team, int64_t elements, int64_t alone) { return elements <= alone ? solo_ : team; }

  void draw_wave(Team& team, const Ops& ops, const Draw& draw);

  Team solo_{1};
  std::vector<Best> parts_;
  std::vector<float> high_, sums_;  // of every row: its highest logit; its logsumexp
  std::vector<int64_t> highest_, reached_;  // column of the highest logit; the rows that come next
  std::vector<Drawn> wave_;
};

}  // namespace xs
