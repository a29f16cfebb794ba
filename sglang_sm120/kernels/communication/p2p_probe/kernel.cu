// Tests of memory that several GPUs share: does the right thing arrive, how late, and how much of it a second.
// Every wait ends: when what it waits for is there, or at a limit by the clock, and then the result says TIMED_OUT.
#include "probe.cuh"

constexpr int MAX_PEERS = 8;
constexpr uint32_t DONE = 1, TIMED_OUT = 2;  // the first word of a result; 0: the kernel has not ended

struct PatternArgs {
    uint8_t* memory;   // vectors of 16 bytes
    uint32_t* result;  // check: status, wrong words
    int64_t first;     // number of the first vector in the pattern
    int64_t vectors;
    uint32_t seed;
};
struct ChainArgs {
    uint8_t* chain;    // a word every `stride` bytes: the offset in bytes of the word to read next
    uint32_t* result;  // chase: status, offset of the last word, nanoseconds (low, high)
    uint64_t limit_ns;
    int words, stride, step;  // words: a power of two; step: odd
    int warmup, hops;
};
struct PingPongArgs {
    const uint64_t* mine;  // the flag here, which the peer writes
    uint64_t* theirs;      // the flag there
    const uint8_t* inbox;  // the message here, which the peer writes
    uint8_t* outbox;       // the message there
    uint32_t* result;      // status, wrong words of messages, nanoseconds of the rounds after the warm-up (low, high)
    uint64_t limit_ns;
    uint64_t first_flag;   // flags count on from here; no earlier run may have used these
    int vectors;           // 16-byte vectors of a message; 0: flags only
    int warmup, rounds, starts;
};
struct MeetArgs {
    const uint64_t* mine[MAX_PEERS];  // flags here, each written by one peer
    uint64_t* theirs[MAX_PEERS];
    uint32_t* result;  // TIMED_OUT if a peer did not come; otherwise not written
    uint64_t limit_ns;
    uint64_t flag;     // above those of earlier meetings
    int peers;
};
struct CopyArgs {
    const uint8_t* from[MAX_PEERS];
    uint8_t* to[MAX_PEERS];
    int64_t vectors;  // of each copy
    int copies;       // the grid is a multiple of it
};

namespace {

__device__ __forceinline__ void report(uint32_t* result, uint32_t status, uint32_t value, uint64_t ns) {
    result[0] = status;
    result[1] = value;
    result[2] = uint32_t(ns);
    result[3] = uint32_t(ns >> 32);
}

// All threads of the block; ends with the flag, which nothing of the message may come after.
__device__ __forceinline__ void send(const PingPongArgs& p, uint64_t flag) {
    for (int64_t i = threadIdx.x; i < p.vectors; i += blockDim.x) store_pattern(p.outbox, i, uint32_t(flag), i);
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (p.vectors) store_release(p.theirs, flag);
    else store_relaxed(p.theirs, flag);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) fill(const __grid_constant__ PatternArgs p) {
    const int64_t stride = int64_t(gridDim.x) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < p.vectors; i += stride)
        store_pattern(p.memory, i, p.seed, p.first + i);
}
SM120_HOST_EXPORT(fill, PatternArgs)

extern "C" __global__ void __launch_bounds__(1024) check(const __grid_constant__ PatternArgs p) {  // one block
    __shared__ uint32_t total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    uint32_t wrong = 0;
    for (int64_t i = threadIdx.x; i < p.vectors; i += blockDim.x) wrong += wrong_words(p.memory, i, p.seed, p.first + i);
    if (wrong) atomicAdd(&total, wrong);
    __syncthreads();
    if (threadIdx.x == 0) report(p.result, DONE, total, 0);
}
SM120_HOST_EXPORT(check, PatternArgs)

extern "C" __global__ void __launch_bounds__(256) fill_chain(const __grid_constant__ ChainArgs p) {
    for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < p.words; i += int(gridDim.x * blockDim.x))
        *reinterpret_cast<uint32_t*>(p.chain + int64_t(i) * p.stride) = uint32_t((i + p.step) % p.words * p.stride);
}
SM120_HOST_EXPORT(fill_chain, ChainArgs)

// One thread: each read waits for the one before.
extern "C" __global__ void __launch_bounds__(32) chase(const __grid_constant__ ChainArgs p) {
    uint64_t start = clock_ns();
    const uint64_t deadline = start + p.limit_ns;
    uint32_t at = 0;
    for (int hop = 0; hop < p.warmup + p.hops; ++hop) {
        if (hop == p.warmup) start = clock_ns();
        at = load_relaxed(p.chain + at);
        if (hop % 64 == 63 && clock_ns() >= deadline) return report(p.result, TIMED_OUT, at, 0);
    }
    report(p.result, DONE, at, clock_ns() - start);
}
SM120_HOST_EXPORT(chase, ChainArgs)

// One block on each of two GPUs; one of them starts. The seed of a message is its flag.
extern "C" __global__ void __launch_bounds__(256) ping_pong(const __grid_constant__ PingPongArgs p) {
    __shared__ uint32_t arrived, total;
    uint64_t start = clock_ns();
    const uint64_t deadline = start + p.limit_ns;
    uint32_t wrong = 0, status = DONE;
    if (threadIdx.x == 0) total = 0;
    for (int round = 0; round < p.warmup + p.rounds; ++round) {
        const uint64_t flag = p.first_flag + uint64_t(round);
        if (round == p.warmup) start = clock_ns();
        if (p.starts) send(p, flag);
        if (threadIdx.x == 0) arrived = wait_for(p.mine, flag, deadline);
        __syncthreads();
        if (!arrived) {
            status = TIMED_OUT;
            break;
        }
        for (int64_t i = threadIdx.x; i < p.vectors; i += blockDim.x) wrong += wrong_words(p.inbox, i, uint32_t(flag), i);
        if (!p.starts) send(p, flag);
        __syncthreads();  // everyone has read `arrived` and the inbox
    }
    const uint64_t ns = clock_ns() - start;
    if (wrong) atomicAdd(&total, wrong);
    __syncthreads();
    if (threadIdx.x == 0) report(p.result, status, total, ns);
}
SM120_HOST_EXPORT(ping_pong, PingPongArgs)

// One block, a thread a peer: ends on all GPUs at about the same time.
extern "C" __global__ void __launch_bounds__(32) meet(const __grid_constant__ MeetArgs p) {
    const int peer = int(threadIdx.x);
    if (peer >= p.peers || load_relaxed(p.result) == TIMED_OUT) return;
    store_release(p.theirs[peer], p.flag);
    if (!wait_for(p.mine[peer], p.flag, clock_ns() + p.limit_ns)) *p.result = TIMED_OUT;
}
SM120_HOST_EXPORT(meet, MeetArgs)

// Between own memory and that of one or more peers, either way; block b serves copy b % copies.
extern "C" __global__ void __launch_bounds__(512) copy(const __grid_constant__ CopyArgs p) {
    constexpr int AT_ONCE = 4;  // loads in flight
    const int copy = int(blockIdx.x) % p.copies;
    const uint8_t* const from = p.from[copy];
    uint8_t* const to = p.to[copy];
    const int64_t stride = int64_t(gridDim.x / p.copies) * blockDim.x;
    for (int64_t i = int64_t(blockIdx.x / p.copies) * blockDim.x + threadIdx.x; i < p.vectors; i += AT_ONCE * stride) {
        uint32_t x[AT_ONCE][4];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (i + j * stride < p.vectors) load_cached(from + (i + j * stride) * 16, x[j]);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (i + j * stride < p.vectors)
                *reinterpret_cast<uint4*>(to + (i + j * stride) * 16) = make_uint4(x[j][0], x[j][1], x[j][2], x[j][3]);
    }
}
SM120_HOST_EXPORT(copy, CopyArgs)
