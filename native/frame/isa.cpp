#include "isa.hpp"

#include <stdexcept>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace gemmtune {

extern const IsaOps kPortableOps;
#if defined(GEMMTUNE_X86)
extern const IsaOps kAvx2Ops, kAvx512Ops, kAvx512Bf16Ops, kAvx512VnniOps, kAmxOps;
#endif

namespace {

bool always_usable() { return true; }

#if defined(GEMMTUNE_X86)
// __builtin_cpu_supports also checks that the system saves the registers (XCR0).
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

// CPUID leaf 7: EDX bits 22 (bf16), 24 (tile), 25 (int8). On Linux a process must also request the tile registers.
bool has_amx() {
#if defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kNeeded = (1u << 22) | (1u << 24) | (1u << 25);
  if ((d & kNeeded) != kNeeded) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

struct InstructionSet {
  const IsaOps* ops;
  bool (*usable)();
};

const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> all = {
      {&kPortableOps, &always_usable},
#if defined(GEMMTUNE_X86)
      {&kAvx2Ops, &has_avx2},
      {&kAvx512Ops, &has_avx512},
      {&kAvx512VnniOps, &has_avx512_vnni},
      {&kAvx512Bf16Ops, &has_avx512_bf16},
      {&kAmxOps, &has_amx},
#endif
  };
  return all;
}

}  // namespace

std::vector<std::string> compiled_isas() {
  std::vector<std::string> names;
  for (const InstructionSet& e : instruction_sets()) names.emplace_back(e.ops->name);
  return names;
}

std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  for (const InstructionSet& e : instruction_sets())
    if (e.usable()) names.emplace_back(e.ops->name);
  return names;
}

const IsaOps& isa_ops(const std::string& name) {
  for (const InstructionSet& e : instruction_sets()) {
    if (name != e.ops->name) continue;
    if (!e.usable()) throw std::invalid_argument("this CPU cannot run the instruction set '" + name + "'");
    return *e.ops;
  }
  throw std::invalid_argument("unknown instruction set '" + name + "'");
}

}  // namespace gemmtune
