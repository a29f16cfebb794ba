// NVFP4 W4A16 grouped GEMM for 8 to 64 rows an expert, straight from the CUTLASS layout.
//
// As in the decode kernel a warp holds 32 weight rows, lane (g, t) the rows n, n + 32, n + 64, n + 96 and 32 k of every
// 128 ("a chunk"); weights and scales go to registers in 16-byte loads, one chunk ahead. Here a decoded weight meets up
// to 64 rows of x, so x is what has to be shared: a CTA of 8 warps stages 128 k of a block of rows in shared memory
// (cp.async, STAGES deep) and all its warps multiply it. GEMM1 of a gated layer: 4 warps hold 128 gate rows, 4 the same
// up rows. Otherwise 8 warps hold 256 rows. The grid is persistent; tiles are dealt out in the order of the schedule.
//
// x is stored "interleaved": every 8 elements along k in the order 0 4 1 5 2 6 3 7, the pairs in which weights are
// decoded. interleave_rows makes that of hidden states, GEMM1 writes its result so.
#include "w4a16.cuh"

struct GroupedGemmMiddleArgs {
    const uint8_t* weight;      // [E, rows, K / 2]
    const uint8_t* blockscale;  // e4m3 [E, pad128(rows), pad4(K / 16)], swizzled
    const float* global_scale;  // [E, global_scale_stride]
    const uint8_t* x;           // interleaved; GEMM1: [T, K]. GEMM2: [num_blocks * BLOCK_ROWS, K] in schedule order
    uint8_t* out;               // GEMM1: [num_blocks * BLOCK_ROWS, n] in schedule order, interleaved. GEMM2: [num_slots, n]
    const float* router_weights;  // GEMM2: [num_slots]
    const int* sorted_slots;
    const int4* block_info;     // expert, its first block, its blocks, its rows
    const int* num_blocks;
    int rows;                   // of one expert's weight: HALVES * n
    int k;
    int n;
    int top_k;
    int row_major;
    int global_scale_stride, first_scale, second_scale;
    int gate_half;
    MoeActivationArgs activation;
};

struct InterleaveRowsArgs {
    const uint8_t* x;           // 16-bit [num_rows, k]
    uint8_t* out;               // contiguous
    int64_t row_bytes;          // from row to row of x
    int num_rows, k;
};

namespace {

constexpr int STAGES = 3, WARPS = 8, STAGED_COLUMNS = 132, STAGED_ROW_BYTES = 528;

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
#ifdef SM120_HOST
    uint32_t r[4];
    load_cached(global, r);
    for (int i = 0; i < 4; ++i) static_cast<uint32_t*>(shared)[i] = r[i];
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
                 "l"(__cvta_generic_to_global(global))
                 : "memory");
#endif
}
__device__ __forceinline__ void commit_copies() {
#ifndef SM120_HOST
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
#ifndef SM120_HOST
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// NB: blocks of 8 rows of x in a row block. GENERAL: rows, halves or K that are not multiples of 128 (K of 32).
template <class T, bool FIRST, int HALVES, int NB, bool GENERAL>
__device__ __forceinline__ void grouped_gemm(const GroupedGemmMiddleArgs& p) {
    constexpr int BLOCK_ROWS = NB * 8, ROWS_PER_THREAD = (BLOCK_ROWS + 15) / 16, WN = WARPS / HALVES, STAGE_BYTES = BLOCK_ROWS * 256;
    DYNAMIC_SHARED(uint8_t, shared);
    uint8_t* const exchange = shared + STAGES * STAGE_BYTES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int half = warp / WN, wn = warp % WN;
    const int chunks = (p.k + 127) / 128, scale_tiles = (p.k + 63) / 64;
    const unsigned columns = (p.n + 32 * WN - 1) / (32 * WN);
    const int row_bytes = p.k / 2;  // offsets inside one expert fit 31 bits
    const int expert_scale_bytes = (p.rows + 127) / 128 * scale_tiles * 512;
    const int total = *p.num_blocks * columns;
    const uint64_t policy = evict_first_policy();
    const auto load = [&](const uint8_t* from, uint32_t (&r)[4]) {
        // With few rows a block is most often its expert's only one: read once. Else another block may want it too.
        if constexpr (NB <= 2) load_stream(from, r, policy);
        else load_stream(from, r);
    };

    struct Place {
        int packed, block, column;  // expert and rows share a register: there is none to spare
        __device__ __forceinline__ int expert() const { return packed >> 8; }
        __device__ __forceinline__ int rows() const { return packed & 255; }
    };
    const auto locate = [&](unsigned id) {
        const TilePlace at = locate_tile(p.block_info, id, columns, p.row_major);
        return Place{at.info.x << 8 | min(at.info.w - int(at.m) * BLOCK_ROWS, BLOCK_ROWS), int(at.info.y + at.m), int(at.column)};
    };

    // ---- weights: where a lane reads ----
    const uint8_t* weight = nullptr;
    uint32_t scale = 0;  // in 16 bytes from p.blockscale
    int first_row = 0;   // this lane's rows of the half: first_row + 32 i
    const auto point_weights = [&](const Place& at) {
        const int nt = at.column * WN + wn, first = (nt >> 2) * 128 + (nt & 3) * 8 + g;
        scale = unsigned(at.expert()) * unsigned(expert_scale_bytes / 16) + (t >> 1) * 32;
        if constexpr (GENERAL) {
            weight = p.weight + int64_t(at.expert()) * p.rows * row_bytes + t * 16;
            first_row = first;
        } else {
            const int row = half * p.n + first;
            weight = p.weight + (int64_t(at.expert()) * p.rows + row) * row_bytes + t * 16;
            scale += (row >> 7) * scale_tiles * 32 + (row & 31);
        }
    };
    const auto load_weights = [&](int chunk, uint32_t (&w)[4][4], uint32_t (&s)[4]) {
        if constexpr (!GENERAL) {
#pragma unroll
            for (int i = 0; i < 4; ++i) load(weight + (i * 32 * row_bytes + chunk * 64), w[i]);
            load(p.blockscale + size_t(scale + chunk * 64) * 16, s);
        } else {
            const bool valid = chunk * 128 + t * 32 < p.k;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[i] = w[i][0] = w[i][1] = w[i][2] = w[i][3] = 0;
                if (!valid) continue;
                const int row = half * p.n + min(first_row + 32 * i, p.n - 1);  // rows beyond the last are computed and dropped
                load(weight + (row * row_bytes + chunk * 64), w[i]);
                s[i] = *reinterpret_cast<const uint32_t*>(p.blockscale + size_t(scale + chunk * 64) * 16 + scale_row_offset(row, scale_tiles));
            }
        }
    };

    // ---- x: a thread copies 16 bytes of every 16th row of a chunk ----
    // GEMM1 gathers rows, and a thread keeps where its own are. GEMM2's lie one after another, and where a tile's begin
    // is in shared memory, written a tile ahead: it has no registers left for that.
    struct XPlace {
        uint32_t first;  // in 16 bytes from p.x
        int rows;
    };
    constexpr int X_PLACES = 4;
    __shared__ XPlace x_places[FIRST ? 1 : X_PLACES];
    const int unit = threadIdx.x % 16, copy_row = threadIdx.x / 16;
    uint32_t x_row[FIRST ? ROWS_PER_THREAD : 1];  // in 16 bytes from p.x
    int x_rows = 0;
    const auto point_x = [&](const Place& at) {
        x_rows = at.rows();
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; ++i)
            x_row[i] = unsigned(p.sorted_slots[at.block * BLOCK_ROWS + copy_row + 16 * i]) / unsigned(p.top_k) * unsigned(p.k / 8);
    };
    const auto keep_x_place = [&](int i, const Place& at) {
        if (threadIdx.x == 0) x_places[i % X_PLACES] = {unsigned(at.block) * BLOCK_ROWS * unsigned(p.k / 8), at.rows()};
    };
    const auto copy_x = [&](int x_tile, int chunk, int stage) {
        XPlace at = {0, x_rows};
        if constexpr (!FIRST) at = x_places[x_tile % X_PLACES];
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; ++i) {
            const int row = copy_row + 16 * i;
            if (row >= at.rows) continue;  // what lies there instead gives columns of the MMA that nobody stores
            // Units 16 bytes apart in k go to different banks for the eight lanes that read together.
            uint8_t* to = shared + stage * STAGE_BYTES + row * 256 + (unit ^ ((unit >> 2 & 2) | (row & 1))) * 16;
            if (GENERAL && chunk * 128 + unit * 8 >= p.k) {
#pragma unroll
                for (int j = 0; j < 4; ++j) reinterpret_cast<uint32_t*>(to)[j] = 0;
            } else {
                copy_async(to, p.x + (size_t(FIRST ? x_row[i] : at.first + row * (p.k / 8)) + chunk * 16 + unit) * 16);
            }
        }
    };

    float acc[NB][2][4];
    const auto clear = [&] {
#pragma unroll
        for (int b = 0; b < NB; ++b)
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[b][m][i] = 0.f;
    };
    // The barriers of the k loop keep the exchange of one tile apart from the next one's.
    const auto store_gemm1 = [&](const Place& at) {
        float* staged = reinterpret_cast<float*>(exchange);  // [BLOCK_ROWS][STAGED_COLUMNS], the second half's sums
        const float* scales = p.global_scale + at.expert() * p.global_scale_stride;
        const float mine = scales[half ? p.second_scale : p.first_scale] * T::UNSCALE;
        const int local = wn * 8 + g;
        if constexpr (HALVES == 2) {
            if (half == 1) {
#pragma unroll
                for (int b = 0; b < NB; ++b)
                    if (b * 8 < at.rows())
#pragma unroll
                        for (int i = 0; i < 4; ++i)
#pragma unroll
                            for (int j = 0; j < 2; ++j)
                                staged[(b * 8 + 2 * t + j) * STAGED_COLUMNS + local + 32 * i] = acc[b][i / 2][i % 2 * 2 + j] * mine;
            }
            __syncthreads();
            if (half == 1) return;
        }
        const int nt = at.column * WN + wn, first = (nt >> 2) * 128 + (nt & 3) * 8 + g;
        const int place = (first & ~7) + ((g & 4) ? 2 * (g & 3) + 1 : 2 * g);
#pragma unroll
        for (int b = 0; b < NB; ++b)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int row = b * 8 + 2 * t + j;
                if (row >= at.rows()) continue;
                uint16_t* out = reinterpret_cast<uint16_t*>(p.out) + int64_t(at.block * BLOCK_ROWS + row) * p.n + place;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (GENERAL && first + 32 * i >= p.n) continue;
                    const float a = acc[b][i / 2][i % 2 * 2 + j] * mine;
                    float y;
                    if constexpr (HALVES == 2) {
                        const float other = staged[row * STAGED_COLUMNS + local + 32 * i];
                        y = gated(p.activation, p.gate_half ? other : a, p.gate_half ? a : other);
                    } else {
                        y = ungated(p.activation, a);
                    }
                    out[32 * i] = T::round(y);
                }
            }
    };
    // The CTA turns its 256 columns x BLOCK_ROWS around in shared memory, so that memory gets whole lines.
    const auto store_gemm2 = [&](const Place& at) {
        const float mine = p.global_scale[at.expert() * p.global_scale_stride] * T::UNSCALE;
        const int* slots = p.sorted_slots + at.block * BLOCK_ROWS;
        uint8_t* staged = exchange + (wn >> 2) * 256 + (wn & 3) * 16 + g * 2;
#pragma unroll
        for (int b = 0; b < NB; ++b)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int row = b * 8 + 2 * t + j;
                if (row >= at.rows()) continue;
                const float factor = p.router_weights[slots[row]] * mine;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    *reinterpret_cast<uint16_t*>(staged + row * STAGED_ROW_BYTES + i * 64) = T::round(acc[b][i / 2][i % 2 * 2 + j] * factor);
            }
        __syncthreads();
        const int column = at.column * 256 + lane * 8;
        for (int row = warp; row < at.rows(); row += WARPS)
            if (!GENERAL || column < p.n)  // n is a multiple of 8
                *reinterpret_cast<uint4*>(p.out + (int64_t(slots[row]) * p.n + column) * 2) = *reinterpret_cast<const uint4*>(exchange + row * STAGED_ROW_BYTES + lane * 16);
    };

    // Three cursors over the same sequence of (tile, chunk): x is copied STAGES - 1 ahead, weights are loaded one ahead.
    // Tile i of this CTA is the schedule's blockIdx.x + i * gridDim.x.
    const int tiles = (total - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
    if (tiles <= 0) {
        if (!FIRST) grid_dependency_wait();
        return;
    }
    const auto locate_own = [&](int i) { return locate(blockIdx.x + i * gridDim.x); };
    Place current = locate_own(0), next = current, ahead = current;
    uint32_t weight_a[4][4], weight_b[4][4], scale_a[4], scale_b[4];
    point_weights(current);
    load_weights(0, weight_a, scale_a);
    if (tiles > 1) ahead = locate_own(1);
    if constexpr (FIRST) {
        point_x(current);
    } else {
        keep_x_place(0, current);
        keep_x_place(1, ahead);
        __syncthreads();
        grid_dependency_wait();
        grid_dependency_launch();
    }
    int x_tile = 0, x_chunk = 0;
    const auto copy_next = [&](int to_stage) {
        if (x_tile < tiles) {
            copy_x(x_tile, x_chunk, to_stage);
            if (++x_chunk == chunks) {
                x_chunk = 0;
                ++x_tile;
                if constexpr (FIRST) {
                    if (x_tile < tiles) point_x(ahead);
                    if (x_tile + 1 < tiles) ahead = locate_own(x_tile + 1);
                } else {
                    // Read after the next barrier at the earliest.
                    if (x_tile + 1 < tiles && threadIdx.x == 0) keep_x_place(x_tile + 1, locate_own(x_tile + 1));
                }
            }
        }
        commit_copies();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy_next(i);
    int tile = 0, chunk = 0, stage = 0;
    const int lane_bytes = g * 256 + t * 64, twist = (t & 2) | (g & 1);
    clear();

    const auto step = [&](uint32_t (&w)[4][4], uint32_t (&s)[4], uint32_t (&next_w)[4][4], uint32_t (&next_s)[4]) -> bool {
        const bool last = chunk + 1 == chunks, more = !last || tile + 1 < tiles;
        if (last && more) {
            next = locate_own(tile + 1);
            point_weights(next);
        }
        const int next_chunk = last ? 0 : chunk + 1;
        if (more) load_weights(next_chunk, next_w, next_s);
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // this stage is there, and everybody is done with the one that is copied over next
        copy_next(stage == 0 ? STAGES - 1 : stage - 1);
        const uint8_t* x = shared + stage * STAGE_BYTES + lane_bytes;
        uint32_t factor[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = e4m3x2_to_f16x2(uint16_t(s[i] >> (16 * (t & 1))));
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            uint32_t d[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (q == 0) factor[i] = T::template scale<0>(s[i]);
                if (q == 2) factor[i] = T::template scale<1>(s[i]);
                decode_word<T>(w[i][q], factor[i], d[i]);
            }
#pragma unroll
            for (int b = 0; b < NB; ++b) {
                if (b > 0 && b * 8 >= current.rows()) continue;
                const uint4 v = *reinterpret_cast<const uint4*>(x + b * 2048 + (q ^ twist) * 16);
                const uint32_t low[2] = {v.x, v.y}, high[2] = {v.z, v.w};
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const uint32_t a[4] = {d[2 * m][0], d[2 * m + 1][0], d[2 * m][1], d[2 * m + 1][1]};
                    const uint32_t c[4] = {d[2 * m][2], d[2 * m + 1][2], d[2 * m][3], d[2 * m + 1][3]};
                    T::mma(acc[b][m], a, low);
                    T::mma(acc[b][m], c, high);
                }
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        chunk = next_chunk;
        if (last) {
            if constexpr (FIRST) store_gemm1(current);
            else store_gemm2(current);
            if (!more) return false;
            clear();
            current = next;
            ++tile;
        }
        return true;
    };
    while (step(weight_a, scale_a, weight_b, scale_b) && step(weight_b, scale_b, weight_a, scale_a)) {
    }
}

}  // namespace

// A thread moves 16 bytes. Grid: any.
extern "C" __global__ void __launch_bounds__(256) interleave_rows(const __grid_constant__ InterleaveRowsArgs p) {
    grid_dependency_launch();
    grid_dependency_wait();
    const int units = p.k / 8;
    const int64_t total = int64_t(p.num_rows) * units, stride = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += stride) {
        const int64_t row = i / units, unit = i - row * units;
        uint32_t v[4];
        load_cached(p.x + row * p.row_bytes + unit * 16, v);
        *reinterpret_cast<uint4*>(p.out + i * 16) = make_uint4(prmt(v[0], v[2], 0x5410), prmt(v[0], v[2], 0x7632), prmt(v[1], v[3], 0x5410), prmt(v[1], v[3], 0x7632));
    }
}
SM120_HOST_EXPORT(interleave_rows, InterleaveRowsArgs)

#define MIDDLE(NAME, T, FIRST, HALVES, NB, GENERAL, CTAS)                                                              \
    extern "C" __global__ void __launch_bounds__(256, CTAS) NAME(const __grid_constant__ GroupedGemmMiddleArgs p) {    \
        if (FIRST) {                                                                                                   \
            grid_dependency_wait();                                                                                    \
            grid_dependency_launch();                                                                                  \
        }                                                                                                              \
        grouped_gemm<T, FIRST, HALVES, NB, GENERAL>(p);                                                                \
    }                                                                                                                  \
    SM120_HOST_EXPORT(NAME, GroupedGemmMiddleArgs)
#define OF_ROWS(DTYPE, T, ROWS, NB, CTAS)                                        \
    MIDDLE(gemm1_gated_##ROWS##_##DTYPE, T, true, 2, NB, false, CTAS)            \
    MIDDLE(gemm2_##ROWS##_##DTYPE, T, false, 1, NB, false, CTAS)
// The general kernels are for shapes that are rare: one block size for all of them.
#define OF_DTYPE(DTYPE, T)                                                       \
    OF_ROWS(DTYPE, T, 16, 2, 2)                                                  \
    OF_ROWS(DTYPE, T, 32, 4, 2)                                                  \
    OF_ROWS(DTYPE, T, 48, 6, 1)                                                  \
    OF_ROWS(DTYPE, T, 64, 8, 1)                                                  \
    MIDDLE(gemm1_gated_general_32_##DTYPE, T, true, 2, 4, true, 1)               \
    MIDDLE(gemm1_ungated_general_32_##DTYPE, T, true, 1, 4, true, 1)             \
    MIDDLE(gemm2_general_32_##DTYPE, T, false, 1, 4, true, 1)
OF_DTYPE(bf16, Bf16)
OF_DTYPE(f16, F16)
