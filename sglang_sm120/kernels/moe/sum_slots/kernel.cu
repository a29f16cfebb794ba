// The sum of every token's slots: the last step of a MoE layer on this rank.
#include "w4a16.cuh"

struct SumSlotsArgs {
    const uint8_t* slots;       // [T * k, hidden]
    const void* topk_ids;       // [T, k], contiguous
    uint8_t* out;               // [T, hidden]
    int64_t first_expert;
    int64_t num_experts;
    int num_tokens, top_k, hidden, ids_are_int64;
};

namespace {

// In the order of k. Grid: one thread for 8 columns of a token.
template <class T> __device__ __forceinline__ void sum_slots(const SumSlotsArgs& p) {
    constexpr int AT_ONCE = 8;  // loads in flight
    grid_dependency_wait();
    const int vectors = p.hidden / 8;
    const int64_t id = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (id >= int64_t(p.num_tokens) * vectors) return;
    const int64_t first_slot = id / vectors * p.top_k;
    const int column = int(id % vectors) * 8;
    float sum[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    for (int j0 = 0; j0 < p.top_k; j0 += AT_ONCE) {
        bool held[AT_ONCE];  // somebody wrote this slot
        uint32_t y[AT_ONCE][4];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            held[j] = j0 + j < p.top_k;
            if (!held[j]) continue;
            const int64_t slot = first_slot + j0 + j;
            const int64_t expert = p.ids_are_int64 ? static_cast<const int64_t*>(p.topk_ids)[slot] : static_cast<const int*>(p.topk_ids)[slot];
            held[j] = uint64_t(expert) - uint64_t(p.first_expert) < uint64_t(p.num_experts);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (held[j]) load_cached(p.slots + ((first_slot + j0 + j) * p.hidden + column) * 2, y[j]);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (held[j])
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i] += T::widen(uint16_t(y[j][i / 2] >> (16 * (i % 2))));
    }
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = T::round(sum[2 * i]) | uint32_t(T::round(sum[2 * i + 1])) << 16;
    *reinterpret_cast<uint4*>(p.out + (first_slot / p.top_k * p.hidden + column) * 2) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

}  // namespace

#define SUM_SLOTS(DTYPE, T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128) sum_slots_##DTYPE(const __grid_constant__ SumSlotsArgs p) { \
        sum_slots<T>(p);                                                                                       \
    }                                                                                                          \
    SM120_HOST_EXPORT(sum_slots_##DTYPE, SumSlotsArgs)
SUM_SLOTS(bf16, Bf16)
SUM_SLOTS(f16, F16)
