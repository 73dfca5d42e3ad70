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

constexpr int64_t kAlign = 64;
constexpr int64_t kWidest = kLanes * kMaxVectors;

constexpr int64_t align_up(int64_t bytes) { return ceil_div(bytes, kAlign) * kAlign; }

// Scratch memory of one thread, kept between calls and grown when needed. Null when memory cannot be had.
class Arena {
 public:
  ~Arena() { std::free(data_); }
  char* get(int64_t bytes) {
    if (bytes <= size_) return data_;
    std::free(data_);
    size_ = 0;
    data_ = static_cast<char*>(std::aligned_alloc(kAlign, align_up(bytes)));
    if (data_ != nullptr) size_ = bytes;
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

thread_local Arena arena;

const KernelSet* find_set(const IsaOps& isa, Compute compute, DType b) {
  for (int i = 0; i < isa.n_sets; ++i)
    if (isa.sets[i].compute == compute && isa.sets[i].b == b) return &isa.sets[i];
  return nullptr;
}

constexpr DType dense_type(Compute c) {
  return c == Compute::f32 ? DType::f32 : c == Compute::bf16 ? DType::bf16 : DType::s8;
}

// Piece `index` of `count` nearly equal pieces of [0, total), in units of `unit`.
struct Range {
  int64_t begin, end;
};

Range piece(int64_t total, int64_t unit, int64_t count, int64_t index) {
  const int64_t units = ceil_div(total, unit), base = units / count, extra = units % count;
  const int64_t first = index * base + std::min(index, extra), size = base + (index < extra ? 1 : 0);
  return {std::min(total, first * unit), std::min(total, (first + size) * unit)};
}

// Terms that a float32 accumulator takes before it is added to C: rounding errors grow with the number of terms, and sums
// of a few hundred keep as many bits as oneDNN's and MKL's. A multiple of every row of packed B.
constexpr int64_t kLongestSum = 256;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// `n` scales or zero points as fp32, less `offset`; one plain loop per dtype, so that each vectorises.
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

// How one call's rows are cut into micro-tiles: `count` tiles whose sizes differ by at most one.
struct Gemm::Split {
  int64_t rows;
  int count;
  Split(int64_t rows, int mr) : rows(rows), count(static_cast<int>(ceil_div(rows, mr))) {}
  int64_t begin(int tile) const { return tile * (rows / count) + std::min<int64_t>(tile, rows % count); }
  int size(int tile) const { return static_cast<int>(rows / count + (tile < rows % count ? 1 : 0)); }
};

struct Gemm::Scratch {
  char* a;             // packed rows
  char* c;             // accumulator tiles
  char* b;             // expanded or raw-packed block
  float* scale;        // one panel's scales of one segment
  float* zero;
  float* sums;         // [segments, rows] sums of A
  int32_t* compensation;  // of raw B, per column of the panels in flight
  int64_t packed_batch = -1, packed_row = -1, packed_rows = -1, packed_k = -1;
};

struct Gemm::Task {
  int64_t batch, m0, m1, p0, p1, k0, k1, slice;
};

// One block of rows being multiplied by panels [jc, jc_end).
struct Gemm::Work {
  const Call& call;
  const Task& task;
  Split split;
  int64_t row0, jc, jc_end;
  char* partial;  // where split-K accumulators go, or null
};

Gemm::Gemm(const IsaOps& isa, Config config) : isa_(isa), c_(std::move(config)) {
  check_ranges();
  set_ = find_set(isa_, c_.compute, c_.b);
  require(set_ != nullptr || c_.raw, "this instruction set has no kernel for these types");
  dense_ = c_.expand || c_.raw ? find_set(isa_, c_.compute, dense_type(c_.compute)) : set_;
  // int16 pairs have no stored dense form: their kernels widen int8 as they load it.
  require(dense_ != nullptr && !(c_.compute == Compute::i16 && c_.expand), "this instruction set cannot expand these weights");
  kp_ = group_size(c_.compute);
  panel_cols_ = static_cast<int64_t>(c_.nv) * kLanes;
  panels_ = ceil_div(c_.n, panel_cols_);
  check();
  const int64_t k_per_row = c_.raw ? kp_ : kp_ * set_->rows_per_load;
  k_rows_ = ceil_div(c_.k, k_per_row);
  row_bytes_ = c_.raw ? panel_cols_ * kGroupBytes : c_.nv * set_->vector_bytes;
  panel_bytes_ = k_rows_ * row_bytes_;
  const bool grouped = c_.group > 0 && c_.group < c_.k;
  const int64_t unit = grouped ? c_.group : 8;
  if (c_.kc == 0 || c_.kc > c_.k) c_.kc = ceil_div(c_.k, unit) * unit;
  segment_ = grouped ? std::min(c_.kc, c_.group) : c_.kc;
  require(c_.kc % 8 == 0 && segment_ % 8 == 0 && c_.kc % segment_ == 0 && (!grouped || c_.group % segment_ == 0),
          "kc must be a multiple of 8 and, with grouped scales, divide or be divided by the group");
}

// Nothing is divided, narrowed or multiplied before this has passed.
void Gemm::check_ranges() const {
  require(c_.n > 0 && c_.k > 0 && c_.n <= kMostElements && c_.k <= kMostElements, "N and K must be positive, and below 2^30");
  require(c_.nv >= 1 && c_.nv <= kMaxVectors && c_.mr >= 1 && c_.mr <= kMaxRows, "micro-tile out of range");
  require(c_.kc >= 0 && c_.kc <= kMostBlock, "kc out of range");
  require(c_.mc >= 1 && c_.mc <= kMostBlock && c_.nc >= 1 && c_.nc <= kMostBlock, "block sizes out of range");
  require(c_.tm >= 1 && c_.tm <= kMostThreads && c_.tn >= 1 && c_.tn <= kMostThreads && c_.tk >= 1 && c_.tk <= kMostThreads,
          "thread grid out of range");
  require(c_.prefetch >= kPrefetchNext && c_.prefetch <= kMostAhead, "prefetch distance out of range");
  require(c_.group >= 0, "groups of scales must not be negative");
  require(!(c_.expand && c_.raw) && (!c_.dot || c_.raw), "no such template");
}

void Gemm::check() const {
  require(dense_->max_rows[c_.nv] >= c_.mr, "this instruction set has no micro-tile of that size");
  require(c_.mc >= c_.mr, "fewer rows are packed at a time than a micro-tile has");
  require(!c_.dot || (c_.raw && set_ != nullptr && set_->dot[1] != nullptr && c_.mr <= kDotRows && c_.pack_a != PackA::panels),
          "this instruction set has no dot products for these types");
  require(!(c_.expand || c_.raw) || c_.dot || (c_.kc > 0 && c_.kc <= 4096), "expanded blocks need 0 < kc <= 4096");
  require(!((c_.expand || c_.raw) && c_.order == Order::a_stays), "expanded blocks need the order that keeps B");
  require(!(c_.raw && c_.tk > 1), "an unpacked B cannot be split along K");
  require(!(c_.raw && c_.b != DType::f32 && c_.b != DType::bf16 && c_.b != DType::f16 && c_.b != DType::s8), "unpacked B must hold whole numbers of bytes");
  require(c_.group == 0 || !is_integer(c_.compute), "scales per group need a floating-point accumulator");
  const bool same = bits(c_.a) * kp_ == 8 * kGroupBytes && !(c_.compute == Compute::u8s8 && c_.a == DType::s8);
  require(c_.pack_a != PackA::none || (same && c_.k % kp_ == 0), "these activations must be packed");
  // Stored rows of several groups (int4) are consumed whole; A then needs its zero padding.
  require(c_.pack_a != PackA::none || c_.b != DType::s4 || c_.k % 8 == 0, "these activations must be packed");
}

int64_t Gemm::block_bytes() const {
  return (c_.expand || c_.raw) && !c_.dot ? c_.kc / kp_ * panel_cols_ * kGroupBytes : 0;
}

int64_t Gemm::scratch_bytes(int64_t m) const {
  const int64_t rows = std::min(m, c_.mc), segments = ceil_div(c_.k, segment_) + 1;
  const int64_t a = c_.pack_a == PackA::none ? 0 : rows * (align_up(ceil_div(c_.k, 8) * 8 / kp_ * kGroupBytes) + kAlign);
  const bool one_block = c_.kc >= c_.k && !c_.dot;
  const int64_t c = (one_block ? kMaxRows : rows) * (one_block ? 1 : std::min(c_.nc, panels_)) * panel_cols_ * 4;
  const int64_t b = block_bytes();
  const int64_t sums = c_.zero_point ? segments * rows * 4 : 0;
  return align_up(a) + align_up(c) + align_up(b) + 2 * kWidest * 4 + align_up(sums) + align_up(std::min(c_.nc, panels_) * panel_cols_ * 4);
}

void Gemm::run(const Call& call) const {
  if (call.m == 0 || call.batch == 0) return;
  const int64_t tm = std::min<int64_t>(c_.tm, ceil_div(call.m, c_.mr)), tn = std::min<int64_t>(c_.tn, panels_);
  const int64_t tk = call.batch == 1 ? std::min<int64_t>(c_.tk, ceil_div(c_.k, segment_)) : 1;
  const int64_t tasks = call.batch * tm * tn * tk;
  const int threads = static_cast<int>(omp_in_parallel() ? 1 : std::min<int64_t>(omp_get_max_threads(), tasks));
  char* partial = nullptr;
  if (tk > 1) {
    partial = static_cast<char*>(std::aligned_alloc(kAlign, align_up(tk * call.m * panels_ * panel_cols_ * 4)));
    if (partial == nullptr) throw std::bad_alloc();
  }
  const auto task_of = [&](int64_t i) {
    Task t;
    t.slice = i % tk;
    const int64_t in = i / tk % tn, im = i / tk / tn % tm;
    t.batch = i / tk / tn / tm;
    const Range rows = piece(call.m, c_.mr, tm, im), columns = piece(panels_, 1, tn, in), ks = piece(c_.k, segment_, tk, t.slice);
    t.m0 = rows.begin, t.m1 = rows.end, t.p0 = columns.begin, t.p1 = columns.end, t.k0 = ks.begin, t.k1 = ks.end;
    return t;
  };
  std::atomic<int64_t> next{threads};
  std::atomic<bool> failed{false};
  const int64_t bytes = scratch_bytes(call.m);
  const auto body = [&](int thread, int team) {
    char* memory = arena.get(bytes);
    if (memory == nullptr) failed = true;
    Scratch scratch{};
    scratch.a = memory;
    for (int64_t i = thread; memory != nullptr && i < tasks; i = team == 1 ? i + 1 : next.fetch_add(1)) run_task(call, task_of(i), scratch, partial);
  };
  if (threads == 1) {
    body(0, 1);
    if (partial != nullptr && !failed) reduce(call, partial, 0, 1);
  } else {
#pragma omp parallel num_threads(threads)
    {
      const int team = omp_get_num_threads(), thread = omp_get_thread_num();
      // A runtime may grant fewer threads than asked for; the shared counter then starts too far on.
      if (team != threads && thread == 0) next = team;
      if (team != threads) {
#pragma omp barrier
      }
      body(thread, team);
      if (partial != nullptr) {
#pragma omp barrier
        if (!failed) reduce(call, partial, thread, team);
      }
    }
  }
  std::free(partial);
  if (failed) throw std::bad_alloc();
}

void Gemm::run_task(const Call& call, const Task& task, Scratch& s, char* partial) const {
  const int64_t rows_max = std::min(call.m, c_.mc);
  const bool one_block = c_.kc >= c_.k && !c_.dot;
  char* p = s.a;
  if (c_.pack_a != PackA::none) p += align_up(rows_max * (align_up(ceil_div(c_.k, 8) * 8 / kp_ * kGroupBytes) + kAlign));
  s.c = p;
  p += align_up((one_block ? kMaxRows : rows_max) * (one_block ? 1 : std::min(c_.nc, panels_)) * panel_cols_ * 4);
  s.b = p;
  p += align_up(block_bytes());
  s.scale = reinterpret_cast<float*>(p);
  s.zero = s.scale + kWidest;
  s.compensation = reinterpret_cast<int32_t*>(s.zero + kWidest);
  s.sums = reinterpret_cast<float*>(reinterpret_cast<char*>(s.compensation) + align_up(std::min(c_.nc, panels_) * panel_cols_ * 4));

  for (int64_t row0 = task.m0; row0 < task.m1; row0 += c_.mc) {
    Work w{call, task, Split(std::min(c_.mc, task.m1 - row0), c_.mr), row0, 0, 0, partial};
    pack_rows(w, s);
    if (c_.dot) {
      run_dots(w, task, s);
      continue;
    }
    for (w.jc = task.p0; w.jc < task.p1; w.jc += c_.nc) {
      w.jc_end = std::min(task.p1, w.jc + c_.nc);
      if (c_.raw && c_.compute == Compute::u8s8) std::memset(s.compensation, 0, (w.jc_end - w.jc) * panel_cols_ * 4);
      for (int64_t k0 = task.k0; k0 < task.k1; k0 += c_.kc) {
        const int64_t k1 = std::min(task.k1, k0 + c_.kc);
        if (c_.order == Order::b_stays) {
          for (int64_t panel = w.jc; panel < w.jc_end; ++panel) run_panel(w, task, s, panel, k0, k1);
          continue;
        }
        for (int tile = 0; tile < w.split.count; ++tile)
          for (int64_t panel = w.jc; panel < w.jc_end; ++panel) {
            const char* b = call.packed + panel * panel_bytes_ + k0 / (kp_ * set_->rows_per_load) * row_bytes_;
            multiply(w, s, tile, panel, k0, k1, b, row_bytes_);
            if (k1 == task.k1) finish(w, s, tile, panel);
          }
      }
    }
  }
}

void Gemm::pack_rows(const Work& w, Scratch& s) const {
  if (c_.pack_a == PackA::none && !c_.zero_point) return;
  const Task& t = w.task;
  if (s.packed_batch == t.batch && s.packed_row == w.row0 && s.packed_rows == w.split.rows && s.packed_k == t.k0) return;
  s.packed_batch = t.batch, s.packed_row = w.row0, s.packed_rows = w.split.rows, s.packed_k = t.k0;
  const Matrix& a = w.call.a;
  PackAArgs p{};
  p.src = a.data + (t.batch * a.batch + w.row0 * a.row + t.k0 * a.col) * (bits(c_.a) / 8);
  p.dtype = c_.a;
  p.row_stride = a.row, p.col_stride = a.col;
  p.rows = w.split.rows, p.k = t.k1 - t.k0;
  p.compute = c_.compute;
  p.pad_groups = ceil_div(p.k, 8) * 8 / kp_;
  p.dst_row = align_up(p.pad_groups * kGroupBytes) + kAlign;  // an odd number of lines spreads rows over cache sets
  if (c_.pack_a == PackA::rows) {
    p.dst = s.a;
    isa_.pack_a(p);
  } else if (c_.pack_a == PackA::panels) {
    for (int tile = 0; tile < w.split.count; ++tile) {
      PackAArgs one = p;
      one.rows = one.panel = w.split.size(tile);
      one.src = p.src + w.split.begin(tile) * a.row * (bits(c_.a) / 8);
      one.dst = s.a + w.split.begin(tile) * p.pad_groups * kGroupBytes;
      isa_.pack_a(one);
    }
  }
  if (c_.zero_point) isa_.row_sums(p, segment_, s.sums, std::min(w.call.m, c_.mc));
}

void Gemm::run_panel(const Work& w, const Task& task, Scratch& s, int64_t panel, int64_t k0, int64_t k1) const {
  int64_t step = row_bytes_;
  const char* b = prepare_b(w, s, panel, k0, k1, &step);
  for (int tile = 0; tile < w.split.count; ++tile) {
    multiply(w, s, tile, panel, k0, k1, b, step);
    if (k1 == task.k1) finish(w, s, tile, panel);
  }
}

const char* Gemm::prepare_b(const Work& w, Scratch& s, int64_t panel, int64_t k0, int64_t k1, int64_t* step) const {
  if (c_.raw) {
    const Matrix& b = w.call.b;
    const bool shifted = c_.compute == Compute::u8s8 && c_.a == DType::s8;
    pack_block(c_.compute, c_.b, b.data + w.task.batch * b.batch * (bits(c_.b) / 8), b.row, b.col, k0, k1, panel * panel_cols_, c_.n, panel_cols_, s.b,
               shifted ? s.compensation + (panel - w.jc) * panel_cols_ : nullptr);
    *step = block_row_bytes(c_.compute, panel_cols_);
    return s.b;
  }
  const char* b = w.call.packed + panel * panel_bytes_ + k0 / (kp_ * set_->rows_per_load) * row_bytes_;
  if (!c_.expand) return b;
  *step = panel_cols_ * kGroupBytes;
  set_->expand(b, row_bytes_, c_.nv, ceil_div(k1 - k0, kp_), s.b, *step);
  return s.b;
}

void Gemm::locate_a(const Work& w, const Scratch& s, int tile, int64_t k0, const char** a, int64_t* row, int64_t* group) const {
  const int64_t first = w.split.begin(tile);
  if (c_.pack_a == PackA::none) {
    const Matrix& m = w.call.a;
    const int64_t element = bits(c_.a) / 8;
    *row = m.row * element;
    *group = kGroupBytes;
    *a = m.data + (w.task.batch * m.batch + (w.row0 + first) * m.row + k0) * element;
    return;
  }
  const int64_t groups = ceil_div(w.task.k1 - w.task.k0, 8) * 8 / kp_, skipped = (k0 - w.task.k0) / kp_;
  const bool panels = c_.pack_a == PackA::panels;
  *row = panels ? kGroupBytes : align_up(groups * kGroupBytes) + kAlign;
  *group = panels ? w.split.size(tile) * kGroupBytes : kGroupBytes;
  *a = s.a + (panels ? first * groups * kGroupBytes : first * *row) + skipped * *group;
}

// Dot products over a weight as it lies: for each panel of columns, K block by K block so that A stays in the L2 cache.
void Gemm::run_dots(Work& w, const Task& task, Scratch& s) const {
  for (int64_t panel = task.p0; panel < task.p1; ++panel) {
    w.jc = panel;
    for (int64_t k0 = task.k0; k0 < task.k1; k0 += c_.kc) dot_panel(w, s, panel, k0, std::min(task.k1, k0 + c_.kc));
    for (int tile = 0; tile < w.split.count; ++tile)
      store_tile(w.call, task.batch, w.row0 + w.split.begin(tile), w.split.size(tile), panel,
                 s.c + w.split.begin(tile) * panel_cols_ * 4, panel_cols_, nullptr);
  }
}

void Gemm::dot_panel(const Work& w, Scratch& s, int64_t panel, int64_t k0, int64_t k1) const {
  const Matrix& b = w.call.b;
  const int64_t element = bits(c_.b) / 8, n0 = panel * panel_cols_, valid = std::min(panel_cols_, c_.n - n0);
  DotArgs d{};
  d.b_row = b.col * element;
  d.k = k1 - k0;
  d.ldc = panel_cols_;
  d.accumulate = k0 > w.task.k0;
  d.prefetch = c_.prefetch;
  for (int64_t n = 0; n < valid; n += kDotColumns) {
    d.columns = static_cast<int>(std::min<int64_t>(kDotColumns, valid - n));
    d.b = b.data + (w.task.batch * b.batch + (n0 + n) * b.col + k0) * element;
    for (int tile = 0; tile < w.split.count; ++tile) {
      int64_t group = 0;
      locate_a(w, s, tile, k0, &d.a, &d.a_row, &group);
      d.c = reinterpret_cast<float*>(s.c) + w.split.begin(tile) * panel_cols_ + n;
      set_->dot[w.split.size(tile)](d);
    }
  }
}

void Gemm::multiply(const Work& w, Scratch& s, int tile, int64_t panel, int64_t k0, int64_t k1, const char* b, int64_t step) const {
  const int64_t first = w.split.begin(tile), columns = std::min(panel_cols_, c_.n - panel * panel_cols_);
  const int rows = w.split.size(tile);
  // Split-K accumulators keep whole panels, so that no column is left unwritten.
  const int nv = w.partial != nullptr ? c_.nv : static_cast<int>(ceil_div(columns, kLanes));
  const KernelSet* set = c_.expand || c_.raw ? dense_ : set_;
  TileArgs t{};
  locate_a(w, s, tile, k0, &t.a, &t.a_row, &t.a_group);
  const bool one_block = c_.kc >= c_.k;
  if (w.partial != nullptr) {
    t.ldc = panels_ * panel_cols_;
    t.c = w.partial + ((w.task.slice * w.call.m + w.row0 + first) * t.ldc + panel * panel_cols_) * 4;
  } else {
    t.ldc = one_block ? panel_cols_ : std::min(c_.nc, panels_) * panel_cols_;
    t.c = s.c + (one_block ? 0 : first * t.ldc + (panel - w.jc) * panel_cols_) * 4;
  }
  t.b_step = step;
  t.b = b;
  t.accumulate = k0 > w.task.k0;
  prefetch(w, tile, panel, k0, k1, ceil_div(k1 - k0, kp_ * set->rows_per_load), t);
  const int64_t padded_n = panels_ * panel_cols_;
  const int64_t segment = c_.group != 0 ? segment_ : c_.compute == Compute::f32 ? kLongestSum : k1 - k0;
  const char *a = t.a, *ahead = t.prefetch;
  for (int64_t k = k0; k < k1; k += segment) {
    const int64_t end = std::min(k1, k + segment);
    if (c_.group != 0) {
      const int64_t offset = k / c_.group * padded_n + panel * panel_cols_;
      load_params(w.call.scales, c_.scale_dtype, offset, panel_cols_, 0.0f, s.scale);
      t.scale = s.scale;
      if (c_.zero_point) {
        load_params(w.call.zeros, c_.scale_dtype, offset, panel_cols_, c_.zero_offset, s.zero);
        t.zero = s.zero;
        t.a_sum_stride = 1;
        t.a_sum = s.sums + (k - w.task.k0) / segment * std::min(w.call.m, c_.mc) + first;
      }
    }
    t.a = a + (k - k0) / kp_ * t.a_group;
    const int64_t row = (k - k0) / (kp_ * set->rows_per_load);
    t.b = b + row * step;
    t.prefetch = ahead + row * t.prefetch_step;
    t.groups = ceil_div(end - k, kp_);
    if (set->rows_per_load > 1) t.groups = ceil_div(t.groups, set->rows_per_load) * set->rows_per_load;
    set->tile[nv][rows](t);
    t.accumulate = true;
  }
}

// Where the micro-kernel's prefetches go: a fixed distance ahead in B, or this tile's share of the block that comes next
// (the following K block of the panel, else the next panel), so that memory works while the tiles of this block compute.
void Gemm::prefetch(const Work& w, int tile, int64_t panel, int64_t k0, int64_t k1, int64_t rows, TileArgs& t) const {
  t.prefetch_step = t.b_step;
  t.prefetch = t.b + std::max<int64_t>(c_.prefetch, 0);
  if (c_.prefetch != kPrefetchNext || c_.raw) return;
  const int64_t k_per_row = kp_ * set_->rows_per_load;
  const bool same_panel = k1 < w.task.k1 && c_.nc == 1;
  const int64_t next_panel = same_panel ? panel : (panel + 1 < w.jc_end ? panel + 1 : k1 < w.task.k1 ? w.jc : w.jc_end);
  if (next_panel >= w.task.p1) return;
  const int64_t next_k = same_panel || next_panel <= panel ? k1 : (c_.nc == 1 ? w.task.k0 : (next_panel == w.jc_end ? w.task.k0 : k0));
  const int64_t size = ceil_div(std::min(w.task.k1, next_k + c_.kc) - next_k, k_per_row) * row_bytes_;
  const char* next = w.call.packed + next_panel * panel_bytes_ + next_k / k_per_row * row_bytes_;
  t.prefetch = next + size * tile / w.split.count;
  t.prefetch_step = ceil_div(size, rows * w.split.count);
}

void Gemm::finish(const Work& w, Scratch& s, int tile, int64_t panel) const {
  if (w.partial != nullptr) return;
  const bool one_block = c_.kc >= c_.k;
  const int64_t first = w.split.begin(tile), ldc = one_block ? panel_cols_ : std::min(c_.nc, panels_) * panel_cols_;
  char* c = s.c + (one_block ? 0 : first * ldc + (panel - w.jc) * panel_cols_) * 4;
  const int32_t* compensation = nullptr;
  if (c_.compute == Compute::u8s8 && c_.a == DType::s8)
    compensation = c_.raw ? s.compensation + (panel - w.jc) * panel_cols_ : w.call.compensation + panel * panel_cols_;
  store_tile(w.call, w.task.batch, w.row0 + first, w.split.size(tile), panel, c, ldc, compensation);
}

void Gemm::store_tile(const Call& call, int64_t batch, int64_t row, int rows, int64_t panel, void* tile, int64_t ldc,
                      const int32_t* compensation) const {
  EpilogueArgs e{};
  e.c = tile;
  e.ldc = ldc;
  e.integer = is_integer(c_.compute);
  e.rows = rows;
  e.col0 = panel * panel_cols_;
  e.cols = static_cast<int>(std::min(panel_cols_, c_.n - e.col0));
  e.row0 = row;
  e.batch = batch;
  e.compensation = compensation;
  e.steps = c_.steps.data();
  e.n_steps = static_cast<int>(c_.steps.size());
  e.aux = call.aux;
  e.out_dtype = c_.out;
  e.ldo = call.ldo;
  e.out = call.out + (batch * call.out_batch + row * call.ldo + e.col0) * (bits(c_.out) / 8);
  isa_.epilogue(e);
}

// Adds the K slices into the first, in order (so that results repeat bit for bit), and stores.
void Gemm::reduce(const Call& call, char* partial, int thread, int threads) const {
  const int64_t ldc = panels_ * panel_cols_, slices = std::min<int64_t>(c_.tk, ceil_div(c_.k, segment_));
  const int64_t tiles = ceil_div(call.m, c_.mr) * panels_;
  const bool shifted = c_.compute == Compute::u8s8 && c_.a == DType::s8;
  for (int64_t i = thread; i < tiles; i += threads) {
    const int64_t panel = i % panels_, row = i / panels_ * c_.mr;
    const int rows = static_cast<int>(std::min<int64_t>(c_.mr, call.m - row));
    for (int r = 0; r < rows; ++r) {
      char* first = partial + ((row + r) * ldc + panel * panel_cols_) * 4;
      for (int64_t slice = 1; slice < slices; ++slice) {
        const char* other = first + slice * call.m * ldc * 4;
        if (is_integer(c_.compute))
          for (int64_t j = 0; j < panel_cols_; ++j) reinterpret_cast<uint32_t*>(first)[j] += reinterpret_cast<const uint32_t*>(other)[j];
        else
          for (int64_t j = 0; j < panel_cols_; ++j) reinterpret_cast<float*>(first)[j] += reinterpret_cast<const float*>(other)[j];
      }
    }
    store_tile(call, 0, row, rows, panel, partial + (row * ldc + panel * panel_cols_) * 4, ldc,
               shifted ? call.compensation + panel * panel_cols_ : nullptr);
  }
}

}  // namespace gemmtune
