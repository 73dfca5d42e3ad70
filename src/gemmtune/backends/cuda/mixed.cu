// GEMM with narrow weights: C[M, N] = A[M, K] * B[K, N], A of 16-bit floats, B of int8 or int4. B's columns are contiguous: in
// memory it is a matrix of N rows of K.
//
// B's columns are wgmma's rows, which wgmma reads from registers: a thread converts the bytes that it loads from shared
// memory and writes nothing back. A's rows are wgmma's columns, in TMA's layout. One warp issues TMA copies; BN / 64 groups of
// four warps multiply, each 64 columns of B by all BM rows. A group converts the next bytes while wgmma multiplies the
// previous ones. The SPLIT blocks of a cluster divide a tile's K; their sums are added in a fixed order. PDL: see slab.cu.
//
// A stage has 128 elements of K: two boxes of 64 elements of each row of A (128 bytes, swizzled) and 128 elements of each
// column of B (int8: 128 bytes; int4: 64 bytes, whose lower nibbles are the first 64 elements). The mbarriers ``full`` count
// bytes that have arrived; ``empty`` count warps that have finished with a stage.
//
// source.py defines before this text: BM, BN, STAGES, SPLIT (the candidate); KIND, GROUP (elements of K that share a scale; 0:
// all), WARPS, REGISTERS (registers of a thread that multiplies, if that is more than an equal share, so that the warps that
// fetch release theirs; 0: equal shares), PRODUCTS (the wgmma instructions), ACROSS (row stride of the sums in shared
// memory), KEPT, SECTOR, sum_t, c_t, value_t, PARAMETERS, and the files that slab.cu names. It also writes the epilogue and the
// loads of its vectors.

constexpr int CONSUMERS = BN / 16;                                  // warps that multiply
constexpr int STAGE_K = 128;                                           // elements of K in a stage
constexpr int B_ROW = KIND == INT4 ? 64 : 128;                      // bytes of a column of B in a stage
constexpr int A_BYTES = BM * 128, B_BYTES = BN * B_ROW;             // bytes of a box of A; of B in a stage
constexpr int STAGE_BYTES = 2 * A_BYTES + B_BYTES;
constexpr int EARLY_STAGES = (STAGES + 1) / 2;                      // as in slab.cu
constexpr int SUMS = BM / 2;                                        // sums of a thread
constexpr int OUTPUT_BYTES = SPLIT > 1 ? reduction_bytes(SUMS, 32 * CONSUMERS) : 4 * BM * ACROSS;
constexpr int BUFFER_BYTES = OUTPUT_BYTES > STAGES * STAGE_BYTES ? OUTPUT_BYTES : STAGES * STAGE_BYTES;

// Add one quantisation group's sums, multiplied by its scales.
template <int N> __device__ __forceinline__ void add_scaled(sum_t (&sums)[N], const sum_t (&group)[N], const float (&scales)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += group[i] * scales[i / 2 % 2];
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
#if REGISTERS
__launch_bounds__(32 * WARPS, 1)  // without the 1 the compiler does not know the initial registers, and ignores setmaxnreg
#else
__launch_bounds__(32 * WARPS)
#endif
mixed(PARAMETERS) {
    DYNAMIC(memory);
    const int warp = warp_index(), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, part = blockIdx.x % SPLIT;
    const u32 stages = (address_of(memory) + 1023) / 1024 * 1024, full = stages + BUFFER_BYTES, empty = full + 8 * STAGES;
    const u32 vectors = empty + 8 * STAGES + (SPLIT > 1 ? 16 : 0);
    if (threadIdx.x == 0) {
        prefetch_map(&a_desc);
        prefetch_map(&b_desc);
        for (int s = 0; s < STAGES; ++s) {
            init_barrier(full + 8 * s, 1);
            init_barrier(empty + 8 * s, CONSUMERS);
        }
#if SPLIT > 1
        init_reduction<SUMS, 32 * CONSUMERS>(empty + 8 * STAGES, part);
#endif
        fence_barrier_init();
    }
    arrive_cluster();
    __syncthreads();
    const Tile tile = TileOrder((M + BM - 1) / BM, (N + BN - 1) / BN, K).at(blockIdx.x / SPLIT);
    const int first_stored = tile.row * BM, m0 = first_read(first_stored, M, BM), n0 = tile.column * BN;
    const int steps = (K + STAGE_K - 1) / STAGE_K;
    const int stage_bytes = 2 * 128 * min(BM, M) + B_BYTES;  // as in slab.cu
    const int first = steps * part / SPLIT, last = steps * (part + 1) / SPLIT;
    int at = 0, turn = 0;  // the next stage, and the parity of the passes over all stages
    auto next = [&] {
        if (++at == STAGES) at = 0, turn ^= 1;
    };

    if (warp >= CONSUMERS) {
        release_registers();
        if (warp == CONSUMERS) {
            auto fetch_b = [&](int step, int slot) {
                expect_bytes_once(full + 8 * slot, stage_bytes);
                tma_load_once(stages + slot * STAGE_BYTES + 2 * A_BYTES, &b_desc, step * B_ROW, n0, full + 8 * slot);
            };
            const int early_end = following & B_EARLY ? min(first + EARLY_STAGES, last) : first;
            for (int step = first; step < early_end; ++step) fetch_b(step, step - first);
            pdl_wait();
            for (int step = first; step < last; ++step, next()) {
                const u32 stage = stages + at * STAGE_BYTES, done = full + 8 * at;
                if (step >= early_end) {
                    wait_barrier(empty + 8 * at, turn ^ 1);
                    fetch_b(step, at);
                }
                tma_load(stage, &a_desc, step * STAGE_K, m0, done);
                tma_load(stage + A_BYTES, &a_desc, step * STAGE_K + 64, m0, done);
            }
        }
        wait_cluster();
    } else {
        acquire_registers();
        pdl_wait();
        pdl_launch_dependents();
        const int member = threadIdx.x, top = m0;
#if SECTOR
        fetch_tile<BN>(min(BM, M - m0), member + 32 * CONSUMERS * part, 32 * CONSUMERS * SPLIT, [&](int y, int x) {
            const int m = m0 + y, n = min(n0 + x, N - 1);
            // PREFETCH
        });
#endif
        // AHEAD
        sum_t sums[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = 0;
        // TMA's swizzle permutes the 16-byte pieces of a column, depending on the column's index.
        const u32 own = 2 * A_BYTES + (16 * warp + g) * B_ROW + 2 * c, swizzle = KIND == INT4 ? g / 2 : g;
        Fragment numbers[2][4] = {};
        u32 bytes[4][2];
        u32 before = 0;
#if GROUP
        sum_t group[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) group[i] = 0;
        float scales[2] = {0, 0}, next_scales[2];
        auto load_scales = [&](float(&into)[2], int step) {
            const long long row = (long long)(min(step, last - 1) * STAGE_K / GROUP) * N;
#pragma unroll
            for (int i = 0; i < 2; ++i) into[i] = number(s_ptr[row + min(n0 + 16 * warp + g + 8 * i, N - 1)]);
        };
        load_scales(next_scales, first);
#endif
        auto load = [&](u32 stage, int half) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int e = 0; e < 2; ++e) {  // two bytes of this column, and two of the column 8 further
                    const u32 piece = stage + own + (((KIND == INT8 ? 4 * half + i : i) ^ swizzle) << 4) + 8 * e;
                    bytes[i][e] = load_two_halves(piece) | load_two_halves(piece + 8 * B_ROW) << 16;
                }
        };
        auto convert = [&](int half, int i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) numbers[half][i].r[e] = two_numbers(bytes[i][e / 2], half, e % 2 ? 0x4342 : 0x4140);
        };
        for (int step = first; step < last; ++step, next()) {
            const u32 stage = stages + at * STAGE_BYTES, a = rows_from(stage);
            wait_barrier(full + 8 * at, turn);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (KIND == INT8 || half == 0) load(stage, half);
#pragma unroll
                for (int i = 0; i < 4; ++i) convert(half, i);
#if GROUP
                if (half == 0) {
                    wait_for_sums<0>(group);
                    add_scaled(sums, group, scales);
                    scales[0] = next_scales[0], scales[1] = next_scales[1];
                    load_scales(next_scales, step + 1);
                }
                sum_t(&into)[SUMS] = group;
#else
                sum_t(&into)[SUMS] = sums;
#endif
                begin(into);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    multiply_group(into, numbers[half][i], a + (half * A_BYTES + 32 * i) / 16, !GROUP || half || i);
                commit();
                wait_for_sums<1>(into);
                if (half == 0 && before && lane == 0) arrive(before);
#pragma unroll
                for (int i = 0; i < 4; ++i) keep_in_registers(numbers[1 - half][i]);
            }
            before = empty + 8 * at;
        }
#if GROUP
        wait_for_sums<0>(group);
        add_scaled(sums, group, scales);
#else
        wait_for_sums<0>(sums);
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) keep_in_registers(numbers[1][i]);

#if KEPT
        VectorWord* const kept = reinterpret_cast<VectorWord*>(memory + (vectors - address_of(memory)));
        // KEPT
#if SPLIT > 1
        sync_threads_of<32 * CONSUMERS>();
#endif
#endif
        // What the epilogue reads of matrices of C's shape, for one element.
        struct Elements {
            // MEMBERS
        };
        auto elements_at = [&](int m, int n) {
            Elements elements;
            // ELEMENTS
            return elements;
        };
        auto finish = [&](int m, int n, int y, int x, sum_t sum, const Elements& elements) {
            // EPILOGUE
        };
        // All stages have been read: their memory is free for sums.
        char* free = memory + (stages - address_of(memory));
#if SPLIT > 1
        struct FourElements { Elements of[4]; };
        // wgmma's fragments: element e of vector i of a thread is in row y of the tile, which is a row of C, and column x.
        auto row_of = [&](int i, int e) { return 8 * i + 2 * c + e % 2; };
        auto column_of = [&](int e) { return 16 * warp + g + e / 2 * 8; };
        auto read = [&](int i) {
            FourElements four;
#pragma unroll
            for (int e = 0; e < 4; ++e) four.of[e] = elements_at(min(m0 + row_of(i, e), M - 1), min(n0 + column_of(e), N - 1));
            return four;
        };
        reduce_cluster<32 * CONSUMERS>(sums, free, empty + 8 * STAGES, part, read, [&](int i, Four four, const FourElements& elements) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int y = row_of(i, e), x = column_of(e), m = m0 + y, n = n0 + x;
                if (m >= first_stored && m < M && n < N)
                    round_to(c_ptr[(long long)m * ldc + n], finish(m, n, y, x, four.of[e], elements.of[e]));
            }
        });
#else
        // wgmma's fragments have single columns of C's rows: transpose through shared memory to store rows.
        sum_t* turned = reinterpret_cast<sum_t*>(free);
        sync_threads_of<32 * CONSUMERS>();
#pragma unroll
        for (int i = 0; i < SUMS; ++i)
            turned[(i / 4 * 8 + 2 * c + i % 2) * ACROSS + 16 * warp + g + i / 2 % 2 * 8] = sums[i];
        sync_threads_of<32 * CONSUMERS>();
        const Rows C{c_ptr, ldc, first_stored, M, N};
#pragma unroll 4
        for (int e = RUN * threadIdx.x; e < BM * BN; e += RUN * 32 * CONSUMERS) {
            const int y = e / BN, x = e % BN, m = m0 + y, n = n0 + x;
            if (!C.has(m) || n >= N) continue;
            Run run;
#pragma unroll
            for (int i = 0; i < RUN; i += 2) {
                const sum_t* both = turned + y * ACROSS + x + i;
                const int left = min(n + i, N - 1), right = min(n + i + 1, N - 1);
                round_to(run.of[i / 2], c_t{}, finish(m, left, y, x + i, both[0], elements_at(m, left)),
                         finish(m, right, y, x + i + 1, both[1], elements_at(m, right)));
            }
            store(C, m, n, run);
        }
#endif
    }
}
