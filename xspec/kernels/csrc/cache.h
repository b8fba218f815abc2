// Writing keys and values that no attention step brings along.
#pragma once

#include "ops.h"

namespace xs {

// kv [rows, 2 * G, D]: keys, then values, to flat slots [rows]. Where a slot occurs twice, what stays may be
// a mixture. `finite`: 0 for what is not.
void store_kv(Worker& worker, const Cache& cache, const bf16* kv, int64_t rows, const int64_t* slots,
              bool finite);

}  // namespace xs
