// Device helpers for every kernel. Compiles with nvcc, with NVRTC (no headers needed) and, with -DSM120_HOST, with g++.
#pragma once
#if defined(SM120_HOST)
#include "host.h"
#else
#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#else
#include <cstdint>
#endif
// Nothing on the device: what it is for, host.h says.
#define SM120_HOST_EXPORT(NAME, ARGS)
// `name` points to the launch's dynamic shared memory, aligned to 128 bytes.
#define DYNAMIC_SHARED(type, name)                                                \
    extern __shared__ __align__(128) unsigned char sm120_dynamic_shared[];        \
    type* name = reinterpret_cast<type*>(sm120_dynamic_shared)
#endif

// ---- 16-byte loads from global memory; the address is a multiple of 16 ----
// An L2 policy for data that is read once: it leaves the cache before other data.
__device__ __forceinline__ uint64_t evict_first_policy() {
#ifdef SM120_HOST
    return 0;
#else
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
#endif
}

#ifdef SM120_HOST
inline void sm120_host_load(const void* address, uint32_t (&r)[4]) {
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) sm120_host::fail("a misaligned 16-byte load");
    std::memcpy(r, address, 16);
}
#endif

// Read-only data (weights), past L1. With a policy: read once, under that L2 policy, and L2 fetches the whole 128 bytes
// around it. Nothing may write it during the kernel or, with programmatic launch, before grid_dependency_wait().
__device__ __forceinline__ void load_stream(const void* address, uint32_t (&r)[4], uint64_t policy) {
#ifdef SM120_HOST
    (void)policy;
    sm120_host_load(address, r);
#else
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "l"(__cvta_generic_to_global(address)), "l"(policy));
#endif
}
__device__ __forceinline__ void load_stream(const void* address, uint32_t (&r)[4]) {
#ifdef SM120_HOST
    sm120_host_load(address, r);
#else
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "l"(__cvta_generic_to_global(address)));
#endif
}

// Data that is read again, or that an earlier kernel wrote (activations): not .nc, so that it is also right for data
// written before grid_dependency_wait() returned.
__device__ __forceinline__ void load_cached(const void* address, uint32_t (&r)[4]) {
#ifdef SM120_HOST
    sm120_host_load(address, r);
#else
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "l"(__cvta_generic_to_global(address))
                 : "memory");
#endif
}

// ---- programmatic dependent launch; without it, and below sm_90, these do nothing ----
// Returns when the kernels before this one have finished and their writes are visible.
__device__ __forceinline__ void grid_dependency_wait() {
#if !defined(SM120_HOST) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start once every block has called this or exited.
__device__ __forceinline__ void grid_dependency_launch() {
#if !defined(SM120_HOST) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- bits ----
// Byte i of the result is byte (selector >> 4i & 7) of {b, a}: 0..3 are a's bytes, 4..7 b's. Bit 3 of a selector nibble
// replicates the sign of that byte.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t r = 0;
#ifdef SM120_HOST
    const uint64_t bytes = uint64_t(b) << 32 | a;
    for (int i = 0; i < 4; ++i) {
        const uint32_t nibble = selector >> (4 * i) & 15, byte = uint32_t(bytes >> (8 * (nibble & 7))) & 255;
        r |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
#else
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
#endif
    return r;
}

// ---- pairs of 16-bit floats; the first is the low half ----
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
#ifdef SM120_HOST
    return sm120_host::bf16_product(uint16_t(a), uint16_t(b)) |
           uint32_t(sm120_host::bf16_product(uint16_t(a >> 16), uint16_t(b >> 16))) << 16;
#else
    uint32_t r;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));  // a * b + -0 rounds the same
#endif
    return r;
#endif
}

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t a, uint32_t b) {
#ifdef SM120_HOST
    return sm120_host::f16_product(uint16_t(a), uint16_t(b)) |
           uint32_t(sm120_host::f16_product(uint16_t(a >> 16), uint16_t(b >> 16))) << 16;
#else
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#endif
}

// ---- conversions: nearest even, overflow to infinity, NaN to 0x7fff ----
__device__ __forceinline__ uint32_t f32_to_bf16x2(float low, float high) {
#ifdef SM120_HOST
    return sm120_host::f32_to_bf16(low) | uint32_t(sm120_host::f32_to_bf16(high)) << 16;
#else
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#endif
}
__device__ __forceinline__ uint32_t f32_to_f16x2(float low, float high) {
#ifdef SM120_HOST
    return sm120_host::f32_to_f16(low) | uint32_t(sm120_host::f32_to_f16(high)) << 16;
#else
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#endif
}
__device__ __forceinline__ uint16_t f32_to_bf16(float value) {
#ifdef SM120_HOST
    return sm120_host::f32_to_bf16(value);
#else
    uint16_t r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(value));
    return r;
#endif
}
__device__ __forceinline__ uint16_t f32_to_f16(float value) {
#ifdef SM120_HOST
    return sm120_host::f32_to_f16(value);
#else
    uint16_t r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(value));
    return r;
#endif
}
__device__ __forceinline__ float bf16_to_f32(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
__device__ __forceinline__ float f16_to_f32(uint16_t bits) {
#ifdef SM120_HOST
    return sm120_host::f16_to_f32(bits);
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

// ---- arithmetic ----
// e^x within a few ulp for |x| up to 10; the host's is the correctly rounded one nearly always.
__device__ __forceinline__ float fast_exp(float x) { return __expf(x); }
