// GEMM of a moderate number of rows: C[M, N] = A[M, K] * B[K, N]. B's columns are contiguous: in memory it is a matrix of N
// rows of K.
//
// A block computes a slab of C, BM rows by BN columns: one warp issues TMA copies, BM / 64 groups of four warps multiply
// (wgmma). BN may be any multiple of 8 (wgmma's widths), so that the number of slabs can equal the number of SMs. B is read
// once. A is read by every block; the SHARE blocks of a cluster, with adjacent slabs, therefore fetch a part of A each and
// multicast it: the L2 delivers 1 / SHARE of the bytes. Alternatively the SPLIT blocks of a cluster divide the K of one slab
// and add their sums in a fixed order: wider slabs mean that fewer blocks read A.
//
// PDL: the kernel may start before the previous one has ended (``pdl_wait``), and load B before that if ``following`` has
// B_EARLY.
//
// A stage has CHUNKS times 128 bytes of every row of A and B, in the layout of TMA and wgmma (128-byte swizzle). The
// mbarriers ``full`` count bytes that have arrived; ``empty`` count warps, of all blocks that receive a stage, that have
// finished with it.
//
// A norm in front (RMS_NORM): further warps, one for each four rows, multiply a stage's A by the norm's weight, in shared memory,
// and sum the squares of the rows; ``ready`` counts these warps. A row's factor is applied to its sums at the end.
//
// source.py defines before this text: BM, BN, STAGES, CHUNKS, SHARE, SPLIT (the candidate), WIDTH (bytes of an element),
// STEPWISE (wgmma accumulates fp8 with fewer bits than float32: each chunk's sums are added in float32, the slab's columns
// divided into PIECES, TURNS of them in flight), GATED, RMS_NORM, EPS (as in skinny.cu), PRODUCTS (the wgmma instructions), CLUSTER
// (blocks of a cluster), WARPS, REGISTERS (as in mixed.cu), KEPT (words of epilogue vectors of a group of warps), SECTOR
// (vectors.cu), sum_t, c_t, value_t (the type before the rounding to c_t), PARAMETERS, then ptx.cu, hopper.cu, numbers.cu,
// vectors.cu, sums.cu and rows.cu. It also writes the epilogue and the loads of its vectors.

constexpr int GROUPS = (BM + 63) / 64, CONSUMERS = 4 * GROUPS;  // groups of four warps; warps that multiply
constexpr int A_ROWS = BM / SHARE;                              // rows of A that one block fetches
constexpr int A_BYTES = BM * 128, B_BYTES = BN * 128;           // bytes of a chunk
constexpr int STAGE_BYTES = CHUNKS * (A_BYTES + B_BYTES);
constexpr int ELEMENTS = 128 / WIDTH;                           // elements of K in a chunk
constexpr int EARLY_STAGES = (STAGES + 1) / 2;                  // stages of B to load early; more would delay the first of A
constexpr int SUMS = BN / 2;                                    // sums of a thread
constexpr int WIDE = GATED ? BN / 2 : BN;                       // columns of C in a slab
constexpr int PIECE_SUMS = SUMS / PIECES, STEP_PRODUCTS = CHUNKS * PIECES;  // if STEPWISE: sums of a product, and products of a step
constexpr int REDUCTION_BYTES = SPLIT > 1 ? reduction_bytes(SUMS, 32 * CONSUMERS) : 0;
// wgmma reads 64 rows. Rows beyond BM may have any values (their results are not stored), but must be in shared memory.
constexpr int ROW_PADDING = (64 - BM) * 128 > CHUNKS * B_BYTES ? (64 - BM) * 128 - CHUNKS * B_BYTES : 0;
constexpr int ALL_STAGES_BYTES = STAGES * STAGE_BYTES + ROW_PADDING;
constexpr int NORMALIZERS = RMS_NORM ? BM / 4 : 0;                  // warps that normalise A
constexpr int WEIGHTS_BYTES = RMS_NORM ? CHUNKS * 128 : 0;          // of the norm's weight, in a stage
constexpr int BUFFER_BYTES = REDUCTION_BYTES > ALL_STAGES_BYTES ? REDUCTION_BYTES : ALL_STAGES_BYTES;

#if RMS_NORM
static_assert(!REGISTERS, "the warps that normalise need more registers than they would keep");

// Multiply eight elements of A by weights, and add their squares to ``squares``.
__device__ __forceinline__ uint4 normalize(const uint4& a, const uint4& weights, float& squares) {
    auto scale = [&](u32 pair, u32 weight_pair) {
        const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
        squares += low * low + high * high;
        return multiply_halves(pair, weight_pair);
    };
    return {scale(a.x, weights.x), scale(a.y, weights.y), scale(a.z, weights.z), scale(a.w, weights.w)};
}
#endif

// Multiply one chunk of A and B (given by ``rows_from``) into ``d``; add to ``d`` if ``add``.
template <int N> __device__ __forceinline__ void multiply_chunk(sum_t (&d)[N], u32 a, u32 b, int add) {
    begin(d);
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_group(d, a + 2 * k, b + 2 * k, add || k > 0);
    commit();
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(32 * WARPS, 1) slab(PARAMETERS) {
    DYNAMIC(memory);
    const int warp = warp_index(), lane = threadIdx.x % 32, rank = blockIdx.x % SHARE, part = blockIdx.x % SPLIT;
    const u32 stages = (address_of(memory) + 1023) / 1024 * 1024, weights = stages + BUFFER_BYTES;
    const u32 full = weights + STAGES * WEIGHTS_BYTES, empty = full + 8 * STAGES, ready = empty + 8 * STAGES;
    const u32 row_squares = ready + (RMS_NORM ? 8 * STAGES : 0);
    const u32 vectors = row_squares + (RMS_NORM ? 4 * BM : 0) + (SPLIT > 1 ? 16 : 0);
    if (threadIdx.x == 0) {
        prefetch_map(&a_desc);
        prefetch_map(&b_desc);
        for (int s = 0; s < STAGES; ++s) {
            init_barrier(full + 8 * s, 1);
            init_barrier(empty + 8 * s, SHARE * CONSUMERS);
            if (RMS_NORM) init_barrier(ready + 8 * s, NORMALIZERS);
        }
#if SPLIT > 1
        init_reduction<SUMS, 32 * CONSUMERS>(empty + 8 * STAGES, part);
#endif
        fence_barrier_init();
    }
    arrive_cluster();
#if SHARE > 1
    wait_cluster();
#else
    __syncthreads();
#endif
    const int end_n = GATED ? N / 2 : N;  // of C's columns
    const int tiles_n = (end_n + WIDE - 1) / WIDE;
    const TileOrder order((M + BM - 1) / BM, (tiles_n + SHARE - 1) / SHARE, K);  // of the tiles of a cluster
    auto first_column = [&](Tile of_cluster) { return (of_cluster.column * SHARE + rank) * WIDE; };
    const int tiles = order.rows * order.columns, first = blockIdx.x / CLUSTER;
    const int stride = gridDim.x / CLUSTER, steps = (K + CHUNKS * ELEMENTS - 1) / (CHUNKS * ELEMENTS);
    const int from = steps * part / SPLIT, to = steps * (part + 1) / SPLIT;
    // If M is less than a tile's rows, TMA's box has M of them (host: TmaKernel.clips_boxes), and blocks without rows send none.
    const int a_rows = min(A_ROWS, M), senders = min(SHARE, (M + A_ROWS - 1) / A_ROWS);
    const int stage_bytes = CHUNKS * (senders * a_rows * 128 + B_BYTES);
    auto weights_bytes = [&](int step) { return min(WEIGHTS_BYTES, (K - step * CHUNKS * ELEMENTS) * WIDTH); };
    // Blocks of other rows read the same part of B. If they do not start together the kernel takes up to a fifth longer
    // (docs/notes/cuda.md).
    const bool together = !STEPWISE && order.rows > 1;
    int at = 0, turn = 0;  // the next stage, and the parity of the passes over all stages
    auto next = [&] {
        if (++at == STAGES) at = 0, turn ^= 1;
    };

    if (warp >= CONSUMERS) {
        release_registers();
        if (warp == CONSUMERS) {
            int early_stages = 0;  // stages whose part of B was loaded early
            auto fetch_b = [&](int step, int slot, int n0) {
                const u32 stage = stages + slot * STAGE_BYTES, done = full + 8 * slot;
                expect_bytes_once(done, stage_bytes + weights_bytes(step));
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    const u32 into = stage + CHUNKS * A_BYTES + chunk * B_BYTES;
                    tma_load_once(into, &b_desc, (step * CHUNKS + chunk) * ELEMENTS, n0, done);
#if GATED
                    tma_load_once(into + WIDE * 128, &b_desc, (step * CHUNKS + chunk) * ELEMENTS, end_n + n0, done);
#endif
                }
            };
            if (following & B_EARLY && !together && first < tiles)
                for (; early_stages < min(EARLY_STAGES, to - from); ++early_stages)
                    fetch_b(from + early_stages, early_stages, first_read(first_column(order.at(first)), end_n, WIDE));
            pdl_wait();
            for (int tile = first; tile < tiles; tile += stride) {
                const Tile position = order.at(tile);
                const int m0 = first_read(position.row * BM, M, BM) + rank * A_ROWS;
                const int n0 = first_read(first_column(position), end_n, WIDE);
                for (int step = from; step < to; ++step, next()) {
                    const u32 stage = stages + at * STAGE_BYTES, done = full + 8 * at;
                    if (early_stages > 0) {
                        --early_stages;
                    } else {
                        wait_barrier(empty + 8 * at, turn ^ 1);
                        fetch_b(step, at, n0);
                    }
#if RMS_NORM
                    bulk_load(weights + at * WEIGHTS_BYTES, t0 + step * CHUNKS * ELEMENTS, weights_bytes(step), done);
#endif
                    if (rank >= senders) continue;
#pragma unroll
                    for (int chunk = 0; chunk < CHUNKS; ++chunk)
                        tma_load_multicast(stage + chunk * A_BYTES + rank * A_ROWS * 128, &a_desc,
                                      (step * CHUNKS + chunk) * ELEMENTS, m0, done);
                }
            }
        }
#if RMS_NORM
        else {
            const int segment = lane % 8, y = 4 * (warp - CONSUMERS - 1) + lane / 8;
            for (int tile = first; tile < tiles; tile += stride) {
                float squares[CHUNKS] = {};
                for (int step = from; step < to; ++step, next()) {
                    const u32 a = stages + at * STAGE_BYTES + y * 128 + (segment ^ y % 8) * 16;
                    const u32 factors = weights + at * WEIGHTS_BYTES + segment * 16;
                    // Beyond K, TMA has written zeros to A, and the weights are undefined.
                    auto in_range = [&](int chunk) {
                        return y < M && (step * CHUNKS + chunk) * ELEMENTS + segment * (ELEMENTS / 8) < K;
                    };
                    uint4 elements[CHUNKS], scales[CHUNKS];
                    wait_barrier(full + 8 * at, turn);
#pragma unroll
                    for (int chunk = 0; chunk < CHUNKS; ++chunk)
                        if (in_range(chunk)) {
                            elements[chunk] = load_shared(a + chunk * A_BYTES);
                            scales[chunk] = load_shared(factors + chunk * 128);
                        }
#pragma unroll
                    for (int chunk = 0; chunk < CHUNKS; ++chunk)
                        if (in_range(chunk))
                            store_shared(a + chunk * A_BYTES, normalize(elements[chunk], scales[chunk], squares[chunk]));
                    if (step == to - 1) {
                        float sum = squares[0];
#pragma unroll
                        for (int chunk = 1; chunk < CHUNKS; ++chunk) sum += squares[chunk];
#pragma unroll
                        for (int bit = 1; bit < 8; bit *= 2) sum += __uint_as_float(shuffle_xor(__float_as_uint(sum), bit));
                        // The previous tile's squares have been read: a tile has more steps than there are stages.
                        if (segment == 0) store_shared(row_squares + 4 * y, sum);
                    }
                    fence_shared_writes();
                    __syncwarp();
                    if (lane == 0) arrive(ready + 8 * at);
                }
            }
        }
#endif
#if SPLIT > 1
        wait_cluster();
#endif
    } else {
        acquire_registers();
        pdl_wait();
        if (!together) pdl_launch_dependents();
        const int group = warp / 4, member = threadIdx.x % 128;
        int round = 0;
        for (int tile = first; tile < tiles; tile += stride) {
            const Tile position = order.at(tile);
            const int first_stored = position.row * BM, m0 = first_read(first_stored, M, BM);
            const int n0 = first_read(first_column(position), end_n, WIDE);
            const int top = m0 + 64 * group;
            const Rows C{c_ptr, ldc, first_stored, min(M, m0 + BM), end_n};
#if SECTOR
            fetch_tile<WIDE>(min(min(64, BM), M - top), member + 128 * part, 128 * SPLIT, [&](int y, int x) {
                const int m = top + y, n = min(n0 + x, end_n - 1);
                // PREFETCH
            });
#endif
            // AHEAD
            sum_t sums[SUMS];
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i] = 0;
#if STEPWISE
            sum_t products[TURNS][PIECE_SUMS];
            auto multiply_piece = [&](int i) {
                const u32 stage = stages + at * STAGE_BYTES;
                const u32 a = rows_from(stage + warp / 4 * 64 * 128), b = rows_from(stage + CHUNKS * A_BYTES);
                const int columns = i % PIECES * (BN / PIECES);
                multiply_chunk(products[i % TURNS], a + i / PIECES * A_BYTES / 16,
                               b + (i / PIECES * B_BYTES + columns * 128) / 16, 0);
            };
            auto add_piece = [&](int i) {
#pragma unroll
                for (int e = 0; e < PIECE_SUMS; ++e) sums[i % PIECES * PIECE_SUMS + e] += products[i % TURNS][e];
            };
            for (int step = from; step < to; ++step, next()) {
                wait_barrier(full + 8 * at, turn);
                // No wgmma stays in flight between steps: ptxas would serialise all of them (warning C7514).
#pragma unroll
                for (int i = 0; i < STEP_PRODUCTS + TURNS - 1; ++i) {
                    const int done = i - TURNS + 1;
                    if (i < STEP_PRODUCTS) multiply_piece(i);
                    if (done < 0) continue;
                    if (i < STEP_PRODUCTS) wait_for_sums<TURNS - 1>(products[done % TURNS]);
                    else wait_for_sums<0>(products[done % TURNS]);
                    if (done == STEP_PRODUCTS - 1 && lane < SHARE) arrive_at(empty + 8 * at, lane);
                    add_piece(done);
                }
            }
#else
            u32 before = 0;  // the ``empty`` mbarrier of the previous step, to arrive at when its wgmma is done
            for (int step = from; step < to; ++step, next()) {
                const u32 stage = stages + at * STAGE_BYTES;
                const u32 a = rows_from(stage + warp / 4 * 64 * 128), b = rows_from(stage + CHUNKS * A_BYTES);
                wait_barrier(full + 8 * at, turn);
                if (RMS_NORM) wait_barrier(ready + 8 * at, turn);
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk)
                    multiply_chunk(sums, a + chunk * A_BYTES / 16, b + chunk * B_BYTES / 16, 1);
                wait_for_sums<CHUNKS>(sums);
                if (before && lane < SHARE) arrive_at(before, lane);
                before = empty + 8 * at;
            }
            wait_for_sums<0>(sums);
            if (lane < SHARE) arrive_at(before, lane);
            if (together) pdl_launch_dependents();
#endif
#if KEPT
            // Two buffers alternate, because a warp may be one tile ahead of others of its group.
            VectorWord* const all = reinterpret_cast<VectorWord*>(memory + (vectors - address_of(memory)));
            VectorWord* const kept = all + (round++ % 2 * GROUPS + group) * KEPT;
            // KEPT
            sync_threads_of<128>(group);
#endif
#if RMS_NORM
            auto row_factor = [&](int y) { return rsqrtf(load_shared_float(row_squares + 4 * min(y, BM - 1)) / K + EPS); };
#endif
            auto finish = [&](int m, int n, int y, int x, sum_t sum) {
                // EPILOGUE
            };
            // wgmma's fragments: four lanes have two rows, 8 apart, and each lane a pair of every 8 columns.
            const int row = warp % 4 * 16 + lane / 4, own = lane % 4;
#if RMS_NORM
            const float factors[2] = {row_factor(64 * group + row), row_factor(64 * group + row + 8)};
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i] *= factors[i / 2 % 2];
#endif
            // Return the result of column x of the slab from its sum; GATED: and from that of the right half.
            auto result_of = [&](int m, int y, int x, const sum_t* sum) {
                const int n = min(n0 + x, end_n - 1);
                value_t result = finish(m, n, y, x, *sum);
#if GATED
                value_t gate = result;
                // GATE
                result = gate * finish(m, n + end_n, y, x + WIDE, sum[WIDE / 2]);
#endif
                return result;
            };
            auto pair_of = [&](int y, int x, const sum_t* both) {
                const int m = min(top + y, M - 1);
                Pair pair;
                round_to(pair, c_t{}, result_of(m, y, x, both), result_of(m, y, x + 1, both + 1));
                return pair;
            };
#if SPLIT > 1
            // All stages have been read: their memory is free for sums.
            char* free = memory + (stages - address_of(memory));
            auto read = [](int) { return Nothing{}; };
            reduce_cluster<32 * CONSUMERS>(sums, free, empty + 8 * STAGES, part, read, [&](int i, Four four, Nothing) {
                const int x = 8 * i + 2 * own;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    store(C, top + row + 8 * half, n0 + x, pair_of(row + 8 * half, x, four.of + 2 * half));
            });
#else
            if (warp % 4 * 16 >= BM) continue;
#pragma unroll
            for (int first = 0; first < WIDE / 8; first += TOGETHER) {
                Pair pairs[2][TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (first + i < WIDE / 8)
                            pairs[half][i] =
                                pair_of(row + 8 * half, 8 * (first + i) + 2 * own, sums + 4 * (first + i) + 2 * half);
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (first + TOGETHER <= WIDE / 8) store(C, top + row + 8 * half, n0 + 8 * first, own, pairs[half]);
                    else
#pragma unroll
                        for (int i = 0; i < WIDE / 8 % TOGETHER; ++i)
                            store(C, top + row + 8 * half, n0 + 8 * (first + i) + 2 * own, pairs[half][i]);
            }
#endif
        }
    }
#if SHARE > 1
    leave_cluster();  // a block must not exit while others send to it
#endif
}
