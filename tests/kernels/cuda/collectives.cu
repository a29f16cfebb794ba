// Each warp and block collective, atomics and shared memory, one small kernel each, for the CPU emulation's tests.
#include "common.cuh"

struct Args {
    const uint32_t* in;
    uint32_t* out;  // [gridDim * blockDim] unless said otherwise
    uint32_t n, mask;
};
#define KERNEL(NAME, BODY)                                                                   \
    extern "C" __global__ void NAME(const __grid_constant__ Args p) {                        \
        const unsigned lane = threadIdx.x & 31, i = blockIdx.x * blockDim.x + threadIdx.x;   \
        (void)lane; (void)i;                                                                 \
        BODY                                                                                 \
    }                                                                                        \
    SM120_HOST_EXPORT(NAME, Args)
#define ALL 0xffffffffu

// Shuffles of n, each lane its own source for the plain one; width in mask.
KERNEL(shuffle, p.out[i] = __shfl_sync(ALL, p.in[i], (int)p.in[i + blockDim.x], (int)p.mask);)
KERNEL(shuffle_up, p.out[i] = __shfl_up_sync(ALL, p.in[i], p.n, (int)p.mask);)
KERNEL(shuffle_down, p.out[i] = __shfl_down_sync(ALL, p.in[i], p.n, (int)p.mask);)
KERNEL(shuffle_xor, p.out[i] = __shfl_xor_sync(ALL, p.in[i], (int)p.n, (int)p.mask);)
KERNEL(shuffle_8_bytes, uint64_t v = p.in[i]; v = v << 32 | i; v = __shfl_xor_sync(ALL, v, 1);
       p.out[2 * i] = (uint32_t)v; p.out[2 * i + 1] = (uint32_t)(v >> 32);)
// Lanes of p.mask only; the others leave `out` alone.
KERNEL(ballot, if (p.mask >> lane & 1) p.out[i] = __ballot_sync(p.mask, (int)p.in[i]);)
KERNEL(match_any, if (p.mask >> lane & 1) p.out[i] = __match_any_sync(p.mask, p.in[i]);)
KERNEL(reduce_add, if (p.mask >> lane & 1) p.out[i] = __reduce_add_sync(p.mask, p.in[i]);)
KERNEL(reduce_max, if (p.mask >> lane & 1) p.out[i] = __reduce_max_sync(p.mask, p.in[i]);)
KERNEL(reduce_min, if (p.mask >> lane & 1) p.out[i] = __reduce_min_sync(p.mask, p.in[i]);)
KERNEL(any_all, p.out[i] = __any_sync(ALL, (int)p.in[i]) | __all_sync(ALL, (int)p.in[i]) << 1;)
// Two halves of a warp in different collectives at the same time, one of them twice.
KERNEL(two_groups, if (lane < 16) { p.out[i] = __reduce_add_sync(0xffffu, p.in[i]); }
       else { uint32_t v = __shfl_xor_sync(0xffff0000u, p.in[i], 1);
              __syncwarp(0xffff0000u);
              p.out[i] = __shfl_xor_sync(0xffff0000u, v, 2); })
// Only warp 1 takes part; the others exit at once.
KERNEL(one_warp, if (threadIdx.x / 32 != 1) return; p.out[i] = __reduce_add_sync(ALL, p.in[i]);)
// Lanes from n on exit; the rest names all 32 in its mask.
KERNEL(exited_lanes, if (lane >= p.n) return; p.out[i] = __reduce_add_sync(ALL, p.in[i]);)
KERNEL(shuffle_from_exited, if (lane >= p.n) return; p.out[i] = __shfl_sync(ALL, p.in[i], 31);)
// Threads from n on exit, before or after the others reach the barrier; the rest still meets there.
KERNEL(exited_threads, __shared__ uint32_t slot; if (threadIdx.x >= p.n) return;
       if (threadIdx.x == 0) slot = p.in[i]; __syncthreads(); p.out[i] = slot;)
// Each thread reads its left neighbour's value; without the barrier (mask 0) the order of threads shows.
KERNEL(neighbour, __shared__ uint32_t slots[1024]; slots[threadIdx.x] = p.in[i]; if (p.mask) __syncthreads();
       p.out[i] = slots[(threadIdx.x + blockDim.x - 1) % blockDim.x];)
KERNEL(dynamic_neighbour, DYNAMIC_SHARED(uint32_t, slots); slots[threadIdx.x] = p.in[i]; __syncthreads();
       p.out[i] = slots[(threadIdx.x + blockDim.x - 1) % blockDim.x] + (uint32_t)((uintptr_t)slots % 128);)
// Shared memory as each block finds it, and then dirties it.
template <int N> __device__ uint32_t find_and_dirty() {
    __shared__ uint32_t slots[N];
    const uint32_t found = slots[threadIdx.x];
    slots[threadIdx.x] = 7;
    return found;
}
KERNEL(unwritten_static, p.out[i] = find_and_dirty<64>() & find_and_dirty<128>();)
KERNEL(unwritten_dynamic, DYNAMIC_SHARED(uint32_t, slots); p.out[i] = slots[threadIdx.x]; slots[threadIdx.x] = 7;)
KERNEL(past_dynamic, DYNAMIC_SHARED(uint32_t, slots); slots[p.n] = i;)
// Template instances have shared memory of their own.
KERNEL(two_instances, find_and_dirty<64>(); p.out[i] = find_and_dirty<128>();)
// out: a counter, a ring counter, and a lock that each thread takes; then what each thread saw of the counter.
KERNEL(atomics, p.out[4 + i] = atomicAdd(p.out, 1u); atomicInc(p.out + 1, 4u);
       while (atomicCAS(p.out + 2, 0u, 1u) != 0u) __nanosleep(10); p.out[3] += threadIdx.x;
       __threadfence(); atomicExch(p.out + 2, 0u);)
KERNEL(integers, const uint32_t x = p.in[i]; p.out[3 * i] = __popc(x); p.out[3 * i + 1] = __clz((int)x);
       p.out[3 * i + 2] = __ffs((int)x) + min(0, 1) + (int)max(0u, 0u) + (int)(__ldg(p.in + i) - x);)
// Warps of one block do different numbers of collectives, between two barriers.
KERNEL(uneven_warps, __shared__ uint32_t total; if (threadIdx.x == 0) total = 0; __syncthreads();
       for (unsigned k = 0; k <= threadIdx.x / 32; ++k) {
           const uint32_t sum = __reduce_add_sync(ALL, p.in[i]);
           if (lane == 0) atomicAdd(&total, sum);
           __syncwarp();
       } __syncthreads(); p.out[i] = total;)
// Faults.
KERNEL(divergent_barrier, if (threadIdx.x < 40) __syncthreads(); else __syncwarp();)
KERNEL(mixed_collectives, p.out[i] = lane & 1 ? __ballot_sync(ALL, 1) : __reduce_add_sync(ALL, i);)
KERNEL(not_in_mask, __syncwarp(p.mask);)
KERNEL(misaligned, uint32_t r[4]; load_cached((const char*)p.in + p.n, r); p.out[i] = r[0];)
