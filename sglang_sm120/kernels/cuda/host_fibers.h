// Threads of one CUDA block as fibers of one CPU thread: scheduling, collectives, barriers, shared memory.
// Fibers run one at a time until they wait, so data races and memory ordering are not modelled. What is found: a wrong
// result, a deadlock, a wait without end, a lane missing from its own mask, an mma by part of a warp, writing past
// dynamic shared memory, and (as NaN) reading shared memory that was not written. With -DSM120_HOST_REVERSE threads and
// blocks run in descending order: a result that differs shows a missing barrier.
#pragma once
#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace sm120_host {

struct Index { unsigned x = 0, y = 0, z = 0; };

constexpr unsigned WARP = 32, MAX_THREADS = 1024;
constexpr unsigned MAX_IDLE_ROUNDS = 100000;
constexpr size_t STACK_BYTES = 256 << 10, PAGE = 4096, CANARY_BYTES = 64;
constexpr unsigned char POISON = 0xff;  // NaN as float32, bfloat16, float16 and e4m3; -1 as an integer

using Words = uint32_t (*)[16];               // [lane of the warp][word]
using Combine = void (*)(Words in, Words out, uint32_t present);  // turns the lanes' words into each lane's result

enum class State { DONE, READY, IN_COLLECTIVE, AT_BARRIER };

struct Fiber {
    jmp_buf context;
    ucontext_t entry;
    bool started = false;
    State state = State::DONE;
    Combine combine = nullptr;  // what this lane waits for; equal for the lanes that meet
    const char* name = "";
    uint32_t mask = 0;
};

struct Warp {
    uint32_t alive = 0, waiting = 0;  // lanes
    uint32_t words[WARP][16];         // what a lane brought, then what it takes away
};

struct Block {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    char* stacks = nullptr;
    unsigned num_stacks = 0;
    unsigned threads = 0, alive = 0, at_barrier = 0, current = 0;
    unsigned idle_rounds = 0;  // in a row, in which threads only slept
    void (*kernel)(const void*) = nullptr;
    const void* args = nullptr;
    jmp_buf scheduler;
    std::vector<unsigned char> dynamic_shared;
    size_t shared_bytes = 0;
    std::string error;
};

inline Block block;
inline std::mutex one_launch;  // the block and the index variables are global: launches take turns

inline thread_local uint32_t shared_anchor;  // finds this library's thread-local memory; see poison_static_shared
}  // namespace sm120_host

inline sm120_host::Index threadIdx, blockIdx, blockDim, gridDim;

namespace sm120_host {

// _setjmp and _longjmp switch without a system call; makecontext only starts a fiber.
__attribute__((noinline)) inline void leave_fiber() {
    if (_setjmp(block.fibers[block.current].context) == 0) _longjmp(block.scheduler, 1);
    asm volatile("" ::: "memory");
}

[[noreturn]] inline void fail(const std::string& what) {
    block.error = "block " + std::to_string(blockIdx.x) + ", thread " + std::to_string(block.current) + ": " + what;
    _longjmp(block.scheduler, 1);
}

inline void release_barrier_if_complete() {
    if (block.at_barrier == 0 || block.at_barrier != block.alive) return;
    block.at_barrier = block.idle_rounds = 0;
    for (unsigned i = 0; i < block.threads; ++i)
        if (block.fibers[i].state == State::AT_BARRIER) block.fibers[i].state = State::READY;
}

// Finishes the collective that `lane` of `warp` waits for, once each of its lanes that has not exited is there.
inline bool finish_collective(unsigned warp, unsigned lane) {
    Warp& w = block.warps[warp];
    Fiber* lanes = &block.fibers[warp * WARP];
    const uint32_t present = lanes[lane].mask & w.alive;
    if ((w.waiting & present) != present) return false;
    // A copy for the lanes here: the others may wait in, or not have read the result of, another collective.
    uint32_t in[WARP][16], out[WARP][16];
    std::memset(in, POISON, sizeof in);
    for (unsigned i = 0; i < WARP; ++i) {
        if (!(present >> i & 1)) continue;
        if (lanes[i].combine != lanes[lane].combine || lanes[i].mask != lanes[lane].mask) return false;
        std::memcpy(in[i], w.words[i], sizeof in[i]);
    }
    lanes[lane].combine(in, out, present);
    w.waiting &= ~present;
    block.idle_rounds = 0;
    for (unsigned i = 0; i < WARP; ++i) {
        if (!(present >> i & 1)) continue;
        std::memcpy(w.words[i], out[i], sizeof out[i]);
        lanes[i].state = State::READY;
    }
    return true;
}

// One warp-level collective: deposits this lane's words, waits for the lanes of `mask`, returns this lane's result.
inline const uint32_t* collective(const char* name, uint32_t mask, Combine combine, const uint32_t* words, int count) {
    const unsigned warp = block.current / WARP, lane = block.current % WARP;
    Warp& w = block.warps[warp];
    Fiber& self = block.fibers[block.current];
    if (!(mask >> lane & 1)) fail(std::string(name) + " with a mask that lacks the calling lane");
    std::memcpy(w.words[lane], words, size_t(count) * 4);
    self.combine = combine;
    self.name = name;
    self.mask = mask;
    self.state = State::IN_COLLECTIVE;
    w.waiting |= 1u << lane;
    if (!finish_collective(warp, lane)) leave_fiber();
    return w.words[lane];
}

inline void barrier() {
    block.fibers[block.current].state = State::AT_BARRIER;
    ++block.at_barrier;
    release_barrier_if_complete();
    if (block.fibers[block.current].state != State::READY) leave_fiber();
    asm volatile("" ::: "memory");
}

inline void exit_thread() {
    const unsigned warp = block.current / WARP;
    block.fibers[block.current].state = State::DONE;
    block.warps[warp].alive &= ~(1u << block.current % WARP);
    --block.alive;
    block.idle_rounds = 0;
    release_barrier_if_complete();
    for (unsigned i = 0; i < WARP; ++i)
        if (block.warps[warp].waiting >> i & 1) finish_collective(warp, i);
}

inline void fiber_main() {
    for (;;) {  // a fiber that finished serves the next block
        block.kernel(block.args);
        exit_thread();
        leave_fiber();
    }
}

__attribute__((noinline)) inline void resume(unsigned index) {
    Fiber& fiber = block.fibers[index];
    block.current = index;
    threadIdx = {index, 0, 0};
    if (_setjmp(block.scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.context, 1);
    fiber.started = true;
    getcontext(&fiber.entry);
    fiber.entry.uc_stack.ss_sp = block.stacks + index * (STACK_BYTES + PAGE) + PAGE;
    fiber.entry.uc_stack.ss_size = STACK_BYTES;
    fiber.entry.uc_link = nullptr;
    makecontext(&fiber.entry, fiber_main, 0);
    setcontext(&fiber.entry);
}

// As many as a block needs, since each is two mappings, of which Linux gives a process 65,530: many libraries share them.
inline void make_stacks() {
    if (block.threads <= block.num_stacks) return;
    if (block.stacks) munmap(block.stacks, block.num_stacks * (STACK_BYTES + PAGE));
    block.num_stacks = (block.threads + 63) / 64 * 64;
    void* memory = mmap(nullptr, block.num_stacks * (STACK_BYTES + PAGE), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bool made = memory != MAP_FAILED;
    block.stacks = static_cast<char*>(memory);
    for (unsigned i = 0; made && i < block.num_stacks; ++i)  // a page below each stack that faults when the stack overflows
        made = mprotect(block.stacks + i * (STACK_BYTES + PAGE), PAGE, PROT_NONE) == 0;
    if (!made) {
        std::perror("stacks for the threads of a CUDA block on the CPU (is vm.max_map_count reached?)");
        std::abort();
    }
    block.fibers.resize(MAX_THREADS);
    for (Fiber& fiber : block.fibers) fiber.started = false;  // those that were suspended had their stacks in the old memory
}

// `__shared__` is `static thread_local` here: all of a library's thread-local variables lie in one range of memory,
// wherever they were declared (functions, templates), and the dynamic linker tells where.
inline int poison_if_ours(dl_phdr_info* info, size_t, void*) {
    const auto anchor = reinterpret_cast<uintptr_t>(&shared_anchor);
    const auto start = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
    for (int i = 0; start && i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type != PT_TLS || anchor < start || anchor >= start + header.p_memsz) continue;
        std::memset(info->dlpi_tls_data, POISON, header.p_memsz);
        return 1;
    }
    return 0;
}
inline void poison_static_shared() {
    shared_anchor = 0;  // makes this thread's range exist
    dl_iterate_phdr(poison_if_ours, nullptr);
    if (shared_anchor != 0xffffffffu) std::abort();
}

inline unsigned char* dynamic_shared() {
    const auto start = reinterpret_cast<uintptr_t>(block.dynamic_shared.data());
    return reinterpret_cast<unsigned char*>((start + 127) & ~uintptr_t(127));
}

inline void describe_deadlock() {
    block.error = "block " + std::to_string(blockIdx.x) + ": deadlock, no thread can go on:";
    std::string last;
    for (unsigned i = 0; i < block.threads; ++i) {
        const Fiber& fiber = block.fibers[i];
        char at[96] = "has exited";
        if (fiber.state == State::AT_BARRIER) std::snprintf(at, sizeof at, "waits at __syncthreads");
        if (fiber.state == State::IN_COLLECTIVE)
            std::snprintf(at, sizeof at, "waits at %s of lanes %08x", fiber.name, fiber.mask);
        if (last != at) block.error += " thread " + std::to_string(i) + " on " + at + ";";
        last = at;
    }
}

inline void run_block() {
    make_stacks();
    poison_static_shared();
    block.dynamic_shared.assign(block.shared_bytes + 128 + CANARY_BYTES, POISON);
    unsigned char* canary = dynamic_shared() + block.shared_bytes;
    std::memset(canary, 0xa5, CANARY_BYTES);
    block.warps.assign((block.threads + WARP - 1) / WARP, Warp());
    block.alive = block.threads;
    block.at_barrier = block.idle_rounds = 0;
    for (unsigned i = 0; i < block.threads; ++i) {
        block.fibers[i].state = State::READY;
        block.warps[i / WARP].alive |= 1u << i % WARP;
    }
    while (block.alive && block.error.empty()) {
        bool progress = false;
        for (unsigned i = 0; i < block.threads && block.error.empty(); ++i) {
#ifdef SM120_HOST_REVERSE
            const unsigned index = block.threads - 1 - i;
#else
            const unsigned index = i;
#endif
            if (block.fibers[index].state != State::READY) continue;
            progress = true;
            resume(index);
        }
        if (!progress && block.error.empty()) describe_deadlock();
        if (++block.idle_rounds > MAX_IDLE_ROUNDS)
            block.error = "block " + std::to_string(blockIdx.x) + ": " + std::to_string(MAX_IDLE_ROUNDS) +
                          " rounds in which threads only slept";
    }
    if (!block.error.empty()) {
        for (Fiber& fiber : block.fibers) fiber.started = false;  // they hang in the middle of a kernel: start afresh
        return;
    }
    for (size_t i = 0; i < CANARY_BYTES; ++i)
        if (canary[i] != 0xa5)
            block.error = "block " + std::to_string(blockIdx.x) + ": wrote past its dynamic shared memory of " +
                          std::to_string(block.shared_bytes) + " bytes";
}

// Runs a grid; returns what went wrong, or nullptr.
inline const char* launch(int grid, int threads, int shared_bytes, void (*kernel)(const void*), const void* args) {
    const std::lock_guard<std::mutex> turn(one_launch);
    static char message[4096];
    block.error.clear();
    block.kernel = kernel;
    block.args = args;
    block.threads = unsigned(threads);
    block.shared_bytes = size_t(shared_bytes);
    gridDim = {unsigned(grid), 1, 1};
    blockDim = {unsigned(threads), 1, 1};
    for (int i = 0; i < grid && block.error.empty(); ++i) {
#ifdef SM120_HOST_REVERSE
        blockIdx = {unsigned(grid - 1 - i), 0, 0};
#else
        blockIdx = {unsigned(i), 0, 0};
#endif
        run_block();
    }
    std::snprintf(message, sizeof message, "%s", block.error.c_str());
    return block.error.empty() ? nullptr : message;
}

}  // namespace sm120_host
