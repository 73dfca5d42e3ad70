// The steps of an epilogue behind a product that another library computed.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace gemmtune {

// Compute the steps for all rows of `args`, by OpenMP's threads where there is work for several.
void run_pointwise_threaded(const IsaOps& isa, const PointwiseArgs& args);

}  // namespace gemmtune
