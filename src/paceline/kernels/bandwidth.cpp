// How fast this machine's memory can be read by the decoder's own threads: the limit that a step is held against.
#include "threads.h"
#include "vector.h"

using namespace paceline;

extern "C" {

// Read `size` bytes (a multiple of 64) once, in pieces handed out as the decoder's layers are; returns their xor, so that
// nothing can be left out.
uint64_t paceline_read(const void* memory, size_t size, void* pool) {
    constexpr size_t PIECE = 1 << 18;
    auto& threads = *static_cast<ThreadPool*>(pool);
    std::atomic<uint64_t> total{0};
    threads.run([&](int) {
        threads.for_each(int((size + PIECE - 1) / PIECE), 1, [&](int piece, int) {
            typedef uint64_t u64x8 __attribute__((vector_size(64)));
            const auto* from = static_cast<const u64x8*>(memory) + size_t(piece) * (PIECE / 64);
            const size_t count = std::min(PIECE, size - size_t(piece) * PIECE) / 64;
            u64x8 sums[4] = {};
            size_t i = 0;
            for (; i + 4 <= count; i += 4)
                for (int j = 0; j < 4; ++j) sums[j] ^= from[i + j];
            for (; i < count; ++i) sums[0] ^= from[i];
            const u64x8 all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
            uint64_t folded = 0;
            for (int j = 0; j < 8; ++j) folded ^= all[j];
            total.fetch_xor(folded, std::memory_order_relaxed);
        });
    });
    return total;
}

}  // extern "C"
