// A fixed set of threads that run one function together, with barriers inside it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

// Nanoseconds of a clock that only goes forward.
inline int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// How many of the threads are worth waiting for. Where other work has taken the core of one, all others wait for it at
// each barrier, until its time slice comes: a step of one stream on two cores takes seven times as long, and twice as long
// without that thread. So where waiting takes more than a thread's share of the time, one thread fewer runs for a while.
// (More than a quarter in any case: some of the waiting of many threads is for want of tiles.)
class Attendance {
public:
    explicit Attendance(int most) : most_(most), threads_(most) {}

    int threads() const { return threads_; }

    // A run that ended at `end` took so long, of which some thread waited so long for others; nanoseconds.
    void add(int64_t end, int64_t took, int64_t waited) {
        took_ += took;
        waited_ += waited;
        if (took_ < WINDOW) return;
        if (threads_ > 1 && waited_ * std::min(threads_, 4) > took_) {
            rest_ = end - raised_ < PROVEN ? std::min(2 * rest_, LONGEST_REST) : SHORTEST_REST;
            until_ = end + rest_;
            --threads_;
        } else if (threads_ < most_ && end >= until_) {
            raised_ = end;
            ++threads_;
        }
        took_ = waited_ = 0;
    }

private:
    static constexpr int64_t MS = 1'000'000;
    static constexpr int64_t WINDOW = 50 * MS;  // longer than what a client or an event loop does at once
    static constexpr int64_t SHORTEST_REST = 50 * MS, LONGEST_REST = 800 * MS;  // before another one is tried again
    static constexpr int64_t PROVEN = 200 * MS;

    const int most_;
    int threads_;
    int64_t took_ = 0, waited_ = 0;  // since the last decision
    int64_t raised_ = 0, rest_ = SHORTEST_REST, until_ = 0;
};

// Thread 0 is the caller of `run`; the others sleep between runs and cost nothing. Waiting spins for a while (a barrier
// is usually over in a microsecond) and then sleeps, so that a thread whose core was taken does not hold up others that
// could use theirs.
class Pool {
public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return num_threads_; }
    // Of these, the threads of the latest run (`Attendance`). Any thread may ask.
    int attending() const { return (int)seats_.load(std::memory_order_relaxed); }

    // body(thread) on every thread that takes part (`Attendance`), always on 0; returns when all have returned. One run
    // at a time.
    void run(const std::function<void(int)>& body);

    // Inside a run: none of its threads passes before all have arrived. Who comes last does `alone` before they all go on;
    // the others do `meanwhile`, a little at a time.
    template <class Alone, class Meanwhile>
    void barrier(int thread, const Alone& alone, const Meanwhile& meanwhile) {
        waited_[thread].nanoseconds += meet(alone, meanwhile);
    }

private:
    // Longer than the attention that one thread does for all (a wake-up costs as much again), shorter than a time slice.
    // (With 1 ms, a step of one stream took 170 ms beside a program that keeps one of two cores busy: who spins holds the core
    // that the thread it waits for could have.)
    static constexpr int64_t SPIN = 100'000;  // nanoseconds
    static constexpr int SPINS_PER_LOOK = 32;  // at the clock

    // Sequentially consistent: the library's `notify_all` first looks whether anybody sleeps, and would not see who is just
    // about to, and does not see the new value yet.
    static void change(std::atomic<uint32_t>& value, uint32_t to) {
        value.store(to, std::memory_order_seq_cst);
        value.notify_all();
    }
    // How long that took, in nanoseconds, if it was not over while spinning; as is the next.
    template <class Alone, class Meanwhile>
    int64_t meet(const Alone& alone, const Meanwhile& meanwhile) {
        const uint32_t threads = threads_;
        if (threads == 1) return alone(), 0;
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 != threads) return wait_while(phase_, phase, meanwhile);
        alone();
        arrived_.store(0, std::memory_order_relaxed);
        change(phase_, phase + 1);
        return 0;
    }
    void work(int thread);
    template <class Meanwhile>
    int64_t wait_while(const std::atomic<uint32_t>& value, uint32_t old, const Meanwhile& meanwhile) const {
        const int64_t begin = now();
        if (spins_) {
            do {
                for (int spin = 0; spin < SPINS_PER_LOOK; ++spin) {
                    if (value.load(std::memory_order_acquire) != old) return 0;
                    meanwhile();
                    relax();
                }
            } while (now() < begin + SPIN);
        }
        while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
        return now() - begin;
    }

    const int num_threads_;
    const bool spins_;
    Attendance attendance_;
    uint32_t threads_;  // of the run: those below it; changes between runs only
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) std::atomic<uint32_t> job_{0};  // a run's number, and in the lowest bits its threads; they wait for it
    // Threads of the latest run; others sleep until it has more. Not at a multiple of 64, as the rest: the library takes
    // who sleeps here for one of those who wait there, and would call the system at every barrier.
    std::atomic<uint32_t> seats_{0};
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};  // counts barriers
    struct alignas(64) Waited {
        int64_t nanoseconds = 0;  // in this run, at its inner barriers
    };
    std::vector<Waited> waited_;
    std::atomic<bool> is_closing_{false};
    std::vector<std::thread> workers_;
};

}  // namespace headrace
