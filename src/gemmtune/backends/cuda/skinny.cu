// A product of few rows: C[M, N] = A[M, K] * B[K, N], B's columns contiguous, so that it is a matrix of N rows of K.
//
// Memory decides such a product, so B goes from global memory straight to the registers that the matrix units read
// (mma.sync, B's columns as its 16 rows, A's rows as its 8 columns): no shared memory, no barrier before the end, many
// loads under way. Nothing says in which order K is summed, as long as A and B agree. So a lane takes 16 contiguous
// bytes of B as they lie, calls them the elements of K that mma wants of it, and reads A to match. SIDE warps of a
// block lie side by side along N and read the same of A, which the L1 then has; the others take K in turns and add up
// at the end; so do the SPLIT blocks of a cluster. Every sum is in a fixed order. It begins early as slab.cu's does.
//
// What source.py puts before this: the constants BM, BN, WARPS, SIDE, DEPTH, SPLIT (the candidate); KIND, WIDTH (bytes
// of an element of A), EVEN_K, GROUP (elements of K that share a scale; 0: all), ZERO, BATCHED; sum_t, the type that
// mma adds up in; MMA, the instruction; ONE (1.0 twice), KEPT (words of vectors that are kept), c_t, value_t (what is
// rounded to it), scale_t (of narrow weights) and PARAMETERS; then ptx.cu, numbers.cu and vectors.cu. It writes the
// epilogue, and what that wants ahead, too.

constexpr int R = BN / SIDE / 16, MT = BM / 8;        // blocks of mma: of a warp's columns of B, of A's rows
constexpr int TURNS = WARPS / SIDE;                  // warps that share K
constexpr int RUN = KIND == INT4 ? 32 : KIND == INT8 ? 16 : 16 / WIDTH;  // elements of K in a lane's 16 bytes of B
constexpr int CHUNK = 4 * RUN;                       // and in a warp's 64 bytes of a row
constexpr int LOADS = RUN * WIDTH / 16;              // 16-byte loads of A that match them
constexpr int STEP = TURNS * DEPTH;                  // chunks from one look at a warp's loads to the next
constexpr int ALL = BN * BM;

struct Chunk {
    uint4 b[2 * R], a[MT][LOADS];
#if GROUP
    scale_t scales[2 * R];
#endif
#if ZERO
    scale_t zeros[2 * R];
#endif
};

struct Shared {
    sum_t turns[TURNS][BN][BM + 1];
#if SPLIT > 1
    sum_t block[ALL];
#endif
#if KEPT
    Kept kept[KEPT];
#endif
};

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// One chunk into ``acc``.
__device__ __forceinline__ void product(sum_t (&acc)[R][MT][4], const Chunk& chunk) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const uint4 &high = chunk.b[2 * r], &low = chunk.b[2 * r + 1];
#if KIND == PLAIN
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < MT; ++i)
                multiply(acc[r][i], word(high, 2 * j), word(low, 2 * j), word(high, 2 * j + 1), word(low, 2 * j + 1),
                         word(chunk.a[i][0], 2 * j), word(chunk.a[i][0], 2 * j + 1));
#else
#pragma unroll
        for (int j = 0; j < RUN / 4; ++j) {
#if KIND == INT8
            const u32 h = word(high, j), l = word(low, j);
            const u32 b0 = from_int8(h, 0x4140), b1 = from_int8(l, 0x4140);
            const u32 b2 = from_int8(h, 0x4342), b3 = from_int8(l, 0x4342);
#else  // the lower halves of 16 bytes are the first elements of their block, the upper ones those 64 later
            const u32 h = word(high, j % 4) >> j / 4 * 4 & 0x0f0f0f0fu, l = word(low, j % 4) >> j / 4 * 4 & 0x0f0f0f0fu;
            const u32 b0 = from_int4(h, 0x4140), b1 = from_int4(l, 0x4140);
            const u32 b2 = from_int4(h, 0x4342), b3 = from_int4(l, 0x4342);
#endif
#pragma unroll
            for (int i = 0; i < MT; ++i)
                multiply(acc[r][i], b0, b1, b2, b3, word(chunk.a[i][j / 2], j % 2 * 2),
                         word(chunk.a[i][j / 2], j % 2 * 2 + 1));
        }
#endif
    }
}

#if ZERO
// The sums of A's rows over one chunk: what zero points are multiplied by.
__device__ __forceinline__ void row_sums(sum_t (&sums)[MT][4], const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0;
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                multiply(sums[i], ONE, ONE, ONE, ONE, word(chunk.a[i][j], 2 * half), word(chunk.a[i][j], 2 * half + 1));
    }
}
#endif

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(32 * WARPS) skinny(PARAMETERS) {
    SHARED(Shared, shared);
    const int warp = threadIdx.x / 32, turn = warp / SIDE, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const int tiles_m = (M + BM - 1) / BM, tile = blockIdx.x / SPLIT, part = blockIdx.x % SPLIT;
    const int m0 = tile % tiles_m * BM, n0 = tile / tiles_m * BN, own_n = warp % SIDE * (BN / SIDE), n1 = n0 + own_n;
#if BATCHED
    a_ptr += blockIdx.y * batch_a;
    b_ptr += blockIdx.y * batch_b;
    c_ptr += blockIdx.y * batch_c;
#endif
    const int chunks = (K + CHUNK - 1) / CHUNK;
    const int begin = (int)((long long)chunks * part / SPLIT), end = (int)((long long)chunks * (part + 1) / SPLIT);
    const int first = begin + turn * DEPTH;
    const char *b_at[2 * R], *a_at[MT];
#pragma unroll
    for (int i = 0; i < 2 * R; ++i)  // columns beyond N: the last one's, and nobody stores what comes of them
        b_at[i] = (const char*)b_ptr + (long long)min(n1 + 8 * i + g, N - 1) * ldb * B_BYTES + (long long)first * 64 +
                  16 * c;
#pragma unroll
    for (int i = 0; i < MT; ++i)
        a_at[i] = (const char*)a_ptr + (long long)min(m0 + 8 * i + g, M - 1) * lda * WIDTH +
                  (long long)first * CHUNK * WIDTH + c * (KIND == INT4 ? 16 : RUN) * WIDTH;

    auto inside = [&](int at) { return EVEN_K || at * CHUNK + c * RUN < K; };
    auto fetch_b = [&](Chunk& into, int d, int ahead, int at, bool before) {
#pragma unroll
        for (int i = 0; i < 2 * R; ++i) {
            const char* from = b_at[i] + (d + ahead) * 64;
            if (!EVEN_K) into.b[i] = uint4{0, 0, 0, 0};
            if (inside(at)) into.b[i] = before ? load_early(from) : load_once(from);
        }
    };
    auto fetch_a = [&](Chunk& into, int d, int ahead, int at) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                const int offset = KIND == INT4 ? (j / 2 * 64 + j % 2 * 8) * WIDTH : j * 16;
                if (!EVEN_K) into.a[i][j] = uint4{0, 0, 0, 0};
                if (inside(at) && m0 + 8 * i + g < M) into.a[i][j] = load(a_at[i] + (d + ahead) * CHUNK * WIDTH + offset);
            }
    };
    auto fetch_scales = [&](Chunk& into, int at) {  // as long before they are wanted as what they scale
#if GROUP
        const long long group = (long long)(at * CHUNK / GROUP) * N;
#pragma unroll
        for (int i = 0; i < 2 * R; ++i) {
            const long long n = group + min(n1 + 8 * i + g, N - 1);
            into.scales[i] = s_ptr[n];
#if ZERO
            into.zeros[i] = z_ptr[n];
#endif
        }
#endif
    };

    sum_t acc[R][MT][4];
#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < MT; ++i) acc[r][i][0] = acc[r][i][1] = acc[r][i][2] = acc[r][i][3] = 0;
    Chunk ring[DEPTH];
    if (following & B_EARLY) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (first + d < end) fetch_b(ring[d], d, 0, first + d, true);
        follow();
    } else {
        follow();
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (first + d < end) fetch_b(ring[d], d, 0, first + d, false);
    }
    if (!(following & NEXT_LATE)) let_follow();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
        for (int i = 0; i < MT; ++i)  // rows beyond M stay zero
#pragma unroll
            for (int j = 0; j < LOADS; ++j) ring[d].a[i][j] = uint4{0, 0, 0, 0};
        if (first + d < end) {
            fetch_a(ring[d], d, 0, first + d);
            fetch_scales(ring[d], first + d);
        }
    }
    const int member = threadIdx.x, top = m0;
    // AHEAD
    for (int base = first; base < end; base += STEP) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (d == 0 || base + d < end) {
#if GROUP
                sum_t own[R][MT][4];
#pragma unroll
                for (int r = 0; r < R; ++r)
#pragma unroll
                    for (int i = 0; i < MT; ++i) own[r][i][0] = own[r][i][1] = own[r][i][2] = own[r][i][3] = 0;
                product(own, ring[d]);
#if ZERO
                sum_t rows[MT][4];
                row_sums(rows, ring[d]);
#endif
#pragma unroll
                for (int r = 0; r < R; ++r)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float scale = number(ring[d].scales[2 * r + half]);
#if ZERO
                        const float zero = number(ring[d].zeros[2 * r + half]) - (KIND == INT4 ? 8.0f : 0.0f);
#endif
#pragma unroll
                        for (int i = 0; i < MT; ++i)
#pragma unroll
                            for (int e = 2 * half; e < 2 * half + 2; ++e) {
#if ZERO
                                own[r][i][e] -= rows[i][e] * zero;
#endif
                                acc[r][i][e] += own[r][i][e] * scale;
                            }
                    }
#else
                product(acc, ring[d]);
#endif
            }
            if (base + STEP + d < end) {
                fetch_b(ring[d], d, STEP, base + STEP + d, false);
                fetch_a(ring[d], d, STEP, base + STEP + d);
                fetch_scales(ring[d], base + STEP + d);
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * R; ++i) b_at[i] += STEP * 64;
#pragma unroll
        for (int i = 0; i < MT; ++i) a_at[i] += STEP * CHUNK * WIDTH;
    }
    if (following & NEXT_LATE) let_follow();

#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                shared.turns[turn][own_n + 16 * r + e / 2 * 8 + g][8 * i + 2 * c + e % 2] = acc[r][i][e];
#if KEPT
    Kept* const kept = shared.kept;
    // KEPT
#endif
    __syncthreads();
    auto added_up = [&](int e) {
        sum_t sum = shared.turns[0][e % BN][e / BN];
#pragma unroll
        for (int i = 1; i < TURNS; ++i) sum += shared.turns[i][e % BN][e / BN];
        return sum;
    };
#if SPLIT > 1
    for (int e = threadIdx.x; e < ALL; e += 32 * WARPS) shared.block[e] = added_up(e);
    wait_for_cluster();
#endif
    for (int e = ALL / SPLIT * part + threadIdx.x; e < ALL / SPLIT * (part + 1); e += 32 * WARPS) {
        const int x = e % BN, y = e / BN, n = n0 + x, m = m0 + y;
        if (m >= M || n >= N) continue;
#if SPLIT > 1
        sum_t sum = 0;
#pragma unroll
        for (int i = 0; i < SPLIT; ++i) sum += read_from(i, shared.block + e);
#else
        sum_t sum = added_up(e);
#endif
        auto finish = [&] {
            // EPILOGUE
        };
        round_to(c_ptr[(long long)m * ldc + n], finish());
    }
#if SPLIT > 1  // nobody leaves while others read what it added up
    leave_cluster();
#endif
}
