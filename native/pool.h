// A fixed set of threads that run one function together, with barriers inside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace headrace {

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

    // body(thread) on every thread; returns when all have returned. One run at a time.
    void run(const std::function<void(int)>& body);

    // Inside a run: nobody passes before all threads have arrived. Who comes last does `alone` before they all go on.
    template <class Alone>
    void barrier(const Alone& alone) {
        if (num_threads_ == 1) return alone();
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == (uint32_t)num_threads_) {
            alone();
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            phase_.notify_all();
        } else {
            wait_while(phase_, phase);
        }
    }

private:
    void work(int thread);
    void wait_while(const std::atomic<uint32_t>& value, uint32_t old) const;

    const int num_threads_;
    const bool spins_;
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) std::atomic<uint32_t> job_{0};       // counts runs; workers wait for the next
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};     // counts barriers
    std::atomic<bool> is_closing_{false};
    std::vector<std::thread> workers_;
};

}  // namespace headrace
