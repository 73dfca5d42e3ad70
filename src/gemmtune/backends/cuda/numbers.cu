// Rounding to integers (ptx.cu has the floats): saturating, ties to even. Conversion of int8 and int4 weights to 16-bit floats.
__device__ __forceinline__ void round_to(signed char& to, float x) {
    to = (signed char)min(max(__float2int_rn(x), -128), 127);  // __float2int_rn saturates, and returns 0 for NaN
}
__device__ __forceinline__ void round_to(unsigned char& to, float x) {
    to = (unsigned char)min(max(__float2int_rn(x), 0), 255);
}
__device__ __forceinline__ void round_to(int& to, int x) { to = x; }
__device__ __forceinline__ void round_to(signed char& to, int x) { to = (signed char)min(max(x, -128), 127); }
__device__ __forceinline__ void round_to(unsigned char& to, int x) { to = (unsigned char)min(max(x, 0), 255); }

template <class T> __device__ __forceinline__ float rounded(float x) {
    T result;
    round_to(result, x);
    return number(result);
}

#if KIND != PLAIN
// An integer becomes a float by exact arithmetic: its bits become the low mantissa bits of a float whose last place is 1, and
// that float's value without them is subtracted.
//
// Convert two of four int8; ``selector`` chooses them. The mantissa of float16 has room for 8 bits: 1024 + 128 + q. That of
// bfloat16 has room for 7: 128 + the lower seven bits, minus 128, or minus 256 if the sign bit (now the exponent's last) is
// set.
__device__ __forceinline__ u32 from_int8(u32 q, u32 selector) {
#if HALF
    return subtract_halves(__byte_perm(q ^ 0x80808080u, 0x64646464u, selector), 0x64806480u);
#else
    const u32 u = __byte_perm(q, 0x43434343u, selector);
    return subtract_halves(u & 0xff7fff7fu, u & 0xff80ff80u);
#endif
}

// Convert two of four unsigned int4, one in each byte, minus 8.
__device__ __forceinline__ u32 from_int4(u32 q, u32 selector) {
    return HALF ? subtract_halves(__byte_perm(q, 0x64646464u, selector), 0x64086408u)
                : subtract_halves(__byte_perm(q, 0x43434343u, selector), 0x43084308u);
}

// Convert two of four bytes. For int4: their lower nibbles, or their upper ones if ``upper``.
__device__ __forceinline__ u32 two_numbers(u32 bytes, int upper, u32 selector) {
    return KIND == INT8 ? from_int8(bytes, selector) : from_int4(bytes >> 4 * upper & 0x0f0f0f0fu, selector);
}
#endif
