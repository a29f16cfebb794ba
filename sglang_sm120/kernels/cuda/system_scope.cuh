// Memory that other GPUs write and read while a kernel runs: signals with system-scope release and acquire, data between.
//
// A peer that waits for a signal with `load_acquire` sees what the signalling thread wrote before its `store_release`,
// and what other threads of that block wrote before a __syncthreads() ahead of it. Data behind a signal is read with
// `load_system`, which does not look into L1.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void store_release(uint64_t* address, uint64_t value) {
#ifdef SM120_HOST
    __atomic_store_n(address, value, __ATOMIC_RELEASE);
#else
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(address)), "l"(value) : "memory");
#endif
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* address) {
#ifdef SM120_HOST
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
#else
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(address)) : "memory");
    return value;
#endif
}
// 16 bytes; the address is a multiple of 16.
__device__ __forceinline__ void load_system(const void* address, uint32_t (&r)[4]) {
#ifdef SM120_HOST
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) sm120_host::fail("a misaligned 16-byte load");
    for (int i = 0; i < 4; ++i) r[i] = __atomic_load_n(static_cast<const uint32_t*>(address) + i, __ATOMIC_RELAXED);
#else
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "l"(__cvta_generic_to_global(address))
                 : "memory");
#endif
}
// 16 bytes of which a peer may see some words before others, each word whole.
__device__ __forceinline__ void store_system(void* address, const uint32_t (&r)[4]) {
#ifdef SM120_HOST
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) sm120_host::fail("a misaligned 16-byte store");
    for (int i = 0; i < 4; ++i) __atomic_store_n(static_cast<uint32_t*>(address) + i, r[i], __ATOMIC_RELAXED);
#else
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(address)), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#endif
}
__device__ __forceinline__ void store_16(void* address, const uint32_t (&r)[4]) {
#ifdef SM120_HOST
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) sm120_host::fail("a misaligned 16-byte store");
    std::memcpy(address, r, 16);
#else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(address)), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
#endif
}
// Nanoseconds of a clock that runs while a thread waits; its steps may be a microsecond.
__device__ __forceinline__ uint64_t clock_ns() {
#ifdef SM120_HOST
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
#else
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#endif
}
// Between two looks at a signal. On the CPU the other ranks are threads that want the core.
__device__ __forceinline__ void spin_pause() {
#ifdef SM120_HOST
    const timespec moment{0, 20000};
    nanosleep(&moment, nullptr);
    __nanosleep(0);
#endif
}
