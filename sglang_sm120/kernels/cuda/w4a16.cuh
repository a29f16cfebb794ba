// What the W4A16 MoE kernels share: e2m1 weights as operands of the model's dtype, and the activations between the GEMMs.
#pragma once
#include "nvfp4_mma.cuh"

enum MoeActivationKind { SILU, GELU, RELU2, IDENTITY, SWIGLU_CLAMPED };
struct MoeActivationArgs {
    int kind;                // MoeActivationKind
    float limit, alpha, beta;  // SWIGLU_CLAMPED
};

// How 16-bit floats of the model's dtype are made from e2m1. `place` puts sign, exponent and mantissa of nibbles i and
// i + 4 of a word into the two halves: the value times 2^-126 (bfloat16) or 2^-14 (float16). The scale carries the rest
// up to UNSCALE, so that a product of 6 significant bits is exact and in range for every e4m3.
struct Bf16 {
    static constexpr float UNSCALE = 128.f;
    // One multiplication copies a nibble to bits 15..12, for the sign, and to bits 9..6.
    template <int I> static __device__ __forceinline__ uint32_t place(uint32_t word) {
        if constexpr (I >= 2) word >>= 8;
        return ((word & (I % 2 ? 0x00F000F0u : 0x000F000Fu)) * (I % 2 ? 0x0104u : 0x1040u)) & 0x81C081C0u;
    }
    template <int I> static __device__ __forceinline__ uint32_t scale(uint32_t f16x2) {
        const float s = f16_to_f32(uint16_t(I ? f16x2 >> 16 : f16x2)) * 6.646139978924579e35f;  // 2^119
        return f32_to_bf16x2(s, s);
    }
    static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) { return mul_bf16x2(a, b); }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_bf16(d, a, b); }
    static __device__ __forceinline__ uint16_t round(float value) { return f32_to_bf16(value); }
    static __device__ __forceinline__ float widen(uint16_t bits) { return bf16_to_f32(bits); }
};
struct F16 {
    static constexpr float UNSCALE = 128.f;
    template <int I> static __device__ __forceinline__ uint32_t place(uint32_t word) {
        const uint32_t sign = I == 3 ? word : word << (12 - 4 * I), rest = I == 3 ? word >> 3 : word << (9 - 4 * (I % 3));
        return (sign & 0x80008000u) | (rest & 0x0E000E00u);
    }
    template <int I> static __device__ __forceinline__ uint32_t scale(uint32_t f16x2) {
        return mul_f16x2(prmt(f16x2, 0, I ? 0x3232 : 0x1010), 0x58005800u);  // 2^7
    }
    static __device__ __forceinline__ uint32_t mul(uint32_t a, uint32_t b) { return mul_f16x2(a, b); }
    static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_f16(d, a, b); }
    static __device__ __forceinline__ uint16_t round(float value) { return f32_to_f16(value); }
    static __device__ __forceinline__ float widen(uint16_t bits) { return f16_to_f32(bits); }
};

// ---- activations, as fused_moe/reference.py has them; comparisons are such that NaN stays NaN ----
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + fast_exp(-x)); }
__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.f + erff(x * 0.70710678118654752f)); }
__device__ __forceinline__ float gated(const MoeActivationArgs& p, float gate, float up) {
    if (p.kind == GELU) return gelu(gate) * up;
    if (p.kind == SILU) return gate * sigmoid(gate) * up;
    gate = gate > p.limit ? p.limit : gate;
    up = up > p.limit ? p.limit : (up < -p.limit ? -p.limit : up);
    return gate * sigmoid(p.alpha * gate) * (up + p.beta);
}
__device__ __forceinline__ float ungated(const MoeActivationArgs& p, float x) {
    if (p.kind == SILU) return x * sigmoid(x);
    if (p.kind == GELU) return gelu(x);
    if (p.kind == RELU2) {
        x = x < 0.f ? 0.f : x;
        return x * x;
    }
    return x;
}

// `total` pieces of work for `parts` workers, in order, evenly.
struct Deal {
    int total, parts;
    __device__ __forceinline__ int begin(int part) const { return part * (total / parts) + min(part, total % parts); }
};

// ---- what both GEMM kernels do the same way ----
// The tile of an id: `info` is block_info of the first block of an expert, m the tile's block of that expert's. Ids run
// expert after expert, and within one along a weight column's blocks (column-major) or along a block's columns.
struct TilePlace {
    int4 info;
    unsigned m, column;
};
__device__ __forceinline__ TilePlace locate_tile(const int4* block_info, unsigned id, unsigned columns, bool row_major) {
    const int4 info = block_info[id / columns];
    const unsigned local = id - info.y * columns, blocks = info.z;
    if (blocks <= 1) return {info, 0, local};
    return {info, row_major ? local / columns : local % blocks, row_major ? local % columns : local / blocks};
}
// Bytes from an expert's first block scale to row `row`'s first, of scales swizzled in tiles of 128 rows x 64 k.
__device__ __forceinline__ int scale_row_offset(int row, int scale_tiles) {
    return (row >> 7) * (scale_tiles * 512) + (row & 31) * 16 + ((row >> 5) & 3) * 4;
}
// Eight weights: `factor` is their scale as T::scale makes it. d: weights 0 and 4, 1 and 5, 2 and 6, 3 and 7.
template <class T> __device__ __forceinline__ void decode_word(uint32_t word, uint32_t factor, uint32_t (&d)[4]) {
    d[0] = T::mul(T::template place<0>(word), factor);
    d[1] = T::mul(T::template place<1>(word), factor);
    d[2] = T::mul(T::template place<2>(word), factor);
    d[3] = T::mul(T::template place<3>(word), factor);
}
