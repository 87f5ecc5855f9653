// The pool of threads: who takes part when, and that whoever takes part does so once and meets the others at barriers.
#include "../pool.h"

#include <chrono>
#include <thread>

#include "common.h"

namespace headrace {
namespace {

constexpr int64_t MS = 1'000'000;

// Runs of `took` from `time` on, until `end`.
void pass(Attendance& attendance, int64_t& time, int64_t end, int64_t took, int64_t waited) {
    while (time < end) attendance.add(time += took, took, waited);
}

void check_attendance() {
    int64_t time = 1'000 * MS;
    Attendance two(2);
    pass(two, time, time + 1'000 * MS, 5 * MS, 2 * MS);
    EXPECT(two.threads() == 2, "waiting for less than a thread's share");
    two.add(time += 25 * MS, 25 * MS, 20 * MS);
    EXPECT(two.threads() == 2, "one slow run");
    pass(two, time, time + 100 * MS, 5 * MS, 0);
    EXPECT(two.threads() == 2, "one slow run among others");
    pass(two, time, time + 75 * MS, 25 * MS, 20 * MS);
    EXPECT(two.threads() == 1, "waiting for more");
    pass(two, time, time + 25 * MS, 8 * MS, 0);
    EXPECT(two.threads() == 1, "too early to try again");
    int64_t last = time;
    for (int64_t rest : {50, 100, 200, 400, 800, 800, 800}) {  // of two threads who wait again and again
        while (two.threads() == 1) two.add(time += 10 * MS, 10 * MS, 0);
        EXPECT(time - last >= (rest - 50) * MS && time - last <= (rest + 60) * MS, "tried after %ld ms", (long)((time - last) / MS));
        pass(two, time, time + 50 * MS, 25 * MS, 20 * MS);
        EXPECT(two.threads() == 1, "still waiting");
        last = time;
    }
    while (two.threads() == 1) two.add(time += 10 * MS, 10 * MS, 0);
    pass(two, time, time + 400 * MS, 5 * MS, 0);
    pass(two, time, time + 50 * MS, 25 * MS, 20 * MS);
    EXPECT(two.threads() == 1, "waiting again");
    last = time;
    while (two.threads() == 1) two.add(time += 5 * MS, 5 * MS, 0);
    EXPECT(time - last <= 100 * MS, "a pause is short again after a good time");

    Attendance many(8);
    many.add(time += 100 * MS, 100 * MS, 20 * MS);
    EXPECT(many.threads() == 8, "less than a quarter");
    many.add(time += 100 * MS, 100 * MS, 30 * MS);
    EXPECT(many.threads() == 7, "one of eight is late");
    many.add(time += 50 * MS, 50 * MS, 30 * MS);
    EXPECT(many.threads() == 6, "a second one");
    Attendance alone(1);
    pass(alone, time, time + 100 * MS, 5 * MS, 5 * MS);
    EXPECT(alone.threads() == 1, "somebody has to");
}

void check_runs() {
    constexpr int THREADS = 4, RUNS = IS_SHORT ? 400 : 4000, BARRIERS = 3;
    Pool pool(THREADS);
    int fewest = THREADS;
    for (int run = 0; run < RUNS; ++run) {
        std::atomic<int> times[THREADS]{}, arrived[BARRIERS]{}, alone{0};
        std::atomic<bool> met{true};
        pool.run([&](int thread) {
            ++times[thread];
            for (auto& count : arrived) {
                // At first somebody is late in every run, so that fewer take part.
                if (thread == THREADS - 1 && run < RUNS / 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                ++count;
                pool.barrier(thread, [&] { ++alone; }, [] {});
                if (count != arrived[0]) met = false;
            }
        });
        int num = 0;
        while (num < THREADS && times[num] == 1) ++num;
        fewest = std::min(fewest, num);
        for (int thread = num; thread < THREADS; ++thread) EXPECT(times[thread] == 0, "run %d: thread %d of %d", run, thread, num);
        for (auto& count : arrived) EXPECT(num >= 1 && count == num, "run %d: %d of %d came", run, count.load(), num);
        EXPECT(alone == BARRIERS && met, "run %d: the barriers", run);
    }
    EXPECT(fewest < THREADS, "who is always late takes part no more");
}

void check_return() {
    if (std::thread::hardware_concurrency() < 2) return (void)std::puts("left out: threads that come back, on one processor");
    Pool pool(2);
    bool is_gone = false, is_back = false;
    for (int run = 0; !is_back; ++run) {  // however long it takes
        std::atomic<int> num{0};
        pool.run([&](int thread) {
            ++num;
            if (thread == 1 && !is_gone) std::this_thread::sleep_for(std::chrono::milliseconds(4));
        });
        is_back = is_gone && num == 2;
        is_gone = is_gone || num == 1;
    }
    EXPECT(is_back, "a thread rests for ever");
}

void check_end() {  // while threads rest
    for (int pool_number = 0; pool_number < 10; ++pool_number) {
        Pool pool(3);
        for (int run = 0; run < 30; ++run)
            pool.run([&](int thread) {
                if (thread == 2) std::this_thread::sleep_for(std::chrono::milliseconds(4));
            });
    }
}

}  // namespace
}  // namespace headrace

int main(int argc, char** argv) {
    if (argc > 1 && !std::strcmp(argv[1], "--time")) return 0;
    headrace::check_attendance();
    headrace::check_runs();
    headrace::check_return();
    headrace::check_end();
    return headrace::report("pool");
}
