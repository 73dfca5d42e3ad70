// The loops around the micro-kernels: blocking, packing of A, threads, split K. No instruction set is named here.
#pragma once

#include <cstdint>
#include <vector>

#include "types.hpp"

namespace gemmtune {

enum class PackA : int { none = 0, rows = 1, panels = 2 };
enum class Order : int { b_stays = 0, a_stays = 1 };  // what the inner loop keeps in the L1 cache

// While one block of B serves several row tiles, fetch the next block, a share with each tile.
constexpr int64_t kPrefetchNext = -1;

// Bounds of what a configuration may say: products of two sizes and a few factors stay within int64.
constexpr int64_t kMostElements = int64_t{1} << 30;  // N, K
constexpr int64_t kMostBlock = int64_t{1} << 30;     // kc, mc, nc
constexpr int kMostThreads = 1 << 16;                // each side of the thread grid
constexpr int64_t kMostAhead = int64_t{1} << 30;     // bytes of prefetching

// Everything about a kernel that does not change from call to call. Sizes in elements unless said otherwise.
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
  int tm, tn, tk;     // thread grid; more tasks than threads are dealt out dynamically
  PackA pack_a;
  int64_t prefetch;   // bytes ahead in B, or kPrefetchNext
  bool expand;        // convert a block of B to the dense type first, instead of in registers
  bool raw;           // B is an unpacked, strided matrix
  bool dot;           // raw, and read where it lies: its K is contiguous
  int64_t group;      // K elements that share a scale; 0 = unquantised
  DType scale_dtype;
  bool zero_point;
  float zero_offset;  // what the stored integers already had subtracted (8 for int4)
  std::vector<Step> steps;
};

struct Matrix {
  const char* data;
  int64_t row, col, batch;  // strides in elements
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
  int64_t ldo, out_batch;      // elements
  const Aux* aux;
};

class Gemm {
 public:
  // Throws std::invalid_argument when the configuration is one the kernels cannot run.
  Gemm(const IsaOps& isa, Config config);
  // Throws std::bad_alloc when scratch memory cannot be had; nothing is written then.
  void run(const Call& call) const;
  const Config& config() const { return c_; }

 private:
  struct Split;
  struct Scratch;
  struct Work;
  struct Task;

  void check_ranges() const;
  void check() const;
  int64_t block_bytes() const;  // of an expanded or raw-packed block
  int64_t scratch_bytes(int64_t m) const;
  void run_task(const Call&, const Task&, Scratch&, char* partial) const;
  void run_panel(const Work&, const Task&, Scratch&, int64_t panel, int64_t k0, int64_t k1) const;
  const char* prepare_b(const Work&, Scratch&, int64_t panel, int64_t k0, int64_t k1, int64_t* step) const;
  void run_dots(Work&, const Task&, Scratch&) const;
  void dot_panel(const Work&, Scratch&, int64_t panel, int64_t k0, int64_t k1) const;
  // Where rows of A start for a tile, as the micro-kernels read them.
  void locate_a(const Work&, const Scratch&, int tile, int64_t k0, const char** a, int64_t* row, int64_t* group) const;
  void pack_rows(const Work&, Scratch&) const;
  void multiply(const Work&, Scratch&, int tile, int64_t panel, int64_t k0, int64_t k1, const char* b, int64_t step) const;
  void prefetch(const Work&, int tile, int64_t panel, int64_t k0, int64_t k1, int64_t rows, TileArgs& t) const;
  void finish(const Work&, Scratch&, int tile, int64_t panel) const;
  void reduce(const Call&, char* partial, int thread, int threads) const;
  void store_tile(const Call&, int64_t batch, int64_t row, int rows, int64_t panel, void* tile, int64_t ldc,
                  const int32_t* compensation) const;

  const IsaOps& isa_;
  const KernelSet* set_;    // reads the stored B
  const KernelSet* dense_;  // reads expanded or raw-packed blocks; equals set_ when B is read directly
  Config c_;
  int64_t kp_, panels_, panel_cols_, row_bytes_, panel_bytes_, k_rows_, segment_;
};

// Rounds up; b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace gemmtune
