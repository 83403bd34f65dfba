// A pool of threads that run one function together and meet at barriers. The caller is thread 0. Waiting spins first
// (a decode step has hundreds of barriers a few microseconds apart) and then yields. Sleeping at barriers was measured
// to be worse on a busy machine: a thread that wakes queues behind the neighbour again.
//
// Where other programs keep the cores busy every barrier waits for the thread that has just lost its core, and two
// threads take several times as long as one. So a thread is left out for a while when waiting costs more than the
// thread brings. How many threads take part never changes a result.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <sched.h>
#include <thread>
#include <vector>

namespace paceline {

static inline void spin_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class ThreadPool {
    using Clock = std::chrono::steady_clock;

public:
    explicit ThreadPool(int num_threads)
        : num_threads_(num_threads), num_active_(num_threads), stretch_cursors_(size_t(num_threads) * NUM_CURSORS),
          calls_(num_threads) {
        for (int id = 1; id < num_threads; ++id) workers_.emplace_back([this, id] { work(id); });
    }
    ~ThreadPool() {
        stopping_ = true;
        for (int id = 1; id < num_threads_; ++id) call(id);
        for (auto& worker : workers_) worker.join();
    }
    int num_threads() const { return num_threads_; }  // at most; task() sees thread numbers below this
    int num_active() const { return num_active_; }    // in the next run

    // Run task(thread) on every thread that takes part; returns when all are done.
    template <typename Task> void run(Task&& task) {
        task_ = std::ref(task);
        waited_.store(0, std::memory_order_relaxed);
        const auto start = Clock::now();
        for (int id = 1; id < num_active_; ++id) call(id);
        task_(0);
        barrier();
        const auto end = Clock::now();
        judge(end, end - start, Clock::duration(waited_.load(std::memory_order_relaxed)));
    }

    void barrier() {
        // Read before arriving: once the last one is here, thread 0 may go on to a run of fewer threads.
        const int last = num_active_ - 1;
        if (last == 0) return advance();
        const uint64_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == last) {
            arrived_.store(0, std::memory_order_relaxed);
            return advance();
        }
        for (int spins = 0; spins < BARRIER_SPINS; ++spins, spin_pause())
            if (phase_.load(std::memory_order_acquire) != phase) return;
        const auto start = Clock::now();
        while (phase_.load(std::memory_order_acquire) == phase) sched_yield();
        waited_.fetch_add((Clock::now() - start).count(), std::memory_order_relaxed);
    }

    // Hand out items 0..count-1 in runs of `grain` to whichever thread is free, then meet. Which thread computes an
    // item never changes its result.
    template <typename Body> void for_each(int count, int grain, Body&& body) {
        auto& cursor = cursors_[phase_.load(std::memory_order_relaxed) % NUM_CURSORS].next;
        for (int first; (first = cursor.fetch_add(grain, std::memory_order_relaxed)) < count;)
            body(first, first + grain < count ? first + grain : count);
        barrier();
    }

    // The same for work that streams through memory: every thread has a stretch of its own, so that what it fetches
    // ahead is what it will need, and helps itself from the others' stretches when it is through.
    // body(first, last, end): end is where the stretch ends.
    template <typename Body> void for_each_in_stretches(int thread, int count, int grain, Body&& body) {
        const uint64_t phase = phase_.load(std::memory_order_relaxed);
        const int64_t grains = (count + grain - 1) / grain;
        for (int turn = 0; turn < num_active_; ++turn) {
            const int owner = (thread + turn) % num_active_;
            auto& cursor = stretch_cursors_[size_t(owner) * NUM_CURSORS + phase % NUM_CURSORS].next;
            const int begin = int(grains * owner / num_active_) * grain;
            const int end = std::min(int(grains * (owner + 1) / num_active_) * grain, count);
            for (int first; (first = begin + cursor.fetch_add(grain, std::memory_order_relaxed)) < end;)
                body(first, std::min(first + grain, end), end);
        }
        barrier();
    }

private:
    // The last thread to arrive clears the cursors that the phase after next will use: nobody is there yet.
    void advance() {
        const uint64_t next = phase_.load(std::memory_order_relaxed) + 1;
        const size_t slot = (next + 1) % NUM_CURSORS;
        cursors_[slot].next.store(0, std::memory_order_relaxed);
        for (int owner = 0; owner < num_threads_; ++owner)
            stretch_cursors_[size_t(owner) * NUM_CURSORS + slot].next.store(0, std::memory_order_relaxed);
        phase_.store(next, std::memory_order_release);
    }
    // What a run says about the machine. The threads waited `waited` beyond spinning, summed over those that did: all
    // but one, when one is missing. Twice in a row that was more than half of what one thread fewer would cost at most:
    // leave one out, for longer each time that bringing all back turns out to be too early.
    void judge(Clock::time_point now, Clock::duration took, Clock::duration waited) {
        const int others = num_active_ - 1;
        const auto lost = others ? waited / others : Clock::duration{0};
        crowded_runs_ = 2 * others * lost > took - lost ? crowded_runs_ + 1 : 0;
        if (crowded_runs_ == 2) {
            crowded_runs_ = 0;
            num_active_ -= 1;
            until_ = now + pause_;
            pause_ = std::min<Clock::duration>(2 * pause_, LONGEST_PAUSE);
        } else if (now >= until_ && num_active_ < num_threads_) {
            num_active_ = num_threads_;
            until_ = now + pause_;
        } else if (now >= until_) {
            pause_ = FIRST_PAUSE;
        }
    }
    void call(int id) {
        calls_[id].count.fetch_add(1, std::memory_order_release);
        calls_[id].count.notify_one();
    }
    void work(int id) {
        auto& calls = calls_[id].count;
        for (uint32_t seen = 0;;) {
            for (int spins = 0; calls.load(std::memory_order_acquire) == seen; ++spins)
                spins < IDLE_SPINS ? spin_pause() : calls.wait(seen);
            seen += 1;
            if (stopping_) return;
            task_(id);
            barrier();
        }
    }

    static constexpr int BARRIER_SPINS = 2000, IDLE_SPINS = 4000;
    static constexpr Clock::duration FIRST_PAUSE = std::chrono::milliseconds(50);
    static constexpr Clock::duration LONGEST_PAUSE = std::chrono::milliseconds(400);
    static constexpr int NUM_CURSORS = 4;
    struct alignas(64) Cursor { std::atomic<int> next{0}; };
    struct alignas(64) Calls { std::atomic<uint32_t> count{0}; };
    int num_threads_, num_active_;  // num_active_ changes between runs only
    int crowded_runs_ = 0;
    Clock::duration pause_ = FIRST_PAUSE;
    Clock::time_point until_{};
    std::vector<Cursor> stretch_cursors_;  // [thread][phase]
    std::vector<Calls> calls_;             // by thread
    std::vector<std::thread> workers_;
    std::function<void(int)> task_;
    std::atomic<bool> stopping_{false};
    Cursor cursors_[NUM_CURSORS];
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint64_t> phase_{0};
    alignas(64) std::atomic<Clock::rep> waited_{0};
};

}  // namespace paceline
