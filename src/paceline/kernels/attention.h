// Attention of a tile of query rows over one paged sequence, one KV head, one segment of positions.
//
// A cache block holds 16 positions: keys as [kv_head][head_dim][16] so that lanes are positions, values as
// [kv_head][16][head_dim]. A segment is 128 positions at a fixed place, so its softmax is computed at once and the
// segments of a row are combined in order, whatever rows share the pass: a row's bits depend on its own query and
// cache alone (online softmax: Milakov and Gimelshein, arXiv 1805.02867; split over positions as in flash-decoding).
#pragma once
#include <algorithm>
#include <limits>
#include "vector.h"

namespace paceline {

constexpr int KV_BLOCK = 16;
constexpr int SEGMENT = 128;
constexpr int MAX_HEAD_DIM = 256;
constexpr int SCORE_STRIDE = SEGMENT + LANES;
constexpr int MAX_QUERIES = 16;

struct AttentionShape {
    int head_dim;
    float scale, softcap;  // softcap 0: none
    int window;            // 0: none, else positions seen including one's own
};

// One query head's view of a segment: unnormalised output, the largest score and the sum of weights.
struct Partial {
    float largest, total;
};

// Queries q[0..Q) of one KV head. For query i: position[i]; its result goes to partial[i] and out[i] (head_dim floats).
// STRIDE: floats between queries, at least head_dim; a constant, so that one register reaches all of them.
template <int Q, int STRIDE, typename KV>
static inline void attend_segment(const float* queries /* [Q][STRIDE] */, const int* position, int count,
                                  const KV* keys, const KV* values, size_t block_stride, const int32_t* block_table,
                                  int segment, const AttentionShape& shape, Partial** partial, float** out,
                                  float* scores /* [Q][SCORE_STRIDE] */) {
    const int begin = segment * SEGMENT;
    int newest = 0, oldest = std::numeric_limits<int>::max();
    for (int i = 0; i < count; ++i) {
        newest = std::max(newest, position[i]);
        oldest = std::min(oldest, shape.window ? std::max(0, position[i] - shape.window + 1) : 0);
    }
    const int first_block = std::max(begin, oldest) / KV_BLOCK;
    const int last_block = std::min(begin + SEGMENT - 1, newest) / KV_BLOCK;  // inclusive

    for (int b = first_block; b <= last_block; ++b) {
        const KV* k = keys + size_t(block_table[b]) * block_stride;
        f32x16 acc[Q];
        for (int i = 0; i < Q; ++i) acc[i] = splat(0.0f);
        for (int d = 0; d < shape.head_dim; ++d) {
            const f32x16 key = load(k + d * KV_BLOCK);
#pragma GCC unroll 16
            for (int i = 0; i < Q; ++i) acc[i] = fma(splat(queries[i * STRIDE + d]), key, acc[i]);
        }
        for (int i = 0; i < Q; ++i) store(scores + i * SCORE_STRIDE + b * KV_BLOCK - begin, acc[i]);
    }

    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < count; ++i) {
        float* row = scores + i * SCORE_STRIDE;
        const int low = shape.window ? std::max(0, position[i] - shape.window + 1) : 0;
        f32x16 top = splat(-std::numeric_limits<float>::infinity());
        for (int b = first_block; b <= last_block; ++b) {
            f32x16 s = load(row + b * KV_BLOCK - begin) * splat(shape.scale);
            if (shape.softcap > 0.0f) s = splat(shape.softcap) * hyperbolic_tangent(s / splat(shape.softcap));
            if (b * KV_BLOCK + LANES - 1 > position[i] || b * KV_BLOCK < low) {
                const i32x16 at = lane + b * KV_BLOCK;
                s = ((at <= splat(position[i])) & (at >= splat(low))) ? s : splat(-std::numeric_limits<float>::infinity());
            }
            store(row + b * KV_BLOCK - begin, s);
            top = maximum(top, s);
        }
        const float largest = maximum(top);
        const bool seen = largest > -std::numeric_limits<float>::infinity();
        f32x16 total = splat(0.0f);
        for (int b = first_block; b <= last_block; ++b) {
            const f32x16 s = load(row + b * KV_BLOCK - begin);
            const f32x16 p = seen ? exponential(s - splat(largest)) : splat(0.0f);
            store(row + b * KV_BLOCK - begin, p);
            total += p;
        }
        *partial[i] = {largest, sum(total)};
    }

    for (int d = 0; d < shape.head_dim; d += LANES) {
        f32x16 acc[Q];
        for (int i = 0; i < Q; ++i) acc[i] = splat(0.0f);
        for (int b = first_block; b <= last_block; ++b) {
            const KV* v = values + size_t(block_table[b]) * block_stride + d;
            const float* weight = scores + b * KV_BLOCK - begin;
            for (int t = 0; t < KV_BLOCK; ++t) {
                const f32x16 value = load(v + t * shape.head_dim);
#pragma GCC unroll 16
                for (int i = 0; i < Q; ++i) acc[i] = fma(splat(weight[i * SCORE_STRIDE + t]), value, acc[i]);
            }
        }
        for (int i = 0; i < count; ++i) store(out[i] + d, acc[i]);
    }
}

}  // namespace paceline
