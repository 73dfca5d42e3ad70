// The types that the frame and the kernels share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gemmtune {

// A "vector" is 16 lanes of 32 bits on every ISA (one zmm, two ymm or four xmm registers).
constexpr int kLanes = 16;
constexpr int kMaxVectors = 4;  // a panel is 16, 32, 48 or 64 columns wide
constexpr int kMaxRows = 32;    // rows of the largest micro-tile (AMX)
constexpr int kGroupBytes = 4;  // A is broadcast 4 bytes at a time: 1 fp32, 2 bf16, 2 int16 or 4 int8

// Return a / b rounded up; b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// f8: float8_e4m3fn (1 sign, 4 exponent and 3 mantissa bits, bias 7, no infinity, NaN where all 7 low bits are set).
enum class DType : int { f32 = 0, bf16, f16, s8, u8, s32, s4, f8 };

// The instruction that multiplies and accumulates. A group is the kp consecutive k that the instruction consumes. (A
// quantisation group, the k that share a scale, is always called by its full name.)
enum class Compute : int {
  f32 = 0,   // kp = 1, fp32 FMA
  bf16 = 1,  // kp = 2, bf16 pairs into fp32
  i16 = 2,   // kp = 2, int16 pairs into int32 (int8 operands, widened)
  u8s8 = 3,  // kp = 4, unsigned by signed: 128 is added to a signed A, and the compensation subtracted from C
  s8s8 = 4,  // kp = 4, signed by signed (AMX)
};

constexpr int group_size(Compute c) {
  return c == Compute::f32 ? 1 : (c == Compute::bf16 || c == Compute::i16) ? 2 : 4;
}

constexpr bool is_integer(Compute c) { return c == Compute::i16 || c == Compute::u8s8 || c == Compute::s8s8; }

constexpr int bits(DType t) {
  switch (t) {
    case DType::f32:
    case DType::s32: return 32;
    case DType::bf16:
    case DType::f16: return 16;
    case DType::s4: return 4;
    default: return 8;
  }
}

// Rows of a matrix.
struct Rows {
  const char* first;
  int64_t stride;  // bytes between them
  int64_t bytes;   // of each
};

constexpr int kMaxNextMatrices = 2;

// Arguments of a tile kernel: C[rows, 16*nv] (+)= A[rows, groups] * B[groups, 16*nv].
struct TileArgs {
  const char* a;         // first row, first group
  int64_t a_row_stride;  // bytes between rows of A
  int64_t a_group_stride;  // bytes between groups of A
  const char* b;         // packed panel
  int64_t b_stride;      // bytes from one B row to the next
  int64_t groups;        // groups of kp to consume
  void* c;               // fp32 or int32 tile
  int64_t ldc;           // elements between rows of C
  bool accumulate;       // add to C instead of overwriting it
  const char* prefetch;  // the address to prefetch with the first row of B
  int64_t prefetch_stride;  // bytes by which this address advances with each row
  bool prefetch_whole;      // all bytes between these addresses are to be fetched: a share of the next block
  // With scales, the groups are those of one or more segments, each of one quantisation group.
  const float* scale;    // scales of the first segment for each column, or null
  const float* zero;     // (zero points - stored offset) of the first segment for each column, or null
  const float* a_sum;    // sums of A over the first segment for each row (with zero)
  int64_t segment_groups;  // groups of a segment; the last one may have fewer
  int64_t scale_stride;    // elements between the scales, and the zero points, of two segments
  int64_t a_sum_stride;    // elements between the sums of two segments
  const char* next_out;   // the first of the rows of the output that the next tile is stored to, or null
  int64_t next_out_rows;  // how many there are
  int64_t out_stride;     // bytes between rows of the output
  int64_t out_bytes;      // of a row of the next tile in the output
  Rows next_matrices[kMaxNextMatrices];  // the same rows and columns of matrices that the epilogue reads
  int next_matrix_count;
  uint32_t* tile_state;  // AMX: the configuration of the tile registers, which the calls of one thread share; 0: none yet
};

using TileKernel = void (*)(const TileArgs&);

// Arguments of a dot kernel: C[rows, columns] (+)= A[rows, k] * B[columns, k]^T, both operands contiguous along K. B is an
// unpacked weight.
struct DotArgs {
  const char* a;
  int64_t a_row_stride;  // bytes between rows of A
  const char* b;
  int64_t b_col_stride;  // bytes between columns of B (each is k contiguous elements)
  int64_t k;
  float* c;
  int64_t ldc;
  int columns;    // 1 to kDotColumns
  bool accumulate;
  int64_t prefetch;  // prefetch distance in bytes in each column of B
};

constexpr int kDotColumns = 4;
constexpr int kDotRows = 4;
using DotKernel = void (*)(const DotArgs&);

// All micro-kernels of one (ISA, compute, stored B type). Arrays of them are constexpr: code that initialised them while the
// module is loaded would be compiled for the ISA, and end the process on a CPU without it.
struct KernelSet {
  Compute compute;
  DType b;
  int groups_per_row;                // groups that one B row holds (int4 rows hold 8 k)
  int vector_bytes;                  // bytes of one B row per 16 columns
  int max_rows[kMaxVectors + 1];     // largest micro-tile for each number of vectors
  TileKernel tile[kMaxVectors + 1][kMaxRows + 1];
  DotKernel dot[kDotRows + 1];       // by rows; null without dot kernels
  // Expands B rows to the dense form of `compute` (64 bytes per 16 columns and group).
  void (*expand)(const char* b, int64_t b_stride, int nv, int64_t groups, char* dst, int64_t dst_stride);
};

enum class StepKind : int { scale = 0, bias, add, mul, relu, gelu, gelu_tanh, silu, clamp, cast };
enum class Axis : int { tensor = 0, row, col, full };

struct Step {
  StepKind kind;
  Axis axis;
  DType dtype;      // of the tensor, or the target of a cast
  bool has_tensor;
  float value, lo, hi;
  bool exact;  // keeps an integer accumulator exact: see is_exact in bindings.cpp
  int64_t int_value, int_lo, int_hi;  // value, lo and hi of an exact step, within kSaturationLimit
};

// Exact epilogue steps saturate int64 values at this magnitude: beyond the range of every output type, and small enough that
// the sum of two such values fits int64.
constexpr int64_t kSaturationLimit = int64_t{1} << 61;

// An epilogue tensor of one call.
struct Aux {
  const char* data;
  int64_t ld;            // elements between rows (axis full only)
  int64_t batch_stride;  // elements between batches (axis full only)
};

// The activation of a gate: the columns of B's left half, through the activation, times those of its right half.
enum class Gate : int { none = 0, silu, gelu, gelu_tanh };

struct EpilogueArgs {
  void* c;               // tile in fp32 or int32, overwritten
  int64_t ldc;
  bool integer;          // c holds int32
  int rows, cols;        // with a gate, the second half of the columns are those of B's right half
  Gate gate;
  int64_t right;         // with a gate: columns from one of B's left half to its factor, N / 2
  int64_t row0, col0, batch;  // col0: of the first column, with a gate in B's left half
  const int32_t* compensation;  // subtracted from int32 accumulators, one for each column of this tile, or null
  const Step* steps;
  int n_steps;
  const Aux* aux;
  char* out;             // element (row0, col0)
  int64_t ldo;           // elements
  DType out_dtype;
};

// Arguments of pointwise, which computes the steps of an epilogue, and its gate, from the rows of a matrix in memory.
struct PointwiseArgs {
  const char* src;
  DType src_dtype;
  int64_t src_stride;    // elements between rows
  int64_t rows, n;       // n: columns of the source, with a gate of both halves
  int64_t row0;          // the number of the first row, for epilogue tensors
  Gate gate;
  const Step* steps;
  int n_steps;
  const Aux* aux;
  char* out;
  int64_t ldo;           // elements
  DType out_dtype;
};

// Arguments of pack_a, which converts rows of A to 4-byte groups, row-major (panel == 0) or interleaved by `panel` rows.
struct PackAArgs {
  const char* src;       // element (0, 0)
  DType dtype;
  int64_t row_stride, col_stride;  // elements
  int64_t rows, k;       // k is padded with zeros to whole groups
  Compute compute;
  char* dst;
  int64_t dst_row_stride;  // bytes between rows (row-major); ignored for panels
  int64_t pad_groups;    // groups to write, >= ceil(k / kp)
  int panel;             // 0, or the rows of the interleaved micro-panel
};

// The kernels, epilogue and packing of A of one instruction set.
struct IsaOps {
  const char* name;
  const KernelSet* sets;
  int n_sets;
  void (*epilogue)(const EpilogueArgs&);
  void (*pointwise)(const PointwiseArgs&);
  void (*pack_a)(const PackAArgs&);
  void (*row_sums)(const PackAArgs&, int64_t quant_group, float* sums, int64_t sums_stride);
  void (*release)();  // called by each thread after its last tile: releases what tile_state describes; null: nothing to release
};

}  // namespace gemmtune
