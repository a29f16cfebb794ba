// The helpers of common.cuh and nvfp4_mma.cuh, one kernel each, for comparison with numpy.
#include "nvfp4_mma.cuh"

struct MmaArgs {
    const uint8_t *a, *a_scale, *b, *b_scale;  // [tiles][16][32], [tiles][16][4], [tiles][8][32], [tiles][8][4]
    float* d;                                  // [16][8]
    int tiles;
};

// One warp: d = sum over tiles of (a * a_scale) (b * b_scale)^T.
template <int TIDA, int TIDB> __device__ __forceinline__ void multiply(const MmaArgs& p) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    for (int tile = 0; tile < p.tiles; ++tile) {
        const uint8_t *a_tile = p.a + tile * 512, *b_tile = p.b + tile * 256;
        uint32_t a[4], b[2], sfa = 0x7f7f7f7fu, sfb = 0x7f7f7f7fu;  // NaN in the lanes whose scales must not be read
        for (int half = 0; half < 2; ++half) {
            a[2 * half] = *(const uint32_t*)(a_tile + g * 32 + 16 * half + 4 * t);
            a[2 * half + 1] = *(const uint32_t*)(a_tile + (g + 8) * 32 + 16 * half + 4 * t);
            b[half] = *(const uint32_t*)(b_tile + g * 32 + 16 * half + 4 * t);
        }
        if (t >> 1 == TIDA) sfa = *(const uint32_t*)(p.a_scale + tile * 64 + (g + 8 * (t & 1)) * 4);
        if (t == TIDB) sfb = *(const uint32_t*)(p.b_scale + tile * 32 + g * 4);
        mma_nvfp4<TIDA, TIDB>(d, a, b, sfa, sfb);
    }
    for (int i = 0; i < 4; ++i) p.d[(g + (i >> 1) * 8) * 8 + 2 * t + (i & 1)] = d[i];
}
#define MMA_KERNEL(NAME, TIDA, TIDB)                                                                              \
    extern "C" __global__ void NAME(const __grid_constant__ MmaArgs p) { multiply<TIDA, TIDB>(p); }               \
    SM120_HOST_EXPORT(NAME, MmaArgs)
MMA_KERNEL(mma_nvfp4_0_0, 0, 0)
MMA_KERNEL(mma_nvfp4_1_3, 1, 3)
MMA_KERNEL(mma_nvfp4_0_2, 0, 2)
MMA_KERNEL(mma_nvfp4_1_1, 1, 1)

struct HalfMmaArgs {
    const uint16_t *a, *b;  // [16][16], [8][16]
    float* d;               // [16][8], added to
};
template <bool BF16> __device__ __forceinline__ void multiply_half(const HalfMmaArgs& p) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; ++i) a[i] = *(const uint32_t*)(p.a + (g + (i & 1) * 8) * 16 + (i >> 1) * 8 + 2 * t);
    for (int i = 0; i < 2; ++i) b[i] = *(const uint32_t*)(p.b + g * 16 + i * 8 + 2 * t);
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = p.d[(g + (i >> 1) * 8) * 8 + 2 * t + (i & 1)];
    if (BF16) mma_bf16(d, a, b);
    else mma_f16(d, a, b);
    for (int i = 0; i < 4; ++i) p.d[(g + (i >> 1) * 8) * 8 + 2 * t + (i & 1)] = d[i];
}
extern "C" __global__ void mma_16_bit_bf16(const __grid_constant__ HalfMmaArgs p) { multiply_half<true>(p); }
SM120_HOST_EXPORT(mma_16_bit_bf16, HalfMmaArgs)
extern "C" __global__ void mma_16_bit_f16(const __grid_constant__ HalfMmaArgs p) { multiply_half<false>(p); }
SM120_HOST_EXPORT(mma_16_bit_f16, HalfMmaArgs)

struct MapArgs {
    const uint32_t *a, *b;  // [count]
    uint32_t* out;          // [count][width]
    int count, width;
};
// out[i] = EXPRESSION of x = a[i], y = b[i], over a grid of any size
#define MAP_KERNEL(NAME, EXPRESSION)                                                                              \
    extern "C" __global__ void NAME(const __grid_constant__ MapArgs p) {                                          \
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += gridDim.x * blockDim.x) {           \
            const uint32_t x = p.a[i], y = p.b[i];                                                                \
            (void)x, (void)y;                                                                                     \
            uint32_t* out = p.out + i * p.width;                                                                  \
            EXPRESSION;                                                                                           \
        }                                                                                                         \
    }                                                                                                             \
    SM120_HOST_EXPORT(NAME, MapArgs)
MAP_KERNEL(map_mul_bf16x2, *out = mul_bf16x2(x, y))
MAP_KERNEL(map_mul_f16x2, *out = mul_f16x2(x, y))
MAP_KERNEL(map_f32_to_bf16x2, *out = f32_to_bf16x2(__uint_as_float(x), __uint_as_float(y)))
MAP_KERNEL(map_f32_to_f16x2, *out = f32_to_f16x2(__uint_as_float(x), __uint_as_float(y)))
MAP_KERNEL(map_f32_to_bf16, *out = f32_to_bf16(__uint_as_float(x)))
MAP_KERNEL(map_f32_to_f16, *out = f32_to_f16(__uint_as_float(x)))
MAP_KERNEL(map_bf16_to_f32, *out = __float_as_uint(bf16_to_f32((uint16_t)x)))
MAP_KERNEL(map_f16_to_f32, *out = __float_as_uint(f16_to_f32((uint16_t)x)))
MAP_KERNEL(map_e4m3x2_to_f16x2, *out = e4m3x2_to_f16x2((uint16_t)x))
MAP_KERNEL(map_e4m3x2_to_f16x2_by_bits, *out = e4m3x2_to_f16x2_by_bits((uint16_t)x))
MAP_KERNEL(map_prmt, *out = prmt(x, ~x, y))
MAP_KERNEL(map_fast_exp, *out = __float_as_uint(fast_exp(__uint_as_float(x))))
MAP_KERNEL(map_e2m1x8_to_f16x2, uint32_t r[4]; e2m1x8_to_f16x2(x, r); for (int j = 0; j < 4; ++j) out[j] = r[j])
// 16-byte loads; y chooses the address
MAP_KERNEL(map_loads, uint32_t r[4]; uint32_t s[4]; load_stream(p.a + y, r, evict_first_policy());
           grid_dependency_wait(); load_cached(p.a + y, s); grid_dependency_launch();
           for (int j = 0; j < 4; ++j) { out[j] = r[j]; out[4 + j] = s[j]; })
