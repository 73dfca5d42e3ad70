// Vectors that the epilogue reads, such as a scale for each column. Their loads have the full latency of global memory, so
// they are issued before the products, and the values are in shared memory when the sums are complete.
union VectorWord {
    float number;
    int whole;
};

// SIZE elements of a vector, distributed over the registers of THREADS threads until they are stored.
template <class T, int SIZE, int THREADS> struct Ahead {
    static constexpr int PER_THREAD = (SIZE + THREADS - 1) / THREADS;
    T elements[PER_THREAD];

    // Load the elements from ``first`` on; elements beyond ``last`` repeat it.
    __device__ __forceinline__ Ahead(const T* from, int first, int last, int thread) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) elements[i] = load_now(from + min(first + min(thread + i * THREADS, SIZE - 1), last));
    }

    __device__ __forceinline__ void numbers(VectorWord* to, int thread) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i)
            if (thread + i * THREADS < SIZE) to[thread + i * THREADS].number = number(elements[i]);
    }

    __device__ __forceinline__ void integers(VectorWord* to, int thread) const {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i)
            if (thread + i * THREADS < SIZE) to[thread + i * THREADS].whole = elements[i];
    }
};

#if SECTOR
// The L2 fetches a tile of the epilogue's matrices while the products are computed: ``fetch`` is called with the row and column
// of one element of each SECTOR columns (source.py: 32 bytes of the widest matrix; 0 without matrices). ``threads`` threads
// share the calls.
template <int COLUMNS, class Fetch>
__device__ __forceinline__ void fetch_tile(int rows, int thread, int threads, Fetch fetch) {
    constexpr int SECTORS = (COLUMNS + SECTOR - 1) / SECTOR;
    for (int i = thread; i < rows * SECTORS; i += threads) fetch(i / SECTORS, i % SECTORS * SECTOR);
}
#endif
