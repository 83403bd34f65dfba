// Reductions over the vocabulary, one row at a time: argmax, Gumbel-max with counter-based noise, log-sum-exp.
// The noise is that of runtime/sampling.py, bit for bit up to the rounding of the logarithms.
#include <limits>
#include "threads.h"
#include "vector.h"

using namespace paceline;

namespace {

static inline uint64_t mix(uint64_t z) {  // splitmix64's finaliser
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The first index of the largest value.
int argmax_row(const float* x, int size) {
    f32x16 best = splat(-std::numeric_limits<float>::infinity());
    i32x16 at = splat(0), index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        const f32x16 v = load(x + i);
        at = v > best ? index : at;
        best = maximum(v, best);
        index += LANES;
    }
    float largest = -std::numeric_limits<float>::infinity();
    int winner = 0;
    for (int lane = 0; lane < LANES; ++lane)
        if (best[lane] > largest || (best[lane] == largest && at[lane] < winner)) largest = best[lane], winner = at[lane];
    for (; i < size; ++i)
        if (x[i] > largest) largest = x[i], winner = i;
    return winner;
}

int gumbel_row(const float* x, int size, uint64_t key) {
    float largest = -std::numeric_limits<float>::infinity();
    int winner = 0;
    for (int token = 0; token < size; ++token) {
        if (x[token] == -std::numeric_limits<float>::infinity()) continue;
        const uint64_t bits = mix(key + uint64_t(token) * 0x9e3779b97f4a7c15ull) >> 40;
        const float u = (float(bits) + 0.5f) * 0x1p-24f;
        // The noise of u is at most -log(1 - u) below its bound: skip the logarithms that cannot win.
        if (x[token] + 17.5f < largest) continue;
        const float value = x[token] - std::log(-std::log(u));
        if (value > largest) largest = value, winner = token;
    }
    return winner;
}

float logsumexp_row(const float* x, int size) {
    f32x16 best = splat(-std::numeric_limits<float>::infinity());
    int i = 0;
    for (; i + LANES <= size; i += LANES) best = maximum(best, load(x + i));
    float largest = maximum(best);
    for (; i < size; ++i) largest = x[i] > largest ? x[i] : largest;
    f32x16 total = splat(0.0f);
    for (i = 0; i + LANES <= size; i += LANES) total += exponential(load(x + i) - splat(largest));
    float rest = sum(total);
    for (; i < size; ++i) rest += exponential(x[i] - largest);
    return largest + std::log(rest);
}

template <typename Row> void each_row(void* pool, int rows, Row&& row) {
    auto& threads = *static_cast<ThreadPool*>(pool);
    threads.run([&](int) { threads.for_each(rows, 1, [&](int i, int) { row(i); }); });
}

}  // namespace

extern "C" {

void paceline_argmax(const float* logits, int rows, int size, int32_t* tokens, void* pool) {
    each_row(pool, rows, [&](int i) { tokens[i] = argmax_row(logits + size_t(i) * size, size); });
}

// keys[i]: the mixed (seed, position) of row i.
void paceline_gumbel_argmax(const float* logits, int rows, int size, uint64_t unused, const uint64_t* keys,
                            int32_t* tokens, void* pool) {
    (void)unused;
    each_row(pool, rows, [&](int i) { tokens[i] = gumbel_row(logits + size_t(i) * size, size, keys[i]); });
}

void paceline_logsumexp(const float* logits, int rows, int size, float* out, void* pool) {
    each_row(pool, rows, [&](int i) { out[i] = logsumexp_row(logits + size_t(i) * size, size); });
}

}  // extern "C"
