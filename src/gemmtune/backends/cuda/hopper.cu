// PTX primitives of slab.cu and mixed.cu, for compute capability 9.0a only: TMA, mbarriers and wgmma. Addresses are 32-bit
// addresses of shared memory.
typedef unsigned long long u64;

struct __align__(64) Map { char opaque[128]; };

#define DYNAMIC(name) extern __shared__ char name[]

__device__ __forceinline__ u32 address_of(const void* here) { return (u32)__cvta_generic_to_shared(here); }

__device__ __forceinline__ void init_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Make initialised mbarriers visible to TMA and to the cluster's other blocks.
__device__ __forceinline__ void fence_barrier_init() {
#if CLUSTER > 1
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Cluster barrier in two parts: all threads arrive after their block's mbarriers are initialised, and wait for all others
// before they use another block's mbarriers.
__device__ __forceinline__ void arrive_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// Wait until the phase of parity ``turn`` has ended: the current phase or the previous one.
__device__ __forceinline__ void wait_barrier(u32 barrier, int turn) {
    u32 done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(barrier), "r"(turn) : "memory");
}

// Arrive at an mbarrier of one arrival; its phase ends when ``bytes`` bytes have arrived too.
__device__ __forceinline__ void arrive_expect_bytes(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Return the index of the thread's warp. The shuffle tells the compiler that it is uniform over the warp, so that addresses
// that depend on it stay in uniform registers, which wgmma and TMA need.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0); }

// Prefix of an instruction that one lane of a converged warp executes. Inside a branch for one lane the compiler could not
// use uniform registers, and would move TMA's operands into them in a loop each time.
#define ONCE "{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n@one "

__device__ __forceinline__ void expect_bytes_once(u32 barrier, int bytes) {
    asm volatile(ONCE "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Return the cluster address of shared memory of block ``rank`` at the address ``own`` of this block.
__device__ __forceinline__ u32 remote_address(u32 own, int rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    return remote;
}

__device__ __forceinline__ void arrive_remote(u32 barrier, int rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_address(barrier, rank)) : "memory");
}

// Arrive at an mbarrier of block ``rank`` of the SHARE blocks that share A.
__device__ __forceinline__ void arrive_at(u32 barrier, int rank) {
#if SHARE > 1
    arrive_remote(barrier, rank);
#else
    arrive(barrier);
#endif
}

// Store four words to another block's shared memory; its mbarrier counts their bytes.
template <class Four> __device__ __forceinline__ void send(u32 to, u32 barrier, Four four) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];"
                 ::"r"(to), "r"(barrier), SUM(four.of[0]), SUM(four.of[1]), SUM(four.of[2]), SUM(four.of[3]) : "memory");
}

// Prefetch a tensor map.
__device__ __forceinline__ void prefetch_map(const Map* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// TMA copy by one warp: the box of a matrix that starts at column k and row ``row``, with zeros beyond the edges. The matrix
// is read once, so the L2 evicts it first.
__device__ __forceinline__ void tma_load_once(u32 to, const Map* map, int k, int row, u32 barrier) {
    asm volatile("{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy;\n" ONCE
                 "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], policy;\n}\n}"
                 ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ void tma_load(u32 to, const Map* map, int k, int row, u32 barrier) {
    asm volatile(ONCE "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];\n}"
                 ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

// TMA copy to all SHARE blocks, at equal addresses; each block's mbarrier counts the bytes.
__device__ __forceinline__ void tma_load_multicast(u32 to, const Map* map, int k, int row, u32 barrier) {
#if SHARE > 1
    asm volatile(ONCE "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;\n}"
                 ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier), "h"((unsigned short)((1 << SHARE) - 1)) : "memory");
#else
    tma_load(to, map, k, row, barrier);
#endif
}

// Copy ``bytes`` bytes, a multiple of 16, by one warp. Both addresses are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile(ONCE "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Move registers from the four warps that fetch to those that multiply, if these need more (REGISTERS) than an equal share.
__device__ __forceinline__ void release_registers() {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
}
__device__ __forceinline__ void acquire_registers() {
#if REGISTERS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
}

// Load two bytes from shared memory.
__device__ __forceinline__ u32 load_two_halves(u32 address) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ float load_shared_float(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void store_shared(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// Make this thread's writes to shared memory visible to wgmma.
__device__ __forceinline__ void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Synchronise THREADS threads of the block, those of one group.
template <int THREADS> __device__ __forceinline__ void sync_threads_of(int group = 0) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(THREADS) : "memory");
}

// wgmma's matrix descriptor for rows of 128 swizzled bytes, with 1024 bytes per eight rows. Its lower half has the address in
// units of 16 bytes.
__device__ __forceinline__ u32 rows_from(u32 address) { return address >> 4 | 1 << 16; }
__device__ __forceinline__ u64 rows_of(u32 from) { return (u64)(1024 >> 4 | 1 << 30) << 32 | from; }

// wgmma uses these registers until it has been waited for: keep the compiler from moving them.
template <int N> __device__ __forceinline__ void keep_in_registers(sum_t (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+" SUM(sums[i])::"memory");
}

template <int N> __device__ __forceinline__ void begin(sum_t (&sums)[N]) {
    keep_in_registers(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most the last LEFT committed groups are unfinished.
template <int LEFT, int N> __device__ __forceinline__ void wait_for_sums(sum_t (&sums)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    keep_in_registers(sums);
}

// A thread's fragment of 64 rows of A by 16 elements of K.
struct Fragment { u32 r[4]; };

__device__ __forceinline__ void keep_in_registers(Fragment& fragment) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(fragment.r[e])::"memory");
}

// wgmma of four warps: d[64, 2 N] = (add ? d : 0) + A[64, 32 bytes] * B[2 N, 32 bytes], each thread with its fragment of d. A
// and B are given by ``rows_from``; A may be in registers.
template <int N, class A> __device__ __forceinline__ void multiply_group(sum_t (&d)[N], A a, u32 b, int add) { PRODUCTS }
