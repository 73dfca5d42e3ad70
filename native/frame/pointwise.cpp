#include "pointwise.hpp"

#include <omp.h>

#include <algorithm>

namespace gemmtune {

// Elements for which another thread is worth waking.
constexpr int64_t kThreadElements = 1 << 15;

void run_pointwise_threaded(const IsaOps& isa, const PointwiseArgs& args) {
  const int64_t worth = std::max<int64_t>(1, args.rows * args.n / kThreadElements);
  const int64_t threads = omp_in_parallel() ? 1 : std::min<int64_t>({omp_get_max_threads(), args.rows, worth});
  const auto run_share = [&](int64_t share) {
    const int64_t first = args.rows * share / threads, last = args.rows * (share + 1) / threads;
    PointwiseArgs part = args;
    part.src += first * args.src_stride * (bits(args.src_dtype) / 8);
    part.out += first * args.ldo * (bits(args.out_dtype) / 8);
    part.row0 = args.row0 + first;
    part.rows = last - first;
    isa.pointwise(part);
  };
  if (threads == 1) return run_share(0);
#pragma omp parallel for num_threads(static_cast<int>(threads))
  for (int64_t share = 0; share < threads; ++share) run_share(share);
}

}  // namespace gemmtune
