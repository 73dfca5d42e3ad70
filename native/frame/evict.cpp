#include "evict.hpp"

#if defined(GEMMTUNE_X86)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace gemmtune {

#if defined(GEMMTUNE_X86)
namespace {

constexpr int64_t kLine = 64;

__attribute__((target("clflushopt"))) void evict_lines(const char* memory, int64_t bytes) {
  const char* const first = reinterpret_cast<const char*>(reinterpret_cast<intptr_t>(memory) / kLine * kLine);
  for (const char* line = first; line < memory + bytes; line += kLine) _mm_clflushopt(const_cast<char*>(line));
  _mm_mfence();
}

}  // namespace

bool can_evict() {
  static const bool has_clflushopt = [] {  // once: CPUID traps in a virtual machine
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 23));  // leaf 7: EBX bit 23
  }();
  return has_clflushopt;
}

void evict(const char* memory, int64_t bytes) {
  if (can_evict()) evict_lines(memory, bytes);
}
#else
bool can_evict() { return false; }

void evict(const char*, int64_t) {}
#endif

}  // namespace gemmtune
