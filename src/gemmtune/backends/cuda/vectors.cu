// What the epilogue wants of vectors (a scale for each column, say). Memory takes as long to answer for them as for
// anything else: they are asked for before the products, and lie in shared memory when the sums are there.
union Kept {
    float number;
    int whole;
};

// SIZE elements of a vector, each held by one of THREADS until then.
template <class T, int SIZE, int THREADS> struct Ahead {
    static constexpr int EACH = (SIZE + THREADS - 1) / THREADS;
    T held[EACH];

    // From ``first`` on; beyond ``last``: that one again.
    __device__ __forceinline__ Ahead(const T* from, int first, int last, int thread) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) held[i] = soon(from + min(first + min(thread + i * THREADS, SIZE - 1), last));
    }

    __device__ __forceinline__ void numbers(Kept* to, int thread) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (thread + i * THREADS < SIZE) to[thread + i * THREADS].number = number(held[i]);
    }

    __device__ __forceinline__ void integers(Kept* to, int thread) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (thread + i * THREADS < SIZE) to[thread + i * THREADS].whole = held[i];
    }
};
