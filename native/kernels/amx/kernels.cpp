// AMX bf16 and int8: tiles of up to 32 x 32 of C in 2 x 2 tile registers. B's packed rows are in AMX's layout: 16 columns of
// kp consecutive k in 64 bytes. Narrower weights are expanded first (by AVX512-BF16 code, which these CPUs can run), or, for
// few rows, multiplied by fp32 FMAs from the packed layout, which were faster than vdpbf16ps on a CPU with AMX.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "../../frame/epilogue.hpp"
#include "../../frame/pack_a.hpp"
#include "../avx512_bf16/dot.hpp"

namespace gemmtune {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileGroups = 16;  // groups of 4 bytes in a 64-byte tile row

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Set the shapes of the tile registers: 0-3 hold C (row tile i, column tile j: 2 i + j), 4-5 A, 6-7 B. They keep them until
// release_tiles: configured at each tile of C, a product with K = 768 took 4 to 12% longer. state: as TileArgs::tile_state.
void configure_tiles(uint32_t* state, int rows, int groups) {
  const uint32_t wanted = static_cast<uint32_t>(rows) << 8 | static_cast<uint32_t>(groups);
  if (*state == wanted) return;
  *state = wanted;
  TileConfig config;
  for (int i = 0; i < 2; ++i) {
    const int r = rows - i * kTileRows;
    const auto tile_rows = static_cast<uint8_t>(r < 0 ? 0 : (r < kTileRows ? r : kTileRows));
    for (int j = 0; j < 2; ++j) config.rows[2 * i + j] = tile_rows, config.row_bytes[2 * i + j] = tile_rows ? 64 : 0;
    config.rows[4 + i] = tile_rows, config.row_bytes[4 + i] = static_cast<uint16_t>(tile_rows ? groups * kGroupBytes : 0);
    config.rows[6 + i] = static_cast<uint8_t>(groups), config.row_bytes[6 + i] = 64;
  }
  asm volatile("" : : "r"(&config) : "memory");  // GCC 12 assumes that _tile_loadconfig reads only the first 8 bytes
  _tile_loadconfig(&config);
}

enum class TileProduct { bf16, s8s8, u8s8 };

#define GT_MULTIPLY(c, a, b)                                      \
  do {                                                            \
    if constexpr (P == TileProduct::bf16) _tile_dpbf16ps(c, a, b);    \
    else if constexpr (P == TileProduct::s8s8) _tile_dpbssd(c, a, b); \
    else _tile_dpbusd(c, a, b);                                   \
  } while (0)

// The rows of the output that the next tile is stored to, and those of the matrices that its epilogue reads. They are prefetched
// into the L2 while this tile is multiplied, a few with each chunk: many cache misses at once, or stores to rows that are in no
// cache, would delay the loads of A and B. Rows that are a multiple of 4 KiB apart do not fit the L1 together.
class NextOutput {
 public:
  explicit NextOutput(const TileArgs& t)
      : output_{t.next_out, t.out_stride, t.out_bytes}, matrices_(t.next_matrices), matrix_count_(t.next_matrix_count),
        rows_(t.next_out_rows), rows_a_chunk_(ceil_div(rows_, std::max<int64_t>(t.groups / kTileGroups, 1))) {}
  // Prefetch the next rows, those of one chunk.
  void prefetch_rows() {
    for (const int64_t end = std::min(row_ + rows_a_chunk_, rows_); row_ < end; ++row_) {
      prefetch_row(output_);
      for (int m = 0; m < matrix_count_; ++m) prefetch_row(matrices_[m]);
    }
  }

 private:
  void prefetch_row(const Rows& rows) const {
    for (int64_t byte = 0; byte < rows.bytes; byte += 64) __builtin_prefetch(rows.first + row_ * rows.stride + byte, 0, 2);
  }

  const Rows output_;
  const Rows* matrices_;
  const int matrix_count_;
  const int64_t rows_, rows_a_chunk_;
  int64_t row_ = 0;
};

// Prefetch what belongs to the chunk of B from group `first`: all of its share of the next block, which the L2 keeps until this
// block is done, or, at a distance in this one, the first line, which the hardware's prefetcher follows.
inline void prefetch_b(const TileArgs& t, int64_t first) {
  const char* line = t.prefetch + first * t.prefetch_stride;
  if (!t.prefetch_whole) return __builtin_prefetch(line, 0, 3);
  for (const char* end = line + kTileGroups * t.prefetch_stride; line < end; line += 64) __builtin_prefetch(line, 0, 2);
}

// Multiply `chunks` chunks of A and B, each of `groups` groups from group `first`, and store the C tiles at c. Add to C if
// `load_c`. c_stride is in bytes. after(i) is called when the products of chunk i are under way.
template <TileProduct P, int MR, int NV, class After>
void multiply_chunks(const TileArgs& t, char* c, int64_t c_stride, int64_t first, int64_t chunks, int groups, bool load_c,
                     NextOutput& output, const After& after) {
  configure_tiles(t.tile_state, MR, groups);
  constexpr bool kTwoRows = MR > kTileRows, kTwoColumns = NV > 1;
  char* lower_c = c + kTileRows * c_stride;
  if (load_c) {
    _tile_loadd(0, c, c_stride);
    if constexpr (kTwoColumns) _tile_loadd(1, c + 64, c_stride);
    if constexpr (kTwoRows) _tile_loadd(2, lower_c, c_stride);
    if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, lower_c + 64, c_stride);
  } else {
    _tile_zero(0);
    if constexpr (kTwoColumns) _tile_zero(1);
    if constexpr (kTwoRows) _tile_zero(2);
    if constexpr (kTwoRows && kTwoColumns) _tile_zero(3);
  }
  for (int64_t i = 0; i < chunks; ++i) {
    output.prefetch_rows();
    const char* a = t.a + (first + i * kTileGroups) * kGroupBytes;
    const char* b = t.b + (first + i * kTileGroups) * t.b_stride;
    prefetch_b(t, first + i * kTileGroups);
    _tile_loadd(4, a, t.a_row_stride);
    _tile_loadd(6, b, t.b_stride);
    GT_MULTIPLY(0, 4, 6);
    if constexpr (kTwoColumns) {
      _tile_loadd(7, b + 64, t.b_stride);
      GT_MULTIPLY(1, 4, 7);
    }
    if constexpr (kTwoRows) {
      _tile_loadd(5, a + kTileRows * t.a_row_stride, t.a_row_stride);
      GT_MULTIPLY(2, 5, 6);
    }
    if constexpr (kTwoRows && kTwoColumns) GT_MULTIPLY(3, 5, 7);
    after(i);
  }
  _tile_stored(0, c, c_stride);
  if constexpr (kTwoColumns) _tile_stored(1, c + 64, c_stride);
  if constexpr (kTwoRows) _tile_stored(2, lower_c, c_stride);
  if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, lower_c + 64, c_stride);
}

struct Nothing {
  void operator()(int64_t) const {}
};

template <TileProduct P, int MR, int NV, class After = Nothing>
void multiply(const TileArgs& t, char* c, int64_t c_stride, bool accumulate, NextOutput& output, const After& after = {}) {
  const int64_t chunks = t.groups / kTileGroups;
  const int tail = static_cast<int>(t.groups % kTileGroups);
  if (chunks > 0) multiply_chunks<P, MR, NV>(t, c, c_stride, 0, chunks, kTileGroups, accumulate, output, after);
  if (tail > 0) multiply_chunks<P, MR, NV>(t, c, c_stride, chunks * kTileGroups, 1, tail, accumulate || chunks > 0, output, Nothing{});
}

// Add rows [first, last) of the products of one segment to C: C (+)= scale * (product - zero * row_sum).
template <int NV>
inline void add_scaled(const TileArgs& t, const float* product, int64_t first, int64_t last) {
  constexpr int kColumns = NV * kLanes;
  __m512 scale[NV], zero[NV];
  for (int j = 0; j < NV; ++j) {
    scale[j] = _mm512_loadu_ps(t.scale + j * kLanes);
    zero[j] = t.zero != nullptr ? _mm512_loadu_ps(t.zero + j * kLanes) : _mm512_setzero_ps();
  }
  auto* c = static_cast<float*>(t.c);
  for (int64_t r = first; r < last; ++r)
    for (int j = 0; j < NV; ++j) {
      __m512 v = _mm512_load_ps(product + r * kColumns + j * kLanes);
      if (t.zero != nullptr) v = Float512::subtract_product(v, zero[j], t.a_sum[r]);
      float* p = c + r * t.ldc + j * kLanes;
      _mm512_storeu_ps(p, Float512::scale_add(v, scale[j], p, t.accumulate));
    }
}

void release_tiles() { _tile_release(); }

// The products of a segment are scaled while the next one is multiplied: a part of the rows behind each chunk. Scaled by
// themselves, the rows of a segment of 128 k took half as long as its products (docs/notes/cpu.md).
template <TileProduct P, int MR, int NV>
void amx_tile(const TileArgs& t) {
  constexpr int kColumns = NV * kLanes;
  NextOutput output(t);
  if (t.scale == nullptr) return multiply<P, MR, NV>(t, static_cast<char*>(t.c), t.ldc * 4, t.accumulate, output);
  alignas(64) float products[2][MR * kColumns];
  TileArgs segment = t, previous = t;
  int64_t index = 0;
  for (int64_t left = t.groups; left > 0; left -= t.segment_groups, ++index) {
    segment.groups = left < t.segment_groups ? left : t.segment_groups;
    const int64_t chunks = segment.groups / kTileGroups;
    const float* scaled = products[(index + 1) % 2];
    const auto scale_rows = [&](int64_t chunk) {
      if (index > 0) add_scaled<NV>(previous, scaled, chunk * MR / chunks, (chunk + 1) * MR / chunks);
    };
    multiply<P, MR, NV>(segment, reinterpret_cast<char*>(products[index % 2]), kColumns * 4, false, output, scale_rows);
    if (chunks == 0 && index > 0) add_scaled<NV>(previous, scaled, 0, MR);
    previous = segment;
    advance_segment(segment, t.segment_groups);
  }
  add_scaled<NV>(previous, products[(index + 1) % 2], 0, MR);
}

struct FmaPairsS4 : FmaPairs {
  using StoredVec = DotS4::StoredVec;
  static constexpr int kVectorBytes = DotS4::kVectorBytes, kGroupsPerRow = DotS4::kGroupsPerRow;
  GT_INLINE StoredVec load_stored(const char* p) { return DotS4::load_stored(p); }
  template <int S> GT_INLINE F32Pair convert(StoredVec v) { return split_pairs((__m512i)DotS4::convert<S>(v)); }
};

template <TileProduct P, int NV, int... R>
constexpr void set_amx_kernels(KernelSet& set, std::integer_sequence<int, R...>) {
  set.max_rows[NV] = sizeof...(R);
  ((set.tile[NV][R + 1] = &amx_tile<P, R + 1, NV>), ...);
}

template <TileProduct P>
constexpr KernelSet amx_set(Compute compute, DType b) {
  KernelSet set{};
  set.compute = compute;
  set.b = b;
  set.groups_per_row = 1;
  set.vector_bytes = 64;
  set_amx_kernels<P, 1>(set, std::make_integer_sequence<int, kMaxRows>{});
  set_amx_kernels<P, 2>(set, std::make_integer_sequence<int, kMaxRows>{});
  return set;
}

constexpr KernelSet kSets[] = {
    amx_set<TileProduct::bf16>(Compute::bf16, DType::bf16), make_kernel_set<FmaPairsS8, 12, 12, 7, 5, DotS8>(Compute::bf16, DType::s8),
    make_kernel_set<FmaPairsS4, 12, 12, 7, 5, DotS4>(Compute::bf16, DType::s4), amx_set<TileProduct::s8s8>(Compute::s8s8, DType::s8),
    amx_set<TileProduct::u8s8>(Compute::u8s8, DType::s8),
};

}  // namespace

extern const IsaOps kAmxOps;
const IsaOps kAmxOps = {"amx", kSets, sizeof(kSets) / sizeof(kSets[0]), &run_epilogue, &run_pointwise, &pack_activations, &row_sums, &release_tiles};

}  // namespace gemmtune
