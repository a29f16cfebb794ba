// Global memory brought into L2 ahead of its use. Writes nothing and returns no data, so it cannot change a result.
#include "system_scope.cuh"
#ifdef SM120_HOST
#include <utility>
#include <vector>
#endif

struct L2PrefetchRange {
    const uint8_t* first;  // a multiple of 16
    int64_t bytes;         // a multiple of 16
};

struct L2PrefetchArgs {
    L2PrefetchRange ranges[32];  // MAX_RANGES in config.py
    int num_ranges;
    int chunk_bytes;  // a multiple of 16: what a thread asks for at once
    int interval_ns;  // between two rounds of a block; 0: as fast as they can be issued
    int keep;         // evict_last: lines that outlive a stream of others
};

namespace {

#ifdef SM120_HOST
std::vector<std::pair<uint64_t, uint64_t>> asked;  // address, bytes: all there is to see on the CPU
#endif

__device__ __forceinline__ uint64_t l2_policy(bool keep) {
    uint64_t policy = 0;
#ifndef SM120_HOST
    if (keep) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    else asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

struct Bulk {  // sm_90 and later: one instruction for a chunk
    static __device__ __forceinline__ void prefetch(const uint8_t* address, int bytes, uint64_t policy, bool) {
#ifdef SM120_HOST
        asked.emplace_back(reinterpret_cast<uint64_t>(address), bytes);
#elif __CUDA_ARCH__ >= 900
        asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(__cvta_generic_to_global(address)),
                     "r"(bytes), "l"(policy)
                     : "memory");
#endif
    }
};

struct Lines {  // every architecture: an instruction for 32 bytes, the sector that L2 fetches
    static __device__ __forceinline__ void prefetch(const uint8_t* address, int bytes, uint64_t, bool keep) {
#ifdef SM120_HOST
        asked.emplace_back(reinterpret_cast<uint64_t>(address), bytes);
#else
        for (int at = 0; at < bytes; at += 32) {
            if (keep) asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(__cvta_generic_to_global(address + at)) : "memory");
            else asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address + at)) : "memory");
        }
#endif
    }
};

// Chunks in the order of the ranges, so that what is listed first arrives first: in a round, thread i of block b takes
// chunk i * gridDim + b of the round. A block waits between rounds and never for the memory: there is nothing to wait for.
template <class How> __device__ __forceinline__ void prefetch(const L2PrefetchArgs& p) {
    const uint64_t policy = l2_policy(p.keep), start_ns = p.interval_ns ? clock_ns() : 0;
    const int64_t round = int64_t(gridDim.x) * blockDim.x;
    int64_t chunk = int64_t(threadIdx.x) * gridDim.x + blockIdx.x, rounds = 0;
    for (int r = 0; r < p.num_ranges; ++r) {
        const L2PrefetchRange range = p.ranges[r];
        const int64_t chunks = (range.bytes + p.chunk_bytes - 1) / p.chunk_bytes;
        for (; chunk < chunks; chunk += round) {
            if (p.interval_ns) {
                const uint64_t due_ns = start_ns + uint64_t(rounds++) * p.interval_ns;
                while (clock_ns() < due_ns) __nanosleep(64);
            }
            const int64_t at = chunk * p.chunk_bytes;
            How::prefetch(range.first + at, int(min((long long)(range.bytes - at), (long long)p.chunk_bytes)), policy, p.keep);
        }
        chunk -= chunks;  // of this round, what is left for the next range
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32) l2_prefetch_bulk(const __grid_constant__ L2PrefetchArgs p) { prefetch<Bulk>(p); }
SM120_HOST_EXPORT(l2_prefetch_bulk, L2PrefetchArgs)
extern "C" __global__ void __launch_bounds__(32) l2_prefetch_lines(const __grid_constant__ L2PrefetchArgs p) { prefetch<Lines>(p); }
SM120_HOST_EXPORT(l2_prefetch_lines, L2PrefetchArgs)

#ifdef SM120_HOST
// The n-th of what was asked for; false past the last, which forgets them all.
extern "C" __attribute__((visibility("default"))) int l2_prefetch_asked(unsigned n, uint64_t* address, uint64_t* bytes) {
    if (n >= asked.size()) return asked.clear(), 0;
    return *address = asked[n].first, *bytes = asked[n].second, 1;
}
#endif
