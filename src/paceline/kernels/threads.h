// A pool of threads that run one function together and meet at barriers. The caller is thread 0. Waiting spins first
// (a decode step has hundreds of barriers a few microseconds apart) and then yields or sleeps, so that a busy machine
// is not fought.
#pragma once
#include <algorithm>
#include <atomic>
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
public:
    explicit ThreadPool(int num_threads) : num_threads_(num_threads), stretch_cursors_(size_t(num_threads) * NUM_CURSORS) {
        for (int id = 1; id < num_threads; ++id) workers_.emplace_back([this, id] { work(id); });
    }
    ~ThreadPool() {
        stopping_ = true;
        generation_.fetch_add(1);
        generation_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    int num_threads() const { return num_threads_; }

    // Run task(thread) on every thread; returns when all are done.
    template <typename Task> void run(Task&& task) {
        task_ = std::ref(task);
        generation_.fetch_add(1);
        generation_.notify_all();
        task_(0);
        barrier();
    }

    void barrier() {
        if (num_threads_ == 1) { advance(); return; }
        const uint64_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            advance();
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins)
            spins < 2000 ? spin_pause() : (void)sched_yield();
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
        for (int turn = 0; turn < num_threads_; ++turn) {
            const int owner = (thread + turn) % num_threads_;
            auto& cursor = stretch_cursors_[size_t(owner) * NUM_CURSORS + phase % NUM_CURSORS].next;
            const int begin = int(grains * owner / num_threads_) * grain;
            const int end = std::min(int(grains * (owner + 1) / num_threads_) * grain, count);
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
    void work(int id) {
        uint64_t seen = 0;
        for (;;) {
            for (int spins = 0; generation_.load(std::memory_order_acquire) == seen; ++spins)
                spins < 4000 ? spin_pause() : generation_.wait(seen);
            seen += 1;
            if (stopping_) return;
            task_(id);
            barrier();
        }
    }

    static constexpr int NUM_CURSORS = 4;
    struct alignas(64) Cursor { std::atomic<int> next{0}; };
    int num_threads_;
    std::vector<Cursor> stretch_cursors_;  // [thread][phase]
    std::vector<std::thread> workers_;
    std::function<void(int)> task_;
    std::atomic<bool> stopping_{false};
    Cursor cursors_[NUM_CURSORS];
    alignas(64) std::atomic<uint64_t> generation_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint64_t> phase_{0};
};

}  // namespace paceline
