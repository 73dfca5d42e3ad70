// Rounding, beside what ptx.cu has: integers saturate, ties go to even.
__device__ __forceinline__ void round_to(signed char& to, float x) {
    to = (signed char)__float2int_rn(fminf(fmaxf(x, -128.0f), 127.0f));
}
__device__ __forceinline__ void round_to(unsigned char& to, float x) {
    to = (unsigned char)__float2int_rn(fminf(fmaxf(x, 0.0f), 255.0f));
}
__device__ __forceinline__ void round_to(int& to, int x) { to = x; }
__device__ __forceinline__ void round_to(signed char& to, int x) { to = (signed char)min(max(x, -128), 127); }
__device__ __forceinline__ void round_to(unsigned char& to, int x) { to = (unsigned char)min(max(x, 0), 255); }

template <class T> __device__ __forceinline__ float rounded(float x) {
    T there;
    round_to(there, x);
    return number(there);
}
