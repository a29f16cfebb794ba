// NVFP4 W4A16 grouped GEMM for few rows an expert, straight from the CUTLASS layout: row-major packed weights and
// 128x4-swizzled scales. What a GEMM of one token costs is reading weights, so everything here serves the memory bus.
//
// Tensor cores compute 16 weight rows x 8 rows of x (m16n8k16, weights are the left operand). A warp works on 32 weight
// rows: lane (g, t) = (lane / 4, lane % 4) holds rows n, n + 32, n + 64, n + 96 of a 128-row block, n = 8 * octet + g,
// and of every 128 of k ("a chunk") the 32 from t * 32 on. So
//   - one 16-byte load a row brings a lane its 32 elements, one more the scales of exactly these four rows: 5 loads of
//     16 bytes, 2,304 bytes a warp and chunk, none read twice; they go to registers, one chunk ahead of their use;
//   - the order of k inside a chunk is free as long as x is read in the same order: 16 bytes of x are 8 k of one row.
// The grid is persistent. GEMM1 deals out (tile, part of K) evenly: a tile that lies across blocks is summed through
// global memory, always in the same order. GEMM2 has a short K, so it deals out tiles of 32 rows to single warps.
#include "w4a16.cuh"

struct GroupedGemmDecodeArgs {
    const uint8_t* weight;      // [E, rows, K / 2]
    const uint8_t* blockscale;  // e4m3 [E, pad128(rows), pad4(K / 16)], swizzled
    const float* global_scale;  // [E, global_scale_stride]
    const uint8_t* x;           // GEMM1: [T, K], rows x_row_bytes apart. GEMM2: what GEMM1 wrote
    uint8_t* out;               // GEMM1: [num_blocks * 8, n] in schedule order, 8-groups of n interleaved. GEMM2: [num_slots, n]
    const float* router_weights;  // GEMM2: [num_slots]
    const int* sorted_slots;
    const int4* block_info;     // expert, its first block, its blocks, its rows
    const int* num_blocks;
    float* partial;             // GEMM1: [grid, HALVES * 256], parts of tiles
    int* partial_ready;         // GEMM1: [grid], zero before the launch
    int64_t x_row_bytes;
    int rows;                   // of one expert's weight: HALVES * n
    int k;
    int n;
    int top_k;
    int row_major;
    int num_slots;              // tiny kernels: T * k, at most 32
    const void* topk_ids;       // tiny kernels: [T, k], contiguous
    int64_t first_expert, num_experts;
    int ids_are_int64;
    int global_scale_stride, first_scale, second_scale;  // columns of global_scale for the halves of the rows
    int gate_half;              // which half of the rows is the gate
    MoeActivationArgs activation;
};

namespace {

constexpr int BLOCK_ROWS = 8, PADDED = 36;  // 32 weight rows and 4 to keep the exchange free of bank conflicts

// ---- what CTAs tell each other ----
__device__ __forceinline__ int load_acquire(const int* address) {
#ifdef SM120_HOST
    return *address;
#else
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
    return value;
#endif
}
// Past L1: another multiprocessor has just written it.
__device__ __forceinline__ float load_shared_by_ctas(const float* address) {
#ifdef SM120_HOST
    return *address;
#else
    float value;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
    return value;
#endif
}

// Where a lane reads: 32 weight rows of one expert against one block of up to 8 rows of x.
template <bool GENERAL> struct Tile {
    const uint8_t *weight, *scale;   // of this lane's first row and k
    uint32_t x;                      // in 16 bytes from args.x
    int first;                       // this lane's rows of the half: first + 32 i
    int expert, block, column, rows;
    bool alone;                      // the only block of its expert
    int slot[2];                     // GEMM2: of the two rows of x that this lane's sums belong to
    float factor[2];                 // GEMM2: router weight * global scale
};

struct Schedule {
    const int4* block_info;
    const int* sorted_slots;
    int num_blocks;
};

// The schedule of up to 32 slots, made by every CTA for itself: nothing to wait for, and one launch less. The same as
// moe/expert_schedule makes: experts ascending, the slots of an expert ascending.
constexpr int TINY_SLOTS = 32;
struct TinySchedule {
    int4 block_info[TINY_SLOTS];
    int sorted_slots[TINY_SLOTS * BLOCK_ROWS];
    int num_blocks;
};
__device__ __forceinline__ Schedule make_tiny_schedule(const GroupedGemmDecodeArgs& p, TinySchedule& made) {
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        int expert = -1;
        if (lane < p.num_slots) {
            const int64_t id = p.ids_are_int64 ? static_cast<const int64_t*>(p.topk_ids)[lane] : static_cast<const int*>(p.topk_ids)[lane];
            const uint64_t local = uint64_t(id) - uint64_t(p.first_expert);
            if (local < uint64_t(p.num_experts)) expert = int(local);
        }
        const unsigned peers = __match_any_sync(0xffffffffu, expert);
        const int rows = __popc(peers), rank = __popc(peers & ((1u << lane) - 1)), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const bool leads = expert >= 0 && rank == 0;
        int first = 0, total = 0;
#pragma unroll
        for (int other = 0; other < 32; ++other) {
            const int other_expert = __shfl_sync(0xffffffffu, leads ? expert : -1, other), other_blocks = __shfl_sync(0xffffffffu, blocks, other);
            if (other_expert < 0) continue;
            total += other_blocks;
            if (other_expert < expert) first += other_blocks;
        }
        if (expert >= 0) made.sorted_slots[(first + rank / BLOCK_ROWS) * BLOCK_ROWS + rank % BLOCK_ROWS] = lane;
        if (leads)
            for (int m = 0; m < blocks; ++m) made.block_info[first + m] = make_int4(expert, first, blocks, rows);
        if (lane == 0) made.num_blocks = total;
    }
    __syncthreads();
    return {made.block_info, made.sorted_slots, made.num_blocks};
}

// One GEMM over `begin` to `end`, counted in steps of WK chunks, S a tile. WK warps share the K of a tile; in GEMM1
// another WK work on its second half of rows. GENERAL: rows, halves or K that are not multiples of 128 (K of 32).
template <class T, bool FIRST, int HALVES, int WK, bool GENERAL>
__device__ __forceinline__ void grouped_gemm(const GroupedGemmDecodeArgs& p, const Schedule& schedule, float* shared, int begin, int end) {
    constexpr int WARPS = WK * HALVES;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int wk = FIRST ? warp % WK : 0, half = FIRST ? warp / WK : 0;
    const int scale_tiles = (p.k + 63) / 64, steps = ((p.k + 127) / 128 + WK - 1) / WK;
    const unsigned columns = (p.n + 127) / 128 * 4;  // a tile has rows of all four quarters of a 128-row block
    const int64_t row_bytes = p.k / 2, expert_scale_bytes = int64_t((p.rows + 127) / 128) * scale_tiles * 512;
    const uint64_t policy = evict_first_policy();

    const auto locate = [&](unsigned id, Tile<GENERAL>& at) {
        const TilePlace place = locate_tile(schedule.block_info, id, columns, p.row_major);
        at.column = place.column;
        at.alone = place.info.z == 1;
        at.expert = place.info.x;
        at.block = place.info.y + place.m;
        at.rows = min(place.info.w - int(place.m) * BLOCK_ROWS, BLOCK_ROWS);
        const int first = (at.column >> 2) * 128 + (at.column & 3) * 8 + g;
        if constexpr (GENERAL) {
            at.first = first;
            at.weight = p.weight + int64_t(at.expert) * p.rows * row_bytes + t * 16;
            at.scale = p.blockscale + at.expert * expert_scale_bytes + (t >> 1) * 512;
        } else {
            const int row = half * p.n + first;
            at.weight = p.weight + (int64_t(at.expert) * p.rows + row) * row_bytes + t * 16;
            at.scale = p.blockscale + at.expert * expert_scale_bytes + int64_t(row >> 7) * scale_tiles * 512 + (row & 31) * 16 + (t >> 1) * 512;
        }
    };
    const auto locate_x = [&](Tile<GENERAL>& at) {
        const int row = at.block * BLOCK_ROWS + (g < at.rows ? g : 0);  // spare columns of the MMA read a row that is read anyway
        if constexpr (FIRST) {
            at.x = uint32_t(unsigned(schedule.sorted_slots[row]) / unsigned(p.top_k) * (p.x_row_bytes >> 4)) + t * 4;
        } else {
            at.x = uint32_t(row * (p.x_row_bytes >> 4)) + t * 4;
            const float scale = p.global_scale[at.expert * p.global_scale_stride] * T::UNSCALE;
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (2 * t + j < at.rows) {
                    at.slot[j] = schedule.sorted_slots[at.block * BLOCK_ROWS + 2 * t + j];
                    at.factor[j] = p.router_weights[at.slot[j]] * scale;
                }
        }
    };
    const auto inside = [&](int chunk) { return !GENERAL || chunk * 128 + t * 32 < p.k; };
    const auto load_weights = [&](const Tile<GENERAL>& at, int chunk, uint32_t (&w)[4][4], uint32_t (&s)[4]) {
        if constexpr (!GENERAL) {
#pragma unroll
            for (int i = 0; i < 4; ++i) load_stream(at.weight + i * 32 * row_bytes + chunk * 64, w[i], policy);
            load_stream(at.scale + int64_t(chunk) * 1024, s, policy);
        } else {
            const bool valid = inside(chunk);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[i] = w[i][0] = w[i][1] = w[i][2] = w[i][3] = 0;
                if (!valid) continue;
                const int row = half * p.n + min(at.first + 32 * i, p.n - 1);  // rows beyond the last are computed and dropped
                load_stream(at.weight + row * row_bytes + chunk * 64, w[i], policy);
                s[i] = *reinterpret_cast<const uint32_t*>(at.scale + scale_row_offset(row, scale_tiles) + int64_t(chunk) * 1024);
            }
        }
    };
    const auto load_x = [&](const Tile<GENERAL>& at, int chunk, int q, uint32_t (&x)[4]) {
        if (GENERAL && !inside(chunk)) x[0] = x[1] = x[2] = x[3] = 0;
        else load_cached(p.x + (size_t(at.x) + chunk * 16 + q) * 16, x);
    };

    float acc[2][4];  // [rows n, n + 32 | n + 64, n + 96][two rows of x for either]
    const auto clear = [&] {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][i] = 0.f;
    };
    const auto store_gemm2 = [&](const Tile<GENERAL>& at) {
        const int first = (at.column >> 2) * 128 + (at.column & 3) * 8 + g;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (2 * t + j >= at.rows) continue;
            uint16_t* out = reinterpret_cast<uint16_t*>(p.out) + int64_t(at.slot[j]) * p.n + first;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!GENERAL || first + 32 * i < p.n) out[32 * i] = T::round(acc[i / 2][i % 2 * 2 + j] * at.factor[j]);
        }
    };
    // Sums of all warps of the CTA. head: the tile begins here; whole: it also ends here. Else later CTAs of the deal hold the rest.
    const auto store_gemm1 = [&](const Tile<GENERAL>& at, bool head, bool whole, int tile_end) {
        const float* scales = p.global_scale + at.expert * p.global_scale_stride;
        const float first_scale = scales[p.first_scale] * T::UNSCALE, second_scale = scales[p.second_scale] * T::UNSCALE;
        const int order = gridDim.x - 1 - blockIdx.x;
        int others_end = order + 1;  // the CTAs from order + 1 on hold the rest of the tile
        if (head && !whole) {
            const Deal deal = {schedule.num_blocks * int(columns) * steps, int(gridDim.x)};
            while (deal.begin(others_end) < tile_end) ++others_end;
            // All are asked at once. Each had work: where there is less of it than CTAs, it went to the first ones.
            for (int other = order + 1 + int(threadIdx.x); other < others_end; other += WARPS * 32)
                while (load_acquire(p.partial_ready + other) == 0) __nanosleep(20);
        }
        __syncthreads();
        float* mine = shared + warp * (BLOCK_ROWS * PADDED);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) mine[(2 * t + i % 2) * PADDED + (2 * m + i / 2) * 8 + g] = acc[m][i];
        __syncthreads();
        for (int o = threadIdx.x; o < at.rows * 32; o += WARPS * 32) {
            const int row = o % 32, token = o / 32;
            float sum[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                sum[h] = 0.f;
#pragma unroll
                for (int k = 0; k < WK; ++k) sum[h] += shared[(h * WK + k) * (BLOCK_ROWS * PADDED) + token * PADDED + row];
                if (!head) p.partial[(int64_t(order) * HALVES + h) * 256 + o] = sum[h];
            }
            if (!head) continue;
#pragma unroll 4
            for (int other = order + 1; other < others_end; ++other)
#pragma unroll
                for (int h = 0; h < HALVES; ++h) sum[h] += load_shared_by_ctas(p.partial + (int64_t(other) * HALVES + h) * 256 + o);
            const int column = (at.column >> 2) * 128 + (at.column & 3) * 8 + (row & 7) + 32 * (row >> 3);
            if (GENERAL && column >= p.n) continue;
            float y;
            if constexpr (HALVES == 2) {
                const float a = sum[0] * first_scale, b = sum[1] * second_scale;
                y = gated(p.activation, p.gate_half ? b : a, p.gate_half ? a : b);
            } else {
                y = ungated(p.activation, sum[0] * first_scale);
            }
            const int place = (column & ~7) + ((column & 4) ? 2 * (column & 3) + 1 : 2 * (column & 3));
            reinterpret_cast<uint16_t*>(p.out)[int64_t(at.block * BLOCK_ROWS + token) * p.n + place] = T::round(y);
        }
        if (!head) {
            __syncthreads();
            if (threadIdx.x == 0) {
                __threadfence();
                atomicExch(p.partial_ready + order, 1);
            }
        }
    };

    int at_step = begin;
    if (at_step >= end) {
        if (!FIRST) grid_dependency_wait();
        return;
    }
    int tile = at_step / steps, chunk = (at_step - tile * steps) * WK + wk, tile_begin = begin;
    Tile<GENERAL> current, next;
    uint32_t weight_a[4][4], weight_b[4][4], scale_a[4], scale_b[4], x[4][4];
    locate(tile, current);
    load_weights(current, chunk, weight_a, scale_a);
    locate_x(current);
    if constexpr (!FIRST) {  // nothing so far depends on GEMM1
        grid_dependency_wait();
        grid_dependency_launch();
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) load_x(current, chunk, q, x[q]);
    next = current;
    const auto locate_next = [&] {
        if ((tile + 1) * steps >= end) return;
        if (!FIRST && current.alone && current.column + 1 < int(columns)) {  // the same rows of x: only the weights move on
            const bool wraps = (current.column & 3) == 3;
            next = current;
            ++next.column;
            if constexpr (GENERAL) {
                next.first += wraps ? 104 : 8;
            } else {
                next.weight += (wraps ? 104 : 8) * row_bytes;
                next.scale += wraps ? scale_tiles * 512 - 384 : 128;
            }
            return;
        }
        locate(tile + 1, next);
        locate_x(next);
    };
    locate_next();
    clear();

    // One chunk a warp: asks for the next one's weights, decodes and multiplies this one, refills x behind itself.
    const auto step = [&](uint32_t (&w)[4][4], uint32_t (&s)[4], uint32_t (&next_w)[4][4], uint32_t (&next_s)[4]) -> bool {
        const int tile_end = (tile + 1) * steps;
        const bool last = at_step + 1 == min(tile_end, end), more = at_step + 1 < end;
        const int next_chunk = last ? wk : chunk + WK;
        Tile<GENERAL> from;  // selected member by member: a selected reference would live in memory
        from.weight = last ? next.weight : current.weight;
        from.scale = last ? next.scale : current.scale;
        from.x = last ? next.x : current.x;
        if constexpr (GENERAL) from.first = last ? next.first : current.first;
        if (more) load_weights(from, next_chunk, next_w, next_s);
        uint32_t scale[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) s[i] = e4m3x2_to_f16x2(uint16_t(s[i] >> (16 * (t & 1))));
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            uint32_t d[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (q == 0) scale[i] = T::template scale<0>(s[i]);
                if (q == 2) scale[i] = T::template scale<1>(s[i]);
                decode_word<T>(w[i][q], scale[i], d[i]);
            }
            uint32_t v[4];  // x0 x4, x1 x5, x2 x6, x3 x7, as `place` pairs the weights
            if constexpr (FIRST) {
                v[0] = prmt(x[q][0], x[q][2], 0x5410);
                v[1] = prmt(x[q][0], x[q][2], 0x7632);
                v[2] = prmt(x[q][1], x[q][3], 0x5410);
                v[3] = prmt(x[q][1], x[q][3], 0x7632);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = x[q][i];
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const uint32_t a[4] = {d[2 * m][i], d[2 * m + 1][i], d[2 * m][i + 1], d[2 * m + 1][i + 1]}, b[2] = {v[i], v[i + 1]};
                    T::mma(acc[m], a, b);
                }
            if (more) load_x(from, next_chunk, q, x[q]);
        }
        ++at_step;
        chunk = next_chunk;
        if (last) {
            if constexpr (FIRST) {
                const bool head = tile_begin == tile * steps;
                store_gemm1(current, head, head && at_step == tile_end, tile_end);
            } else {
                store_gemm2(current);
            }
            if (!more) return false;
            clear();
            current = next;
            ++tile;
            tile_begin = at_step;
            locate_next();
        }
        return true;
    };
    while (step(weight_a, scale_a, weight_b, scale_b) && step(weight_b, scale_b, weight_a, scale_a)) {
    }
}

template <class T, int HALVES, int WK, bool GENERAL, bool TINY>
__device__ __forceinline__ void gemm1(const GroupedGemmDecodeArgs& p) {
    DYNAMIC_SHARED(float, shared);
    grid_dependency_wait();
    grid_dependency_launch();
    const int steps = ((p.k + 127) / 128 + WK - 1) / WK, columns = (p.n + 127) / 128 * 4;
    if constexpr (TINY) {  // whole tiles, one or two a CTA
        __shared__ TinySchedule made;
        const Schedule schedule = make_tiny_schedule(p, made);
        const Deal deal = {schedule.num_blocks * columns, int(gridDim.x)};
        grouped_gemm<T, true, HALVES, WK, GENERAL>(p, schedule, shared, deal.begin(blockIdx.x) * steps, deal.begin(blockIdx.x + 1) * steps);
    } else {
        const Schedule schedule = {p.block_info, p.sorted_slots, *p.num_blocks};
        const Deal deal = {schedule.num_blocks * columns * steps, int(gridDim.x)};
        const int order = gridDim.x - 1 - blockIdx.x;  // a CTA waits only for those that started before it
        grouped_gemm<T, true, HALVES, WK, GENERAL>(p, schedule, shared, deal.begin(order), deal.begin(order + 1));
    }
}

template <class T, bool GENERAL, bool TINY> __device__ __forceinline__ void gemm2(const GroupedGemmDecodeArgs& p) {
    const int steps = (p.k + 127) / 128, columns = (p.n + 127) / 128 * 4;
    Schedule schedule;
    if constexpr (TINY) {
        __shared__ TinySchedule made;
        schedule = make_tiny_schedule(p, made);
    } else {
        // Complete already: GEMM1 let this kernel start only after it had waited for the schedule.
        schedule = {p.block_info, p.sorted_slots, *p.num_blocks};
    }
    const Deal deal = {schedule.num_blocks * columns, int(gridDim.x * (blockDim.x / 32))};
    const int warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    grouped_gemm<T, false, 1, 1, GENERAL>(p, schedule, nullptr, deal.begin(warp) * steps, deal.begin(warp + 1) * steps);
}

}  // namespace

// Registers for 16 warps a multiprocessor. `general` kernels may take more.
#define GEMM1(NAME, T, HALVES, WK, GENERAL, TINY)                                                                        \
    extern "C" __global__ void __launch_bounds__(WK * HALVES * 32, GENERAL || TINY ? 1 : 2)                              \
        NAME(const __grid_constant__ GroupedGemmDecodeArgs p) {                                                          \
        gemm1<T, HALVES, WK, GENERAL, TINY>(p);                                                                          \
    }                                                                                                                    \
    SM120_HOST_EXPORT(NAME, GroupedGemmDecodeArgs)
#define GEMM2(NAME, T, GENERAL, TINY)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128, 4) NAME(const __grid_constant__ GroupedGemmDecodeArgs p) {         \
        gemm2<T, GENERAL, TINY>(p);                                                                                      \
    }                                                                                                                    \
    SM120_HOST_EXPORT(NAME, GroupedGemmDecodeArgs)
#define ALL_OF(DTYPE, T)                                                                                                 \
    GEMM1(gemm1_gated_##DTYPE, T, 2, 4, false, false)                                                                    \
    GEMM1(gemm1_gated_general_##DTYPE, T, 2, 4, true, false)                                                             \
    GEMM1(gemm1_gated_tiny_##DTYPE, T, 2, 8, false, true)                                                                \
    GEMM1(gemm1_ungated_##DTYPE, T, 1, 8, false, false)                                                                  \
    GEMM1(gemm1_ungated_general_##DTYPE, T, 1, 8, true, false)                                                           \
    GEMM2(gemm2_##DTYPE, T, false, false)                                                                                \
    GEMM2(gemm2_general_##DTYPE, T, true, false)                                                                         \
    GEMM2(gemm2_tiny_##DTYPE, T, false, true)
ALL_OF(bf16, Bf16)
ALL_OF(f16, F16)
