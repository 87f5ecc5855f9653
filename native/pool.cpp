#include "pool.h"

#include <algorithm>
#include <stdexcept>

namespace headrace {

namespace {

constexpr int THREADS_BITS = 10;  // of `job_`
constexpr uint32_t THREADS_MASK = (1u << THREADS_BITS) - 1;

}  // namespace

Pool::Pool(int num_threads)
    : num_threads_(num_threads < 1 ? 1 : num_threads),
      // With more threads than processors, who is waited for may need the very core that the waiting burns.
      spins_(num_threads <= (int)std::thread::hardware_concurrency()),
      attendance_(num_threads_),
      threads_(num_threads_),
      seats_(num_threads_),
      waited_(num_threads_) {
    if (num_threads_ > (int)THREADS_MASK) throw std::invalid_argument("more than 1023 threads");
    for (int thread = 1; thread < num_threads_; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
    is_closing_.store(true);
    change(job_, job_ + (1 << THREADS_BITS));
    change(seats_, num_threads_);  // one for each; of any other number a resting thread might just have seen the same
    for (auto& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& body) {
    if (num_threads_ == 1) return body(0);
    body_ = &body;
    const int64_t begin = now();
    threads_ = attendance_.threads();
    for (Waited& each : waited_) each.nanoseconds = 0;
    if (seats_.load(std::memory_order_relaxed) != threads_) change(seats_, threads_);
    const uint32_t number = (job_.load(std::memory_order_relaxed) >> THREADS_BITS) + 1;
    change(job_, number << THREADS_BITS | threads_);
    body(0);
    waited_[0].nanoseconds += meet([] {}, [] {});  // the body must not go out of scope while a worker is in it
    int64_t waited = 0;
    for (const Waited& each : waited_) waited = std::max(waited, each.nanoseconds);
    const int64_t end = now();
    attendance_.add(end, end - begin, waited);
}

void Pool::work(int thread) {
    uint32_t seen = 0;
    while (true) {
        wait_while(job_, seen, [] {});
        seen = job_.load(std::memory_order_acquire);
        if (is_closing_.load()) return;
        if ((int)(seen & THREADS_MASK) > thread) {
            (*body_)(thread);
            meet([] {}, [] {});
            continue;
        }
        // Until a later run has a place for it; no run can end without a thread that has one.
        for (uint32_t seats; (int)(seats = seats_.load(std::memory_order_acquire)) <= thread;)
            seats_.wait(seats, std::memory_order_acquire);
    }
}

}  // namespace headrace
