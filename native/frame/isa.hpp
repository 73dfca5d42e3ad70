// The instruction sets that this build contains and that this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "types.hpp"

namespace gemmtune {

// Return the names of the compiled sets that CPUID (and, for AMX, Linux) permits, the most portable first.
std::vector<std::string> usable_isas();
// Return the names of all compiled sets, in the same order.
std::vector<std::string> compiled_isas();
// Return the operations of a usable set. Throws std::invalid_argument for any other name.
const IsaOps& isa_ops(const std::string& name);

}  // namespace gemmtune
