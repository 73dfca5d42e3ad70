// Which instruction sets this build has and this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "types.hpp"

namespace gemmtune {

// Names of the sets that were compiled and that CPUID (and, for AMX, the kernel) grants, plainest first.
std::vector<std::string> usable_isas();
std::vector<std::string> compiled_isas();
// The operations of a usable set; throws std::invalid_argument for any other name.
const IsaOps& isa_ops(const std::string& name);

}  // namespace gemmtune
