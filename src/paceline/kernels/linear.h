// Linear layers over packed weights, reading every weight from memory once whatever the number of rows.
//
// Weights are stored in blocks of 16 outputs: int8 as uint8[out/16][in/4][16][4] holding q + 128; int4 as
// uint8[out/16][in/32][320], in groups of 32 inputs (see FourBitGroup); bf16 and float32 as [out/16][in][16]. Rows come in tiles of 1, 2, 4 or 8 with the tile's rows interleaved, so that one address
// register and constant offsets reach all of them. The sum of one (row, output) runs over the inputs in one fixed order
// in every tile width: a row's bits do not depend on its neighbours.
#pragma once
#include <algorithm>
#include <vector>
#include "vector.h"

namespace paceline {

enum WeightKind : int32_t { INT8 = 0, BF16 = 1, FLOAT32 = 2, INT4 = 3 };

// Thirty-two inputs of sixteen outputs: weight = scale * nibble + minimum. Byte 4 * output + i of nibbles[j] has input
// 8 * j + i in its low half and input 8 * j + 4 + i in its high half.
struct FourBitGroup {
    static constexpr int INPUTS = 32, VECTORS = 4;
    uint8_t nibbles[VECTORS][64];
    f16 scale[LANES], minimum[LANES];

    float value(int input, int output) const {
        const uint8_t both = nibbles[input / 8][4 * output + input % 4];
        const int nibble = input % 8 < 4 ? both & 15 : both >> 4;
        return to_float(scale[output]) * float(nibble) + to_float(minimum[output]);
    }
};
static_assert(sizeof(FourBitGroup) == 320);

struct Linear {
    const void* weight;
    const float* scale;  // [out], int8 only
    const float* bias;   // [out] or null
    int32_t kind, in, out, group;  // group: inputs that share one activation scale (int8 and int4)

    int blocks() const { return (out + LANES - 1) / LANES; }
    bool quantised() const { return kind == INT8 || kind == INT4; }
};

constexpr int MAX_TILE = 8;

static inline int tile_width(int rows) {
    int width = 1;
    while (width < rows) width *= 2;
    return width;
}

// Sixteen values that fit int8, as four groups of four bytes, `stride` apart.
static inline void store_fours(int8_t* to, size_t stride, i32x16 values) {
    typedef int8_t i8x16 __attribute__((vector_size(16)));
#if defined(__AVX512F__)
    const i8x16 bytes = (i8x16)_mm512_cvtepi32_epi8((__m512i)values);
#else
    const i8x16 bytes = __builtin_convertvector(values, i8x16);
#endif
    int32_t fours[4];
    std::memcpy(fours, &bytes, 16);
    for (int i = 0; i < 4; ++i) std::memcpy(to + i * stride, fours + i, 4);
}

// The rows of one linear layer's input, quantised or not, in tiles. Rows of a tile share cache lines: one thread should
// set all of them. Lanes beyond the last row hold what an earlier step left there; nobody reads their results.
struct Activations {
    std::vector<int8_t> quantised;  // [tile][in/4][width][4]
    std::vector<float> values;      // [tile][in][width], for bf16 and float32 weights
    std::vector<float> scales;      // [tile][group][width]
    std::vector<int32_t> offsets;   // [tile][group][width], -128 * sum of the group's quantised inputs
    std::vector<float> sums;        // [tile][group][width], scale * that sum: what a weight's minimum is multiplied by
    int rows = 0;

    void reserve(int max_rows, int max_in) {
        const size_t padded = size_t(max_rows + MAX_TILE) * max_in;
        quantised.assign(padded, 0);
        values.assign(padded, 0.0f);
        scales.assign(padded / 4, 0.0f);
        offsets.assign(padded / 4, 0);
        sums.assign(padded / 4, 0.0f);
    }
    int num_tiles() const { return (rows + MAX_TILE - 1) / MAX_TILE; }
    int width(int tile) const { return tile_width(std::min(rows - tile * MAX_TILE, MAX_TILE)); }

    void set_row(int row, const float* x, const Linear& layer) { set_part(row, x, layer, 0, layer.in); }

    // Take inputs [first, last) of the row `x` in the form that `layer` wants; whole groups of them. Symmetric int8 per
    // group: scale = max|x| / 127.
    void set_part(int row, const float* x, const Linear& layer, int first, int last) {
        const int tile = row / MAX_TILE, lane = row % MAX_TILE, w = width(tile);
        if (!layer.quantised()) {
            float* out = values.data() + size_t(tile) * MAX_TILE * layer.in + lane;
            for (int k = first; k < last; ++k) out[size_t(k) * w] = x[k];
            return;
        }
        const int groups = layer.in / layer.group;
        int8_t* out = quantised.data() + size_t(tile) * MAX_TILE * layer.in + lane * 4;
        for (int g = first / layer.group; g < last / layer.group; ++g) {
            const float* xs = x + g * layer.group;
            f32x16 top = splat(0.0f);
            int k = 0;
            for (; k + LANES <= layer.group; k += LANES) top = maximum(top, absolute(load(xs + k)));
            float largest = maximum(top);
            for (; k < layer.group; ++k) largest = std::max(largest, std::fabs(xs[k]));
            const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
            i32x16 totals = splat(0);
            int8_t* to = out + size_t(g) * (layer.group / 4) * w * 4;
            for (k = 0; k + LANES <= layer.group; k += LANES, to += 16 * w) {
                const i32x16 q = round_to_int(load(xs + k) * splat(inverse));
                totals += q;
                store_fours(to, size_t(w) * 4, q);
            }
            int32_t total = sum(totals);
            for (; k < layer.group; k += 4, to += 4 * w)
                for (int i = 0; i < 4; ++i) {
                    to[i] = int8_t(std::nearbyint(xs[k + i] * inverse));
                    total += to[i];
                }
            const size_t at = size_t(tile) * MAX_TILE * groups + size_t(g) * w + lane;
            scales[at] = largest / 127.0f;
            offsets[at] = -128 * total;
            sums[at] = scales[at] * float(total);
        }
    }
};

// Sixty-four unsigned bytes, four neighbouring inputs of each of sixteen outputs, and the four inputs of a row.
#if defined(__AVX512VNNI__) && !defined(PACELINE_PORTABLE)
typedef __m512i Bytes;
static inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline Bytes low_halves(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
static inline Bytes high_halves(Bytes v) { return low_halves(_mm512_srli_epi16(v, 4)); }
static inline int32_t load_four(const int8_t* p) { int32_t four; std::memcpy(&four, p, 4); return four; }
// acc[lane] += sum over four neighbours of weight (unsigned) * input (signed): exact in int32.
static inline i32x16 dot4(i32x16 acc, Bytes weight, int32_t four) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, weight, _mm512_set1_epi32(four));
}
#elif defined(__AVX2__) && !defined(PACELINE_PORTABLE)
struct Bytes { __m256i half[2]; };
struct Four { __m256i even, odd; };  // inputs 0 and 2, and 1 and 3, widened to int16
static inline Bytes load_bytes(const uint8_t* p) {
    return {{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}};
}
static inline Bytes low_halves(Bytes v) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {{_mm256_and_si256(v.half[0], mask), _mm256_and_si256(v.half[1], mask)}};
}
static inline Bytes high_halves(Bytes v) {
    return low_halves({{_mm256_srli_epi16(v.half[0], 4), _mm256_srli_epi16(v.half[1], 4)}});
}
static inline Four load_four(const int8_t* p) {
    const auto pair = [](int8_t a, int8_t b) { return _mm256_set1_epi32(int(uint16_t(a)) | int(uint32_t(uint16_t(b)) << 16)); };
    return {pair(p[0], p[2]), pair(p[1], p[3])};
}
// In int16 pairs, because vpmaddubsw saturates; sums of two products of 255 * 127 fit int32.
static inline i32x16 dot4(i32x16 acc, Bytes weight, Four four) {
    __m256i sums[2];
    std::memcpy(sums, &acc, 64);
    for (int h = 0; h < 2; ++h) {
        const __m256i even = _mm256_and_si256(weight.half[h], _mm256_set1_epi16(255));
        const __m256i odd = _mm256_srli_epi16(weight.half[h], 8);
        sums[h] = _mm256_add_epi32(sums[h], _mm256_add_epi32(_mm256_madd_epi16(even, four.even),
                                                             _mm256_madd_epi16(odd, four.odd)));
    }
    std::memcpy(&acc, sums, 64);
    return acc;
}
#else
struct Bytes { uint8_t at[64]; };
static inline Bytes load_bytes(const uint8_t* p) { Bytes v; std::memcpy(v.at, p, 64); return v; }
static inline Bytes low_halves(Bytes v) { for (auto& byte : v.at) byte &= 15; return v; }
static inline Bytes high_halves(Bytes v) { for (auto& byte : v.at) byte >>= 4; return v; }
static inline const int8_t* load_four(const int8_t* p) { return p; }
static inline i32x16 dot4(i32x16 acc, const Bytes& weight, const int8_t* x) {
    for (int i = 0; i < LANES; ++i)
        acc[i] += int32_t(weight.at[4 * i]) * x[0] + int32_t(weight.at[4 * i + 1]) * x[1] +
                  int32_t(weight.at[4 * i + 2]) * x[2] + int32_t(weight.at[4 * i + 3]) * x[3];
    return acc;
}
#endif

// What a pass over one tile asks of memory meanwhile: the next blocks' weights, shared out over the tiles so that
// computing and reading overlap. `first` and `count` are in blocks beyond those being computed.
struct Prefetch { int first, count; };

template <int B> static inline void prefetch(const uint8_t* next, size_t stride, Prefetch ahead) {
    for (int b = 0; b < B; ++b)
        if (b < ahead.count) __builtin_prefetch(next + (ahead.first + b) * stride, 0, 2);
}

// One tile of W rows against B neighbouring blocks of 16 outputs: out[b * W + r].
template <int W, int B>
static inline void tile_int8(const Activations& x, int tile, const Linear& layer, int block, Prefetch ahead,
                             f32x16* out) {
    const int groups = layer.in / layer.group, steps = layer.group / 4;
    const int8_t* q = x.quantised.data() + size_t(tile) * MAX_TILE * layer.in;
    const float* scales = x.scales.data() + size_t(tile) * MAX_TILE * groups;
    const int32_t* offsets = x.offsets.data() + size_t(tile) * MAX_TILE * groups;
    const size_t stride = size_t(layer.in) * LANES;
    const uint8_t* weight = static_cast<const uint8_t*>(layer.weight) + block * stride;
    const uint8_t* next = weight + B * stride;
    for (int i = 0; i < W * B; ++i) out[i] = splat(0.0f);
    for (int g = 0; g < groups; ++g) {
        i32x16 acc[B][W];
#pragma GCC unroll 8
        for (int r = 0; r < W; ++r)
            for (int b = 0; b < B; ++b)
                acc[b][r] = splat(offsets[g * W + r]);
        for (int s = 0; s < steps; ++s, weight += 4 * LANES, next += 4 * LANES, q += 4 * W) {
            Bytes w[B];
#pragma GCC unroll 4
            for (int b = 0; b < B; ++b) w[b] = load_bytes(weight + b * stride);
            prefetch<B>(next, stride, ahead);
#pragma GCC unroll 8
            for (int r = 0; r < W; ++r) {
                const auto four = load_four(q + 4 * r);
#pragma GCC unroll 4
                for (int b = 0; b < B; ++b) acc[b][r] = dot4(acc[b][r], w[b], four);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < W; ++r) {
            const f32x16 scale = splat(scales[g * W + r]);
            for (int b = 0; b < B; ++b)
                out[b * W + r] = fma(__builtin_convertvector(acc[b][r], f32x16), scale, out[b * W + r]);
        }
    }
    for (int b = 0; b < B; ++b) {
        const f32x16 scale = load(layer.scale + (block + b) * LANES);
        for (int r = 0; r < W; ++r) out[b * W + r] = out[b * W + r] * scale;
    }
}

template <int W, int B>
static inline void tile_int4(const Activations& x, int tile, const Linear& layer, int block, Prefetch ahead,
                             f32x16* out) {
    const int groups = layer.in / FourBitGroup::INPUTS;
    const int8_t* q = x.quantised.data() + size_t(tile) * MAX_TILE * layer.in;
    const float* scales = x.scales.data() + size_t(tile) * MAX_TILE * groups;
    const float* sums = x.sums.data() + size_t(tile) * MAX_TILE * groups;
    const FourBitGroup* weight = static_cast<const FourBitGroup*>(layer.weight) + size_t(block) * groups;
    const size_t stride = size_t(groups) * sizeof(FourBitGroup);
    for (int i = 0; i < W * B; ++i) out[i] = splat(0.0f);
    for (int g = 0; g < groups; ++g, ++weight) {
        const uint8_t* next = reinterpret_cast<const uint8_t*>(weight + B * groups);
        for (size_t line = 0; line < sizeof(FourBitGroup); line += 64) prefetch<B>(next + line, stride, ahead);
        i32x16 acc[B][W];
        for (int b = 0; b < B; ++b)
            for (int r = 0; r < W; ++r) acc[b][r] = splat(0);
#pragma GCC unroll 4
        for (int j = 0; j < FourBitGroup::VECTORS; ++j, q += 8 * W) {
            Bytes low[B], high[B];
#pragma GCC unroll 4
            for (int b = 0; b < B; ++b) {
                const Bytes both = load_bytes(weight[b * groups].nibbles[j]);
                low[b] = low_halves(both);
                high[b] = high_halves(both);
            }
#pragma GCC unroll 8
            for (int r = 0; r < W; ++r) {
                const auto first = load_four(q + 4 * r);
#pragma GCC unroll 4
                for (int b = 0; b < B; ++b) acc[b][r] = dot4(acc[b][r], low[b], first);
            }
#pragma GCC unroll 8
            for (int r = 0; r < W; ++r) {
                const auto second = load_four(q + 4 * (W + r));
#pragma GCC unroll 4
                for (int b = 0; b < B; ++b) acc[b][r] = dot4(acc[b][r], high[b], second);
            }
        }
        f32x16 scale[B], minimum[B];
        for (int b = 0; b < B; ++b) {
            scale[b] = load(weight[b * groups].scale);
            minimum[b] = load(weight[b * groups].minimum);
        }
#pragma GCC unroll 8
        for (int r = 0; r < W; ++r) {
            const f32x16 row_scale = splat(scales[g * W + r]), row_sum = splat(sums[g * W + r]);
            for (int b = 0; b < B; ++b) {
                const f32x16 product = __builtin_convertvector(acc[b][r], f32x16) * row_scale;
                out[b * W + r] = fma(row_sum, minimum[b], fma(product, scale[b], out[b * W + r]));
            }
        }
    }
}

template <int W, int B, typename Weight>
static inline void tile_float(const Activations& x, int tile, const Linear& layer, int block, f32x16* out) {
    const float* values = x.values.data() + size_t(tile) * MAX_TILE * layer.in;
    const Weight* weight = static_cast<const Weight*>(layer.weight) + size_t(block) * layer.in * LANES;
    const size_t next_block = size_t(layer.in) * LANES;
    f32x16 acc[B][W];
    for (int b = 0; b < B; ++b)
        for (int r = 0; r < W; ++r) acc[b][r] = splat(0.0f);
    for (int k = 0; k < layer.in; ++k, weight += LANES, values += W)
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) {
            const f32x16 w = load(weight + b * next_block);
#pragma GCC unroll 8
            for (int r = 0; r < W; ++r) acc[b][r] = fma(w, splat(values[r]), acc[b][r]);
        }
    for (int b = 0; b < B; ++b)
        for (int r = 0; r < W; ++r) out[b * W + r] = acc[b][r];
}

template <int W, int B, typename Epilogue>
static inline void tile(const Activations& x, int t, const Linear& layer, int block, Prefetch ahead, Epilogue&& epilogue) {
    const int rows = std::min(x.rows - t * MAX_TILE, W);
    f32x16 out[W * B];
    if (layer.kind == INT8) tile_int8<W, B>(x, t, layer, block, ahead, out);
    else if (layer.kind == INT4) tile_int4<W, B>(x, t, layer, block, ahead, out);
    else if (layer.kind == BF16) tile_float<W, B, bf16>(x, t, layer, block, out);
    else tile_float<W, B, float>(x, t, layer, block, out);
    for (int b = 0; b < B; ++b)
        for (int r = 0; r < rows; ++r) {
            f32x16 y = out[b * W + r];
            if (layer.bias) y = y + load(layer.bias + (block + b) * LANES);
            epilogue(t * MAX_TILE + r, block + b, y);
        }
}

// B blocks for every tile of rows. The last tile may be narrow.
template <int B, typename Epilogue>
static inline void tiles(const Activations& x, const Linear& layer, int block, int end, Epilogue&& epilogue) {
    const bool more = block + 2 * B <= end;
    for (int t = 0; t < x.num_tiles(); ++t) {
        // One row of int8 leaves the hardware's own prefetching enough time. Otherwise one tile fetches all of the next
        // blocks, and of more tiles each of the first B fetches one.
        const Prefetch ahead = !more || (layer.kind == INT8 && x.rows <= 2) ? Prefetch{0, 0}
                               : x.num_tiles() == 1 ? Prefetch{0, B}
                                                    : Prefetch{t, t < B ? 1 : 0};
        switch (x.width(t)) {
            case 1: tile<1, B>(x, t, layer, block, ahead, epilogue); break;
            case 2: tile<2, B>(x, t, layer, block, ahead, epilogue); break;
            case 4: tile<4, B>(x, t, layer, block, ahead, epilogue); break;
            default: tile<8, B>(x, t, layer, block, ahead, epilogue);
        }
    }
}

// Compute blocks [first, last) for all rows; epilogue(row, block, f32x16) takes each result. Blocks up to `end` will be
// wanted next, by the same thread.
template <typename Epilogue>
static inline void linear(const Activations& x, const Linear& layer, int first, int last, int end, Epilogue&& epilogue) {
    int block = first;
    // Four blocks at once hide the latency of few rows' sums; eight rows by two blocks fill the registers.
    if (x.rows <= 4)
        for (; block + 4 <= last; block += 4) tiles<4>(x, layer, block, end, epilogue);
    for (; block + 2 <= last; block += 2) tiles<2>(x, layer, block, end, epilogue);
    for (; block < last; ++block) tiles<1>(x, layer, block, end, epilogue);
}

}  // namespace paceline
