// The expert schedule by ONE block, in three steps: count, scan, scatter.
//
// Each counting warp owns a contiguous segment of the slots and its own row of counters, so that a slot's place is the
// experts before it + the warps before it + its rank among its warp's: no result depends on which warp runs first.
//
// The time is that of a chain of latencies. So the loads of ids are issued STEPS at a time before the first is used, no
// link grows with the blocks that one expert has, and the code that a small input runs is short: it is fetched, too.
#include "common.cuh"

struct ExpertScheduleArgs {
    const void* topk_ids;
    int* sorted_slots;
    int* block_expert;
    int* expert_first_block;
    int* expert_rows;
    int* num_blocks;
    int4* block_info;       // of every row block: expert, the expert's first block, its blocks, its rows
    int* cleared;           // set to 0 for the kernels that follow, or null
    int64_t token_stride;   // in elements
    int64_t choice_stride;  // in elements
    int64_t expert_offset;
    int num_slots;
    int top_k;
    int num_experts;
    int block_rows;
    int counting_warps;
    int ids_are_int64;
    int capacity;           // entries of sorted_slots
    int num_cleared;
};

namespace {

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr int STEPS = 8;  // of 32 slots; a warp keeps their experts in registers
constexpr int CHUNK = STEPS * WARP;
constexpr int FEW_BLOCKS = 8;  // an expert's thread writes as many itself; a guess of what the search for owners costs

__device__ __forceinline__ void fill(int* out, int count, int value) {
    const int quads = reinterpret_cast<uintptr_t>(out) % sizeof(int4) == 0 ? count / 4 : 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < quads; i += blockDim.x)
        reinterpret_cast<int4*>(out)[i] = make_int4(value, value, value, value);
#pragma unroll 1
    for (int i = 4 * quads + threadIdx.x; i < count; i += blockDim.x) out[i] = value;
}

// The ids of this lane's slots, 32 apart, in two words each. Nothing here uses what is loaded: a use of one would wait
// before the next is on its way.
__device__ __forceinline__ void load_ids(const ExpertScheduleArgs& args, int base, int end, int lane, int (&low)[STEPS],
                                         int (&high)[STEPS]) {
    const int slot = base + lane;
    const int words = args.ids_are_int64 ? 2 : 1;
    int64_t token_stride = args.token_stride * words, choice_stride = args.choice_stride * words;
    int token = 0, choice = slot, token_step = 0, choice_step = WARP;
    const bool evenly_spaced = token_stride == args.top_k * choice_stride;  // then all is one token: no division
    if (!evenly_spaced) {
        token = slot / args.top_k, choice = slot % args.top_k;
        token_step = WARP / args.top_k, choice_step = WARP % args.top_k;
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        if (base + i * WARP >= end) break;
        low[i] = high[i] = -1;  // skipped
        if (slot + i * WARP < end) {
            const int64_t at = token * token_stride + choice * choice_stride;
            low[i] = static_cast<const int*>(args.topk_ids)[at];
            if (words == 2) high[i] = static_cast<const int*>(args.topk_ids)[at + 1];
        }
        token += token_step, choice += choice_step;
        if (!evenly_spaced && choice >= args.top_k) choice -= args.top_k, ++token;
    }
}

// The local expert of an id; -1 where it is skipped.
__device__ __forceinline__ int local_expert(const ExpertScheduleArgs& args, int low, int high) {
    const int sign = args.ids_are_int64 ? high : low >> 31;
    const uint64_t id = static_cast<uint64_t>(static_cast<uint32_t>(sign)) << 32 | static_cast<uint32_t>(low);
    // Unsigned: an id below the offset wraps to a large one, and no int64 overflows.
    const uint64_t local = id - static_cast<uint64_t>(args.expert_offset);
    return local < static_cast<uint64_t>(args.num_experts) ? static_cast<int>(local) : -1;
}

// counts[warp][e] becomes the rows of e in earlier warps; returns the rows of e. Eight at a time: the stores in between
// would make each load wait.
__device__ __forceinline__ int scan_over_warps(int* counts, int warps, int num_experts, int expert) {
    int rows = 0;
    for (int first = 0; first < warps; first += 8) {
        int count[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) count[i] = first + i < warps ? counts[(first + i) * num_experts + expert] : 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (first + i < warps) counts[(first + i) * num_experts + expert] = rows;
            rows += count[i];
        }
    }
    return rows;
}

__device__ __forceinline__ int inclusive_scan_over_lanes(int value, int lane) {
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, value, distance);
        if (lane >= distance) value += below;
    }
    return value;
}

// The lanes with this lane's expert, 0 or more. By votes: a match instruction takes a turn for each different value.
__device__ __forceinline__ unsigned lanes_of(int expert, int bits) {
    unsigned peers = __ballot_sync(ALL_LANES, expert >= 0);
    for (int bit = 0; bit < bits; ++bit) {
        const bool mine = expert >> bit & 1;
        const unsigned set = __ballot_sync(ALL_LANES, mine);
        peers &= mine ? set : ~set;
    }
    return peers;
}

// The last expert whose first block is not behind this one; experts without rows start where the next one does.
__device__ __forceinline__ int expert_of_block(const int* first_blocks, int num_experts, int block) {
    int expert = 0;
    for (int step = 1 << (31 - __clz(num_experts)); step > 0; step /= 2)
        if (expert + step < num_experts && first_blocks[expert + step] <= block) expert += step;
    return expert;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024) expert_schedule(const __grid_constant__ ExpertScheduleArgs args) {
    DYNAMIC_SHARED(int, shared);
    const int num_experts = args.num_experts, counting_warps = args.counting_warps, block_rows = args.block_rows;
    const int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int* const counts = shared;                                       // [counting_warps][num_experts]
    int* const first_blocks = counts + counting_warps * num_experts;  // [num_experts]
    int* const expert_rows = first_blocks + num_experts;              // [num_experts]
    int* const warp_blocks = expert_rows + num_experts;               // [WARP]
    int* const many_blocks = warp_blocks + WARP;  // [1]: whether an expert has more than FEW_BLOCKS

    // A dependent kernel waits for the end of this one before it reads; it may load its code and weights meanwhile.
    grid_dependency_launch();
    const bool counting = warp < counting_warps;
    int segment = counting ? (args.num_slots + counting_warps - 1) / counting_warps : 0;
    segment = (segment + WARP - 1) / WARP * WARP;
    const int begin = min(warp * segment, args.num_slots), end = min(begin + segment, args.num_slots);
    int* const own_counts = counts + warp * num_experts;
    fill(counts, counting_warps * num_experts, 0);
    if (thread == 0) *many_blocks = 0;
    __syncthreads();
    grid_dependency_wait();  // for the ids; and nothing is written before it either, since `out` may still be read

    // 1. Count. The order in which lanes add changes no sum.
    int low[STEPS], high[STEPS], experts[STEPS];
    int base = begin;
    do {
        load_ids(args, base, end, lane, low, high);
        if (base == begin) {
            // Written while the ids come, in whole lines and everywhere: nobody knows yet where the padding will be.
            fill(args.sorted_slots, args.capacity, -1);
            fill(args.cleared, args.num_cleared, 0);
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if (base + i * WARP >= end) break;
            experts[i] = local_expert(args, low[i], high[i]);
            if (experts[i] >= 0) atomicAdd(&own_counts[experts[i]], 1);
        }
        base += CHUNK;
    } while (base < end);
    __syncthreads();

    // 2. Scan. One thread an expert.
    const int rows = thread < num_experts ? scan_over_warps(counts, counting_warps, num_experts, thread) : 0;
    const int blocks = (rows + block_rows - 1) / block_rows;
    const int blocks_to_here = inclusive_scan_over_lanes(blocks, lane);
    if (lane == WARP - 1) warp_blocks[warp] = blocks_to_here;
    if (blocks > FEW_BLOCKS) *many_blocks = 1;
    __syncthreads();
    const unsigned of_warp = lane < blockDim.x / WARP ? warp_blocks[lane] : 0;
    const int total = __reduce_add_sync(ALL_LANES, of_warp);
    const int before = __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0);
    const int first_block = before + blocks_to_here - blocks;
    if (thread < num_experts) {
        first_blocks[thread] = first_block;
        expert_rows[thread] = rows;
    }
    __syncthreads();

    // The tables of experts and of blocks.
    if (thread == 0) args.num_blocks[0] = total;
    if (thread < num_experts) {
        args.expert_first_block[thread] = first_block;
        args.expert_rows[thread] = rows;
    }
    if (*many_blocks == 0) {
#pragma unroll 1
        for (int i = first_block; i < first_block + blocks; ++i) {
            args.block_expert[i] = thread;
            args.block_info[i] = make_int4(thread, first_block, blocks, rows);
        }
    } else {
#pragma unroll 1
        for (int i = thread; i < total; i += blockDim.x) {
            const int expert = expert_of_block(first_blocks, num_experts, i), its_rows = expert_rows[expert];
            const int its_blocks = (its_rows + block_rows - 1) / block_rows;
            args.block_expert[i] = expert;
            args.block_info[i] = make_int4(expert, first_blocks[expert], its_blocks, its_rows);
        }
    }

    // 3. Scatter. A warp goes through its segment in order, so ranks ascend.
    const bool kept = end - begin <= CHUNK;  // the experts, since step 1
    const int expert_bits = 32 - __clz(num_experts - 1);
    for (base = begin; base < end; base += CHUNK) {
        if (!kept) load_ids(args, base, end, lane, low, high);
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            if (base + i * WARP >= end) break;
            const int expert = kept ? experts[i] : local_expert(args, low[i], high[i]);
            const unsigned peers = lanes_of(expert, expert_bits);  // the lowest of them adds for all
            const int leader = __ffs(peers) - 1;
            int row = 0;
            // The counters are this warp's alone, and its steps come in order: the result is always the same.
            if (expert >= 0 && lane == leader)
                row = first_blocks[expert] * block_rows + atomicAdd(&own_counts[expert], __popc(peers));
            row = __shfl_sync(ALL_LANES, row, leader);
            const int rank = __popc(peers & ((1u << lane) - 1));
            if (expert >= 0) args.sorted_slots[row + rank] = base + i * WARP + lane;
            __syncwarp();
        }
    }
}
SM120_HOST_EXPORT(expert_schedule, ExpertScheduleArgs)
