#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

namespace {

// Longer than the attention that one thread does for all (a wake-up costs as much again), shorter than a time slice.
// (With 1 ms, a step of one stream took 170 ms beside a program that keeps one of two cores busy: who spins holds the core
// that the thread it waits for could have.)
constexpr auto SPIN = std::chrono::microseconds(100);
constexpr int SPINS_PER_LOOK = 32;  // at the clock

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int num_threads)
    : num_threads_(num_threads < 1 ? 1 : num_threads),
      // With more threads than processors, who is waited for may need the very core that the waiting burns.
      spins_(num_threads <= (int)std::thread::hardware_concurrency()) {
    for (int thread = 1; thread < num_threads_; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
    is_closing_.store(true);
    job_.fetch_add(1);
    job_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::wait_while(const std::atomic<uint32_t>& value, uint32_t old) const {
    if (spins_) {
        const auto end = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int spin = 0; spin < SPINS_PER_LOOK; ++spin) {
                if (value.load(std::memory_order_acquire) != old) return;
                relax();
            }
        } while (std::chrono::steady_clock::now() < end);
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

void Pool::run(const std::function<void(int)>& body) {
    body_ = &body;
    if (num_threads_ > 1) {
        job_.fetch_add(1, std::memory_order_release);
        job_.notify_all();
    }
    body(0);
    barrier([] {});  // the body must not go out of scope while a worker is in it
}

void Pool::work(int thread) {
    uint32_t seen = 0;
    while (true) {
        wait_while(job_, seen);
        seen = job_.load(std::memory_order_acquire);
        if (is_closing_.load()) return;
        (*body_)(thread);
        barrier([] {});
    }
}

}  // namespace headrace
