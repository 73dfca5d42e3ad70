// What the kernels say in PTX: elements as they lie in memory and as numbers, loads, the matrix units, clusters. (NVRTC
// comes without the toolkit's headers. Tests put a CPU's version in place of this file: tests/backends/emulated.h.)
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

// Two, as they lie side by side.
__device__ __forceinline__ u32 both(bfloat16, float x, float y) {
    u32 found;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(y), "f"(x));
    return found;
}
__device__ __forceinline__ u32 both(float16, float x, float y) {
    u32 found;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(y), "f"(x));
    return found;
}

// Waits until the kernels before this one have ended, whose writes are there then. Where a launch does not ask for it this
// one begins when they have ended.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// When all blocks have said so the next kernel may begin where this one leaves room; behind ``follow`` alone, so that no
// more than two are under way.
__device__ __forceinline__ void let_follow() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// B is read once: it should not push A out of the L1.
__device__ __forceinline__ uint4 load_once(const char* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

// Before ``follow`` the L1 might still have it as it was before somebody wrote it: from the L2.
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

// Asked for here and now, however long it takes until it is used.
__device__ __forceinline__ float soon(const float* from) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}
__device__ __forceinline__ int soon(const int* from) {
    int x;
    asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}
template <class Half> __device__ __forceinline__ Half soon(const Half* from) {
    Half x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x.bits) : "l"(from));
    return x;
}

// d[16, 8] += b[16, k] * a[k, 8]: a warp's, each lane with its share of them.
__device__ __forceinline__ void multiply(sum_t (&d)[4], u32 b0, u32 b1, u32 b2, u32 b3, u32 a0, u32 a1) {
    asm("mma.sync.aligned." MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+" SUM(d[0]), "+" SUM(d[1]), "+" SUM(d[2]), "+" SUM(d[3])
        : "r"(b0), "r"(b1), "r"(b2), "r"(b3), "r"(a0), "r"(a1));
}

// Two 16-bit numbers less two others.
__device__ __forceinline__ u32 minus(u32 one, u32 other) {
    u32 d;
#if HALF
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(one), "r"(other));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(other), "r"(ONE ^ 0x80008000u), "r"(one));
#endif
    return d;
}

__device__ __forceinline__ void wait_for_cluster() {
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}

// What the lane has whose number differs by ``bit``.
__device__ __forceinline__ u32 exchanged(u32 x, int bit) { return __shfl_xor_sync(0xffffffffu, x, bit); }
__device__ __forceinline__ unsigned short exchanged(unsigned short x, int bit) {
    return (unsigned short)exchanged((u32)x, bit);
}
__device__ __forceinline__ unsigned long long exchanged(unsigned long long x, int bit) {
    return (unsigned long long)exchanged((u32)(x >> 32), bit) << 32 | exchanged((u32)x, bit);
}

// When all others are about to leave, too. What anybody wrote need not be seen for that, and is not waited for.
__device__ __forceinline__ void leave_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed; barrier.cluster.wait;" ::: "memory");
}

// What the cluster's block ``rank`` has where this one has ``here``, in shared memory.
__device__ __forceinline__ sum_t read_from(int rank, const sum_t* here) {
    const u32 own = (u32)__cvta_generic_to_shared(here);
    u32 there;
    sum_t found;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=" SUM(found) : "r"(there) : "memory");
    return found;
}

#define SHARED(type, name) __shared__ type name
