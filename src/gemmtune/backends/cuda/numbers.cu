// Rounding, beside what ptx.cu has (integers saturate, ties go to even), and narrow weights as numbers.
__device__ __forceinline__ void round_to(signed char& to, float x) {
    to = (signed char)min(max(__float2int_rn(x), -128), 127);  // which makes 0 of NaN, and saturates
}
__device__ __forceinline__ void round_to(unsigned char& to, float x) {
    to = (unsigned char)min(max(__float2int_rn(x), 0), 255);
}
__device__ __forceinline__ void round_to(int& to, int x) { to = x; }
__device__ __forceinline__ void round_to(signed char& to, int x) { to = (signed char)min(max(x, -128), 127); }
__device__ __forceinline__ void round_to(unsigned char& to, int x) { to = (unsigned char)min(max(x, 0), 255); }

template <class T> __device__ __forceinline__ float rounded(float x) {
    T there;
    round_to(there, x);
    return number(there);
}

#if KIND != PLAIN
// Integers become numbers by putting an exponent before them whose last place is 1, and subtracting it: all exact.
//
// Two int8 of four, chosen by ``pick``. float16 has room for all 8 bits: 1024 + 128 + q. bfloat16 has not: 128 + the
// lower seven, from which 128 is subtracted, or, where the sign bit (the exponent's last) is set, 256.
__device__ __forceinline__ u32 from_int8(u32 q, u32 pick) {
#if HALF
    return minus(__byte_perm(q ^ 0x80808080u, 0x64646464u, pick), 0x64806480u);
#else
    const u32 u = __byte_perm(q, 0x43434343u, pick);
    return minus(u & 0xff7fff7fu, u & 0xff80ff80u);
#endif
}

// Two int4 of four bytes below 16, less 8.
__device__ __forceinline__ u32 from_int4(u32 q, u32 pick) {
    return HALF ? minus(__byte_perm(q, 0x64646464u, pick), 0x64086408u)
                : minus(__byte_perm(q, 0x43434343u, pick), 0x43084308u);
}

// Two of four bytes; int4: their lower halves, or their upper ones.
__device__ __forceinline__ u32 two_numbers(u32 bytes, int upper, u32 pick) {
    return KIND == INT8 ? from_int8(bytes, pick) : from_int4(bytes >> 4 * upper & 0x0f0f0f0fu, pick);
}
#endif
