// GEMM of few rows: C[M, N] = A[M, K] * B[K, N]. B's columns are contiguous: in memory it is a matrix of N rows of K.
//
// Such a product is limited by memory bandwidth. B is therefore loaded from global memory directly into the registers of
// mma.sync (B's columns are its 16 rows, A's rows its 8 columns): no shared memory, no barrier before the end, many loads in
// flight. The order of K in the sum is free if A and B use one order. A lane therefore loads 16 contiguous bytes of B, uses
// them as the elements of K of its fragment, and loads the matching elements of A. SIDE warps of a block are adjacent along N
// and read the same elements of A, mostly from the L1. The other warps divide K, as do the SPLIT blocks of a cluster; their
// sums are added at the end. The order of every sum is fixed. PDL: see slab.cu.
//
// source.py defines before this text: BM, BN, WARPS, SIDE, DEPTH, SPLIT (the candidate); KIND, WIDTH (bytes of an element of
// A), EVEN_K, GROUP (elements of K that share a scale; 0: all), ZERO, BATCHED, RMS_NORM and LAYER_NORM (whether A's rows are
// normalised first, with EPS and the weight t0, by their root mean square, or by their mean and variance), NORM_BIAS (whether
// the bias t1 is then added), GATED (whether C is the left half of the product's columns, the gate,
// times the right half: half of a tile's columns are in either); sum_t, mma's accumulator type; MMA, the
// instruction; ONE (1.0 twice), KEPT (words of epilogue vectors in shared memory), SECTOR (vectors.cu), c_t, value_t (the type
// before the rounding to c_t), scale_t (of narrow weights) and PARAMETERS; then ptx.cu, numbers.cu and vectors.cu. It also
// writes the epilogue and the loads of its vectors.

constexpr int R = BN / SIDE / 16, MT = BM / 8;        // mma tiles along a warp's columns of B, and along A's rows
constexpr int TURNS = WARPS / SIDE;                  // warps that divide K
constexpr int RUN = KIND == INT4 ? 32 : KIND == INT8 ? 16 : 16 / WIDTH;  // elements of K in a lane's 16 bytes of B
constexpr int CHUNK = 4 * RUN;                       // elements of K in the 64 bytes of a row that a warp loads
constexpr int LOADS = RUN * WIDTH / 16;              // 16-byte loads of A for these elements
constexpr int STEP = TURNS * DEPTH;                  // chunks between a warp's iterations
constexpr int TILE_SIZE = BN * BM;
constexpr int WIDE = GATED ? BN / 2 : BN;            // columns of C in a tile

struct Chunk {
    uint4 b[2 * R], a[MT][LOADS];
#if RMS_NORM || LAYER_NORM
    uint4 weights[LOADS];
#endif
#if NORM_BIAS
    uint4 biases[LOADS];
#endif
#if GROUP
    scale_t scales[2 * R];
#endif
#if ZERO
    scale_t zeros[2 * R];
#endif
};

__device__ __forceinline__ u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

#if LAYER_NORM
// The number of some elements, their mean, and the sum of the squares of their differences from it.
struct Moments {
    float count, mean, squares;
};

// Add the moments of further elements (Chan, Golub and LeVeque 1983, "Algorithms for computing the sample variance").
__device__ __forceinline__ void add(Moments& to, const Moments& other) {
    const float count = to.count + other.count, share = count > 0 ? other.count / count : 0, difference = other.mean - to.mean;
    to.squares += other.squares + difference * difference * to.count * share;
    to.mean += difference * share;
    to.count = count;
}

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ Moments moments_of(const uint4& pairs) {
    Moments moments{8, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) moments.mean += low_half(word(pairs, i)) + high_half(word(pairs, i));
    moments.mean *= 0.125f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float low = low_half(word(pairs, i)) - moments.mean, high = high_half(word(pairs, i)) - moments.mean;
        moments.squares += low * low + high * high;
    }
    return moments;
}
#endif

struct Shared {
    sum_t turns[TURNS][BN][BM + 1];
#if SPLIT > 1
    sum_t block[TILE_SIZE];
#endif
#if RMS_NORM
    float squares[TURNS][BM], block_squares[BM];
#endif
#if LAYER_NORM
    Moments moments[WARPS > BM ? WARPS : BM];
#endif
#if KEPT
    VectorWord kept[KEPT];
#endif
};

// Return where a lane's load j of A is, in bytes from its first one in a chunk.
__device__ constexpr int a_offset(int j) { return KIND == INT4 ? (j / 2 * 64 + j % 2 * 8) * WIDTH : j * 16; }

// Add the product of one chunk to ``acc``.
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
#else  // lower nibbles are elements of the first half of a block of 128, upper nibbles those 64 later
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

#if RMS_NORM
// Add the sums of squares of A's rows over one chunk to ``squares``, and multiply A by the norm's weight. A row's factor is
// applied to its sums at the end. The squares are the diagonal of A * A^T, whose row g, columns 2c and 2c + 1, a lane has.
__device__ __forceinline__ void normalize(sum_t (&squares)[MT][4], Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            uint4& a = chunk.a[i][j];
            const uint4& weights = chunk.weights[j];
            multiply(squares[i], a.x, 0, a.y, 0, a.x, a.y);
            multiply(squares[i], a.z, 0, a.w, 0, a.z, a.w);
            a = uint4{multiply_halves(a.x, weights.x), multiply_halves(a.y, weights.y), multiply_halves(a.z, weights.z),
                      multiply_halves(a.w, weights.w)};
        }
}
#elif LAYER_NORM
// Normalise A's rows in one chunk. means, factors: of the row of A that a lane has in each mma tile.
__device__ __forceinline__ void normalize(const float (&means)[MT], const float (&factors)[MT], Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            auto normalized = [&](u32 pair, u32 weights, u32 biases) {
                const float low = (low_half(pair) - means[i]) * factors[i], high = (high_half(pair) - means[i]) * factors[i];
                const float first = rounded<bfloat16>(low * low_half(weights) + low_half(biases));
                const float second = rounded<bfloat16>(high * high_half(weights) + high_half(biases));
                return __float_as_uint(first) >> 16 | __float_as_uint(second) & 0xffff0000u;
            };
            uint4& a = chunk.a[i][j];
            const uint4& weights = chunk.weights[j];
#if NORM_BIAS
            const uint4& biases = chunk.biases[j];
#else
            const uint4 biases{0, 0, 0, 0};
#endif
            a = uint4{normalized(a.x, weights.x, biases.x), normalized(a.y, weights.y, biases.y),
                      normalized(a.z, weights.z, biases.z), normalized(a.w, weights.w, biases.w)};
        }
}
#endif

#if ZERO
// Sum A's rows over one chunk; zero points multiply these sums.
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
    const int m0 = tile % tiles_m * BM, n0 = tile / tiles_m * WIDE, warp_n = warp % SIDE * (BN / SIDE);
    const int end_n = GATED ? N / 2 : N;  // of C's columns
#if BATCHED
    a_ptr += blockIdx.y * batch_a;
    b_ptr += blockIdx.y * batch_b;
    c_ptr += blockIdx.y * batch_c;
#endif
    const int chunks = (K + CHUNK - 1) / CHUNK;
    const int begin = (int)((long long)chunks * part / SPLIT), end = (int)((long long)chunks * (part + 1) / SPLIT);
    const int first = begin + turn * DEPTH;
    const char *b_from[2 * R], *a_from[MT];
    // Return the column of B that is column x of the tile; beyond the last one, it is the last one, whose results are not
    // stored.
    auto column_of_b = [&](int x) {
        const bool right = GATED && x >= WIDE;
        return min(n0 + (right ? x - WIDE : x), end_n - 1) + (right ? end_n : 0);
    };
#pragma unroll
    for (int i = 0; i < 2 * R; ++i)
        b_from[i] = (const char*)b_ptr + (long long)column_of_b(warp_n + 8 * i + g) * ldb * B_BYTES + (long long)first * 64 +
                  16 * c;
#pragma unroll
    for (int i = 0; i < MT; ++i)
        a_from[i] = (const char*)a_ptr + (long long)min(m0 + 8 * i + g, M - 1) * lda * WIDTH +
                  (long long)first * CHUNK * WIDTH + c * (KIND == INT4 ? 16 : RUN) * WIDTH;

#if RMS_NORM || LAYER_NORM
    const long long inner_from = (long long)first * CHUNK * WIDTH + c * (KIND == INT4 ? 16 : RUN) * WIDTH;
    const char* weights_from = (const char*)t0 + inner_from;
#if NORM_BIAS
    const char* biases_from = (const char*)t1 + inner_from;
#endif
#endif

    auto in_range = [&](int at) { return EVEN_K || at * CHUNK + c * RUN < K; };
    auto fetch_b = [&](Chunk& into, int d, int ahead, int at, bool before) {
#pragma unroll
        for (int i = 0; i < 2 * R; ++i) {
            const char* from = b_from[i] + (d + ahead) * 64;
            if (!EVEN_K) into.b[i] = uint4{0, 0, 0, 0};
            if (in_range(at)) into.b[i] = before ? load_early(from) : load_once(from);
        }
    };
    auto fetch_a = [&](Chunk& into, int d, int ahead, int at) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                if (!EVEN_K) into.a[i][j] = uint4{0, 0, 0, 0};
                if (in_range(at) && m0 + 8 * i + g < M) into.a[i][j] = load(a_from[i] + (d + ahead) * CHUNK * WIDTH + a_offset(j));
            }
#if RMS_NORM || LAYER_NORM
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            const int offset = (d + ahead) * CHUNK * WIDTH + a_offset(j);
            if (!EVEN_K) into.weights[j] = uint4{0, 0, 0, 0};
            if (in_range(at)) into.weights[j] = load(weights_from + offset);
#if NORM_BIAS
            if (!EVEN_K) into.biases[j] = uint4{0, 0, 0, 0};
            if (in_range(at)) into.biases[j] = load(biases_from + offset);
#endif
        }
#endif
    };
    auto fetch_scales = [&](Chunk& into, int at) {  // as early as the elements that they scale
#if GROUP
        const long long group = (long long)(at * CHUNK / GROUP) * N;
#pragma unroll
        for (int i = 0; i < 2 * R; ++i) {
            const long long n = group + column_of_b(warp_n + 8 * i + g);
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
#if RMS_NORM
    sum_t squares[MT][4];
#pragma unroll
    for (int i = 0; i < MT; ++i) squares[i][0] = squares[i][1] = squares[i][2] = squares[i][3] = 0;
#endif
    Chunk ring[DEPTH];
    if (following & B_EARLY) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (first + d < end) fetch_b(ring[d], d, 0, first + d, true);
        pdl_wait();
    } else {
        pdl_wait();
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            if (first + d < end) fetch_b(ring[d], d, 0, first + d, false);
    }
    if (!(following & NEXT_LATE)) pdl_launch_dependents();
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
#if LAYER_NORM
    // Each block reads its rows of A once before the product, while its first loads of B are on their way.
    const int rows = min(BM, M - m0), shares = max(1, WARPS / rows);  // the warps that share a row
    for (int item = warp; item < rows * shares; item += WARPS) {
        const char* from = (const char*)a_ptr + (long long)(m0 + item % rows) * lda * WIDTH;
        Moments moments{0, 0, 0};
#pragma unroll 4
        for (int i = 32 * (item / rows) + lane; i < K / 8; i += 32 * shares) add(moments, moments_of(load(from + 16 * i)));
#pragma unroll
        for (int bit = 1; bit < 32; bit *= 2) {
            auto other = [&](float own) { return __uint_as_float(shuffle_xor(__float_as_uint(own), bit)); };
            add(moments, Moments{other(moments.count), other(moments.mean), other(moments.squares)});
        }
        if (lane == 0) shared.moments[item] = moments;
    }
    __syncthreads();
    float means[MT], factors[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) {
        Moments moments{0, 0, 0};
        for (int item = 8 * i + g; 8 * i + g < rows && item < rows * shares; item += rows) add(moments, shared.moments[item]);
        means[i] = moments.mean, factors[i] = rsqrtf(moments.squares / K + EPS);
    }
#endif
    const int member = threadIdx.x, top = m0;
#if SECTOR
    fetch_tile<WIDE>(min(BM, M - m0), member + 32 * WARPS * part, 32 * WARPS * SPLIT, [&](int y, int x) {
        const int m = m0 + y, n = min(n0 + x, end_n - 1);
        // PREFETCH
    });
#endif
    // AHEAD
    for (int base = first; base < end; base += STEP) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (d == 0 || base + d < end) {
#if RMS_NORM
                normalize(squares, ring[d]);
#elif LAYER_NORM
                normalize(means, factors, ring[d]);
#endif
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
        for (int i = 0; i < 2 * R; ++i) b_from[i] += STEP * 64;
#pragma unroll
        for (int i = 0; i < MT; ++i) a_from[i] += STEP * CHUNK * WIDTH;
#if RMS_NORM || LAYER_NORM
        weights_from += STEP * CHUNK * WIDTH;
#endif
#if NORM_BIAS
        biases_from += STEP * CHUNK * WIDTH;
#endif
    }
    if (following & NEXT_LATE) pdl_launch_dependents();

#pragma unroll
    for (int r = 0; r < R; ++r)
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                shared.turns[turn][warp_n + 16 * r + e / 2 * 8 + g][8 * i + 2 * c + e % 2] = acc[r][i][e];
#if RMS_NORM
    if (warp % SIDE == 0 && c == g / 2)
#pragma unroll
        for (int i = 0; i < MT; ++i) shared.squares[turn][8 * i + g] = g % 2 ? squares[i][1] : squares[i][0];
#endif
#if KEPT
    VectorWord* const kept = shared.kept;
    // KEPT
#endif
    __syncthreads();
    auto sum_warps = [&](int e) {
        sum_t sum = shared.turns[0][e % BN][e / BN];
#pragma unroll
        for (int i = 1; i < TURNS; ++i) sum += shared.turns[i][e % BN][e / BN];
        return sum;
    };
#if RMS_NORM
    auto square_warps = [&](int y) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) sum += shared.squares[i][y];
        return sum;
    };
#endif
#if SPLIT > 1
    for (int e = threadIdx.x; e < TILE_SIZE; e += 32 * WARPS) shared.block[e] = sum_warps(e);
#if RMS_NORM
    for (int y = threadIdx.x; y < BM; y += 32 * WARPS) shared.block_squares[y] = square_warps(y);
#endif
    wait_for_cluster();
#endif
    // Return the result of row y and column x of the tile, which are row m of C and column n of B.
    auto finish = [&](int x, int y, int m, int n) {
#if SPLIT > 1
        sum_t sum = 0;
#pragma unroll
        for (int i = 0; i < SPLIT; ++i) sum += load_remote(i, shared.block + y * BN + x);
#else
        sum_t sum = sum_warps(y * BN + x);
#endif
#if RMS_NORM
#if SPLIT > 1
        float squared = 0;
#pragma unroll
        for (int i = 0; i < SPLIT; ++i) squared += load_remote(i, shared.block_squares + y);
#else
        const float squared = square_warps(y);
#endif
        sum *= rsqrtf(squared / K + EPS);
#endif
        // EPILOGUE
    };
    constexpr int RESULTS = WIDE * BM / SPLIT;  // of a block of the cluster
    for (int e = RESULTS * part + threadIdx.x; e < RESULTS * (part + 1); e += 32 * WARPS) {
        const int x = e % WIDE, y = e / WIDE, n = n0 + x, m = m0 + y;
        if (m >= M || n >= end_n) continue;
        value_t result = finish(x, y, m, n);
#if GATED
        value_t gate = result;
        // GATE
        result = gate * finish(x + WIDE, y, m, n + end_n);
#endif
        round_to(c_ptr[(long long)m * ldc + n], result);
    }
#if SPLIT > 1  // a block must not exit while others read its sums
    leave_cluster();
#endif
}
