// Split-K reduction over the SPLIT blocks of a cluster. Thread t of every block has partial sums of the same elements of the
// tile, in vectors of four. Block 0 reduces the first of these vectors, block 1 the next, and so on. Each block sends its
// partial sums to the block that reduces them, when the receiver's memory is free.

struct alignas(4 * sizeof(sum_t)) Four { sum_t of[4]; };
struct Nothing {};

__device__ constexpr int first_of_rank(int rank, int fours) { return (rank * fours + SPLIT - 1) / SPLIT; }

// Return the bytes of shared memory that ``reduce_cluster`` overwrites.
__device__ constexpr int reduction_bytes(int sums, int threads) {
    return SPLIT * ((sums / 4 + SPLIT - 1) / SPLIT) * threads * (int)sizeof(Four);
}

// Initialise the two mbarriers of the reduction: receivers' memory is free; partial sums have arrived. One thread calls this
// before any block sends.
template <int SUMS, int THREADS> __device__ __forceinline__ void init_reduction(u32 barriers, int part) {
    init_barrier(barriers, SPLIT * THREADS / 32);
    init_barrier(barriers + 8, 1);
    arrive_expect_bytes(barriers + 8, (first_of_rank(part + 1, SUMS / 4) - first_of_rank(part, SUMS / 4)) * SPLIT * THREADS * sizeof(Four));
}

// Reduce the partial sums over the blocks, in a fixed order, and call ``finish(i, four, read(i))`` for each vector i
// (sums[4 * i] to sums[4 * i + 3]) of this block, which is number ``part``. ``read`` loads what the epilogue needs from global
// memory; all of it is loaded while partial sums are on their way. The first THREADS threads of the block call this;
// ``memory`` is shared memory that the block no longer needs.
template <int THREADS, int SUMS, class R, class F>
__device__ __forceinline__ void reduce_cluster(const sum_t (&sums)[SUMS], char* memory, u32 barriers, int part, R read, F finish) {
    constexpr int FOURS = SUMS / 4, MAX_FOURS = (FOURS + SPLIT - 1) / SPLIT;
    const int lane = threadIdx.x % 32;
    wait_cluster();
    __syncwarp();
    if (lane < SPLIT) arrive_remote(barriers, lane);
    wait_barrier(barriers, 0);
    const u32 own = address_of(memory) + (part * MAX_FOURS * THREADS + threadIdx.x) * sizeof(Four);
#pragma unroll
    for (int rank = 0; rank < SPLIT; ++rank) {
        const u32 remote = remote_address(own, rank), remote_barrier = remote_address(barriers + 8, rank);
#pragma unroll
        for (int i = first_of_rank(rank, FOURS); i < first_of_rank(rank + 1, FOURS); ++i)
            send(remote + (i - first_of_rank(rank, FOURS)) * THREADS * sizeof(Four), remote_barrier,
                 Four{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]});
    }
    const int first = first_of_rank(part, FOURS), last = first_of_rank(part + 1, FOURS);
    decltype(read(0)) loaded[MAX_FOURS];
#pragma unroll
    for (int i = 0; i < MAX_FOURS; ++i)
        if (first + i < last) loaded[i] = read(first + i);
    wait_barrier(barriers + 8, 0);
#pragma unroll
    for (int i = 0; i < MAX_FOURS; ++i) {
        if (first + i >= last) break;
        Four all{};
#pragma unroll
        for (int rank = 0; rank < SPLIT; ++rank) {
            const Four one = reinterpret_cast<const Four*>(memory)[(rank * MAX_FOURS + i) * THREADS + threadIdx.x];
#pragma unroll
            for (int e = 0; e < 4; ++e) all.of[e] += one.of[e];
        }
        finish(first + i, all, loaded[i]);
    }
}
