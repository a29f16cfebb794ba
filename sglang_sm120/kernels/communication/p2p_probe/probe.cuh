// What the kernels of the probe use: flags that GPUs write into each other's memory, and a pattern to fill it with.
#pragma once
#include "system_scope.cuh"

namespace {

// A flag that announces nothing; store_release is for those that do.
__device__ __forceinline__ void store_relaxed(uint64_t* address, uint64_t value) {
#ifdef SM120_HOST
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
#else
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "l"(value) : "memory");
#endif
}
__device__ __forceinline__ uint32_t load_relaxed(const void* address) {
#ifdef SM120_HOST
    return __atomic_load_n(static_cast<const uint32_t*>(address), __ATOMIC_RELAXED);
#else
    uint32_t value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
    return value;
#endif
}
// Until the flag is `value` or above; false at the deadline.
__device__ __forceinline__ bool wait_for(const uint64_t* flag, uint64_t value, uint64_t deadline) {
    for (unsigned polls = 1; load_acquire(flag) < value; ++polls) {
        spin_pause();
#ifndef SM120_HOST
        if (polls % 32) continue;  // reading the clock takes as long as a poll
#endif
        if (clock_ns() >= deadline) return false;
    }
    return true;
}

// ---- what memory is filled with: a word depends on the seed and on its place ----
__device__ __forceinline__ uint32_t pattern(uint32_t seed, uint64_t word) {
    uint32_t x = uint32_t(word) * 0x9e3779b9u ^ uint32_t(word >> 32) ^ seed * 0x85ebca6bu;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}
__device__ __forceinline__ void store_pattern(uint8_t* memory, int64_t at, uint32_t seed, uint64_t vector) {
    *reinterpret_cast<uint4*>(memory + at * 16) = make_uint4(pattern(seed, 4 * vector), pattern(seed, 4 * vector + 1),
                                                             pattern(seed, 4 * vector + 2), pattern(seed, 4 * vector + 3));
}
__device__ __forceinline__ uint32_t wrong_words(const uint8_t* memory, int64_t at, uint32_t seed, uint64_t vector) {
    uint32_t got[4], wrong = 0;
    load_system(memory + at * 16, got);
#pragma unroll
    for (int i = 0; i < 4; ++i) wrong += got[i] != pattern(seed, 4 * vector + i);
    return wrong;
}

}  // namespace
