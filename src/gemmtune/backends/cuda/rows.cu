// The order of C's tiles, and stores to rows of C from wgmma's fragments, in which a thread has pairs of columns. If sizes
// and addresses allow, the four lanes that have a row's columns exchange pairs, so that each lane stores a run of adjacent
// columns.

template <int BYTES> struct Word;
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<4> { typedef u32 type; };
template <> struct Word<8> { typedef unsigned long long type; };

union Pair {
    c_t of[2];
    Word<2 * sizeof(c_t)>::type word;
};

template <class T> __device__ __forceinline__ void round_to(Pair& to, T, value_t x, value_t y) {
    round_to(to.of[0], x);
    round_to(to.of[1], y);
}
__device__ __forceinline__ void round_to(Pair& to, bfloat16 kind, float x, float y) { to.word = pack_halves(kind, x, y); }
__device__ __forceinline__ void round_to(Pair& to, float16 kind, float x, float y) { to.word = pack_halves(kind, x, y); }

constexpr int TOGETHER = sizeof(c_t) == 4 ? 2 : 4;  // pairs in one store
constexpr int RUN = 2 * TOGETHER;                   // columns in one store

struct alignas(TOGETHER * sizeof(Pair)) Run { Pair of[TOGETHER]; };

// The rows of C from ``first`` on, ``count`` of them; stores to others are ignored.
struct Rows {
    c_t* c;
    long long lead;
    int first, count, n;
    bool aligned;  // no run crosses the edge, and all are aligned

    __device__ Rows(c_t* c, long long lead, int first, int end, int n)
        : c(c), lead(lead), first(first), count(end - first), n(n),
          aligned(n % RUN == 0 && lead % RUN == 0 && (unsigned long long)c % sizeof(Run) == 0) {}
    __device__ bool has(int m) const { return (u32)(m - first) < (u32)count; }
};

// Return the first row, or column, that a tile of ``size`` of them reads, where ``first`` is the first that it stores and
// the matrix has ``count``. The last tile of a matrix starts earlier, so that TMA reads nothing beyond the matrix: filling
// with zeros takes TMA longer than reading. Columns that the last two tiles share are stored by both, with equal bits: to
// leave some out takes registers, too many for tiles of 256 columns.
__device__ __forceinline__ int first_read(int first, int count, int size) { return min(first, max(count - size, 0)); }

struct Tile { int row, column; };

// The order of C's tiles: in bands of rows, one after the other, and down the columns of a band. Blocks that run at a time
// read few rows of A, and the next ones the same rows. In a single band of all rows they would read all of A for each few
// columns of B, from memory where A does not fit the L2 cache.
struct TileOrder {
    int rows, columns, band;  // in tiles

    __device__ __forceinline__ TileOrder(int rows, int columns, int k)
        : rows(rows), columns(columns),
          band(rows <= BAND_TILES ? rows : min(rows, max(BAND_TILES, BAND_BYTES / (BM * WIDTH * k)))) {}
    // Return the row and the column of a tile, counted in tiles, by its number in this order.
    __device__ __forceinline__ Tile at(int number) const {
        if (band == rows) return {number % rows, number / rows};
        const int top = number / (band * columns) * band, height = min(band, rows - top), rest = number - top * columns;
        return {top + rest % height, rest / height};
    }
};

__device__ __forceinline__ void store(const Rows& to, int m, int n, Pair pair) {
    if (!to.has(m)) return;
    c_t* address = to.c + m * to.lead + n;
    if (to.aligned) {
        if (n < to.n) *reinterpret_cast<Pair*>(address) = pair;
        return;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e)
        if (n + e < to.n) address[e] = pair.of[e];
}

// Store a run of one thread.
__device__ __forceinline__ void store(const Rows& to, int m, int n, const Run& run) {
    if (!to.has(m)) return;
    if (to.aligned) {
        if (n < to.n) *reinterpret_cast<Run*>(to.c + m * to.lead + n) = run;
        return;
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) store(to, m, n + 2 * i, run.of[i]);
}

// Store 8 * TOGETHER columns of row m from column n on. Lane ``own`` of four has a pair of every 8 columns. The four lanes
// transpose the matrix [lane, pair], one bit of the indices at a time.
__device__ __forceinline__ void store(const Rows& to, int m, int n, int own, Pair (&pairs)[TOGETHER]) {
    if (!to.aligned) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) store(to, m, n + 8 * i + 2 * own, pairs[i]);
        return;
    }
#pragma unroll
    for (int bit = 1; bit < TOGETHER; bit *= 2)
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (i & bit) continue;
            const bool odd = own & bit;
            Pair &low = pairs[i], &high = pairs[i | bit];
            const auto received = shuffle_xor(odd ? low.word : high.word, bit);
            low.word = odd ? received : low.word;
            high.word = odd ? high.word : received;
        }
    n += 8 * (own % TOGETHER) + 2 * (own / TOGETHER * TOGETHER);
    Run run;
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) run.of[i] = pairs[i];
    store(to, m, n, run);
}
