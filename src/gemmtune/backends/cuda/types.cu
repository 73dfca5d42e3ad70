// Elements as they lie in memory, and as numbers. NVRTC comes without the toolkit's headers, so PTX does it.
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
__device__ __forceinline__ void round_to(bfloat16& to, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
__device__ __forceinline__ void round_to(float16& to, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
// Integers saturate, ties go to even.
__device__ __forceinline__ void round_to(signed char& to, float x) { to = (signed char)__float2int_rn(fminf(fmaxf(x, -128.0f), 127.0f)); }
__device__ __forceinline__ void round_to(unsigned char& to, float x) { to = (unsigned char)__float2int_rn(fminf(fmaxf(x, 0.0f), 255.0f)); }
__device__ __forceinline__ void round_to(int& to, int x) { to = x; }
__device__ __forceinline__ void round_to(signed char& to, int x) { to = (signed char)min(max(x, -128), 127); }
__device__ __forceinline__ void round_to(unsigned char& to, int x) { to = (unsigned char)min(max(x, 0), 255); }

template <class T> __device__ __forceinline__ float rounded(float x) {
    T there;
    round_to(there, x);
    return number(there);
}
