// Reductions over the vocabulary, one row at a time: argmax, Gumbel-max with counter-based noise, log-sum-exp.
// The noise is that of runtime/sampling.py, bit for bit up to the rounding of the logarithms.
#include <limits>
#include "threads.h"
#include "vector.h"

using namespace paceline;

namespace {

typedef uint64_t u64x8 __attribute__((vector_size(64)));

template <typename Integer> static inline Integer mix(Integer z) {  // splitmix64's finaliser
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

constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15ull;
constexpr float MAX_NOISE = 17.3287f;  // -log(-log(1 - 2^-25))

// The noise of one token, in double like the reference, rounded once.
float gumbel_noise(uint64_t row, int token) {
    const uint64_t bits = mix(row + uint64_t(token + 1) * GOLDEN) >> 40;
    return float(-std::log(-std::log((double(bits) + 0.5) * 0x1p-24)));
}

int gumbel_row(const float* x, int size, uint64_t row) {
    int winner = argmax_row(x, size);
    float best = x[winner] + gumbel_noise(row, winner);
    const auto consider = [&](int token) {
        const float score = x[token] + gumbel_noise(row, token);
        if (score > best || (score == best && token < winner)) best = score, winner = token;
    };
    // A token at distance g below the best score needs noise above g, that is 1 - u < 1 - exp(-exp(-g)) <= exp(-g):
    // only tokens that pass this (with slack for rounding) pay for logarithms.
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        const f32x16 logits = load(x + i);
        if (maximum(logits) < best - 1.01f * MAX_NOISE) continue;
        const f32x16 needed = fma(exponential(logits - splat(best)), splat(1.001f), splat(1e-7f));
        float limits[LANES];
        store(limits, needed);
        u64x8 low = {0, 1, 2, 3, 4, 5, 6, 7};
        low = mix((low + uint64_t(i + 1)) * GOLDEN + row) >> 40;
        u64x8 high = {8, 9, 10, 11, 12, 13, 14, 15};
        high = mix((high + uint64_t(i + 1)) * GOLDEN + row) >> 40;
        for (int lane = 0; lane < LANES; ++lane) {
            const float bits = float(int32_t(0xffffff - (lane < 8 ? low[lane % 8] : high[lane % 8])));
            if ((bits + 0.5f) * 0x1p-24f <= limits[lane]) consider(i + lane);
        }
    }
    for (; i < size; ++i) consider(i);
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
    if (rows == 1) return row(0);  // waking threads would take longer
    auto& threads = *static_cast<ThreadPool*>(pool);
    threads.run([&](int) { threads.for_each(rows, 1, [&](int i, int) { row(i); }); });
}

}  // namespace

// Rows of `size` logits are `stride` apart.
extern "C" {

void paceline_argmax(const float* logits, int rows, int size, int64_t stride, int32_t* tokens, void* pool) {
    each_row(pool, rows, [&](int i) { tokens[i] = argmax_row(logits + i * stride, size); });
}

// states[i]: the mixed seed and position of row i, from which its noise is drawn by token id.
void paceline_gumbel_argmax(const float* logits, int rows, int size, int64_t stride, const uint64_t* states,
                            int32_t* tokens, void* pool) {
    each_row(pool, rows, [&](int i) { tokens[i] = gumbel_row(logits + i * stride, size, states[i]); });
}

void paceline_logsumexp(const float* logits, int rows, int size, int64_t stride, float* out, void* pool) {
    each_row(pool, rows, [&](int i) { out[i] = logsumexp_row(logits + i * stride, size); });
}

}  // extern "C"
