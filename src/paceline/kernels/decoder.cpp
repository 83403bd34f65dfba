// One call runs every layer of a decoder over the rows of a step. Knows tokens, positions and block tables; knows
// nothing of requests, sampling or files. The Python twin of this arithmetic is model/decoder.py.
#include <chrono>
#include <memory>
#include <numeric>
#include "attention.h"
#include "linear.h"
#include "threads.h"

using namespace paceline;

extern "C" {

// Mirrors of the ctypes structures in runtime/backend_native.py.
struct LayerWeights {
    Linear qkv, o, gate_up, down;  // gate_up: blocks of 16 gate outputs and 16 up outputs alternate
    const float *attention_norm, *q_norm, *k_norm, *post_attention_norm, *ffn_norm, *post_ffn_norm;
    const float *cosine, *sine;  // [max_seq_len][head_dim / 2]
    int32_t window;
};

struct DecoderConfig {
    int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab, max_rows;
    int32_t gelu, kv_is_float32, num_blocks;
    float norm_eps, attention_scale, attention_softcap, logits_softcap, embedding_scale;
    Linear embedding, head;
    const float* final_norm;
    void *keys, *values;  // [layer][block][kv_head][head_dim * 16]
};

struct Step {
    int32_t num_rows, num_logits, max_blocks;
    const int32_t *tokens, *positions, *sequence_of_row, *block_tables, *logit_rows;
    float* logits;  // [num_logits][vocab padded to whole blocks]
};
}

namespace {

enum Phase { NORM, QKV, ROPE, ATTENTION, COMBINE, OUTPUT, GATE_UP, QUANTISE, DOWN, HEAD, NUM_PHASES };

struct QueryTile { int first_row, num_rows, newest; };
struct Item { int tile, kv_head, segment; };

class Decoder {
public:
    Decoder(const DecoderConfig& config, const LayerWeights* layers, ThreadPool* pool)
        : c_(config), layers_(layers, layers + config.num_layers), pool_(*pool) {
        const int widest = std::max(c_.hidden, c_.num_heads * c_.head_dim);
        input_.reserve(c_.max_rows, widest);
        inner_.reserve(c_.max_rows, c_.intermediate);
        residual_.resize(size_t(c_.max_rows) * c_.hidden);
        qkv_.resize(size_t(c_.max_rows) * qkv_width());
        mixed_.resize(size_t(c_.max_rows) * std::max(c_.hidden, c_.num_heads * c_.head_dim));
        gated_.resize(size_t(c_.max_rows) * c_.intermediate);
        normed_.resize(size_t(pool_.num_threads()) * std::max(c_.hidden, c_.num_heads * c_.head_dim));
        scratch_.resize(size_t(pool_.num_threads()) * SCRATCH_FLOATS);
    }

    void forward(const Step& step) {
        plan(step);
        input_.rows = inner_.rows = step.num_rows;
        pool_.run([&](int thread) {
            if (thread == 0) mark_ = std::chrono::steady_clock::now();
            embed(step, thread);
            for (int l = 0; l < c_.num_layers; ++l) {
                attention(step, l, thread);
                feed_forward(step, l, thread);
            }
            head(step, thread);
        });
    }

    double seconds[NUM_PHASES] = {};

private:
    int qkv_width() const { return (c_.num_heads + 2 * c_.num_kv_heads) * c_.head_dim; }

    // Runs of at most MAX_QUERIES rows of one sequence, and every (tile, KV head, segment) they must visit.
    void plan(const Step& step) {
        tiles_.clear(); items_.clear();
        for (int row = 0; row < step.num_rows;) {
            int end = row + 1;
            while (end < step.num_rows && end - row < MAX_QUERIES && step.sequence_of_row[end] == step.sequence_of_row[row])
                ++end;
            tiles_.push_back({row, end - row, step.positions[end - 1]});
            row = end;
        }
        num_segments_ = 1;
        for (const auto& tile : tiles_) num_segments_ = std::max(num_segments_, tile.newest / SEGMENT + 1);
        for (int t = 0; t < int(tiles_.size()); ++t)
            for (int h = 0; h < c_.num_kv_heads; ++h)
                for (int s = 0; s <= tiles_[t].newest / SEGMENT; ++s) items_.push_back({t, h, s});
        const size_t per_row = size_t(c_.num_heads) * num_segments_;
        rows_per_pass_ = std::max<int>(MAX_QUERIES, int(PARTIAL_FLOATS / (per_row * c_.head_dim)));
        rows_per_pass_ = std::min(rows_per_pass_, step.num_rows);
        const size_t rows = std::min(step.num_rows, rows_per_pass_ + MAX_QUERIES);
        if (partials_.size() < rows * per_row) partials_.resize(rows * per_row);
        if (outputs_.size() < rows * per_row * c_.head_dim) outputs_.resize(rows * per_row * c_.head_dim);
    }

    void embed(const Step& step, int thread) {
        pool_.for_each(step.num_rows, 1, [&](int row, int) {
            const int token = step.tokens[row], block = token / LANES, lane = token % LANES;
            const Linear& e = c_.embedding;
            float* out = residual_.data() + size_t(row) * c_.hidden;
            const size_t base = size_t(block) * e.in * LANES;
            if (e.kind == INT8) {
                const uint8_t* w = static_cast<const uint8_t*>(e.weight) + base + lane * 4;
                const float scale = e.scale[token];
                for (int k = 0; k < e.in; ++k)
                    out[k] = float(int(w[size_t(k / 4) * 64 + k % 4]) - 128) * scale * c_.embedding_scale;
            } else if (e.kind == INT4) {
                const FourBitGroup* groups = static_cast<const FourBitGroup*>(e.weight) + base / (LANES * FourBitGroup::INPUTS);
                for (int k = 0; k < e.in; ++k)
                    out[k] = groups[k / FourBitGroup::INPUTS].value(k % FourBitGroup::INPUTS, lane) * c_.embedding_scale;
            } else if (e.kind == BF16) {
                const bf16* w = static_cast<const bf16*>(e.weight) + base + lane;
                for (int k = 0; k < e.in; ++k) out[k] = to_float(w[size_t(k) * LANES]) * c_.embedding_scale;
            } else {
                const float* w = static_cast<const float*>(e.weight) + base + lane;
                for (int k = 0; k < e.in; ++k) out[k] = w[size_t(k) * LANES] * c_.embedding_scale;
            }
        });
        lap(thread, NORM);
    }

    void rms_norm(const float* x, const float* weight, int size, float* out) const {
        f32x16 squares = splat(0.0f);
        int k = 0;
        for (; k + LANES <= size; k += LANES) squares = fma(load(x + k), load(x + k), squares);
        float total = sum(squares);
        for (; k < size; ++k) total = std::fma(x[k], x[k], total);
        const float inverse = 1.0f / std::sqrt(total / float(size) + c_.norm_eps);
        for (k = 0; k + LANES <= size; k += LANES) store(out + k, load(x + k) * splat(inverse) * load(weight + k));
        for (; k < size; ++k) out[k] = x[k] * inverse * weight[k];
    }

    float* row_scratch(int thread) {
        return normed_.data() + size_t(thread) * std::max(c_.hidden, c_.num_heads * c_.head_dim);
    }

    // Add a sublayer's output to the residual (through a norm of its own where the model has one), then norm the
    // residual into the input of the next linear layer.
    void norm_rows(const Step& step, int thread, const float* post_norm, const float* norm, const Linear& next) {
        for_each_tile_row(step.num_rows, [&](int row) {
            float* residual = residual_.data() + size_t(row) * c_.hidden;
            float* normed = row_scratch(thread);
            if (post_norm) {
                rms_norm(mixed_.data() + size_t(row) * c_.hidden, post_norm, c_.hidden, normed);
                for (int k = 0; k < c_.hidden; ++k) residual[k] += normed[k];
            }
            rms_norm(residual, norm, c_.hidden, normed);
            input_.set_row(row, normed, next);
        });
        lap(thread, NORM);
    }

    // Rows in whole tiles, so that threads do not fight over the cache lines a tile's rows share.
    template <typename Body> void for_each_tile_row(int rows, Body&& body) {
        pool_.for_each(rows, MAX_TILE, [&](int first, int last) {
            for (int row = first; row < last; ++row) body(row);
        });
    }

    void project(const Activations& x, const Linear& layer, float* out, int stride, int thread, Phase phase) {
        pool_.for_each_in_stretches(thread, layer.blocks(), GRAIN, [&](int first, int last, int end) {
            linear(x, layer, first, last, end,
                   [&](int row, int block, f32x16 y) { store(out + size_t(row) * stride + block * LANES, y); });
        });
        lap(thread, phase);
    }

    // A sublayer's last projection: straight onto the residual, or aside when a norm must come between.
    void project_back(const Activations& x, const Linear& layer, bool aside, int thread, Phase phase) {
        if (aside) return project(x, layer, mixed_.data(), c_.hidden, thread, phase);
        pool_.for_each_in_stretches(thread, layer.blocks(), GRAIN, [&](int first, int last, int end) {
            linear(x, layer, first, last, end, [&](int row, int block, f32x16 y) {
                float* at = residual_.data() + size_t(row) * c_.hidden + block * LANES;
                store(at, load(at) + y);
            });
        });
        lap(thread, phase);
    }

    void attention(const Step& step, int l, int thread) {
        const LayerWeights& w = layers_[l];
        const float* pending = l > 0 ? layers_[l - 1].post_ffn_norm : nullptr;
        norm_rows(step, thread, pending, w.attention_norm, w.qkv);
        project(input_, w.qkv, qkv_.data(), qkv_width(), thread, QKV);
        if (c_.kv_is_float32) mix<float>(step, l, thread);
        else mix<bf16>(step, l, thread);
        project_back(input_, w.o, w.post_attention_norm != nullptr, thread, OUTPUT);
    }

    template <typename KV> void mix(const Step& step, int l, int thread) {
        const size_t block_stride = size_t(c_.num_kv_heads) * c_.head_dim * KV_BLOCK;
        KV* keys = static_cast<KV*>(c_.keys) + size_t(l) * c_.num_blocks * block_stride;
        KV* values = static_cast<KV*>(c_.values) + size_t(l) * c_.num_blocks * block_stride;
        pool_.for_each(step.num_rows, 1, [&](int row, int) { rotate_row(step, layers_[l], row, keys, values); });
        lap(thread, ROPE);
        size_t first_item = 0;
        for (size_t tile = 0; tile < tiles_.size();) {
            const int base = tiles_[tile].first_row;
            size_t end_tile = tile;
            while (end_tile < tiles_.size() &&
                   tiles_[end_tile].first_row + tiles_[end_tile].num_rows - base <= std::max(rows_per_pass_, MAX_QUERIES))
                ++end_tile;
            size_t end_item = first_item;
            while (end_item < items_.size() && items_[end_item].tile < int(end_tile)) ++end_item;
            pool_.for_each(int(end_item - first_item), 1, [&](int i, int) {
                attend(step, layers_[l], items_[first_item + i], base, keys, values, thread);
            });
            lap(thread, ATTENTION);
            const int rows = tiles_[end_tile - 1].first_row + tiles_[end_tile - 1].num_rows - base;
            for_each_tile_row(rows, [&](int i) { combine(step, layers_[l], base + i, base); });
            lap(thread, COMBINE);
            tile = end_tile;
            first_item = end_item;
        }
    }

    void rotate(float* x, const float* norm, const float* cosine, const float* sine) const {
        if (norm) rms_norm(x, norm, c_.head_dim, x);
        const int half = c_.head_dim / 2;
        for (int d = 0; d < half; ++d) {
            const float a = x[d], b = x[d + half];
            x[d] = a * cosine[d] - b * sine[d];
            x[d + half] = b * cosine[d] + a * sine[d];
        }
    }

    template <typename KV>
    void rotate_row(const Step& step, const LayerWeights& w, int row, KV* keys, KV* values) {
        const int position = step.positions[row], hd = c_.head_dim;
        const float* cosine = w.cosine + size_t(position) * (hd / 2);
        const float* sine = w.sine + size_t(position) * (hd / 2);
        float* x = qkv_.data() + size_t(row) * qkv_width();
        for (int h = 0; h < c_.num_heads; ++h) rotate(x + h * hd, w.q_norm, cosine, sine);
        const int32_t* table = step.block_tables + size_t(step.sequence_of_row[row]) * step.max_blocks;
        const size_t block = size_t(table[position / KV_BLOCK]);
        const int slot = position % KV_BLOCK;
        for (int h = 0; h < c_.num_kv_heads; ++h) {
            float* k = x + (c_.num_heads + h) * hd;
            const float* v = x + (c_.num_heads + c_.num_kv_heads + h) * hd;
            rotate(k, w.k_norm, cosine, sine);
            const size_t at = (block * c_.num_kv_heads + h) * hd * KV_BLOCK;
            for (int d = 0; d < hd; ++d) {
                from_float(k[d], keys + at + size_t(d) * KV_BLOCK + slot);
                from_float(v[d], values + at + size_t(slot) * hd + d);
            }
        }
    }

    size_t partial_index(int row, int head, int segment) const {
        return (size_t(row) * c_.num_heads + head) * num_segments_ + segment;
    }

    template <typename KV>
    void attend(const Step& step, const LayerWeights& w, const Item& item, int base, const KV* keys, const KV* values,
                int thread) {
        const QueryTile& tile = tiles_[item.tile];
        const int hd = c_.head_dim, group = c_.num_heads / c_.num_kv_heads;
        // Nothing in this segment is inside any row's window: combine() will not look here either.
        if (w.window && (item.segment + 1) * SEGMENT <= step.positions[tile.first_row] - w.window + 1) return;
        const int32_t* table = step.block_tables + size_t(step.sequence_of_row[tile.first_row]) * step.max_blocks;
        const size_t head_offset = size_t(item.kv_head) * hd * KV_BLOCK;
        const size_t block_stride = size_t(c_.num_kv_heads) * hd * KV_BLOCK;
        const AttentionShape shape = {hd, c_.attention_scale, c_.attention_softcap, w.window};
        float* queries = scratch_.data() + size_t(thread) * SCRATCH_FLOATS;
        float* scores = queries + MAX_QUERIES * (MAX_HEAD_DIM + LANES);
        const int stride = query_stride();
        const int total = tile.num_rows * group;
        for (int first = 0; first < total; first += MAX_QUERIES) {
            const int count = std::min(MAX_QUERIES, total - first);
            int position[MAX_QUERIES];
            Partial* partial[MAX_QUERIES];
            float* out[MAX_QUERIES];
            for (int i = 0; i < count; ++i) {
                const int row = tile.first_row + (first + i) / group, head = item.kv_head * group + (first + i) % group;
                position[i] = step.positions[row];
                std::memcpy(queries + i * stride, qkv_.data() + size_t(row) * qkv_width() + head * hd, hd * 4);
                const size_t index = partial_index(row - base, head, item.segment);
                partial[i] = partials_.data() + index;
                out[i] = outputs_.data() + index * hd;
            }
            const auto run = [&](auto width, auto padded_dim) {
                attend_segment<width.value, padded_dim.value + LANES, KV>(
                    queries, position, count, keys + head_offset, values + head_offset, block_stride, table,
                    item.segment, shape, partial, out, scores);
            };
            const auto run_width = [&](auto width) {
                if (hd <= 64) run(width, std::integral_constant<int, 64>{});
                else if (hd <= 128) run(width, std::integral_constant<int, 128>{});
                else run(width, std::integral_constant<int, 256>{});
            };
            if (count > 8) run_width(std::integral_constant<int, 16>{});
            else if (count > 4) run_width(std::integral_constant<int, 8>{});
            else if (count > 2) run_width(std::integral_constant<int, 4>{});
            else run_width(std::integral_constant<int, 2>{});
        }
    }

    // Merge a row's segments in order and hand the row to the output projection.
    void combine(const Step& step, const LayerWeights& w, int row, int base) {
        const int hd = c_.head_dim, position = step.positions[row];
        const int first = w.window ? std::max(0, position - w.window + 1) / SEGMENT : 0, last = position / SEGMENT;
        float* mixed = mixed_.data() + size_t(row) * c_.num_heads * hd;
        for (int h = 0; h < c_.num_heads; ++h) {
            const Partial* partial = partials_.data() + partial_index(row - base, h, 0);
            const float* outputs = outputs_.data() + partial_index(row - base, h, 0) * hd;
            float largest = partial[first].largest;
            for (int s = first + 1; s <= last; ++s) largest = std::max(largest, partial[s].largest);
            float total = 0.0f, factors[2];
            float* out = mixed + h * hd;
            for (int d = 0; d < hd; ++d) out[d] = 0.0f;
            for (int s = first; s <= last; ++s) {
                factors[0] = exponential(partial[s].largest - largest);
                total = std::fma(partial[s].total, factors[0], total);
                for (int d = 0; d < hd; d += LANES)
                    store(out + d, fma(load(outputs + size_t(s) * hd + d), splat(factors[0]), load(out + d)));
            }
            factors[1] = 1.0f / total;
            for (int d = 0; d < hd; d += LANES) store(out + d, load(out + d) * splat(factors[1]));
        }
        input_.set_row(row, mixed, w.o);
    }

    void feed_forward(const Step& step, int l, int thread) {
        const LayerWeights& w = layers_[l];
        norm_rows(step, thread, w.post_attention_norm, w.ffn_norm, w.gate_up);
        // Whoever computes a group of the next layer's inputs also quantises it, while it is in its own cache.
        const int group_blocks = 2 * w.down.group / LANES;
        const bool whole_groups = w.down.quantised() && w.down.group % LANES == 0 && w.down.group <= MAX_FUSED_GROUP;
        const int grain = whole_groups ? std::lcm(group_blocks, GRAIN) : GRAIN;
        pool_.for_each_in_stretches(thread, w.gate_up.blocks(), grain, [&](int first, int last, int end) {
            linear(input_, w.gate_up, first, last, end, [&](int row, int block, f32x16 y) {
                float* at = gated_.data() + size_t(row) * c_.intermediate + (block / 2) * LANES;
                if (block % 2 == 0) store(at, y);
                else store(at, (c_.gelu ? gelu_tanh(load(at)) : silu(load(at))) * y);
            });
            if (whole_groups)
                for (int row = 0; row < step.num_rows; ++row)
                    inner_.set_part(row, gated_.data() + size_t(row) * c_.intermediate, w.down, first / 2 * LANES,
                                    last / 2 * LANES);
        });
        lap(thread, GATE_UP);
        if (!whole_groups)
            for_each_tile_row(step.num_rows, [&](int row) {
                inner_.set_row(row, gated_.data() + size_t(row) * c_.intermediate, w.down);
            });
        lap(thread, QUANTISE);
        project_back(inner_, w.down, w.post_ffn_norm != nullptr, thread, DOWN);
    }

    void head(const Step& step, int thread) {
        if (step.num_logits == 0) return;
        if (thread == 0) input_.rows = step.num_logits;
        pool_.barrier();
        const float* pending = layers_.back().post_ffn_norm;
        for_each_tile_row(step.num_logits, [&](int i) {
            float* residual = residual_.data() + size_t(step.logit_rows[i]) * c_.hidden;
            float* normed = row_scratch(thread);
            if (pending) {
                rms_norm(mixed_.data() + size_t(step.logit_rows[i]) * c_.hidden, pending, c_.hidden, normed);
                for (int k = 0; k < c_.hidden; ++k) residual[k] += normed[k];
            }
            rms_norm(residual, c_.final_norm, c_.hidden, normed);
            input_.set_row(i, normed, c_.head);
        });
        lap(thread, NORM);
        pool_.for_each_in_stretches(thread, c_.head.blocks(), GRAIN, [&](int first, int last, int end) {
            linear(input_, c_.head, first, last, end, [&](int row, int block, f32x16 y) {
                if (c_.logits_softcap > 0.0f)
                    y = splat(c_.logits_softcap) * hyperbolic_tangent(y / splat(c_.logits_softcap));
                store(step.logits + (size_t(row) * c_.head.blocks() + block) * LANES, y);
            });
        });
        lap(thread, HEAD);
    }

    void lap(int thread, Phase phase) {
        if (thread != 0) return;
        const auto now = std::chrono::steady_clock::now();
        seconds[phase] += std::chrono::duration<double>(now - mark_).count();
        mark_ = now;
    }

    int query_stride() const { return (c_.head_dim <= 64 ? 64 : c_.head_dim <= 128 ? 128 : 256) + LANES; }

    static constexpr int GRAIN = 4;  // blocks of a linear layer that a thread takes at once
    static constexpr int MAX_FUSED_GROUP = 512;
    static constexpr size_t SCRATCH_FLOATS = MAX_QUERIES * (MAX_HEAD_DIM + LANES + SCORE_STRIDE);
    static constexpr size_t PARTIAL_FLOATS = size_t(8) << 20;
    DecoderConfig c_;
    std::vector<LayerWeights> layers_;
    ThreadPool& pool_;
    Activations input_, inner_;  // what the layer at hand reads; inner_ that of `down`
    std::vector<float> residual_, qkv_, mixed_, gated_, normed_, scratch_, outputs_;
    std::vector<Partial> partials_;
    std::vector<QueryTile> tiles_;
    std::vector<Item> items_;
    int num_segments_ = 1, rows_per_pass_ = MAX_QUERIES;
    std::chrono::steady_clock::time_point mark_;
};

}  // namespace

extern "C" {

void* paceline_pool_create(int num_threads) { return new ThreadPool(num_threads); }
void paceline_pool_destroy(void* pool) { delete static_cast<ThreadPool*>(pool); }

void* paceline_decoder_create(const DecoderConfig* config, const LayerWeights* layers, void* pool) {
    return new Decoder(*config, layers, static_cast<ThreadPool*>(pool));
}
void paceline_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }
void paceline_decoder_forward(void* decoder, const Step* step) { static_cast<Decoder*>(decoder)->forward(*step); }

// Seconds spent in each phase since creation, NUM_PHASES doubles.
void paceline_decoder_profile(void* decoder, double* seconds) {
    std::memcpy(seconds, static_cast<Decoder*>(decoder)->seconds, sizeof(double) * NUM_PHASES);
}

// One linear layer on its own: out[rows][layer.out padded to 16].
void paceline_linear(const Linear* layer, const float* x, int rows, float* out, void* pool) {
    Activations input;
    input.reserve(rows, layer->in);
    input.rows = rows;
    for (int r = 0; r < rows; ++r) input.set_row(r, x + size_t(r) * layer->in, *layer);
    auto& threads = *static_cast<ThreadPool*>(pool);
    threads.run([&](int thread) {
        threads.for_each_in_stretches(thread, layer->blocks(), 4, [&](int first, int last, int end) {
            linear(input, *layer, first, last, end, [&](int row, int block, f32x16 y) {
                store(out + (size_t(row) * layer->blocks() + block) * LANES, y);
            });
        });
    });
}

}  // extern "C"
