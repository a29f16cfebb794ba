// NVFP4 block-scaled matrix multiply of one warp, m16n8k64: e2m1 x e2m1, a ue4m3 scale for each 16 along k, float32
// accumulation. sm_120a, sm_121a: one instruction. Elsewhere from sm_80 on, or with -DSM120_EMULATE_MMA: four
// mma.m16n8k16.f16. The emulation's operands are exact (e2m1 * e4m3 has at most 6 significant bits); the order of the
// float32 sums is another one. A scale's sign bit is ignored in both.
#pragma once
#include "common.cuh"

// CUDA 12.8 defines the FEAT macros; NVRTC 13.5 has none for sm_121a, but the family: 1200 or 1210.
#if !defined(SM120_EMULATE_MMA) &&                                                                        \
    (defined(SM120_HOST) || defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL) || \
     (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) &&                                                           \
      (__CUDA_ARCH_FAMILY_SPECIFIC__ == 1200 || __CUDA_ARCH_FAMILY_SPECIFIC__ == 1210)))
#define NVFP4_NATIVE 1
#else
#define NVFP4_NATIVE 0
#endif

// Fragment layout (PTX ISA, m16n8k64 with 4-bit types), g = lane >> 2, t = lane & 3, 8 nibbles a register, low first:
//   a[0]: row g      k = 8t..8t+7       a[1]: row g + 8, same k     a[2], a[3]: the same rows, k + 32
//   b[0]: column g   k = 8t..8t+7       b[1]: column g,  k + 32
//   d[0], d[1]: row g, columns 2t, 2t + 1                           d[2], d[3]: row g + 8
//   sfa: 4 e4m3 bytes (k blocks 0..3): lane t == 2*TIDA has row g's, t == 2*TIDA + 1 row g + 8's    (TIDA 0, 1)
//   sfb: 4 e4m3 bytes: lane t == TIDB has column g's                                                 (TIDB 0..3)
// So the 4 lanes of a quad can hold the A scales of two tiles and the B scales of four in one register.

// ---- 16-bit multiplies: d += a b, m16n8k16 ----
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef SM120_HOST
    uint32_t words[10] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    sm120_host::mma<sm120_host::mma_m16n8k16<sm120_host::f16_to_f32>>("mma_f16", words, 6, d);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef SM120_HOST
    uint32_t words[10] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    sm120_host::mma<sm120_host::mma_m16n8k16<sm120_host::bf16_to_f32>>("mma_bf16", words, 6, d);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// ---- decoding to float16 ----
// Finite codes only, by bit placement: e4m3 has 7 of exponent bias, float16 15, hence the factor 2^8.
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2_by_bits(uint16_t pair) {
    const uint32_t spread = uint32_t(pair & 0xff) | uint32_t(pair >> 8) << 16;
    return mul_f16x2((spread & 0x00800080u) << 8 | (spread & 0x007f007fu) << 7, 0x5c005c00u);
}

// Both e4m3 of a pair, low byte first; exact. NaN gives 0x7fff (below sm_89 it gives 480).
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint16_t pair) {
#if defined(SM120_HOST)
    return sm120_host::e4m3_to_f16(uint8_t(pair)) | uint32_t(sm120_host::e4m3_to_f16(uint8_t(pair >> 8))) << 16;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair));
    return r;
#else
    return e4m3x2_to_f16x2_by_bits(pair);
#endif
}

// 8 e2m1, low nibble first, to 4 pairs: elements 2i and 2i + 1 in r[i], each times 2^-14.
__device__ __forceinline__ void e2m1x8_to_f16x2(uint32_t codes, uint32_t (&r)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t two = codes >> (8 * i) & 0xffu, spread = (two & 0xfu) | (two & 0xf0u) << 12;
        r[i] = (spread & 0x00080008u) << 12 | (spread & 0x00070007u) << 9;
    }
}

// ---- d += (a * sfa) (b * sfb), m16n8k64 ----
template <int TIDA = 0, int TIDB = 0>
__device__ __forceinline__ void mma_nvfp4_emulated(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                   uint32_t sfa, uint32_t sfb) {
    const int lane = int(threadIdx.x & 31), quad = lane & ~3;
    const uint32_t scale_low = __shfl_sync(0xffffffffu, sfa, quad + 2 * TIDA);
    const uint32_t scale_high = __shfl_sync(0xffffffffu, sfa, quad + 2 * TIDA + 1);
    const uint32_t scale_b = __shfl_sync(0xffffffffu, sfb, quad + TIDB);
    // Scales are taken times 2^7 (at most 57344), elements times 2^-14: 2^-7 for A and for B, undone at the end.
    const auto scale = [](uint32_t scales, int shift) {
        const uint32_t code = scales >> shift & 0x7fu;
        return mul_f16x2(e4m3x2_to_f16x2(uint16_t(code | code << 8)), 0x58005800u);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int shift = 16 * half + (lane & 2 ? 8 : 0);  // this lane's k: 32 half + 8t.., in block 2 half + (t >> 1)
        const uint32_t by_low = scale(scale_low, shift), by_high = scale(scale_high, shift);
        const uint32_t by_b = scale(scale_b, shift);
        uint32_t low[4], high[4], column[4];
        e2m1x8_to_f16x2(a[2 * half], low);
        e2m1x8_to_f16x2(a[2 * half + 1], high);
        e2m1x8_to_f16x2(b[half], column);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            low[i] = mul_f16x2(low[i], by_low);
            high[i] = mul_f16x2(high[i], by_high);
            column[i] = mul_f16x2(column[i], by_b);
        }
        // Which k is which inside an mma does not matter as long as A and B agree: 4 of this lane's 8 in each.
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const uint32_t rows[4] = {low[i], high[i], low[i + 1], high[i + 1]};
            const uint32_t columns[2] = {column[i], column[i + 1]};
            mma_f16(sum, rows, columns);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] += sum[i] * 16384.f;
    }
}

template <int TIDA = 0, int TIDB = 0>
__device__ __forceinline__ void mma_nvfp4(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t sfa,
                                          uint32_t sfb) {
    static_assert(TIDA >= 0 && TIDA < 2 && TIDB >= 0 && TIDB < 4, "scale selectors: TIDA 0 or 1, TIDB 0 to 3");
#if !NVFP4_NATIVE
    mma_nvfp4_emulated<TIDA, TIDB>(d, a, b, sfa, sfb);
#elif defined(SM120_HOST)
    uint32_t words[14] = {a[0], a[1], a[2], a[3], b[0], b[1], sfa, sfb, TIDA, TIDB};
    sm120_host::mma<sm120_host::mma_m16n8k64_nvfp4>("mma_nvfp4", words, 10, d);
#else
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%13}, {%14, %15};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(sfa), "h"((uint16_t)0),
          "h"((uint16_t)TIDA), "r"(sfb), "h"((uint16_t)0), "h"((uint16_t)TIDB));
#endif
}
