// A product of some rows: C[M, N] = A[M, K] * B[K, N], B's columns contiguous, so that it is a matrix of N rows of K.
//
// A block computes a slab of C, BM rows by BN columns, with one warp that fetches (TMA) and BM / 64 groups of four that
// multiply (wgmma). BN may be any multiple of 8 (what wgmma has), so that N's slabs are just as many as there are
// multiprocessors. B passes once through; A is wanted by every block, so the SHARE blocks of a cluster, slabs side by
// side, fetch a part of it each and send it to all: the L2 gives 1 / SHARE of what it would. Or the SPLIT blocks of a
// cluster have one slab, a part of K each, and add up in a fixed order: with wider slabs A is wanted by fewer.
//
// It may begin while the kernel before it still runs (``follow``), and read B meanwhile if it is told to (``following``).
//
// A stage holds CHUNKS times 128 bytes of every row of A and B, as TMA lays them for wgmma (128-byte swizzle). ``full``
// counts bytes that have come, ``empty`` the warps, of all blocks that a stage was sent to, that are done with it.
//
// What source.py puts before this: the constants BM, BN, STAGES, CHUNKS, SHARE, SPLIT (the candidate), WIDTH (bytes of an
// element), STEPWISE (wgmma adds fp8 up with fewer bits than float32 has: a chunk at a time, the slab's columns in PIECES,
// TURNS of them at a time), PRODUCTS (what wgmma is asked for), CLUSTER (its blocks), WARPS, REGISTERS (as in mixed.cu),
// KEPT (words of vectors that a group of warps keeps), sum_t, c_t, value_t (what is rounded to it), PARAMETERS, then
// ptx.cu, hopper.cu, numbers.cu, vectors.cu, sums.cu and rows.cu. It writes the epilogue, and what that wants ahead, too.

constexpr int GROUPS = (BM + 63) / 64, CONSUMERS = 4 * GROUPS;  // of four warps; warps that multiply
constexpr int PART = BM / SHARE;                               // rows of A that one block fetches
constexpr int A_BYTES = BM * 128, B_BYTES = BN * 128;          // of a chunk
constexpr int STAGE = CHUNKS * (A_BYTES + B_BYTES);
constexpr int ELEMENTS = 128 / WIDTH;                          // of K in a chunk
constexpr int EARLY = (STAGES + 1) / 2;                        // stages of B before the first of A, which comes behind them
constexpr int SUMS = BN / 2;                                   // of a thread
constexpr int PIECE = SUMS / PIECES, MADE = CHUNKS * PIECES;   // if STEPWISE: of a product, and products of a step
constexpr int SENT = SPLIT > 1 ? sums_bytes(SUMS, 32 * CONSUMERS) : 0;
// wgmma takes 64 rows, whatever comes of those that BM has not: they may be anything, but must be there.
constexpr int BEYOND = (64 - BM) * 128 > CHUNKS * B_BYTES ? (64 - BM) * 128 - CHUNKS * B_BYTES : 0;
constexpr int SPACE = SENT > STAGES * STAGE + BEYOND ? SENT : STAGES * STAGE + BEYOND;

// One chunk of A and B, as ``rows_from`` has them, into ``d``, beside what is there if ``add``.
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
    const int warp = own_warp(), lane = threadIdx.x % 32, rank = blockIdx.x % SHARE, part = blockIdx.x % SPLIT;
    const u32 stages = (address_of(memory) + 1023) / 1024 * 1024, full = stages + SPACE, empty = full + 8 * STAGES;
    const u32 vectors = empty + 8 * STAGES + (SPLIT > 1 ? 16 : 0);
    if (threadIdx.x == 0) {
        will_fetch(&a_desc);
        will_fetch(&b_desc);
        for (int s = 0; s < STAGES; ++s) {
            barrier_of(full + 8 * s, 1);
            barrier_of(empty + 8 * s, SHARE * CONSUMERS);
        }
#if SPLIT > 1
        will_add_up<SUMS, 32 * CONSUMERS>(empty + 8 * STAGES, part);
#endif
        barriers_made();
    }
    greet_cluster();
#if SHARE > 1
    wait_for_greetings();
#else
    __syncthreads();
#endif
    const int tiles_m = (M + BM - 1) / BM, tiles_n = (N + BN - 1) / BN;
    const int tiles = tiles_m * ((tiles_n + SHARE - 1) / SHARE), first = blockIdx.x / CLUSTER;
    const int stride = gridDim.x / CLUSTER, steps = (K + CHUNKS * ELEMENTS - 1) / (CHUNKS * ELEMENTS);
    const int from = steps * part / SPLIT, to = steps * (part + 1) / SPLIT;
    // Blocks of other rows want the same of B. It takes up to a fifth longer when they do not begin together (docs/notes/cuda.md).
    const bool together = !STEPWISE && tiles_m > 1;
    int at = 0, turn = 0;  // the next stage, and how often (modulo 2) all were gone through
    auto next = [&] {
        if (++at == STAGES) at = 0, turn ^= 1;
    };

    if (warp >= CONSUMERS) {
        give_registers();
        if (warp == CONSUMERS) {
            int under_way = 0;  // stages whose part of B was fetched early
            auto fetch_b = [&](int step, int slot, int n0) {
                const u32 stage = stages + slot * STAGE, done = full + 8 * slot;
                expect_once(done, STAGE);
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk)
                    fetch_once(stage + CHUNKS * A_BYTES + chunk * B_BYTES, &b_desc, (step * CHUNKS + chunk) * ELEMENTS, n0,
                               done);
            };
            if (following & B_EARLY && !together && first < tiles)
                for (; under_way < min(EARLY, to - from); ++under_way)
                    fetch_b(from + under_way, under_way, (first / tiles_m * SHARE + rank) * BN);
            follow();
            for (int tile = first; tile < tiles; tile += stride) {
                const int m0 = tile % tiles_m * BM + rank * PART, n0 = (tile / tiles_m * SHARE + rank) * BN;
                for (int step = from; step < to; ++step, next()) {
                    const u32 stage = stages + at * STAGE, done = full + 8 * at;
                    if (under_way > 0) {
                        --under_way;
                    } else {
                        wait_for(empty + 8 * at, turn ^ 1);
                        fetch_b(step, at, n0);
                    }
#pragma unroll
                    for (int chunk = 0; chunk < CHUNKS; ++chunk)
                        fetch_for_all(stage + chunk * A_BYTES + rank * PART * 128, &a_desc,
                                      (step * CHUNKS + chunk) * ELEMENTS, m0, done);
                }
            }
        }
#if SPLIT > 1
        wait_for_greetings();
#endif
    } else {
        take_registers();
        follow();
        if (!together) let_follow();
        const int group = warp / 4, member = threadIdx.x % 128;
        int round = 0;
        for (int tile = first; tile < tiles; tile += stride) {
            const int m0 = tile % tiles_m * BM, n0 = (tile / tiles_m * SHARE + rank) * BN;
            const int top = m0 + 64 * group;
            const Rows C{c_ptr, ldc, min(M, m0 + BM), N};
            // AHEAD
            sum_t sums[SUMS];
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i] = 0;
#if STEPWISE
            sum_t made[TURNS][PIECE];
            auto make = [&](int i) {
                const u32 stage = stages + at * STAGE;
                const u32 a = rows_from(stage + warp / 4 * 64 * 128), b = rows_from(stage + CHUNKS * A_BYTES);
                const int columns = i % PIECES * (BN / PIECES);
                multiply_chunk(made[i % TURNS], a + i / PIECES * A_BYTES / 16,
                               b + (i / PIECES * B_BYTES + columns * 128) / 16, 0);
            };
            auto add = [&](int i) {
#pragma unroll
                for (int e = 0; e < PIECE; ++e) sums[i % PIECES * PIECE + e] += made[i % TURNS][e];
            };
            for (int step = from; step < to; ++step, next()) {
                wait_for(full + 8 * at, turn);
                // Nothing stays under way from step to step: ptxas would make every product wait for the one before (C7514).
#pragma unroll
                for (int i = 0; i < MADE + TURNS - 1; ++i) {
                    const int done = i - TURNS + 1;
                    if (i < MADE) make(i);
                    if (done < 0) continue;
                    if (i < MADE) wait_for_sums<TURNS - 1>(made[done % TURNS]);
                    else wait_for_sums<0>(made[done % TURNS]);
                    if (done == MADE - 1 && lane < SHARE) arrive_at(empty + 8 * at, lane);
                    add(done);
                }
            }
#else
            u32 before = 0;  // what is empty when wgmma is done with the step before
            for (int step = from; step < to; ++step, next()) {
                const u32 stage = stages + at * STAGE;
                const u32 a = rows_from(stage + warp / 4 * 64 * 128), b = rows_from(stage + CHUNKS * A_BYTES);
                wait_for(full + 8 * at, turn);
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk)
                    multiply_chunk(sums, a + chunk * A_BYTES / 16, b + chunk * B_BYTES / 16, 1);
                wait_for_sums<CHUNKS>(sums);
                if (before && lane < SHARE) arrive_at(before, lane);
                before = empty + 8 * at;
            }
            wait_for_sums<0>(sums);
            if (lane < SHARE) arrive_at(before, lane);
            if (together) let_follow();
#endif
#if KEPT
            // Warps that are a tile ahead of others of their group write elsewhere.
            Kept* const all = reinterpret_cast<Kept*>(memory + (vectors - address_of(memory)));
            Kept* const kept = all + (round++ % 2 * GROUPS + group) * KEPT;
            // KEPT
            meet<128>(group);
#endif
            auto finish = [&](int m, int n, int y, int x, sum_t sum) {
                // EPILOGUE
            };
            // wgmma leaves a quad of lanes two rows, 8 apart, and each of them a pair of every 8 columns.
            const int row = warp % 4 * 16 + lane / 4, own = lane % 4;
            auto pair_of = [&](int y, int x, const sum_t* both) {
                const int m = min(top + y, M - 1), n = n0 + x;
                Pair pair;
                round_to(pair, c_t{}, finish(m, min(n, N - 1), y, x, both[0]),
                         finish(m, min(n + 1, N - 1), y, x + 1, both[1]));
                return pair;
            };
#if SPLIT > 1
            // All bytes that were sent for have come and been used: the stages' memory is there for sums.
            add_up<32 * CONSUMERS>(sums, memory + (stages - address_of(memory)), empty + 8 * STAGES, part, [&](int i, Four four) {
                const int x = 8 * i + 2 * own;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    put(C, top + row + 8 * half, n0 + x, pair_of(row + 8 * half, x, four.of + 2 * half));
            });
#else
            if (warp % 4 * 16 >= BM) continue;
#pragma unroll
            for (int first = 0; first < BN / 8; first += TOGETHER) {
                Pair pairs[2][TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (first + i < BN / 8)
                            pairs[half][i] =
                                pair_of(row + 8 * half, 8 * (first + i) + 2 * own, sums + 4 * (first + i) + 2 * half);
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (first + TOGETHER <= BN / 8) put(C, top + row + 8 * half, n0 + 8 * first, own, pairs[half]);
                    else
#pragma unroll
                        for (int i = 0; i < BN / 8 % TOGETHER; ++i)
                            put(C, top + row + 8 * half, n0 + 8 * (first + i) + 2 * own, pairs[half][i]);
            }
#endif
        }
    }
#if SHARE > 1
    leave_cluster();  // not while others send to it
#endif
}
