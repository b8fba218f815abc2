// Memory in huge pages where the system has them: weights and cached keys are read once a pass from end to
// end, and with small pages a good part of that time goes into looking up addresses.
#pragma once

#include <cstddef>

namespace xs {

constexpr size_t kHugePage = size_t{2} << 20;

// Asks for huge pages behind [address, address + bytes); best before it is touched. A hint: never fails.
void advise_huge(void* address, size_t bytes);

// 64-byte aligned, for std::free; null where there is none.
void* allocate(size_t bytes);

}  // namespace xs
