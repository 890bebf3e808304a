// Paged attention over one flattened batch of decodes and prompt chunks.
//
// A block of the cache holds, for each layer, keys then values of each key-value head. Keys lie as
// `[words of head_dim][block_tokens]`, values as `[words of tokens][head_dim]`: both are packed
// right-hand sides, so scores and sums of values are the matrix tiles of matmul.h. Scores of a tile
// are kept whole and exponentiated once (no running rescale), so a position's result does not depend on how
// its prompt was cut into chunks.
#pragma once

#include <vector>

#include "vectors.h"

namespace millpond {

struct AttentionCall {
  void* qkv;                  // [num_tokens, (num_heads + 2 num_kv_heads) * head_dim]; queries are rotated in place
  void* out;                  // [num_tokens, num_heads * head_dim]
  void* cache;                // [blocks, num_layers, 2, num_kv_heads, block_tokens * head_dim]
  const float* rope;          // [positions, 2, head_dim / 2]
  const float* query_norm;    // [head_dim] or null
  const float* key_norm;      // [head_dim] or null
  const int32_t* rows;        // [num_rows]
  const int32_t* starts;      // [num_rows]
  const int32_t* offsets;     // [num_rows + 1]
  const int32_t* tables;      // [max_rows, table_stride]
  int64_t num_rows;
  int64_t table_stride;
  int64_t layer, num_layers, num_heads, num_kv_heads, head_dim, block_tokens;
  float norm_eps;
};

constexpr int TILE_QUERIES = 12;  // (query, head) pairs that share one pass over keys and values

template <class T>
struct Attention {
  using E = typename T::Element;
  const AttentionCall& call;
  const long head_dim = call.head_dim, block = call.block_tokens, kv_heads = call.num_kv_heads;
  const long group = call.num_heads / kv_heads, qkv_width = (call.num_heads + 2 * kv_heads) * head_dim;
  const long head_bytes = head_dim * block * long(sizeof(E));

  explicit Attention(const AttentionCall& c) : call(c) {}

  char* keys(long block_id, long kv_head) const {
    return static_cast<char*>(call.cache) + ((block_id * call.num_layers + call.layer) * 2 * kv_heads + kv_head) * head_bytes;
  }
  char* values(long block_id, long kv_head) const { return keys(block_id, kv_head) + kv_heads * head_bytes; }

  // Head norm if wanted, then rotation of the two halves, in float; `to` may be `from`.
  void rotate_head(const E* from, E* to, const float* norm, const float* rotation) const {
    const long half = head_dim / 2;
    float scale = 1.0f;
    if (norm) {
      Floats squares{};
      for (long i = 0; i < head_dim; i += LANES) {
        Floats part = load(from + i);
        squares += part * part;
      }
      scale = 1.0f / std::sqrt(sum_lanes(squares) / float(head_dim) + call.norm_eps);
    }
    for (long i = 0; i < half; i += LANES) {
      Floats low = load(from + i), high = load(from + half + i);
      if (norm) {
        low *= scale * load_floats(norm + i);
        high *= scale * load_floats(norm + half + i);
      }
      Floats cosine = load_floats(rotation + i), sine = load_floats(rotation + half + i);
      store(to + i, low * cosine - high * sine);
      store(to + half + i, high * cosine + low * sine);
    }
  }

  void write_token(long token, const int32_t* table, long position) const {
    E* row = static_cast<E*>(call.qkv) + token * qkv_width;
    const float* rotation = call.rope + position * head_dim;
    for (long h = 0; h < call.num_heads; h++)
      rotate_head(row + h * head_dim, row + h * head_dim, call.query_norm, rotation);
    const long block_id = table[position / block], slot = position % block, words = head_dim / T::PER_WORD;
    for (long h = 0; h < kv_heads; h++) {
      E* key = row + (call.num_heads + h) * head_dim;
      rotate_head(key, key, call.key_norm, rotation);
      uint32_t* k = reinterpret_cast<uint32_t*>(keys(block_id, h)) + slot;
      for (long w = 0; w < words; w++) memcpy(k + w * block, key + w * T::PER_WORD, 4);
      E* v = reinterpret_cast<E*>(values(block_id, h)) + slot / T::PER_WORD * head_dim * T::PER_WORD + slot % T::PER_WORD;
      const E* value = row + (call.num_heads + kv_heads + h) * head_dim;
      for (long i = 0; i < head_dim; i++) v[i * T::PER_WORD] = value[i];
    }
  }

  // Scores of ROWS queries against one block: `scores[r]` gets `block` values. The keys of the block after it are
  // called for meanwhile: blocks lie anywhere, so the processor cannot guess where reading goes on.
  template <int ROWS>
  void score_block(const uint32_t* const* queries, const char* k, const char* next, float* scores, long stride) const {
    const long words = head_dim / T::PER_WORD;
    const uint32_t* right = reinterpret_cast<const uint32_t*>(k);
    for (long t = 0; t < block; t += LANES) {
      Floats sums[ROWS] = {};
      for (long w = 0; w < words; w++) {
        Words key = load_words(right + w * block + t);
        __builtin_prefetch(next + (w * block + t) * 4);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) sums[r] = dot<T>(sums[r], queries[r][w], key);
      }
      for (int r = 0; r < ROWS; r++) store(scores + r * stride + t, sums[r]);
    }
  }

  // Softmax over the first `context` scores; weights go to `weights` in the cache's element type, zero up to `padded`.
  static float weigh(float* scores, long context, long padded, float scale, E* weights) {
    for (long t = context; t < padded; t++) scores[t] = -INFINITY;
    Floats best = splat(-INFINITY);
    for (long t = 0; t < padded; t += LANES) {
      Floats s = load_floats(scores + t);
      best = s > best ? s : best;
    }
    const float top = max_lanes(best);
    Floats sum{};
    for (long t = 0; t < padded; t += LANES) {
      Floats s = load_floats(scores + t);
      Floats e = exp_lanes((s - top) * scale);
      e = s == -INFINITY ? Floats{} : s == s ? e : s;  // not-a-number must show, not vanish in the exponent's bits
      sum += e;
      store(weights + t, e);
    }
    return sum_lanes(sum);
  }

  // sums[r][*] += weights[r] * values over the tokens of one block, for 32 of the head's dimensions.
  template <int ROWS>
  void add_values(const uint32_t* weights, long stride, const char* v, const char* next, long dim, long tokens,
                  Floats (&sums)[ROWS][2]) const {
    const uint32_t* right = reinterpret_cast<const uint32_t*>(v) + dim;
    const uint32_t* ahead = reinterpret_cast<const uint32_t*>(next) + dim;
    const long words = tokens / T::PER_WORD;
    for (long w = 0; w < words; w++) {
      Words a = load_words(right + w * head_dim), b = load_words(right + w * head_dim + LANES);
      __builtin_prefetch(ahead + w * head_dim);
      __builtin_prefetch(ahead + w * head_dim + LANES);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        sums[r][0] = dot<T>(sums[r][0], weights[r * stride + w], a);
        sums[r][1] = dot<T>(sums[r][1], weights[r * stride + w], b);
      }
    }
    if (tokens % T::PER_WORD) {  // the partner of an odd last token was never written: keep it out even if it is NaN
      Words a = load_words(right + words * head_dim) & 0xffffu, b = load_words(right + words * head_dim + LANES) & 0xffffu;
      for (int r = 0; r < ROWS; r++) {
        sums[r][0] = dot<T>(sums[r][0], weights[r * stride + words], a);
        sums[r][1] = dot<T>(sums[r][1], weights[r * stride + words], b);
      }
    }
  }

  // Queries `first .. first + ROWS` of a sequence, numbered over (token, head of the group), against one key-value head.
  template <int ROWS>
  void attend_tile(long row, long kv_head, long first, std::vector<float>& scratch) const {
    const int32_t* table = call.tables + call.rows[row] * call.table_stride;
    const long offset = call.offsets[row], start = call.starts[row];
    const long longest = start + (first + ROWS - 1) / group + 1;
    const long blocks = (longest + block - 1) / block, padded = blocks * block;
    if (long(scratch.size()) < ROWS * padded * 2) scratch.resize(ROWS * padded * 2);
    float* scores = scratch.data();
    E* weights = reinterpret_cast<E*>(scores + ROWS * padded);
    const uint32_t* queries[ROWS];
    for (int r = 0; r < ROWS; r++) {
      long token = offset + (first + r) / group, head = kv_head * group + (first + r) % group;
      queries[r] = reinterpret_cast<const uint32_t*>(static_cast<E*>(call.qkv) + token * qkv_width + head * head_dim);
    }
    for (long b = 0; b < blocks; b++) {
      const char* next = b + 1 < blocks ? keys(table[b + 1], kv_head) : values(table[0], kv_head);
      score_block<ROWS>(queries, keys(table[b], kv_head), next, scores + b * block, padded);
    }
    float inverse[ROWS];
    const float scale = 1.0f / std::sqrt(float(head_dim));
    for (int r = 0; r < ROWS; r++) {
      long context = start + (first + r) / group + 1;
      inverse[r] = 1.0f / weigh(scores + r * padded, context, padded, scale, weights + r * padded);
    }
    for (long dim = 0; dim < head_dim; dim += 2 * LANES) {
      Floats sums[ROWS][2] = {};
      for (long b = 0; b < blocks; b++) {
        const long tokens = longest - b * block < block ? longest - b * block : block;
        const uint32_t* part = reinterpret_cast<const uint32_t*>(weights + b * block);
        const char* next = values(table[b + 1 < blocks ? b + 1 : b], kv_head);
        add_values<ROWS>(part, padded / T::PER_WORD, values(table[b], kv_head), next, dim, tokens, sums);
      }
      for (int r = 0; r < ROWS; r++) {
        long token = offset + (first + r) / group, head = kv_head * group + (first + r) % group;
        E* to = static_cast<E*>(call.out) + (token * call.num_heads + head) * head_dim + dim;
        store(to, sums[r][0] * inverse[r]);
        store(to + LANES, sums[r][1] * inverse[r]);
      }
    }
  }

  template <int ROWS = TILE_QUERIES>
  void attend_tile_of(long rows, long row, long kv_head, long first, std::vector<float>& scratch) const {
    if constexpr (ROWS > 1) {
      if (rows < ROWS) return attend_tile_of<ROWS - 1>(rows, row, kv_head, first, scratch);
    }
    attend_tile<ROWS>(row, kv_head, first, scratch);
  }

  void run() const {
    std::vector<long> tiles_before(call.num_rows + 1, 0);  // tiles per key-value head
    for (long i = 0; i < call.num_rows; i++) {
      long queries = (call.offsets[i + 1] - call.offsets[i]) * group;
      tiles_before[i + 1] = tiles_before[i] + (queries + TILE_QUERIES - 1) / TILE_QUERIES;
    }
    const long tiles = tiles_before[call.num_rows], tokens = call.offsets[call.num_rows];
    std::vector<int32_t> row_of_token(tokens);
    for (long i = 0; i < call.num_rows; i++)
      for (long token = call.offsets[i]; token < call.offsets[i + 1]; token++) row_of_token[token] = int32_t(i);
#pragma omp parallel
    {
#pragma omp for schedule(static)
      for (long token = 0; token < tokens; token++) {
        const long i = row_of_token[token];
        write_token(token, call.tables + call.rows[i] * call.table_stride, call.starts[i] + token - call.offsets[i]);
      }
      std::vector<float> scratch;
#pragma omp for schedule(dynamic, 1)
      for (long task = 0; task < tiles * kv_heads; task++) {
        const long tile = task / kv_heads, kv_head = task % kv_heads;
        long row = 0;
        for (long low = 0, high = call.num_rows; low < high;) {  // the row whose tiles include this one
          row = (low + high) / 2;
          if (tile < tiles_before[row]) high = row;
          else if (tile >= tiles_before[row + 1]) low = row + 1;
          else break;
        }
        const long queries = (call.offsets[row + 1] - call.offsets[row]) * group;
        const long first = (tile - tiles_before[row]) * TILE_QUERIES;
        attend_tile_of(queries - first < TILE_QUERIES ? queries - first : TILE_QUERIES, row, kv_head, first, scratch);
      }
    }
  }
};

}  // namespace millpond
