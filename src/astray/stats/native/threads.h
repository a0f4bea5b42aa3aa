// Chunks of work, spread over threads.
//
// A chunk is a fixed number of elements whatever the number of threads, with one partial result each, merged in order: so
// threads do not change a single bit of a result.

#ifndef ASTRAY_STATS_THREADS_H
#define ASTRAY_STATS_THREADS_H

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "lanes.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace {

constexpr int64_t kChunk = 1 << 18;        // a few hundred microseconds of work
constexpr int64_t kThreadBytes = 2 << 20;  // per thread: starting one costs about 30 us

// Subnormal numbers are kept here, whatever mode the program has set the processor to.
class KeepSubnormals {
#if defined(__x86_64__) || defined(_M_X64)
    static constexpr unsigned kFlush = 0x8040;  // flush to zero, denormals are zero
    const unsigned saved_ = _mm_getcsr();

  public:
    KeepSubnormals() { if (saved_ & kFlush) _mm_setcsr(saved_ & ~kFlush); }
    ~KeepSubnormals() { if (saved_ & kFlush) _mm_setcsr(saved_); }
#elif defined(__aarch64__) && GNU_VECTORS
    static constexpr uint64_t kFlush = (1u << 24) | (1u << 19);  // FZ, FZ16
    uint64_t saved_;

  public:
    KeepSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        if (saved_ & kFlush) asm volatile("msr fpcr, %0" : : "r"(saved_ & ~kFlush));
    }
    ~KeepSubnormals() { if (saved_ & kFlush) asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
  public:
    KeepSubnormals() {}
    ~KeepSubnormals() {}
#endif
    KeepSubnormals(const KeepSubnormals &) = delete;
    KeepSubnormals &operator=(const KeepSubnormals &) = delete;
};

std::atomic<int> thread_limit{1};

// Calls task(i) for every i below `tasks`. Threads are started for each call and not kept: a pool would not survive
// a fork, and DataLoader workers are forked.
template <class Task> void run_tasks(int64_t tasks, int64_t bytes, const Task &task) {
    int64_t threads = bytes / kThreadBytes;
    if (threads > thread_limit) threads = thread_limit;
    if (threads > tasks) threads = tasks;
    std::atomic<int64_t> next{0};
    auto work = [&] {
        KeepSubnormals subnormals;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(i);
    };
    std::vector<std::thread> others;
    try {
        for (int64_t t = 1; t < threads; ++t) others.emplace_back(work);
    } catch (const std::system_error &) {
        // No more threads can be started; the existing ones do the work.
    }
    work();
    for (auto &thread : others) thread.join();
}

template <class Part, class Chunk> Part by_chunks(int64_t count, int64_t bytes, const Chunk &chunk) {
    std::vector<Part> parts((count + kChunk - 1) / kChunk);
    run_tasks(parts.size(), bytes, [&](int64_t i) { parts[i] = chunk(i * kChunk, std::min(count, (i + 1) * kChunk)); });
    Part result;
    for (const auto &part : parts) result.merge(part);
    return result;
}

}  // namespace

#endif
