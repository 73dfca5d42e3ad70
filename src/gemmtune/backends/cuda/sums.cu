// What the SPLIT blocks of a cluster, which share a tile's K, add up. A thread of each has the same places of the tile:
// fours of sums, whose first few are the first block's to finish, the next few the second's, and so on. Each sends its
// own of them there, as soon as the others have done with the memory that they go to.

struct alignas(4 * sizeof(sum_t)) Four { sum_t of[4]; };

__device__ constexpr int own_from(int rank, int fours) { return (rank * fours + SPLIT - 1) / SPLIT; }

// What ``add_up`` may overwrite at a time.
__device__ constexpr int sums_bytes(int sums, int threads) {
    return SPLIT * ((sums / 4 + SPLIT - 1) / SPLIT) * threads * (int)sizeof(Four);
}

// Its two barriers (whose memory is free, what has come), made by one thread before others may send.
template <int SUMS, int THREADS> __device__ __forceinline__ void will_add_up(u32 barriers, int part) {
    barrier_of(barriers, SPLIT * THREADS / 32);
    barrier_of(barriers + 8, 1);
    expect(barriers + 8, (own_from(part + 1, SUMS / 4) - own_from(part, SUMS / 4)) * SPLIT * THREADS * sizeof(Four));
}

// ``finish(i, four)`` for those fours from sums[4 * i] on that are this block's ``part``, added up over the blocks in a
// fixed order. THREADS take part, the first of their block; ``memory``: of shared memory, which they have done with.
template <int THREADS, int SUMS, class F>
__device__ __forceinline__ void add_up(const sum_t (&sums)[SUMS], char* memory, u32 barriers, int part, F finish) {
    constexpr int FOURS = SUMS / 4, MOST = (FOURS + SPLIT - 1) / SPLIT;
    const int lane = threadIdx.x % 32;
    wait_for_greetings();
    __syncwarp();
    if (lane < SPLIT) arrive_there(barriers, lane);
    wait_for(barriers, 0);
    const u32 own = address_of(memory) + (part * MOST * THREADS + threadIdx.x) * sizeof(Four);
#pragma unroll
    for (int rank = 0; rank < SPLIT; ++rank) {
        const u32 there = place_there(own, rank), tell = place_there(barriers + 8, rank);
#pragma unroll
        for (int i = own_from(rank, FOURS); i < own_from(rank + 1, FOURS); ++i)
            send(there + (i - own_from(rank, FOURS)) * THREADS * sizeof(Four), tell,
                 Four{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]});
    }
    wait_for(barriers + 8, 0);
    const int first = own_from(part, FOURS), last = own_from(part + 1, FOURS);
    for (int i = first; i < last; ++i) {
        Four all{};
#pragma unroll
        for (int rank = 0; rank < SPLIT; ++rank) {
            const Four one = reinterpret_cast<const Four*>(memory)[(rank * MOST + i - first) * THREADS + threadIdx.x];
#pragma unroll
            for (int e = 0; e < 4; ++e) all.of[e] += one.of[e];
        }
        finish(i, all);
    }
}
