// What slab.cu and mixed.cu say in PTX, of compute capability 9.0a alone: TMA, its barriers, and the matrix units as four warps use
// them. Addresses are those of shared memory.
typedef unsigned long long u64;

struct __align__(64) Map { char opaque[128]; };

#define DYNAMIC(name) extern __shared__ char name[]

__device__ __forceinline__ u32 address_of(const void* here) { return (u32)__cvta_generic_to_shared(here); }

__device__ __forceinline__ void barrier_of(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Before others, TMA and other blocks among them, use them.
__device__ __forceinline__ void barriers_made() {
#if CLUSTER > 1
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// All threads tell the cluster that their block is there, with its barriers; and wait for all others to have told it.
__device__ __forceinline__ void greet_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_greetings() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// A barrier's phases alternate: waits for the end of the one that is now, or was last, ``turn``.
__device__ __forceinline__ void wait_for(u32 barrier, int turn) {
    u32 over = 0;
    while (!over)
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(over) : "r"(barrier), "r"(turn) : "memory");
}

// The one arrival of a phase, which ends when so many bytes have come, too.
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The number of a thread's warp, which the compiler knows to be the same for all of it: places that follow from it stay in
// registers that a warp has in common, where wgmma and TMA want them.
__device__ __forceinline__ int own_warp() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); }

// Before what a warp does once, all of its lanes being there. A lane by itself could not use the registers in common, and
// would bring there what TMA wants each time, in a loop.
#define ONCE "{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n@one "

__device__ __forceinline__ void expect_once(u32 barrier, int bytes) {
    asm volatile(ONCE "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The address by which others know this one of the cluster's block ``rank``.
__device__ __forceinline__ u32 place_there(u32 own, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
    return there;
}

__device__ __forceinline__ void arrive_there(u32 barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(place_there(barrier, rank)) : "memory");
}

// Of the blocks that SHARE.
__device__ __forceinline__ void arrive_at(u32 barrier, int rank) {
#if SHARE > 1
    arrive_there(barrier, rank);
#else
    arrive(barrier);
#endif
}

// Four words to a place of another block, a barrier of which hears of them.
template <class Four> __device__ __forceinline__ void send(u32 to, u32 barrier, Four four) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];"
                 ::"r"(to), "r"(barrier), SUM(four.of[0]), SUM(four.of[1]), SUM(four.of[2]), SUM(four.of[3]) : "memory");
}

// TMA will need it soon.
__device__ __forceinline__ void will_fetch(const Map* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// A warp's: a box of a matrix from column k and row ``row``, zeros beyond its edges. What is read once may leave the L2 first.
__device__ __forceinline__ void fetch_once(u32 to, const Map* map, int k, int row, u32 barrier) {
    asm volatile("{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy;\n" ONCE
                 "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], policy;\n}\n}"
                 ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void fetch(u32 to, const Map* map, int k, int row, u32 barrier) {
    asm volatile(ONCE "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];\n}"
                 ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

// To the same place of every block of those that SHARE, each of whose barriers hears of it.
__device__ __forceinline__ void fetch_for_all(u32 to, const Map* map, int k, int row, u32 barrier) {
#if SHARE > 1
    asm volatile(ONCE "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;\n}"
                 ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier), "h"((unsigned short)((1 << SHARE) - 1)) : "memory");
#else
    fetch(to, map, k, row, barrier);
#endif
}

// Registers go from four warps to others, where those want more (REGISTERS) than all could have alike.
__device__ __forceinline__ void give_registers() {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
}
__device__ __forceinline__ void take_registers() {
#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

// Two bytes of what TMA brought.
__device__ __forceinline__ u32 two_at(u32 address) {
    unsigned short found;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(found) : "r"(address) : "memory");
    return found;
}

// So many threads of the block, of one of its groups, wait for each other.
template <int THREADS> __device__ __forceinline__ void meet(int group = 0) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(THREADS) : "memory");
}

// wgmma's description of rows of 128 swizzled bytes, eight rows to 1024 bytes. Its lower half says where: 16 bytes on are 1
// more.
__device__ __forceinline__ u32 rows_from(u32 address) { return address >> 4 | 1 << 16; }
__device__ __forceinline__ u64 rows_of(u32 from) { return (u64)(1024 >> 4 | 1 << 30) << 32 | from; }

// The registers are wgmma's until it is waited for: the compiler must not move them.
template <int N> __device__ __forceinline__ void hold(sum_t (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+" SUM(sums[i])::"memory");
}

template <int N> __device__ __forceinline__ void begin(sum_t (&sums)[N]) {
    hold(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the LEFT last committed are done.
template <int LEFT, int N> __device__ __forceinline__ void wait_for_sums(sum_t (&sums)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    hold(sums);
}

// A thread's share of 64 rows of A by 16 elements of K.
struct Fragment { u32 r[4]; };

__device__ __forceinline__ void hold(Fragment& fragment) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(fragment.r[e])::"memory");
}

// d[64, 2 N] (a group's, each thread with its share) = d, if ``add``, + A[64, 32 bytes] * B[2 N, 32 bytes], as
// ``rows_from`` has them, or A in registers.
template <int N, class A> __device__ __forceinline__ void multiply_group(sum_t (&d)[N], A a, u32 b, int add) { PRODUCTS }
