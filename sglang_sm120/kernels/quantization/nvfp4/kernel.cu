// NVFP4 on a GPU: quantise, dequantise, swizzle, unswizzle. The same bits as reference.py.
//
// Every fp32 operation is a correctly rounded one by name (__fdiv_rn, __fmul_rn), so that nothing is contracted or
// approximated; conversions to and from e4m3 and e2m1 are integer arithmetic on the bits, the same in the host build.
#include "common.cuh"

struct QuantizeArgs {
    const void* x;              // [batches, rows, groups * 16]
    const float* global_scale;  // one, or one a row of a batch
    uint8_t* packed;      // [batches, rows, groups * 8]
    uint8_t* block_scale; // [batches, rows, groups], or [batches, padded_rows, padded_groups] swizzled
    int64_t batch_stride;     // of x, in elements
    int64_t row_stride;       // of x, in elements
    int64_t global_scale_stride;  // 0 for one scale
    int rows;
    int groups;
    int swizzled;
    int log2_threads_along;  // threads of a block along a row
    int blocks_along;        // blocks along a row; after that the grid runs over blocks of rows, then over batches
    int blocks_down;
    int aligned;  // every row of x starts at a multiple of 16 bytes
};

struct DequantizeArgs {
    const uint8_t* packed;       // [rows, groups * 8], rows packed_stride apart
    const uint8_t* block_scale;  // [rows, groups], rows block_scale_stride apart
    const float* global_scale;
    void* out;  // [rows, groups * 16]
    int64_t packed_stride;
    int64_t block_scale_stride;
    int64_t global_scale_stride;
    int rows;
    int groups;
    int log2_threads_along;
    int blocks_along;
    int aligned;  // every row of packed starts at a multiple of 8 bytes
};

struct SwizzleArgs {
    uint8_t* plain;      // row-major [batches, rows, columns]
    uint32_t* swizzled;  // [batches, pad128(rows), pad4(columns)]
    int64_t batch_stride;  // of the row-major side, in bytes
    int64_t row_stride;
    int rows;
    int columns;
    int blocks_along;
    int blocks_down;
    int words;  // a row of the row-major side can be read or written four bytes at a time
};

namespace {

constexpr int GROUP = 16, TILE_ROWS = 128, TILE_COLUMNS = 4, TILE_BYTES = TILE_ROWS * TILE_COLUMNS;
constexpr int TILES_A_BLOCK = 8;  // a 32-byte sector of a row-major row

struct Bfloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

__device__ __forceinline__ float to_float(Bfloat16 x) { return bf16_to_f32(x.bits); }
__device__ __forceinline__ float to_float(Float16 x) { return f16_to_f32(x.bits); }
__device__ __forceinline__ float to_float(float x) { return x; }

// Two neighbours of the result, as the words they lie in.
__device__ __forceinline__ void put_pair(float low, float high, int pair, uint32_t* words, Bfloat16) {
    words[pair] = f32_to_bf16x2(low, high);
}
__device__ __forceinline__ void put_pair(float low, float high, int pair, uint32_t* words, Float16) {
    words[pair] = f32_to_f16x2(low, high);
}
__device__ __forceinline__ void put_pair(float low, float high, int pair, uint32_t* words, float) {
    words[2 * pair] = __float_as_uint(low);
    words[2 * pair + 1] = __float_as_uint(high);
}

__device__ __forceinline__ int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Where a scale lies inside one matrix of 128x4 tiles.
__device__ __forceinline__ int64_t swizzled_offset(int row, int column, int padded_columns) {
    const int64_t first_tile = static_cast<int64_t>(row / TILE_ROWS) * (padded_columns / TILE_COLUMNS);
    const int64_t tile = first_tile + column / TILE_COLUMNS;
    return tile * TILE_BYTES + (row % 32) * 16 + (row / 32) % 4 * 4 + column % TILE_COLUMNS;
}

// float32 -> e4m3, nearest even, saturating at 448; negative and -0.0 -> 0; NaN -> 0x7f.
__device__ __forceinline__ uint32_t encode_e4m3(float x) {
    if (!(x > 0.0f)) return x != x ? 0x7fu : 0u;
    if (x >= 448.0f) return 0x7eu;
    // Below 2^-6 codes are multiples of 2^-9, which is the last bit of a float32 at 2^14: the addition rounds.
    if (x < 0.015625f) return __float_as_uint(__fadd_rn(x, 16384.0f)) - __float_as_uint(16384.0f);
    const uint32_t bits = __float_as_uint(x);
    return ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - ((127u - 7u) << 3);
}

__device__ __forceinline__ float decode_e4m3(uint32_t code) {
    const uint32_t magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    if (magnitude == 0x7fu) return __uint_as_float(0x7fc00000u);
    const float value = magnitude < 8u ? __fmul_rn(static_cast<float>(magnitude), 0.001953125f)  // 2^-9
                                       : __uint_as_float((magnitude << 20) + ((127u - 7u) << 23));
    return __uint_as_float(__float_as_uint(value) | sign);
}

// float32 -> e2m1, nearest even, saturating at 6; the sign is kept, NaN has magnitude 0.
__device__ __forceinline__ uint32_t encode_e2m1(float x) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 31 << 3, magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x40a00001u) return magnitude > 0x7f800000u ? sign : sign | 7u;  // above 5
    // Below 1 codes are multiples of 0.5, the last bit of a float32 at 2^22.
    const uint32_t small = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 4194304.0f)) - 0x4a800000u;
    const uint32_t normal = ((magnitude + 0x1fffffu + ((magnitude >> 22) & 1u)) >> 22) - ((127u - 1u) << 1);
    return sign | (magnitude < 0x3f800000u ? small : normal);
}

__device__ __forceinline__ float decode_e2m1(uint32_t code) {
    const uint32_t magnitude = code & 7u, sign = (code & 8u) << 28;
    const uint32_t normal = (magnitude << 22) + ((127u - 1u) << 23);
    const uint32_t value = magnitude < 2u ? (magnitude ? 0x3f000000u : 0u) : normal;
    return __uint_as_float(value | sign);
}

template <class T>
__device__ __forceinline__ void load_group(const T* from, bool aligned, float (&values)[GROUP]) {
    union { uint32_t words[GROUP * sizeof(T) / 16][4]; T elements[GROUP]; } group;
    if (aligned) {
#pragma unroll
        for (uint32_t i = 0; i < GROUP * sizeof(T) / 16; ++i) load_cached(from + i * 16 / sizeof(T), group.words[i]);
    } else {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) group.elements[i] = from[i];
    }
#pragma unroll
    for (int i = 0; i < GROUP; ++i) values[i] = to_float(group.elements[i]);
}

// One group of 16: its block scale, and its codes in a word of eight for each half.
__device__ __forceinline__ uint2 quantize_group(const float (&x)[GROUP], float s2, uint32_t& scale) {
    uint32_t amax = 0;  // as bits: they order like magnitudes, with NaN above infinity
#pragma unroll
    for (int i = 0; i < GROUP; ++i) amax = max(amax, __float_as_uint(x[i]) & 0x7fffffffu);
    scale = encode_e4m3(__fdiv_rn(__fdiv_rn(__uint_as_float(amax), 6.0f), s2));
    const float divisor = __fmul_rn(decode_e4m3(scale), s2);
    uint32_t word[2] = {0u, 0u};
    if (divisor > 0.0f) {  // not for a scale that is 0 or NaN
#pragma unroll
        for (int i = 0; i < GROUP; ++i) word[i / 8] |= encode_e2m1(__fdiv_rn(x[i], divisor)) << (4 * (i % 8));
    }
    return make_uint2(word[0], word[1]);
}

template <class T>
__device__ __forceinline__ void quantize(const QuantizeArgs& args) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int log2_along = args.log2_threads_along, thread = threadIdx.x, block_row = blockIdx.x / args.blocks_along;
    const int group = ((blockIdx.x % args.blocks_along) << log2_along) + (thread & ((1 << log2_along) - 1));
    const int row = (block_row % args.blocks_down) * (blockDim.x >> log2_along) + (thread >> log2_along);
    const int64_t batch = block_row / args.blocks_down;
    const bool inside = row < args.rows && group < args.groups;

    uint8_t* scale_at = args.block_scale + (batch * args.rows + row) * args.groups + group;
    if (args.swizzled) {
        const int padded_rows = round_up(args.rows, TILE_ROWS), padded_groups = round_up(args.groups, TILE_COLUMNS);
        if (row >= padded_rows || group >= padded_groups) return;
        scale_at = args.block_scale + batch * padded_rows * padded_groups + swizzled_offset(row, group, padded_groups);
        if (!inside) {  // padding; below the last row one thread writes the four bytes of a tile's row
            if (row < args.rows) *scale_at = 0;
            else if (group % TILE_COLUMNS == 0) *reinterpret_cast<uint32_t*>(scale_at) = 0u;
        }
    }
    if (!inside) return;
    const T* const from = static_cast<const T*>(args.x) + batch * args.batch_stride + row * args.row_stride;
    float values[GROUP];
    load_group(from + static_cast<int64_t>(group) * GROUP, args.aligned != 0, values);
    const int64_t flat_row = batch * args.rows + row;
    uint32_t scale = 0;
    const uint2 codes = quantize_group(values, args.global_scale[flat_row * args.global_scale_stride], scale);
    reinterpret_cast<uint2*>(args.packed)[flat_row * args.groups + group] = codes;
    *scale_at = static_cast<uint8_t>(scale);
}

template <class T>
__device__ __forceinline__ void dequantize(const DequantizeArgs& args) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int log2_along = args.log2_threads_along, thread = threadIdx.x;
    const int group = ((blockIdx.x % args.blocks_along) << log2_along) + (thread & ((1 << log2_along) - 1));
    const int row = (blockIdx.x / args.blocks_along) * (blockDim.x >> log2_along) + (thread >> log2_along);
    if (row >= args.rows || group >= args.groups) return;
    const uint8_t* const from = args.packed + row * args.packed_stride + static_cast<int64_t>(group) * 8;
    uint2 codes = make_uint2(0u, 0u);
    if (args.aligned) {
        codes = *reinterpret_cast<const uint2*>(from);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            codes.x |= static_cast<uint32_t>(from[i]) << (8 * i);
            codes.y |= static_cast<uint32_t>(from[i + 4]) << (8 * i);
        }
    }
    const float s2 = args.global_scale[row * args.global_scale_stride];
    const float scale = decode_e4m3(args.block_scale[row * args.block_scale_stride + group]);
    constexpr int WORDS = GROUP * sizeof(T) / 4;
    uint32_t words[WORDS];
#pragma unroll
    for (int pair = 0; pair < GROUP / 2; ++pair) {
        const uint32_t byte = (pair < 4 ? codes.x : codes.y) >> (8 * (pair % 4));
        // e2m1 * e4m3 has 6 significant bits, so only the product with s2 rounds; then the conversion to T.
        const float low = __fmul_rn(__fmul_rn(decode_e2m1(byte), scale), s2);
        const float high = __fmul_rn(__fmul_rn(decode_e2m1(byte >> 4), scale), s2);
        put_pair(low, high, pair, words, T());
    }
    const int64_t flat_group = static_cast<int64_t>(row) * args.groups + group;
    uint4* const out = static_cast<uint4*>(args.out) + flat_group * (WORDS / 4);
#pragma unroll
    for (int i = 0; i < WORDS / 4; ++i)
        out[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}

// A block moves 128 rows x 8 tiles. A thread is one word of a tile, so the swizzled side is read or written in order;
// on the other side the eight tiles of a row share a sector.
template <bool TO_SWIZZLED>
__device__ __forceinline__ void move_scales(const SwizzleArgs& args) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int word = threadIdx.x, tiles = (args.columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int first = blockIdx.x % args.blocks_along * TILES_A_BLOCK, last = min(first + TILES_A_BLOCK, tiles);
    const int tile_row = blockIdx.x / args.blocks_along;  // over all batches
    const int row = tile_row % args.blocks_down * TILE_ROWS + word % 4 * 32 + word / 4;
    const int64_t batch = tile_row / args.blocks_down;
    uint8_t* const plain = args.plain + batch * args.batch_stride + row * args.row_stride;
    uint32_t* const swizzled = args.swizzled + static_cast<int64_t>(tile_row) * tiles * TILE_ROWS + word;
    if (row >= args.rows) {
        for (int tile = first; TO_SWIZZLED && tile < last; ++tile)
            swizzled[static_cast<int64_t>(tile) * TILE_ROWS] = 0u;
        return;
    }
    for (int tile = first; tile < last; ++tile) {
        uint8_t* const at = plain + tile * TILE_COLUMNS;
        const int valid = args.columns - tile * TILE_COLUMNS;  // columns from here on
        uint32_t value = TO_SWIZZLED ? 0u : swizzled[static_cast<int64_t>(tile) * TILE_ROWS];
        if (args.words) {
            if (TO_SWIZZLED) value = *reinterpret_cast<const uint32_t*>(at);
            else *reinterpret_cast<uint32_t*>(at) = value;
        } else {
            for (int i = 0; i < 4 && i < valid; ++i) {
                if (TO_SWIZZLED) value |= static_cast<uint32_t>(at[i]) << (8 * i);
                else at[i] = static_cast<uint8_t>(value >> (8 * i));
            }
        }
        if (TO_SWIZZLED) swizzled[static_cast<int64_t>(tile) * TILE_ROWS] = value;
    }
}

}  // namespace

#define NVFP4_KERNEL(NAME, THREADS, ARGS, BODY)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ ARGS args) { BODY(args); } \
    SM120_HOST_EXPORT(NAME, ARGS)
NVFP4_KERNEL(quantize_bfloat16, 256, QuantizeArgs, quantize<Bfloat16>)
NVFP4_KERNEL(quantize_float16, 256, QuantizeArgs, quantize<Float16>)
NVFP4_KERNEL(quantize_float32, 256, QuantizeArgs, quantize<float>)
NVFP4_KERNEL(dequantize_bfloat16, 256, DequantizeArgs, dequantize<Bfloat16>)
NVFP4_KERNEL(dequantize_float16, 256, DequantizeArgs, dequantize<Float16>)
NVFP4_KERNEL(dequantize_float32, 256, DequantizeArgs, dequantize<float>)
NVFP4_KERNEL(swizzle_blockscale, 128, SwizzleArgs, move_scales<true>)
NVFP4_KERNEL(unswizzle_blockscale, 128, SwizzleArgs, move_scales<false>)
