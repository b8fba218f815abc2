#include "cache.h"

#include "attention.h"

namespace xs {

void store_kv(Worker& worker, const Cache& cache, const bf16* kv, int64_t rows, const int64_t* slots,
              bool finite) {
  const int64_t dim = cache.dim, planes = 2 * cache.kv_heads;
  for (int64_t row; (row = worker.next()) < rows;) {
    const int64_t page = slots[row] / cache.block, token = slots[row] % cache.block;
    for (int64_t plane = 0; plane < planes; ++plane) {
      const bf16* values = kv + (row * planes + plane) * dim;
      bf16* chunk = cache.slab + (plane * cache.pages + page) * cache.block * dim;
      for (int64_t d = 0; d < dim; ++d) {
        const bool bad = finite && (values[d] & 0x7F80) == 0x7F80;
        const int64_t at = plane < cache.kv_heads ? key_index(dim, token, d) : value_index(dim, token, d);
        chunk[at] = bad ? 0 : values[d];
      }
    }
  }
}

}  // namespace xs
