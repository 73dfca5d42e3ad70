#include "gemm.hpp"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "convert.hpp"
#include "pack_b.hpp"

namespace gemmtune {
namespace {

constexpr int64_t kAlignment = 64;

constexpr int64_t align_up(int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

// Scratch memory of one thread, reused across calls. get() returns null when the allocation fails.
class Arena {
 public:
  ~Arena() { std::free(data_); }
  char* get(int64_t bytes) {
    if (bytes <= size_) return data_;
    std::free(data_);
    size_ = 0;
    data_ = static_cast<char*>(std::aligned_alloc(kAlignment, align_up(bytes)));
    if (data_ != nullptr) size_ = bytes;
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

thread_local Arena arena;

const KernelSet* find_kernel_set(const IsaOps& isa, Compute compute, DType b) {
  for (int i = 0; i < isa.n_sets; ++i)
    if (isa.sets[i].compute == compute && isa.sets[i].b == b) return &isa.sets[i];
  return nullptr;
}

constexpr DType dense_type(Compute c) {
  return c == Compute::f32 ? DType::f32 : c == Compute::bf16 ? DType::bf16 : DType::s8;
}

struct Range {
  int64_t begin, end;
};

// Return part `index` of `count` nearly equal parts of [0, total), in multiples of `unit`.
Range partition(int64_t total, int64_t unit, int64_t count, int64_t index) {
  const int64_t units = ceil_div(total, unit), base = units / count, extra = units % count;
  const int64_t first = index * base + std::min(index, extra), size = base + (index < extra ? 1 : 0);
  return {std::min(total, first * unit), std::min(total, (first + size) * unit)};
}

// Most terms that a float32 accumulator sums before it is added to C: rounding errors grow with the number of terms, and
// sums of a few hundred terms keep as many bits as oneDNN's and MKL's. A multiple of the k in every row of packed B.
constexpr int64_t kMaxSumTerms = 256;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// Load `n` scales or zero points as fp32 and subtract `offset`. Each dtype has a loop of its own so that the loop
// vectorises.
void load_params(const char* p, DType t, int64_t first, int64_t n, float offset, float* dst) {
  const auto* half = reinterpret_cast<const uint16_t*>(p) + first;
  if (t == DType::bf16) {
    for (int64_t i = 0; i < n; ++i) dst[i] = bf16_to_f32(half[i]) - offset;
  } else if (t == DType::f16) {
    for (int64_t i = 0; i < n; ++i) dst[i] = f16_to_f32(half[i]) - offset;
  } else {
    const auto* full = reinterpret_cast<const float*>(p) + first;
    for (int64_t i = 0; i < n; ++i) dst[i] = full[i] - offset;
  }
}

}  // namespace

// Partition of a block's rows into `count` micro-tiles whose sizes differ by at most one: the first `larger` have one row more.
struct Gemm::RowTiles {
  int64_t rows;
  int count;
  int64_t smaller_rows, larger;
  RowTiles(int64_t rows, int mr)
      : rows(rows), count(static_cast<int>(ceil_div(rows, mr))), smaller_rows(rows / count), larger(rows % count) {}
  int64_t begin(int tile) const { return tile * smaller_rows + std::min<int64_t>(tile, larger); }
  int size(int tile) const { return static_cast<int>(smaller_rows + (tile < larger ? 1 : 0)); }
};

struct Gemm::Scratch {
  char* a;             // packed rows
  char* c;             // accumulator tiles
  char* b;             // expanded or raw-packed block
  float* scale;        // [segments of a K block, columns of a panel]
  float* zero;         // the same of zero points
  float* sums;         // [segments, rows] sums of A
  int32_t* compensation;  // of raw B, for each column of the panels in [jc, jc_end)
  int64_t packed_batch = -1, packed_row = -1, packed_rows = -1, packed_k = -1;  // the part of A that `a` holds
  int64_t scaled_panel = -1, scaled_k = -1;  // the panel and the first k of `scale` and `zero`
  uint32_t tile_state = 0;  // TileArgs::tile_state of this thread
};

// One thread's unit of work: rows [m0, m1), panels [p0, p1) and k in [k0, k1), which is slice `slice` of split-K.
struct Gemm::Task {
  int64_t batch, m0, m1, p0, p1, k0, k1, slice;
};

// A block of a task's rows, from row0, and the panels [jc, jc_end) that it is being multiplied by.
struct Gemm::RowBlock {
  const Call& call;
  const Task& task;
  RowTiles tiles;
  int64_t row0, jc, jc_end;
  char* partial;  // accumulators of all split-K slices, or null without split-K
};

Gemm::Gemm(const IsaOps& isa, Config config) : isa_(isa), cfg_(std::move(config)) {
  check_ranges();
  set_ = find_kernel_set(isa_, cfg_.compute, cfg_.b);
  require(set_ != nullptr || cfg_.raw, "this instruction set has no kernel for these types");
  dense_ = cfg_.expand || cfg_.raw ? find_kernel_set(isa_, cfg_.compute, dense_type(cfg_.compute)) : set_;
  // int16 pairs have no stored dense form: their kernels widen int8 on load.
  require(dense_ != nullptr && !(cfg_.compute == Compute::i16 && cfg_.expand), "this instruction set cannot expand these weights");
  kp_ = group_size(cfg_.compute);
  panel_cols_ = static_cast<int64_t>(cfg_.nv) * kLanes;
  panels_ = ceil_div(cfg_.n, panel_cols_);
  check_config();
  const int64_t k_per_row = cfg_.raw ? kp_ : kp_ * set_->groups_per_row;
  k_rows_ = ceil_div(cfg_.k, k_per_row);
  row_bytes_ = cfg_.raw ? panel_cols_ * kGroupBytes : cfg_.nv * set_->vector_bytes;
  panel_bytes_ = k_rows_ * row_bytes_;
  const bool quant_grouped = cfg_.quant_group > 0 && cfg_.quant_group < cfg_.k;
  const int64_t unit = quant_grouped ? cfg_.quant_group : 8;
  if (cfg_.kc == 0 || cfg_.kc > cfg_.k) cfg_.kc = ceil_div(cfg_.k, unit) * unit;
  segment_ = quant_grouped ? std::min(cfg_.kc, cfg_.quant_group) : cfg_.kc;
  require(cfg_.kc % 8 == 0 && segment_ % 8 == 0 && cfg_.kc % segment_ == 0 && (!quant_grouped || cfg_.quant_group % segment_ == 0),
          "kc must be a multiple of 8 and, with grouped scales, divide or be divided by the group");
  block_segments_ = cfg_.kc / segment_;
}

// Check the ranges of all fields. The constructor calls this before it divides, narrows or multiplies any of them.
void Gemm::check_ranges() const {
  require(cfg_.n > 0 && cfg_.k > 0 && cfg_.n <= kMaxElements && cfg_.k <= kMaxElements, "N and K must be positive, and below 2^30");
  require(cfg_.nv >= 1 && cfg_.nv <= kMaxVectors && cfg_.mr >= 1 && cfg_.mr <= kMaxRows, "micro-tile out of range");
  require(cfg_.kc >= 0 && cfg_.kc <= kMaxBlock, "kc out of range");
  require(cfg_.mc >= 1 && cfg_.mc <= kMaxBlock && cfg_.nc >= 1 && cfg_.nc <= kMaxBlock, "block sizes out of range");
  require(cfg_.tm >= 1 && cfg_.tm <= kMaxGridDim && cfg_.tn >= 1 && cfg_.tn <= kMaxGridDim && cfg_.tk >= 1 && cfg_.tk <= kMaxGridDim,
          "thread grid out of range");
  require(cfg_.prefetch >= kPrefetchNext && cfg_.prefetch <= kMaxPrefetchBytes, "prefetch distance out of range");
  require(cfg_.quant_group >= 0, "groups of scales must not be negative");
  require(!(cfg_.expand && cfg_.raw) && (!cfg_.dot || cfg_.raw), "no such template");
}

void Gemm::check_config() const {
  require(dense_->max_rows[cfg_.nv] >= cfg_.mr, "this instruction set has no micro-tile of that size");
  require(cfg_.mc >= cfg_.mr, "fewer rows are packed at a time than a micro-tile has");
  require(!cfg_.dot || (cfg_.raw && set_ != nullptr && set_->dot[1] != nullptr && cfg_.mr <= kDotRows && cfg_.pack_a != PackA::panels),
          "this instruction set has no dot products for these types");
  require(!(cfg_.expand || cfg_.raw) || cfg_.dot || (cfg_.kc > 0 && cfg_.kc <= 4096), "expanded blocks need 0 < kc <= 4096");
  require(!((cfg_.expand || cfg_.raw) && cfg_.order == Order::a_in_l1), "expanded blocks need the order that keeps B");
  require(!(cfg_.raw && cfg_.tk > 1), "an unpacked B cannot be split along K");
  require(cfg_.gate == Gate::none || (!cfg_.raw && cfg_.n % panel_cols_ == 0), "a gate needs a packed B of whole panels");
  require(!(cfg_.raw && cfg_.b != DType::f32 && cfg_.b != DType::bf16 && cfg_.b != DType::f16 && cfg_.b != DType::s8),
          "unpacked B must hold whole numbers of bytes");
  require(cfg_.quant_group == 0 || !is_integer(cfg_.compute), "scales per group need a floating-point accumulator");
  const bool same_type = bits(cfg_.a) * kp_ == 8 * kGroupBytes && !(cfg_.compute == Compute::u8s8 && cfg_.a == DType::s8);
  require(cfg_.pack_a != PackA::none || (same_type && cfg_.k % kp_ == 0), "these activations must be packed");
  // The kernels read whole stored rows of several groups (int4); A then needs zero padding to a whole row.
  require(cfg_.pack_a != PackA::none || cfg_.b != DType::s4 || cfg_.k % 8 == 0, "these activations must be packed");
}

int64_t Gemm::block_bytes() const {
  return (cfg_.expand || cfg_.raw) && !cfg_.dot ? cfg_.kc / kp_ * panel_cols_ * kGroupBytes : 0;
}

int64_t Gemm::scales_bytes() const { return cfg_.quant_group == 0 ? 0 : align_up(block_segments_ * panel_cols_ * 4); }

int64_t Gemm::scratch_bytes(int64_t m) const {
  const int64_t rows = std::min(m, cfg_.mc), segments = ceil_div(cfg_.k, segment_) + 1;
  const int64_t a = cfg_.pack_a == PackA::none ? 0 : rows * (align_up(ceil_div(cfg_.k, 8) * 8 / kp_ * kGroupBytes) + kAlignment);
  const bool one_block = cfg_.kc >= cfg_.k && !cfg_.dot;
  const int64_t c = (one_block ? kMaxRows : rows) * (one_block ? 1 : std::min(cfg_.nc, panels_)) * panel_cols_ * 4;
  const int64_t b = block_bytes();
  const int64_t sums = cfg_.zero_point ? segments * rows * 4 : 0;
  return align_up(a) + align_up(c) + align_up(b) + 2 * scales_bytes() + align_up(sums) +
         align_up(std::min(cfg_.nc, panels_) * panel_cols_ * 4);
}

void Gemm::run(const Call& call) const {
  if (call.m == 0 || call.batch == 0) return;
  const int64_t tm = std::min<int64_t>(cfg_.tm, ceil_div(call.m, cfg_.mr)), tn = std::min<int64_t>(cfg_.tn, panels_);
  const int64_t tk = call.batch == 1 ? std::min<int64_t>(cfg_.tk, ceil_div(cfg_.k, segment_)) : 1;
  const int64_t tasks = call.batch * tm * tn * tk;
  const int threads = static_cast<int>(omp_in_parallel() ? 1 : std::min<int64_t>(omp_get_max_threads(), tasks));
  char* partial = nullptr;
  if (tk > 1) {
    partial = static_cast<char*>(std::aligned_alloc(kAlignment, align_up(tk * call.m * panels_ * panel_cols_ * 4)));
    if (partial == nullptr) throw std::bad_alloc();
  }
  const auto make_task = [&](int64_t i) {
    Task t;
    t.slice = i % tk;
    const int64_t grid_n = i / tk % tn, grid_m = i / tk / tn % tm;
    t.batch = i / tk / tn / tm;
    const Range rows = partition(call.m, cfg_.mr, tm, grid_m), panels = partition(panels_, 1, tn, grid_n),
                k = partition(cfg_.k, segment_, tk, t.slice);
    t.m0 = rows.begin, t.m1 = rows.end, t.p0 = panels.begin, t.p1 = panels.end, t.k0 = k.begin, t.k1 = k.end;
    return t;
  };
  std::atomic<int64_t> next{threads};
  std::atomic<bool> failed{false};
  const int64_t bytes = scratch_bytes(call.m);
  const auto run_tasks = [&](int thread, int team) {
    char* memory = arena.get(bytes);
    if (memory == nullptr) failed = true;
    Scratch scratch{};
    scratch.a = memory;
    for (int64_t i = thread; memory != nullptr && i < tasks; i = team == 1 ? i + 1 : next.fetch_add(1))
      run_task(call, make_task(i), scratch, partial);
    if (isa_.release != nullptr) isa_.release();
  };
  if (threads == 1) {
    run_tasks(0, 1);
    if (partial != nullptr && !failed) reduce_slices(call, partial, 0, 1);
  } else {
#pragma omp parallel num_threads(threads)
    {
      const int team = omp_get_num_threads(), thread = omp_get_thread_num();
      // The OpenMP runtime may start fewer threads than requested; the shared counter then has to start at that number.
      if (team != threads && thread == 0) next = team;
      if (team != threads) {
#pragma omp barrier
      }
      run_tasks(thread, team);
      if (partial != nullptr) {
#pragma omp barrier
        if (!failed) reduce_slices(call, partial, thread, team);
      }
    }
  }
  std::free(partial);
  if (failed) throw std::bad_alloc();
}

void Gemm::run_task(const Call& call, const Task& task, Scratch& s, char* partial) const {
  const int64_t max_rows = std::min(call.m, cfg_.mc);
  const bool one_block = cfg_.kc >= cfg_.k && !cfg_.dot;
  char* p = s.a;
  if (cfg_.pack_a != PackA::none) p += align_up(max_rows * (align_up(ceil_div(cfg_.k, 8) * 8 / kp_ * kGroupBytes) + kAlignment));
  s.c = p;
  p += align_up((one_block ? kMaxRows : max_rows) * (one_block ? 1 : std::min(cfg_.nc, panels_)) * panel_cols_ * 4);
  s.b = p;
  p += align_up(block_bytes());
  s.scale = reinterpret_cast<float*>(p);
  s.zero = reinterpret_cast<float*>(p + scales_bytes());
  s.compensation = reinterpret_cast<int32_t*>(p + 2 * scales_bytes());
  s.sums = reinterpret_cast<float*>(reinterpret_cast<char*>(s.compensation) + align_up(std::min(cfg_.nc, panels_) * panel_cols_ * 4));

  // Blocks of nearly equal size: a last one of few rows would read all of B for them.
  const int64_t rows = task.m1 - task.m0, blocks = ceil_div(rows, cfg_.mc);
  const int64_t block_rows = std::min(cfg_.mc, ceil_div(ceil_div(rows, blocks), cfg_.mr) * cfg_.mr);
  for (int64_t row0 = task.m0; row0 < task.m1; row0 += block_rows) {
    RowBlock block{call, task, RowTiles(std::min(block_rows, task.m1 - row0), cfg_.mr), row0, 0, 0, partial};
    pack_rows(block, s);
    if (cfg_.dot) {
      run_dots(block, task, s);
      continue;
    }
    for (block.jc = task.p0; block.jc < task.p1; block.jc += cfg_.nc) {
      block.jc_end = std::min(task.p1, block.jc + cfg_.nc);
      if (cfg_.raw && cfg_.compute == Compute::u8s8) std::memset(s.compensation, 0, (block.jc_end - block.jc) * panel_cols_ * 4);
      for (int64_t k0 = task.k0; k0 < task.k1; k0 += cfg_.kc) {
        const int64_t k1 = std::min(task.k1, k0 + cfg_.kc);
        if (cfg_.order == Order::b_in_l1) {
          for (int64_t panel = block.jc; panel < block.jc_end; ++panel) run_panel(block, task, s, panel, k0, k1);
          continue;
        }
        for (int tile = 0; tile < block.tiles.count; ++tile)
          for (int64_t panel = block.jc; panel < block.jc_end; ++panel) {
            const char* b = call.packed + panel * panel_bytes_ + k0 / (kp_ * set_->groups_per_row) * row_bytes_;
            multiply_tile(block, s, tile, panel, k0, k1, b, row_bytes_);
            if (k1 == task.k1) finish_tile(block, s, tile, panel);
          }
      }
    }
  }
}

void Gemm::pack_rows(const RowBlock& block, Scratch& s) const {
  if (cfg_.pack_a == PackA::none && !cfg_.zero_point) return;
  const Task& t = block.task;
  if (s.packed_batch == t.batch && s.packed_row == block.row0 && s.packed_rows == block.tiles.rows && s.packed_k == t.k0) return;
  s.packed_batch = t.batch, s.packed_row = block.row0, s.packed_rows = block.tiles.rows, s.packed_k = t.k0;
  const Matrix& a = block.call.a;
  PackAArgs p{};
  p.src = a.data + (t.batch * a.batch_stride + block.row0 * a.row_stride + t.k0 * a.col_stride) * (bits(cfg_.a) / 8);
  p.dtype = cfg_.a;
  p.row_stride = a.row_stride, p.col_stride = a.col_stride;
  p.rows = block.tiles.rows, p.k = t.k1 - t.k0;
  p.compute = cfg_.compute;
  p.pad_groups = ceil_div(p.k, 8) * 8 / kp_;
  // An odd number of cache lines spreads rows over cache sets.
  p.dst_row_stride = align_up(p.pad_groups * kGroupBytes) + kAlignment;
  if (cfg_.pack_a == PackA::rows) {
    p.dst = s.a;
    isa_.pack_a(p);
  } else if (cfg_.pack_a == PackA::panels) {
    for (int tile = 0; tile < block.tiles.count; ++tile) {
      PackAArgs tile_args = p;
      tile_args.rows = tile_args.panel = block.tiles.size(tile);
      tile_args.src = p.src + block.tiles.begin(tile) * a.row_stride * (bits(cfg_.a) / 8);
      tile_args.dst = s.a + block.tiles.begin(tile) * p.pad_groups * kGroupBytes;
      isa_.pack_a(tile_args);
    }
  }
  if (cfg_.zero_point) isa_.row_sums(p, segment_, s.sums, std::min(block.call.m, cfg_.mc));
}

void Gemm::run_panel(const RowBlock& block, const Task& task, Scratch& s, int64_t panel, int64_t k0, int64_t k1) const {
  int64_t b_stride = row_bytes_;
  const char* b = prepare_b(block, s, panel, k0, k1, &b_stride);
  for (int tile = 0; tile < block.tiles.count; ++tile) {
    multiply_tile(block, s, tile, panel, k0, k1, b, b_stride);
    if (k1 == task.k1) finish_tile(block, s, tile, panel);
  }
}

const char* Gemm::prepare_b(const RowBlock& block, Scratch& s, int64_t panel, int64_t k0, int64_t k1, int64_t* b_stride) const {
  if (cfg_.raw) {
    const Matrix& b = block.call.b;
    const bool has_compensation = cfg_.compute == Compute::u8s8 && cfg_.a == DType::s8;
    pack_block(cfg_.compute, cfg_.b, b.data + block.task.batch * b.batch_stride * (bits(cfg_.b) / 8), b.row_stride, b.col_stride,
               k0, k1, panel * panel_cols_, cfg_.n, panel_cols_, s.b,
               has_compensation ? s.compensation + (panel - block.jc) * panel_cols_ : nullptr);
    *b_stride = block_row_bytes(cfg_.compute, panel_cols_);
    return s.b;
  }
  const char* b = block.call.packed + panel * panel_bytes_ + k0 / (kp_ * set_->groups_per_row) * row_bytes_;
  if (!cfg_.expand) return b;
  *b_stride = panel_cols_ * kGroupBytes;
  set_->expand(b, row_bytes_, cfg_.nv, ceil_div(k1 - k0, kp_), s.b, *b_stride);
  return s.b;
}

void Gemm::locate_a(const RowBlock& block, const Scratch& s, int tile, int64_t k0, const char** a, int64_t* row_stride,
                    int64_t* group_stride) const {
  const int64_t first = block.tiles.begin(tile);
  if (cfg_.pack_a == PackA::none) {
    const Matrix& m = block.call.a;
    const int64_t element = bits(cfg_.a) / 8;
    *row_stride = m.row_stride * element;
    *group_stride = kGroupBytes;
    *a = m.data + (block.task.batch * m.batch_stride + (block.row0 + first) * m.row_stride + k0) * element;
    return;
  }
  const int64_t groups = ceil_div(block.task.k1 - block.task.k0, 8) * 8 / kp_, skipped_groups = (k0 - block.task.k0) / kp_;
  const bool panels = cfg_.pack_a == PackA::panels;
  *row_stride = panels ? kGroupBytes : align_up(groups * kGroupBytes) + kAlignment;
  *group_stride = panels ? block.tiles.size(tile) * kGroupBytes : kGroupBytes;
  *a = s.a + (panels ? first * groups * kGroupBytes : first * *row_stride) + skipped_groups * *group_stride;
}

// Multiply by dot products over an unpacked weight: for each panel of columns, one K block at a time so that A stays in the
// L2 cache.
void Gemm::run_dots(RowBlock& block, const Task& task, Scratch& s) const {
  for (int64_t panel = task.p0; panel < task.p1; ++panel) {
    block.jc = panel;
    for (int64_t k0 = task.k0; k0 < task.k1; k0 += cfg_.kc) dot_panel(block, s, panel, k0, std::min(task.k1, k0 + cfg_.kc));
    for (int tile = 0; tile < block.tiles.count; ++tile)
      store_tile(block.call, task.batch, block.row0 + block.tiles.begin(tile), block.tiles.size(tile), panel,
                 s.c + block.tiles.begin(tile) * panel_cols_ * 4, panel_cols_, nullptr);
  }
}

void Gemm::dot_panel(const RowBlock& block, Scratch& s, int64_t panel, int64_t k0, int64_t k1) const {
  const Matrix& b = block.call.b;
  const int64_t element = bits(cfg_.b) / 8, n0 = panel * panel_cols_, valid = std::min(panel_cols_, cfg_.n - n0);
  DotArgs d{};
  d.b_col_stride = b.col_stride * element;
  d.k = k1 - k0;
  d.ldc = panel_cols_;
  d.accumulate = k0 > block.task.k0;
  d.prefetch = cfg_.prefetch;
  for (int64_t n = 0; n < valid; n += kDotColumns) {
    d.columns = static_cast<int>(std::min<int64_t>(kDotColumns, valid - n));
    d.b = b.data + (block.task.batch * b.batch_stride + (n0 + n) * b.col_stride + k0) * element;
    for (int tile = 0; tile < block.tiles.count; ++tile) {
      int64_t group_stride = 0;  // A's rows are contiguous
      locate_a(block, s, tile, k0, &d.a, &d.a_row_stride, &group_stride);
      d.c = reinterpret_cast<float*>(s.c) + block.tiles.begin(tile) * panel_cols_ + n;
      set_->dot[block.tiles.size(tile)](d);
    }
  }
}

void Gemm::multiply_tile(const RowBlock& block, Scratch& s, int tile, int64_t panel, int64_t k0, int64_t k1, const char* b,
                         int64_t b_stride) const {
  const int64_t first = block.tiles.begin(tile), columns = std::min(panel_cols_, cfg_.n - panel * panel_cols_);
  const int rows = block.tiles.size(tile);
  // Split-K accumulators hold whole panels, so that reduce_slices reads no uninitialised column.
  const int nv = block.partial != nullptr ? cfg_.nv : static_cast<int>(ceil_div(columns, kLanes));
  const KernelSet* set = cfg_.expand || cfg_.raw ? dense_ : set_;
  TileArgs t{};
  locate_a(block, s, tile, k0, &t.a, &t.a_row_stride, &t.a_group_stride);
  const bool one_block = cfg_.kc >= cfg_.k;
  if (block.partial != nullptr) {
    t.ldc = panels_ * panel_cols_;
    t.c = block.partial + ((block.task.slice * block.call.m + block.row0 + first) * t.ldc + panel * panel_cols_) * 4;
  } else {
    t.ldc = one_block ? panel_cols_ : std::min(cfg_.nc, panels_) * panel_cols_;
    t.c = s.c + (one_block ? 0 : first * t.ldc + (panel - block.jc) * panel_cols_) * 4;
  }
  t.b_stride = b_stride;
  t.b = b;
  if (block.partial == nullptr && k1 == block.task.k1) set_next_output(block, tile, panel, t);
  t.tile_state = &s.tile_state;
  t.accumulate = k0 > block.task.k0;
  set_prefetch(block, tile, panel, k0, k1, ceil_div(k1 - k0, kp_ * set->groups_per_row), t);
  if (cfg_.quant_group != 0) {
    load_scales(block.call, s, panel, k0, k1);
    t.scale = s.scale;
    t.scale_stride = panel_cols_;
    t.segment_groups = segment_ / kp_;
    if (cfg_.zero_point) {
      t.zero = s.zero;
      t.a_sum_stride = std::min(block.call.m, cfg_.mc);
      t.a_sum = s.sums + (k0 - block.task.k0) / segment_ * t.a_sum_stride + first;
    }
  }
  const int64_t segment = cfg_.quant_group == 0 && cfg_.compute == Compute::f32 ? kMaxSumTerms : k1 - k0;
  const char *a = t.a, *prefetch = t.prefetch;
  for (int64_t k = k0; k < k1; k += segment) {
    const int64_t end = std::min(k1, k + segment);
    t.a = a + (k - k0) / kp_ * t.a_group_stride;
    const int64_t row = (k - k0) / (kp_ * set->groups_per_row);
    t.b = b + row * b_stride;
    t.prefetch = prefetch + row * t.prefetch_stride;
    t.groups = ceil_div(end - k, kp_);
    if (set->groups_per_row > 1) t.groups = ceil_div(t.groups, set->groups_per_row) * set->groups_per_row;
    set->tile[nv][rows](t);
    t.accumulate = true;
    t.next_out_rows = 0;  // they have been prefetched
  }
}

// Load the scales and the zero points of a panel's columns for the segments in [k0, k1), unless the last call did.
void Gemm::load_scales(const Call& call, Scratch& s, int64_t panel, int64_t k0, int64_t k1) const {
  if (s.scaled_panel == panel && s.scaled_k == k0) return;
  s.scaled_panel = panel, s.scaled_k = k0;
  float *scale = s.scale, *zero = s.zero;
  for (int64_t k = k0; k < k1; k += segment_, scale += panel_cols_, zero += panel_cols_) {
    const int64_t offset = k / cfg_.quant_group * panels_ * panel_cols_ + panel * panel_cols_;
    load_params(call.scales, cfg_.scale_dtype, offset, panel_cols_, 0.0f, scale);
    if (cfg_.zero_point) load_params(call.zeros, cfg_.scale_dtype, offset, panel_cols_, cfg_.zero_offset, zero);
  }
}

// Set the address and stride of the micro-kernel's prefetches: a fixed distance ahead in B, or this tile's share of the next
// block (the next K block of the panel, else the next panel), so that memory is busy while this block's tiles compute.
void Gemm::set_prefetch(const RowBlock& block, int tile, int64_t panel, int64_t k0, int64_t k1, int64_t rows, TileArgs& t) const {
  t.prefetch_stride = t.b_stride;
  t.prefetch = t.b + std::max<int64_t>(cfg_.prefetch, 0);
  if (cfg_.prefetch != kPrefetchNext || cfg_.raw) return;
  const int64_t k_per_row = kp_ * set_->groups_per_row;
  const bool same_panel = k1 < block.task.k1 && cfg_.nc == 1;
  const int64_t next_panel = same_panel ? panel : (panel + 1 < block.jc_end ? panel + 1 : k1 < block.task.k1 ? block.jc : block.jc_end);
  if (next_panel >= block.task.p1) return;
  const bool first_k = cfg_.nc == 1 || next_panel == block.jc_end;
  const int64_t next_k = same_panel || next_panel <= panel ? k1 : first_k ? block.task.k0 : k0;
  const int64_t size = ceil_div(std::min(block.task.k1, next_k + cfg_.kc) - next_k, k_per_row) * row_bytes_;
  const char* next = block.call.packed + next_panel * panel_bytes_ + next_k / k_per_row * row_bytes_;
  t.prefetch = next + size * tile / block.tiles.count;
  t.prefetch_stride = ceil_div(size, rows * block.tiles.count);
  t.prefetch_whole = true;
}

// Set the rows of the output that the next tile of these rows and panels is stored to, and of the matrices that its epilogue
// reads: none behind the last one, and no matrices with a gate.
void Gemm::set_next_output(const RowBlock& block, int tile, int64_t panel, TileArgs& t) const {
  if (cfg_.order == Order::b_in_l1) {
    if (++tile == block.tiles.count) tile = 0, ++panel;
  } else if (++panel == block.jc_end) {
    panel = block.jc, ++tile;
  }
  if (panel == block.task.p1 || tile == block.tiles.count) return;
  const bool gated = cfg_.gate != Gate::none;
  const int64_t panel_columns = gated ? panel_cols_ / 2 : panel_cols_, all_columns = gated ? cfg_.n / 2 : cfg_.n;
  const int64_t element = bits(cfg_.out) / 8, row = block.row0 + block.tiles.begin(tile), column = panel * panel_columns;
  t.next_out = block.call.out + (block.task.batch * block.call.out_batch_stride + row * block.call.ldo + column) * element;
  t.next_out_rows = block.tiles.size(tile);
  t.out_stride = block.call.ldo * element;
  const int64_t columns = std::min(panel_columns, all_columns - column);
  t.out_bytes = columns * element;
  const Aux* aux = block.call.aux;
  for (const Step& step : cfg_.steps) {
    if (!step.has_tensor) continue;
    const Aux& matrix = *aux++;
    if (gated || step.axis != Axis::full || t.next_matrix_count == kMaxNextMatrices) continue;
    const int64_t size = bits(step.dtype) / 8, offset = block.task.batch * matrix.batch_stride + row * matrix.ld + column;
    t.next_matrices[t.next_matrix_count++] = {matrix.data + offset * size, matrix.ld * size, columns * size};
  }
}

void Gemm::finish_tile(const RowBlock& block, Scratch& s, int tile, int64_t panel) const {
  if (block.partial != nullptr) return;
  const bool one_block = cfg_.kc >= cfg_.k;
  const int64_t first = block.tiles.begin(tile), ldc = one_block ? panel_cols_ : std::min(cfg_.nc, panels_) * panel_cols_;
  char* c = s.c + (one_block ? 0 : first * ldc + (panel - block.jc) * panel_cols_) * 4;
  const int32_t* compensation = nullptr;
  if (cfg_.compute == Compute::u8s8 && cfg_.a == DType::s8)
    compensation = cfg_.raw ? s.compensation + (panel - block.jc) * panel_cols_ : block.call.compensation + panel * panel_cols_;
  store_tile(block.call, block.task.batch, block.row0 + first, block.tiles.size(tile), panel, c, ldc, compensation);
}

void Gemm::store_tile(const Call& call, int64_t batch, int64_t row, int rows, int64_t panel, void* tile, int64_t ldc,
                      const int32_t* compensation) const {
  EpilogueArgs e{};
  e.c = tile;
  e.ldc = ldc;
  e.integer = is_integer(cfg_.compute);
  e.rows = rows;
  e.cols = static_cast<int>(std::min(panel_cols_, cfg_.n - panel * panel_cols_));
  e.gate = cfg_.gate;
  e.col0 = panel * (cfg_.gate == Gate::none ? panel_cols_ : panel_cols_ / 2);
  e.right = cfg_.n / 2;
  e.row0 = row;
  e.batch = batch;
  e.compensation = compensation;
  e.steps = cfg_.steps.data();
  e.n_steps = static_cast<int>(cfg_.steps.size());
  e.aux = call.aux;
  e.out_dtype = cfg_.out;
  e.ldo = call.ldo;
  e.out = call.out + (batch * call.out_batch_stride + row * call.ldo + e.col0) * (bits(cfg_.out) / 8);
  isa_.epilogue(e);
}

// Add the split-K slices into the first slice and store the result. The order is fixed, so results are bitwise reproducible.
void Gemm::reduce_slices(const Call& call, char* partial, int thread, int threads) const {
  const int64_t ldc = panels_ * panel_cols_, slices = std::min<int64_t>(cfg_.tk, ceil_div(cfg_.k, segment_));
  const int64_t tiles = ceil_div(call.m, cfg_.mr) * panels_;
  const bool has_compensation = cfg_.compute == Compute::u8s8 && cfg_.a == DType::s8;
  for (int64_t i = thread; i < tiles; i += threads) {
    const int64_t panel = i % panels_, row = i / panels_ * cfg_.mr;
    const int rows = static_cast<int>(std::min<int64_t>(cfg_.mr, call.m - row));
    for (int r = 0; r < rows; ++r) {
      char* first = partial + ((row + r) * ldc + panel * panel_cols_) * 4;
      for (int64_t slice = 1; slice < slices; ++slice) {
        const char* other = first + slice * call.m * ldc * 4;
        if (is_integer(cfg_.compute))
          for (int64_t j = 0; j < panel_cols_; ++j) reinterpret_cast<uint32_t*>(first)[j] += reinterpret_cast<const uint32_t*>(other)[j];
        else
          for (int64_t j = 0; j < panel_cols_; ++j) reinterpret_cast<float*>(first)[j] += reinterpret_cast<const float*>(other)[j];
      }
    }
    store_tile(call, 0, row, rows, panel, partial + (row * ldc + panel * panel_cols_) * 4, ldc,
               has_compensation ? call.compensation + panel * panel_cols_ : nullptr);
  }
}

}  // namespace gemmtune
