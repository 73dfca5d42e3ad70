#pragma once
#include <cstdint>

namespace gemmtune {

// Whether this CPU can evict single cache lines without waiting for each (CLFLUSHOPT).
bool can_evict();

// Write the cache lines of memory back and remove them from all caches of the machine. Only where can_evict().
void evict(const char* memory, int64_t bytes);

}  // namespace gemmtune
