// CUDA C++ on the CPU: with -DSM120_HOST a kernel.cu is ordinary C++17, each CUDA thread a fiber (host_fibers.h).
//
// A source that wants to run here
//   - includes "common.cuh" or "nvfp4_mma.cuh" first, and no other CUDA or standard header;
//   - has kernels of one by-value struct: extern "C" __global__ void NAME(const __grid_constant__ ARGS p);
//   - writes SM120_HOST_EXPORT(NAME, ARGS) after each kernel, with no semicolon (nothing on the device), also inside a
//     macro that makes kernels;
//   - takes dynamic shared memory with DYNAMIC_SHARED(type, name), inside a function;
//   - aligns shared memory with __align__: `__shared__ __align__(16) float x[4]`;
//   - keeps inline PTX inside functions that also have an #ifdef SM120_HOST branch, as common.cuh does;
//   - uses one-dimensional grids and blocks, whole in x.
// A thread that spins on memory must call __nanosleep in its loop, or no other thread runs. Blocks run one after
// another, so waiting for a later block never ends.
#pragma once
#include "host_fibers.h"
#include "host_formats.h"

#define SM120_HOST_EXPORT(NAME, ARGS)                                                                          \
    extern "C" __attribute__((visibility("default"))) unsigned args_bytes_##NAME() { return sizeof(ARGS); }    \
    extern "C" __attribute__((visibility("default"))) const char* launch_##NAME(int grid, int block,          \
                                                                                int shared_bytes, const void* args) { \
        return sm120_host::launch(                                                                             \
            grid, block, shared_bytes, [](const void* p) { NAME(*static_cast<const ARGS*>(p)); }, args);       \
    }
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(sm120_host::dynamic_shared())

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))

struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- arithmetic ----
inline float __uint_as_float(unsigned bits) { return sm120_host::bits_float(bits); }
inline unsigned __float_as_uint(float value) { return sm120_host::float_bits(value); }
inline float __int_as_float(int bits) { return sm120_host::bits_float(unsigned(bits)); }
inline int __float_as_int(float value) { return int(sm120_host::float_bits(value)); }
inline float __expf(float x) { return expf(x); }  // the device's is an approximation within 2 ulp + 1.16 |x| ulp
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// ---- memory: fibers run one at a time, so plain operations are atomic ----
template <class T> inline T __ldg(const T* address) { return *address; }
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class T, class F> inline T sm120_host_atomic(T* address, F change) {
    const T old = *address;
    *address = change(old);
    return old;
}
#define SM120_HOST_ATOMICS(T)                                                                                   \
    inline T atomicAdd(T* a, T v) { return sm120_host_atomic(a, [=](T old) { return T(old + v); }); }           \
    inline T atomicExch(T* a, T v) { return sm120_host_atomic(a, [=](T) { return v; }); }
#define SM120_HOST_INTEGER_ATOMICS(T)                                                                           \
    SM120_HOST_ATOMICS(T)                                                                                       \
    inline T atomicCAS(T* a, T expected, T v) {                                                                 \
        return sm120_host_atomic(a, [=](T old) { return old == expected ? v : old; });                          \
    }                                                                                                           \
    inline T atomicMin(T* a, T v) { return sm120_host_atomic(a, [=](T old) { return old < v ? old : v; }); }    \
    inline T atomicMax(T* a, T v) { return sm120_host_atomic(a, [=](T old) { return old > v ? old : v; }); }    \
    inline T atomicOr(T* a, T v) { return sm120_host_atomic(a, [=](T old) { return T(old | v); }); }            \
    inline T atomicAnd(T* a, T v) { return sm120_host_atomic(a, [=](T old) { return T(old & v); }); }
SM120_HOST_INTEGER_ATOMICS(int)
SM120_HOST_INTEGER_ATOMICS(unsigned)
SM120_HOST_ATOMICS(float)
inline unsigned atomicInc(unsigned* a, unsigned limit) {
    return sm120_host_atomic(a, [=](unsigned old) { return old >= limit ? 0 : old + 1; });
}

// ---- block and warp collectives ----
inline void __syncthreads() { sm120_host::barrier(); }
inline void __nanosleep(unsigned) { sm120_host::leave_fiber(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    sm120_host::collective("__syncwarp", mask, [](auto, auto, uint32_t) {}, nullptr, 0);
    asm volatile("" ::: "memory");
}

namespace sm120_host {
// Words 0 and 1 are the value, word 2 the lane to read (the caller's own when the source is out of range).
inline void combine_shuffle(Words in, Words out, uint32_t) {
    for (unsigned i = 0; i < WARP; ++i)
        for (int word = 0; word < 2; ++word) out[i][word] = in[in[i][2] & 31][word];
}
template <class T> inline T shuffle(const char* name, unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    uint32_t words[3] = {0, 0, source};
    std::memcpy(words, &value, sizeof(T));
    std::memcpy(&value, collective(name, mask, combine_shuffle, words, 3), sizeof(T));
    return value;
}
// Lanes whose words 0 and 1 equal the caller's.
inline void combine_match(Words in, Words out, uint32_t present) {
    for (unsigned i = 0; i < WARP; ++i) {
        out[i][0] = 0;
        for (unsigned j = 0; j < WARP; ++j)
            if ((present >> j & 1) && in[i][0] == in[j][0] && in[i][1] == in[j][1]) out[i][0] |= 1u << j;
    }
}
// word 0 of each lane present, folded by FOLD; the same result for every lane.
template <uint32_t (*FOLD)(uint32_t total, uint32_t value, unsigned lane), uint32_t START>
inline void combine_fold(Words in, Words out, uint32_t present) {
    uint32_t total = START;
    for (unsigned i = 0; i < WARP; ++i)
        if (present >> i & 1) total = FOLD(total, in[i][0], i);
    for (unsigned i = 0; i < WARP; ++i) out[i][0] = total;
}
inline uint32_t fold_ballot(uint32_t total, uint32_t value, unsigned lane) { return total | (value ? 1u << lane : 0); }
inline uint32_t fold_add(uint32_t total, uint32_t value, unsigned) { return total + value; }
inline uint32_t fold_min(uint32_t total, uint32_t value, unsigned) { return value < total ? value : total; }
inline uint32_t fold_max(uint32_t total, uint32_t value, unsigned) { return value > total ? value : total; }
}  // namespace sm120_host

template <class T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned lane = threadIdx.x & 31, base = lane & ~unsigned(width - 1);
    return sm120_host::shuffle("__shfl_sync", mask, value, base | (unsigned(source) & unsigned(width - 1)));
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = threadIdx.x & 31, base = lane & ~unsigned(width - 1);
    return sm120_host::shuffle("__shfl_up_sync", mask, value, lane - base >= delta ? lane - delta : lane);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = threadIdx.x & 31, base = lane & ~unsigned(width - 1);
    const bool inside = lane - base + delta < unsigned(width);
    return sm120_host::shuffle("__shfl_down_sync", mask, value, inside ? lane + delta : lane);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
    const unsigned lane = threadIdx.x & 31, end = (lane & ~unsigned(width - 1)) + unsigned(width);
    const unsigned source = lane ^ unsigned(lane_mask);
    return sm120_host::shuffle("__shfl_xor_sync", mask, value, source < end ? source : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const uint32_t word = predicate != 0;
    const auto combine = sm120_host::combine_fold<sm120_host::fold_ballot, 0>;
    return *sm120_host::collective("__ballot_sync", mask, combine, &word, 1);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate == 0) == 0; }
template <class T> inline unsigned __match_any_sync(unsigned mask, T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "matches 4 or 8 bytes");
    uint32_t words[2] = {0, 0};
    std::memcpy(words, &value, sizeof(T));
    return *sm120_host::collective("__match_any_sync", mask, sm120_host::combine_match, words, 2);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    const auto combine = sm120_host::combine_fold<sm120_host::fold_add, 0>;
    return *sm120_host::collective("__reduce_add_sync", mask, combine, &value, 1);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
    const auto combine = sm120_host::combine_fold<sm120_host::fold_min, 0xffffffffu>;
    return *sm120_host::collective("__reduce_min_sync", mask, combine, &value, 1);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    const auto combine = sm120_host::combine_fold<sm120_host::fold_max, 0>;
    return *sm120_host::collective("__reduce_max_sync", mask, combine, &value, 1);
}

namespace sm120_host {
// A warp's mma: all 32 lanes, operands in `words`, accumulator d added to in place.
template <void (*MULTIPLY)(const uint32_t (*)[16], uint32_t (*)[16])>
inline void mma(const char* name, uint32_t* words, int count, float (&d)[4]) {
    std::memcpy(words + count, d, 16);
    const auto combine = [](Words in, Words out, uint32_t present) {
        if (present != 0xffffffffu) fail("an mma by a warp without all its 32 lanes");
        MULTIPLY(in, out);
    };
    std::memcpy(d, collective(name, 0xffffffffu, combine, words, count + 4), 16);
}
}  // namespace sm120_host
