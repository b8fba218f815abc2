// Tokens drawn from rows of logits: the noise of verify/noise.py, and the argmax of logits with it.
//
// The noise is a function of (key, position, id) alone, the same bits in every instruction set: whoever
// computes it, for a whole row or for a few ids, draws the same token.
#pragma once

#include <cstdint>
#include <vector>

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
  // score = (logit - high) / heat + noise. The best of each piece of a row: parts [rows, pieces] with
  // pieces = cols / kSampleColumns, rounded up. Rows without heat are left out. logits [rows, stride];
  // high, highest [rows] the highest logit of each row and its column.
  void (*scores)(Worker&, const Noise&, const bf16* logits, int64_t stride, const float* high,
                 const int64_t* highest, const float* heat, Best* parts);
};

const SampleOps& portable_sample_ops();
const SampleOps* avx512_sample_ops();  // null where it was not built
const SampleOps* avx2_sample_ops();

// Those of the same name as `ops`.
const SampleOps& sample_ops(const Ops& ops);

// Draws tokens for whole passes. Owns the buffers between the phases of one; one call at a time.
class Sampler {
 public:
  // Columns drawn [rows]. The temperature of owner o is at o * temperature_stride; null: 0 for all. Rows with
  // temperature 0, and bad rows (their highest logit is not finite), take the lowest column that has it.
  // bad [rows] may be null.
  void draw(Team& team, const Ops& ops, const Noise& noise, const bf16* logits, int64_t stride,
            const float* temperature, int64_t temperature_stride, int64_t* columns, bool* bad);
  // exp(logit - logsumexp of its row) of one column a row, out [rows].
  void probability(Team& team, const Ops& ops, const bf16* logits, int64_t stride, int64_t rows, int64_t cols,
                   const int64_t* columns, float* out);
  void gumbel(Team& team, const Ops& ops, const Noise& noise, float* out);

 private:
  // Waking the others takes longer than a little work: that the caller does alone.
  Team& hands(Team& team, int64_t elements, int64_t alone) { return elements <= alone ? solo_ : team; }

  Team solo_{1};
  std::vector<Best> parts_;
  std::vector<float> high_, row_;  // `row_`: a row's heat, or its logsumexp
};

}  // namespace xs
