// C's rows from what wgmma leaves a thread: pairs of columns. Where sizes and addresses allow, a quad of lanes, which has
// all of a row's columns, gives each of them as many side by side as a store takes.

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
__device__ __forceinline__ void round_to(Pair& to, bfloat16 kind, float x, float y) { to.word = both(kind, x, y); }
__device__ __forceinline__ void round_to(Pair& to, float16 kind, float x, float y) { to.word = both(kind, x, y); }

constexpr int TOGETHER = sizeof(c_t) == 4 ? 2 : 4;  // pairs of a store
constexpr int RUN = 2 * TOGETHER;                   // its columns

struct alignas(TOGETHER * sizeof(Pair)) Run { Pair of[TOGETHER]; };

struct Rows {
    c_t* c;
    long long lead;
    int m, n;
    bool whole;  // no store crosses an edge, or begins where it must not

    __device__ Rows(c_t* c, long long lead, int m, int n)
        : c(c), lead(lead), m(m), n(n), whole(n % RUN == 0 && lead % RUN == 0 && (unsigned long long)c % sizeof(Run) == 0) {}
};

__device__ __forceinline__ void put(const Rows& to, int m, int n, Pair pair) {
    c_t* place = to.c + m * to.lead + n;
    if (m >= to.m) return;
    if (to.whole) {
        if (n < to.n) *reinterpret_cast<Pair*>(place) = pair;
        return;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e)
        if (n + e < to.n) place[e] = pair.of[e];
}

// A thread's own.
__device__ __forceinline__ void put(const Rows& to, int m, int n, const Run& run) {
    if (m >= to.m) return;
    if (to.whole) {
        if (n < to.n) *reinterpret_cast<Run*>(to.c + m * to.lead + n) = run;
        return;
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) put(to, m, n + 2 * i, run.of[i]);
}

// Row m's columns from n on, 8 * TOGETHER of them, of which lane ``own`` of a quad has a pair of every 8: the quad's
// pairs and lanes change places like a matrix's rows and columns, a bit of their numbers at a time.
__device__ __forceinline__ void put(const Rows& to, int m, int n, int own, Pair (&pairs)[TOGETHER]) {
    if (!to.whole) {
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) put(to, m, n + 8 * i + 2 * own, pairs[i]);
        return;
    }
#pragma unroll
    for (int bit = 1; bit < TOGETHER; bit *= 2)
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (i & bit) continue;
            const bool odd = own & bit;
            Pair &low = pairs[i], &high = pairs[i | bit];
            const auto found = exchanged(odd ? low.word : high.word, bit);
            low.word = odd ? found : low.word;
            high.word = odd ? high.word : found;
        }
    n += 8 * (own % TOGETHER) + 2 * (own / TOGETHER * TOGETHER);
    Run run;
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) run.of[i] = pairs[i];
    put(to, m, n, run);
}
