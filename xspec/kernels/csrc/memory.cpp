#include "memory.h"

#include <cstdint>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace xs {

void advise_huge(void* address, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  const uintptr_t first = (at + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (at + bytes) / kHugePage * kHugePage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)address;
  (void)bytes;
#endif
}

void* allocate(size_t bytes) {
  const size_t unit = bytes < kHugePage ? 64 : kHugePage;
  void* memory = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
  if (memory != nullptr && unit == kHugePage) advise_huge(memory, bytes);
  return memory;
}

}  // namespace xs
