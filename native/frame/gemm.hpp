// The loops around the micro-kernels: blocking, packing of A, threads, split K. No instruction set is named here.
#pragma once

#include <cstdint>
#include <vector>

#include "types.hpp"

namespace gemmtune {

enum class PackA : int { none = 0, rows = 1, panels = 2 };
enum class Order : int { b_in_l1 = 0, a_in_l1 = 1 };  // the operand that the inner loop keeps in the L1 cache

// Prefetch the next block of B: each row tile that uses the current block prefetches its share.
constexpr int64_t kPrefetchNext = -1;

// Limits of a configuration: the product of two sizes and a few factors stays within int64.
constexpr int64_t kMaxElements = int64_t{1} << 30;  // N, K
constexpr int64_t kMaxBlock = int64_t{1} << 30;     // kc, mc, nc
constexpr int kMaxGridDim = 1 << 16;                // each dimension of the thread grid
constexpr int64_t kMaxPrefetchBytes = int64_t{1} << 30;  // prefetch distance in bytes

// Configuration of a kernel, constant across calls. Sizes are in elements unless a comment gives another unit.
struct Config {
  DType a, b, out;
  Compute compute;
  int64_t n, k;
  int nv;             // vectors of 16 columns in a panel
  int mr;             // rows of the micro-tile
  int64_t kc;         // K block; 0 = all of K
  int64_t mc;         // rows of A packed at a time
  int64_t nc;         // panels that share one pass over a K block
  Order order;
  int tm, tn, tk;     // grid of tasks along M, N and K; threads take tasks dynamically when there are more tasks than threads
  PackA pack_a;
  int64_t prefetch;   // bytes ahead in B, or kPrefetchNext
  bool expand;        // convert B to the dense type a block at a time, instead of in registers
  bool raw;           // B is an unpacked, strided matrix
  bool dot;           // raw, with contiguous K, and not packed: dot products along K
  int64_t quant_group;  // K elements that share a scale; 0 = unquantised
  DType scale_dtype;
  bool zero_point;
  float zero_offset;  // offset that was subtracted from the stored integers (8 for int4)
  std::vector<Step> steps;
  Gate gate;          // behind the steps; a panel of B then holds columns of its left half and the same ones of its right half
};

struct Matrix {
  const char* data;
  int64_t row_stride, col_stride, batch_stride;  // elements
};

struct Call {
  int64_t batch, m;
  Matrix a;
  Matrix b;                    // raw B only
  const char* packed;          // packed B otherwise
  const char* scales;          // [groups, padded N] of scale_dtype, or null
  const char* zeros;           // [groups, padded N] of scale_dtype: zero points, or null
  const int32_t* compensation; // [padded N], or null
  char* out;
  int64_t ldo, out_batch_stride;  // elements
  const Aux* aux;
};

class Gemm {
 public:
  // Throws std::invalid_argument for a configuration that the kernels cannot run.
  Gemm(const IsaOps& isa, Config config);
  // Throws std::bad_alloc when scratch memory cannot be allocated; part of the output may then be written.
  void run(const Call& call) const;
  const Config& config() const { return cfg_; }

 private:
  struct RowTiles;
  struct Scratch;
  struct RowBlock;
  struct Task;

  void check_ranges() const;
  void check_config() const;
  int64_t block_bytes() const;  // bytes of an expanded or raw-packed block of B
  int64_t scales_bytes() const;  // of a panel's scales of a K block, as fp32
  int64_t scratch_bytes(int64_t m) const;
  void run_task(const Call&, const Task&, Scratch&, char* partial) const;
  void run_panel(const RowBlock&, const Task&, Scratch&, int64_t panel, int64_t k0, int64_t k1) const;
  const char* prepare_b(const RowBlock&, Scratch&, int64_t panel, int64_t k0, int64_t k1, int64_t* b_stride) const;
  void run_dots(RowBlock&, const Task&, Scratch&) const;
  void dot_panel(const RowBlock&, Scratch&, int64_t panel, int64_t k0, int64_t k1) const;
  // Compute the address and strides of a tile's rows of A for the micro-kernels.
  void locate_a(const RowBlock&, const Scratch&, int tile, int64_t k0, const char** a, int64_t* row_stride,
                int64_t* group_stride) const;
  void pack_rows(const RowBlock&, Scratch&) const;
  void load_scales(const Call&, Scratch&, int64_t panel, int64_t k0, int64_t k1) const;
  void multiply_tile(const RowBlock&, Scratch&, int tile, int64_t panel, int64_t k0, int64_t k1, const char* b,
                     int64_t b_stride) const;
  void set_next_output(const RowBlock&, int tile, int64_t panel, TileArgs& t) const;
  void set_prefetch(const RowBlock&, int tile, int64_t panel, int64_t k0, int64_t k1, int64_t rows, TileArgs& t) const;
  void finish_tile(const RowBlock&, Scratch&, int tile, int64_t panel) const;
  void reduce_slices(const Call&, char* partial, int thread, int threads) const;
  void store_tile(const Call&, int64_t batch, int64_t row, int rows, int64_t panel, void* tile, int64_t ldc,
                  const int32_t* compensation) const;

  const IsaOps& isa_;
  const KernelSet* set_;    // reads the stored B
  const KernelSet* dense_;  // reads expanded or raw-packed blocks; equals set_ when B is read directly
  Config cfg_;
  int64_t kp_;          // consecutive k in one group
  int64_t panels_, panel_cols_;
  int64_t row_bytes_;   // of a packed row of a panel of B
  int64_t panel_bytes_, k_rows_;
  int64_t segment_;     // K elements that share a K block and scales
  int64_t block_segments_;  // of a K block
};

}  // namespace gemmtune
