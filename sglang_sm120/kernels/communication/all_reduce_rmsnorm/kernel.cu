// All-reduce over windows of device memory that every rank has mapped, with residual add and RMSNorm behind it.
//
// Grid: up to MAX_CTAS blocks, the same number on every rank; block c of each rank works on rows c, c + grid, ... A row is
// a token (fused) or a piece of the flat tensor. A thread owns the 16-byte vectors threadIdx.x, threadIdx.x + blockDim.x
// of a row, VPT at most; they stay in registers between the sum and the norm. Shared memory: 64 floats.
//
// One-shot: each rank gets the others' rows and adds them up. Two-shot: rank r adds up the r-th piece of each row, then
// the sums are gathered. Push: data is written to peers, and read at home. Pull: written at home, read from peers.
// Bytes that a rank sends for n of input: one-shot (W - 1) n, two-shot 2 (W - 1) / W n.
//
// Lamport is one-shot push without signals: memory that was read is zeroed again, a zero word means "not there yet", and a
// word of two +0 is sent as +0 and -0, which no sum can tell from it. It waits for the bus once, not for a write to have
// arrived and then for a signal. Its part of the windows is used by nothing else.
//
// Sums are in fp32 in the order of the ranks and rounded once, so every rank has the same bits, whatever the algorithm.
// Why no barrier is needed at the end, and what else the signals rely on: docs/kernels/all-reduce-rmsnorm.md.
#include "system_scope.cuh"
#include "w4a16.cuh"

constexpr int MAX_WORLD = 8, MAX_CTAS = 128, WARP_SIZE = 32;

// A window: signals [phase][parity][block][source rank], the owner's own words, then the data of both parities.
constexpr int64_t OWN_WORDS_AT = 8ll * 2 * 2 * MAX_CTAS * MAX_WORLD;
constexpr int64_t DATA_AT = OWN_WORDS_AT + 1024;

struct AllReduceArgs {
    uint64_t windows[MAX_WORLD];  // address here of each rank's window
    const uint8_t* input;         // [elements]
    const uint8_t* residual;      // [rows, width], or null: the sum is all that is wanted
    const uint8_t* gamma;         // [width]
    uint8_t* out;                 // [elements]
    uint8_t* residual_out;        // [rows, width]; may be residual
    uint32_t* status;             // Status words on the host
    int64_t elements;
    int64_t inbox_bytes, gather_bytes, lamport_bytes;  // of one parity
    int rows, width, rank;              // width: elements of a row, a multiple of 8; plain: the last row may be shorter
    float eps, gamma_offset;
};

// The host reads these when something hangs. LIMIT_MS is the host's to set, also for graphs captured before.
enum StatusWord { FAULT, LIMIT_MS, PEER, BLOCK, PHASE, EPOCH };

namespace {

struct Call {
    uint64_t epoch;         // 1, 2, ...: of 64 bits, so that no signal is ever taken for one of an earlier round
    int64_t inbox, gather, lamport;  // offsets in a window
};
struct OwnWords {
    uint64_t epoch;    // of the last call
    uint32_t arrived;  // blocks of this call that have read it
};

__device__ __forceinline__ OwnWords* own_words(const AllReduceArgs& p) {
    return reinterpret_cast<OwnWords*>(p.windows[p.rank] + OWN_WORDS_AT);
}
__device__ __forceinline__ uint64_t* signal_word(uint64_t window, int phase, uint64_t epoch, int source) {
    return reinterpret_cast<uint64_t*>(window) + ((phase * 2 + (epoch & 1)) * MAX_CTAS + blockIdx.x) * MAX_WORLD + source;
}

// The number of this call lives in the window, so that a replayed graph goes on counting.
__device__ __forceinline__ Call begin_call(const AllReduceArgs& p) {
    const uint64_t epoch = static_cast<volatile OwnWords*>(own_words(p))->epoch + 1;
    const int64_t data = DATA_AT + int64_t(epoch & 1) * (p.inbox_bytes + p.gather_bytes + p.lamport_bytes);
    return {epoch, data, data + p.inbox_bytes, data + p.inbox_bytes + p.gather_bytes};
}
// By one thread of a block whose threads have all read the number; `leave` takes what it returns. Nothing waits in between:
// the answer of the atomic comes while peers are waited for. No fence, which would wait for what was sent to peers: the number
// was read, since it was used, and no later write can change that.
__device__ __forceinline__ uint32_t arrive(const AllReduceArgs& p) {
    return gridDim.x > 1 ? atomicAdd(&own_words(p)->arrived, 1u) : 0;
}
// The last block to arrive counts on.
__device__ __forceinline__ void leave(const AllReduceArgs& p, const Call& call, uint32_t arrived) {
    if (threadIdx.x != WARP_SIZE || arrived != gridDim.x - 1) return;
    own_words(p)->arrived = 0;
    own_words(p)->epoch = call.epoch;
}

__device__ __noinline__ void give_up(const AllReduceArgs& p, int peer, int phase, uint64_t epoch) {
    volatile uint32_t* status = p.status;
    status[PEER] = uint32_t(peer);
    status[BLOCK] = blockIdx.x;
    status[PHASE] = uint32_t(phase);
    status[EPOCH] = uint32_t(epoch);
#ifdef SM120_HOST
    status[FAULT] = 1;
    sm120_host::fail("no signal from rank " + std::to_string(peer) + " within the limit");
#else
    __threadfence_system();
    status[FAULT] = 1;
    __threadfence_system();
    __trap();  // nothing that this call would give may be used
#endif
}

// How long a thread has looked for what a peer is to send. The limit lies in host memory, and thousands of threads that read
// it would hold up this rank, and so the others: nobody does before LIMIT_FLOOR_NS, and then every quarter longer.
constexpr uint64_t LIMIT_FLOOR_NS = 50000000;
struct Patience {
    const AllReduceArgs& p;
    uint64_t start = 0;
    uint32_t looks = 0;
    __device__ __forceinline__ void look(int peer, int phase, uint64_t epoch) {
        spin_pause();
        if (++looks < 256 || looks << (__clz(looks) + 3)) return;  // 256, 320, 384, 448, 512, 640, ...
        const uint64_t now = clock_ns();
        if (start == 0) start = now;
        if (now - start < LIMIT_FLOOR_NS) return;
        if (now - start > uint64_t(static_cast<volatile uint32_t*>(p.status)[LIMIT_MS]) * 1000000u) give_up(p, peer, phase, epoch);
    }
};

// The block's data is written; tell every peer, and wait until all of them have told us. Returns what `arrive` does.
template <int WORLD> __device__ __forceinline__ uint32_t exchange_signals(const AllReduceArgs& p, int phase, uint64_t epoch) {
    __syncthreads();
    const uint32_t arrived = phase == 0 && threadIdx.x == WARP_SIZE ? arrive(p) : 0;
    const int peer = int(threadIdx.x);
    if (peer < WORLD && peer != p.rank) {
        store_release(signal_word(p.windows[peer], phase, epoch, p.rank), epoch);
        const uint64_t* signal = signal_word(p.windows[p.rank], phase, epoch, peer);
        Patience patience{p};
        while (load_acquire(signal) != epoch) patience.look(peer, phase, epoch);
    }
    __syncthreads();
    return arrived;
}

// The sum of one vector over the ranks, in their order.
struct Sum {
    float of[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    template <class T> __device__ __forceinline__ void add(const uint32_t (&x)[4]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) of[i] += T::widen(uint16_t(x[i / 2] >> (16 * (i % 2))));
    }
    template <class T> __device__ __forceinline__ void round(uint32_t (&packed)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[i] = T::round(of[2 * i]) | uint32_t(T::round(of[2 * i + 1])) << 16;
    }
};
template <class T, int WORLD> __device__ __forceinline__ void add_up(const uint8_t* const (&sources)[WORLD], uint32_t (&packed)[4]) {
    uint32_t x[WORLD][4];
#pragma unroll
    for (int r = 0; r < WORLD; ++r) load_system(sources[r], x[r]);
    Sum sum;
#pragma unroll
    for (int r = 0; r < WORLD; ++r) sum.template add<T>(x[r]);
    sum.template round<T>(packed);
}

// turn: alternates from call to call, so that one barrier is enough.
__device__ __forceinline__ float block_sum(float value, int turn) {
    __shared__ float parts_of[2][WARP_SIZE];
    float* const parts = parts_of[turn];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
#pragma unroll
    for (int step = WARP_SIZE / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    float total = lane < warps ? parts[lane] : 0.f;
#pragma unroll
    for (int step = WARP_SIZE / 2; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
    return total;
}

// What becomes of a row's sums: written as they are, or residual add and norm.
template <class T, int VPT> struct Finish {
    static constexpr bool EARLY = VPT == 1;  // with two vectors there are no registers left for it
    const AllReduceArgs& p;
    uint32_t gamma[4], residual[4];
    int turn = 0;

    // Loads that need no peer, ahead of the wait for them.
    __device__ __forceinline__ void prefetch_gamma() {
        if (EARLY && p.residual && threadIdx.x * 8 < p.width) load_cached(p.gamma + threadIdx.x * 16, gamma);
    }
    __device__ __forceinline__ void prefetch_residual(int row) {
        if (EARLY && p.residual && row < p.rows && threadIdx.x * 8 < p.width)
            load_cached(p.residual + (int64_t(row) * p.width + threadIdx.x * 8) * 2, residual);
    }
    // sums: this thread's vectors of the row, as an all-reduce returns them.
    __device__ __forceinline__ void row(int row, const uint32_t (&sums)[VPT][4]) {
        float x[VPT][8], squares = 0.f;
#pragma unroll
        for (int j = 0; j < VPT; ++j) {
            const int v = threadIdx.x + j * blockDim.x;
            const int64_t at = (int64_t(row) * p.width + v * 8) * 2;
            if (v * 8 >= p.width || at >= p.elements * 2) continue;
            if (!p.residual) {
                store_16(p.out + at, sums[j]);
                continue;
            }
            if (!EARLY) load_cached(p.residual + at, residual);
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float low = T::widen(uint16_t(sums[j][i])) + T::widen(uint16_t(residual[i]));
                const float high = T::widen(uint16_t(sums[j][i] >> 16)) + T::widen(uint16_t(residual[i] >> 16));
                x[j][2 * i] = low;
                x[j][2 * i + 1] = high;
                squares += low * low + high * high;
                packed[i] = T::round(low) | uint32_t(T::round(high)) << 16;
            }
            store_16(p.residual_out + at, packed);
        }
        if (!p.residual) return;
        prefetch_residual(row + gridDim.x);
        turn ^= 1;
        const float factor = rsqrtf(block_sum(squares, turn) / float(p.width) + p.eps);
#pragma unroll
        for (int j = 0; j < VPT; ++j) {
            const int v = threadIdx.x + j * blockDim.x;
            if (v * 8 >= p.width) continue;
            if (!EARLY) load_cached(p.gamma + v * 16, gamma);
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float low = x[j][2 * i] * factor * (T::widen(uint16_t(gamma[i])) + p.gamma_offset);
                const float high = x[j][2 * i + 1] * factor * (T::widen(uint16_t(gamma[i] >> 16)) + p.gamma_offset);
                packed[i] = T::round(low) | uint32_t(T::round(high)) << 16;
            }
            store_16(p.out + (int64_t(row) * p.width + v * 8) * 2, packed);
        }
    }
};

template <class T, int WORLD, bool PULL, int VPT> __device__ __forceinline__ void one_shot(const AllReduceArgs& p) {
    grid_dependency_wait();
    const Call call = begin_call(p);
    const int64_t slot = p.elements * 2;
    const int vectors = p.width / 8;
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x)
        for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
            const int64_t at = (int64_t(row) * vectors + v) * 16;
            if (at >= slot) break;
            uint32_t x[4];
            load_cached(p.input + at, x);
            if (PULL) store_16(reinterpret_cast<uint8_t*>(p.windows[p.rank] + call.inbox + at), x);
#pragma unroll
            for (int i = 1; i < WORLD; ++i) {
                const int peer = (p.rank + i) % WORLD;  // not all to the same peer at once
                if (!PULL) store_16(reinterpret_cast<uint8_t*>(p.windows[peer] + call.inbox + p.rank * slot + at), x);
            }
        }
    grid_dependency_launch();  // the next kernel may come, and waits for this one's end before it touches anything
    Finish<T, VPT> finish{p};
    finish.prefetch_gamma();
    finish.prefetch_residual(blockIdx.x);
    const uint32_t arrived = exchange_signals<WORLD>(p, 0, call.epoch);
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        uint32_t sums[VPT][4];
#pragma unroll
        for (int j = 0; j < VPT; ++j) {
            const int v = threadIdx.x + j * blockDim.x;
            const int64_t at = (int64_t(row) * vectors + v) * 16;
            if (v >= vectors || at >= slot) continue;
            const uint8_t* sources[WORLD];
#pragma unroll
            for (int r = 0; r < WORLD; ++r)
                sources[r] = r == p.rank ? p.input + at
                             : PULL      ? reinterpret_cast<const uint8_t*>(p.windows[r] + call.inbox + at)
                                         : reinterpret_cast<const uint8_t*>(p.windows[p.rank] + call.inbox + r * slot + at);
            add_up<T, WORLD>(sources, sums[j]);
        }
        finish.row(row, sums);
    }
    leave(p, call, arrived);
}

// The sum of the vectors at `at`, once they are there; their places are zeroed for the call after the next.
template <class T, int WORLD, int VPT>
__device__ __forceinline__ void receive(const AllReduceArgs& p, const Call& call, int64_t at, uint32_t (&packed)[4]) {
    constexpr int AT_ONCE = VPT > 1 ? 1 : WORLD < 4 ? WORLD : 4;  // more would not fit into registers
    const int64_t slot = p.elements * 2;
    uint8_t* const inbox = reinterpret_cast<uint8_t*>(p.windows[p.rank] + call.lamport) + at;
    const uint32_t nothing[4] = {0, 0, 0, 0};
    uint32_t own[4];
    load_cached(p.input + at, own);
    Sum sum;
    Patience patience{p};
#pragma unroll 1
    for (int first = 0; first < WORLD; first += AT_ONCE) {
        uint32_t x[AT_ONCE][4];
        for (int missing = 0; missing >= 0;) {
            missing = -1;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (first + i != p.rank) load_system(inbox + (first + i) * slot, x[i]);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (first + i != p.rank && !(x[i][0] && x[i][1] && x[i][2] && x[i][3])) missing = first + i;
            if (missing >= 0) patience.look(missing, 0, call.epoch);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i == p.rank) {
                sum.template add<T>(own);
                continue;
            }
            store_16(inbox + (first + i) * slot, nothing);
            sum.template add<T>(x[i]);
        }
    }
    sum.template round<T>(packed);
}

template <class T, int WORLD, int VPT> __device__ __forceinline__ void lamport(const AllReduceArgs& p) {
    grid_dependency_wait();
    const Call call = begin_call(p);
    const int64_t slot = p.elements * 2;
    const int vectors = p.width / 8;
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x)
        for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
            const int64_t at = (int64_t(row) * vectors + v) * 16;
            if (at >= slot) break;
            uint32_t x[4];
            load_cached(p.input + at, x);
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = x[i] ? x[i] : 0x8000u;
#pragma unroll
            for (int i = 1; i < WORLD; ++i) {
                const int peer = (p.rank + i) % WORLD;
                store_system(reinterpret_cast<uint8_t*>(p.windows[peer] + call.lamport + p.rank * slot + at), x);
            }
        }
    grid_dependency_launch();  // the next kernel may come, and waits for this one's end before it touches anything
    Finish<T, VPT> finish{p};
    finish.prefetch_gamma();
    finish.prefetch_residual(blockIdx.x);
    __syncthreads();
    const uint32_t arrived = threadIdx.x == WARP_SIZE ? arrive(p) : 0;
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        uint32_t sums[VPT][4];
#pragma unroll
        for (int j = 0; j < VPT; ++j) {
            const int v = threadIdx.x + j * blockDim.x;
            const int64_t at = (int64_t(row) * vectors + v) * 16;
            if (v < vectors && at < slot) receive<T, WORLD, VPT>(p, call, at, sums[j]);
        }
        finish.row(row, sums);
    }
    leave(p, call, arrived);
}

template <class T, int WORLD, bool PULL, int VPT> __device__ __forceinline__ void two_shot(const AllReduceArgs& p) {
    grid_dependency_wait();
    const Call call = begin_call(p);
    const int64_t bytes = p.elements * 2;
    const int vectors = p.width / 8, piece = (vectors + WORLD - 1) / WORLD;  // piece: of a row, at most
    const int64_t slot = int64_t(p.rows) * piece * 16;
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x)
        for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
            const int64_t at = (int64_t(row) * vectors + v) * 16;
            if (at >= bytes) break;
            const int owner = ((v + 1) * WORLD - 1) / vectors, first = vectors * owner / WORLD;
            if (!PULL && owner == p.rank) continue;
            uint32_t x[4];
            load_cached(p.input + at, x);
            store_16(PULL ? reinterpret_cast<uint8_t*>(p.windows[p.rank] + call.inbox + at)
                          : reinterpret_cast<uint8_t*>(p.windows[owner] + call.inbox + p.rank * slot +
                                                       (int64_t(row) * piece + v - first) * 16),
                     x);
        }
    grid_dependency_launch();  // the next kernel may come, and waits for this one's end before it touches anything
    Finish<T, VPT> finish{p};
    finish.prefetch_gamma();
    finish.prefetch_residual(blockIdx.x);
    const uint32_t arrived = exchange_signals<WORLD>(p, 0, call.epoch);

    const int first = vectors * p.rank / WORLD, mine = vectors * (p.rank + 1) / WORLD - first;
    const int own_rows = (p.rows - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
    for (int64_t i = threadIdx.x; i < int64_t(own_rows) * mine; i += blockDim.x) {
        const int row = blockIdx.x + int(i / mine) * gridDim.x, offset = int(i % mine);
        const int64_t at = (int64_t(row) * vectors + first + offset) * 16, packed = (int64_t(row) * piece + offset) * 16;
        if (at >= bytes) continue;
        const uint8_t* sources[WORLD];
#pragma unroll
        for (int r = 0; r < WORLD; ++r)
            sources[r] = r == p.rank ? p.input + at
                         : PULL      ? reinterpret_cast<const uint8_t*>(p.windows[r] + call.inbox + at)
                                     : reinterpret_cast<const uint8_t*>(p.windows[p.rank] + call.inbox + r * slot + packed);
        uint32_t sum[4];
        add_up<T, WORLD>(sources, sum);
#pragma unroll 1
        for (int k = 0; k < (PULL ? 1 : WORLD); ++k) {
            const int peer = (p.rank + k) % WORLD;
            store_16(reinterpret_cast<uint8_t*>(p.windows[peer] + call.gather + at), sum);
        }
    }
    exchange_signals<WORLD>(p, 1, call.epoch);

    for (int row = blockIdx.x; row < p.rows; row += gridDim.x) {
        uint32_t sums[VPT][4];
#pragma unroll
        for (int j = 0; j < VPT; ++j) {
            const int v = threadIdx.x + j * blockDim.x;
            const int64_t at = (int64_t(row) * vectors + v) * 16;
            if (v >= vectors || at >= bytes) continue;
            const int owner = PULL ? ((v + 1) * WORLD - 1) / vectors : p.rank;
            load_system(reinterpret_cast<const uint8_t*>(p.windows[owner] + call.gather + at), sums[j]);
        }
        finish.row(row, sums);
    }
    leave(p, call, arrived);
}

}  // namespace

// VPT 1: rows of up to 6144 elements, 2: up to 12288. With 768 threads a thread has 80 registers, with 1024 too few.
#define ALL_REDUCE(NAME, DTYPE, WORLD, VPT, ...)                                           \
    extern "C" __global__ void __launch_bounds__(768, 1) NAME##_##DTYPE##_w##WORLD##_v##VPT( \
        const __grid_constant__ AllReduceArgs p) {                                         \
        __VA_ARGS__(p);                                                                    \
    }                                                                                      \
    SM120_HOST_EXPORT(NAME##_##DTYPE##_w##WORLD##_v##VPT, AllReduceArgs)
#define ALL_REDUCE_VARIANT(DTYPE, T, WORLD, VPT)                                    \
    ALL_REDUCE(one_shot_lamport, DTYPE, WORLD, VPT, lamport<T, WORLD, VPT>)         \
    ALL_REDUCE(one_shot_push, DTYPE, WORLD, VPT, one_shot<T, WORLD, false, VPT>)    \
    ALL_REDUCE(one_shot_pull, DTYPE, WORLD, VPT, one_shot<T, WORLD, true, VPT>)     \
    ALL_REDUCE(two_shot_push, DTYPE, WORLD, VPT, two_shot<T, WORLD, false, VPT>)    \
    ALL_REDUCE(two_shot_pull, DTYPE, WORLD, VPT, two_shot<T, WORLD, true, VPT>)
#define ALL_REDUCE_WORLDS(DTYPE, T)        \
    ALL_REDUCE_VARIANT(DTYPE, T, 2, 1)     \
    ALL_REDUCE_VARIANT(DTYPE, T, 4, 1)     \
    ALL_REDUCE_VARIANT(DTYPE, T, 8, 1)     \
    ALL_REDUCE_VARIANT(DTYPE, T, 2, 2)     \
    ALL_REDUCE_VARIANT(DTYPE, T, 4, 2)     \
    ALL_REDUCE_VARIANT(DTYPE, T, 8, 2)
ALL_REDUCE_WORLDS(bf16, Bf16)
ALL_REDUCE_WORLDS(f16, F16)
