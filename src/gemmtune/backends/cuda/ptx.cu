// PTX primitives of all kernels: conversions, loads, mma, clusters. (NVRTC has no toolkit headers. Tests replace this file by
// an emulation on the CPU: tests/backends/emulated.h.)
typedef unsigned int u32;

struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };

__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ float number(int x) { return (float)x; }
__device__ __forceinline__ float number(bfloat16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float number(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ __forceinline__ void round_to(float& to, float x) { to = x; }
__device__ __forceinline__ void round_to(bfloat16& to, float x) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
}
__device__ __forceinline__ void round_to(float16& to, float x) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
}

// Round two numbers and pack them into one word, x in its low half.
__device__ __forceinline__ u32 pack_halves(bfloat16, float x, float y) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(y), "f"(x));
    return result;
}
__device__ __forceinline__ u32 pack_halves(float16, float x, float y) {
    u32 result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(y), "f"(x));
    return result;
}

// PDL: wait until the previous kernels of the stream have ended and their writes are visible. A launch without PDL starts
// only then, and does not wait here.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// PDL: allow the next kernel to start on free resources, once all blocks have called this. Call it only after ``pdl_wait``, so
// that at most two kernels run at a time.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Load from B, which is read once, without allocating in the L1, so that A is not evicted from it.
__device__ __forceinline__ uint4 load_once(const char* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Load before ``pdl_wait`` from the L2, because the L1 may have data from before a previous kernel's write.
__device__ __forceinline__ uint4 load_early(const char* from) {
    uint4 v;
    asm volatile("ld.global.cg.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

__device__ __forceinline__ uint4 load(const char* from) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Have the L2 fetch what is at an address.
template <class T> __device__ __forceinline__ void prefetch(const T* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// Load at this point of the program: volatile asm keeps the compiler from moving the load to its use.
__device__ __forceinline__ float load_now(const float* from) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}
__device__ __forceinline__ int load_now(const int* from) {
    int x;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}
template <class Half> __device__ __forceinline__ Half load_now(const Half* from) {
    Half x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x.bits) : "l"(from));
    return x;
}

// Return 1 / (1 + exp(-x)). FAST_MATH: with the hardware's approximations (relative errors of 2^-22), which are small beside the
// rounding of a 16-bit result. The exact functions take some 30 instructions and branches, which a block that has nothing else
// to do at its end waits for.
__device__ __forceinline__ float logistic(float x) {
#if FAST_MATH
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950408889634f * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
    return result;
#else
    return 1.0f / (1.0f + expf(-x));
#endif
}

// mma of a warp: d[16, 8] += b[16, k] * a[k, 8], each lane with its fragments.
__device__ __forceinline__ void multiply(sum_t (&d)[4], u32 b0, u32 b1, u32 b2, u32 b3, u32 a0, u32 a1) {
    asm("mma.sync.aligned." MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+" SUM(d[0]), "+" SUM(d[1]), "+" SUM(d[2]), "+" SUM(d[3])
        : "r"(b0), "r"(b1), "r"(b2), "r"(b3), "r"(a0), "r"(a1));
}

// Subtract two 16-bit floats from two others.
__device__ __forceinline__ u32 subtract_halves(u32 one, u32 other) {
    u32 d;
#if HALF
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(one), "r"(other));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(other), "r"(ONE ^ 0x80008000u), "r"(one));
#endif
    return d;
}

// Multiply two bfloat16 by two others. (fma with -0 is the product, which compute capability 8.0 has no instruction for.)
__device__ __forceinline__ u32 multiply_halves(u32 one, u32 other) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(one), "r"(other), "r"(0x80008000u));
    return d;
}

__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}

// Return x of the lane whose index differs by ``bit``.
__device__ __forceinline__ u32 shuffle_xor(u32 x, int bit) { return __shfl_xor_sync(0xffffffffu, x, bit); }
__device__ __forceinline__ unsigned short shuffle_xor(unsigned short x, int bit) {
    return (unsigned short)shuffle_xor((u32)x, bit);
}
__device__ __forceinline__ unsigned long long shuffle_xor(unsigned long long x, int bit) {
    return (unsigned long long)shuffle_xor((u32)(x >> 32), bit) << 32 | shuffle_xor((u32)x, bit);
}

// Wait until all blocks of the cluster arrive here, before they exit. Writes need not be visible, so the arrival is relaxed.
__device__ __forceinline__ void leave_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");
}

// Read shared memory of the cluster's block ``rank`` at the address that ``here`` has in this block.
__device__ __forceinline__ sum_t load_remote(int rank, const sum_t* here) {
    const u32 own = (u32)__cvta_generic_to_shared(here);
    u32 remote;
    sum_t result;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=" SUM(result) : "r"(remote) : "memory");
    return result;
}

#define SHARED(type, name) __shared__ type name
