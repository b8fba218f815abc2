// Which tokens of a row may be drawn: top-k, top-p and min-p as one lowest logit.
#pragma once

#include <cstdint>

#include "ops.h"
#include "team.h"

namespace xs {

struct Filter {
  int64_t top_k = 0;  // 0: all
  float top_p = 1.0f, min_p = 0.0f;

  bool neutral() const { return top_k <= 0 && !(top_p < 1.0f) && !(min_p > 0.0f); }
};

// The lowest logit that stays; ties of it stay too. verify/filters.py says what is meant. x [cols] without
// NaN, `high` its finite maximum, heat above 0.
float lowest_kept(Worker& worker, const bf16* x, int64_t cols, float high, float heat, const Filter& filter);

}  // namespace xs
