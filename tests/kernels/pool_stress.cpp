// The thread pool at work on more threads than cores, for a sanitiser to watch: phases that read what other threads
// wrote in the phase before, in runs between which threads are left out and brought back.
#include "threads.h"
#include <cstdio>
using namespace paceline;
int main() {
    for (int threads = 1; threads <= 4; ++threads) {
        ThreadPool pool(threads);
        std::vector<long> a(1000), b(1000);
        long bad = 0;
        int fewest = threads;
        for (int round = 0; round < 400; ++round) {
            pool.run([&](int thread) {
                for (int phase = 0; phase < 6; ++phase) {
                    pool.for_each(1000, 7, [&](int first, int last) {
                        for (int i = first; i < last; ++i) a[i] = round + phase + (phase ? b[999 - i] : 0);
                    });
                    pool.for_each_in_stretches(thread, 1000, 8, [&](int first, int last, int) {
                        for (int i = first; i < last; ++i) b[i] = a[999 - i];
                    });
                }
            });
            fewest = std::min(fewest, pool.num_active());
            for (int i = 0; i < 1000; ++i) bad += b[i] != 6L * round + 15;
        }
        printf("%d threads, as few as %d: %ld wrong\n", threads, fewest, bad);
        if (bad) return 1;
    }
}
