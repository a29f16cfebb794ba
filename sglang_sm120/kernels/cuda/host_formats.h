// Number formats and matrix multiplies in plain C++, bit for bit as the PTX instructions define them. No CUDA here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace sm120_host {

inline uint32_t float_bits(float value) { uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }
inline float bits_float(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }

// ---- float16: 1 sign, 5 exponent (bias 15), 10 mantissa ----
inline float f16_to_f32(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    if (exponent == 31) return bits_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0) return bits_float(sign | float_bits(float(mantissa) * 0x1p-24f));
    return bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Nearest even, overflow to infinity, NaN to 0x7fff, as cvt.rn.f16.f32.
inline uint16_t f32_to_f16(float value) {
    uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7fff;
    if (bits >= 0x47800000u) return uint16_t(sign | 0x7c00);                                          // >= 2^16
    if (bits < 0x38800000u) return uint16_t(sign | uint32_t(std::nearbyint(bits_float(bits) * 0x1p24f)));  // < 2^-14
    return uint16_t(sign | ((bits + 0xfff + ((bits >> 13) & 1) - 0x38000000u) >> 13));
}

// ---- bfloat16: the upper half of a float32 ----
inline float bf16_to_f32(uint16_t bits) { return bits_float(uint32_t(bits) << 16); }

// Nearest even, NaN to 0x7fff, as cvt.rn.bf16.f32.
inline uint16_t f32_to_bf16(float value) {
    const uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t f16_product(uint16_t a, uint16_t b) {  // 22 bits, 2^-48 or more: exact in float32, one rounding
    return f32_to_f16(f16_to_f32(a) * f16_to_f32(b));
}

// 16 bits: exact in float32 from 2^-134 on, which is half of the least bfloat16; below it every rounding gives 0.
inline uint16_t bf16_product(uint16_t a, uint16_t b) { return f32_to_bf16(bf16_to_f32(a) * bf16_to_f32(b)); }

// ---- e4m3: 1 sign, 4 exponent (bias 7), 3 mantissa, no infinity, 0x7f and 0xff NaN ----
inline float e4m3_to_f32(uint8_t bits) {
    const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
    if ((bits & 127) == 127) return NAN;
    const float value = exponent ? std::ldexp(1.f + mantissa / 8.f, exponent - 7) : mantissa * 0x1p-9f;
    return bits & 128 ? -value : value;
}
inline uint16_t e4m3_to_f16(uint8_t bits) { return f32_to_f16(e4m3_to_f32(bits)); }

// ---- e2m1: 1 sign, 2 exponent (bias 1), 1 mantissa ----
constexpr float E2M1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                            -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

// ---- matrix multiplies of one warp: `in` is [32 lanes][16 words], `out` [32 lanes][4 words] (float32 bits) ----
// d[16, 8] = c + a[16, K] b[K, 8]: exact products, summed in float64, rounded once.
template <int K>
inline void multiply(const double (&a)[16][K], const double (&b)[8][K], const uint32_t (*in)[16], int c,
                     uint32_t (*out)[16]) {
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            const int row = (lane >> 2) + (i >> 1) * 8, column = 2 * (lane & 3) + (i & 1);
            double sum = bits_float(in[lane][c + i]);
            for (int k = 0; k < K; ++k) sum += a[row][k] * b[column][k];
            out[lane][i] = float_bits(float(sum));
        }
}

// mma.m16n8k16 of 16-bit operands. Words of a lane: a[0..3], b[0..1], c[0..3].
template <float (*DECODE)(uint16_t)>
inline void mma_m16n8k16(const uint32_t (*in)[16], uint32_t (*out)[16]) {
    double a[16][16], b[8][16];
    for (int k = 0; k < 16; ++k) {
        const int t = (k & 7) >> 1, shift = 16 * (k & 1), half = k >> 3;
        for (int row = 0; row < 16; ++row)
            a[row][k] = DECODE(uint16_t(in[(row & 7) * 4 + t][(row >> 3) + 2 * half] >> shift));
        for (int column = 0; column < 8; ++column)
            b[column][k] = DECODE(uint16_t(in[column * 4 + t][4 + half] >> shift));
    }
    multiply<16>(a, b, in, 6, out);
}

// mma.m16n8k64 of e2m1 with a ue4m3 scale for each 16 along K. Words: a[0..3], b[0..1], sfa, sfb, TIDA, TIDB, c[0..3].
inline void mma_m16n8k64_nvfp4(const uint32_t (*in)[16], uint32_t (*out)[16]) {
    double a[16][64], b[8][64];
    const uint32_t tid_a = in[0][8], tid_b = in[0][9];
    for (int k = 0; k < 64; ++k) {
        const int t = (k & 31) >> 3, nibble = 4 * (k & 7), half = k >> 5, block = 8 * (k >> 4);
        for (int row = 0; row < 16; ++row) {
            const int g = (row & 7) * 4, high = row >> 3;
            const uint32_t scale = in[g + 2 * tid_a + high][6] >> block;
            a[row][k] = double(E2M1[(in[g + t][high + 2 * half] >> nibble) & 15]) * e4m3_to_f32(scale & 127);
        }
        for (int column = 0; column < 8; ++column) {
            const uint32_t scale = in[column * 4 + tid_b][7] >> block;
            b[column][k] = double(E2M1[(in[column * 4 + t][4 + half] >> nibble) & 15]) * e4m3_to_f32(scale & 127);
        }
    }
    multiply<64>(a, b, in, 10, out);
}

}  // namespace sm120_host
