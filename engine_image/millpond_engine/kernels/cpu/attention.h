// Paged attention over one flattened batch of decodes and prompt chunks.
//
// A block of the cache holds, for each layer, keys then values of each key-value head. Keys lie as
// `[words of head_dim][block_tokens]`, values as `[words of tokens][head_dim]`: both are packed
// right-hand sides, so scores and sums of values are register tiles like those of matmul.h. Scores of a tile
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
constexpr long MAX_HEAD_DIM = 1024;

// Vectors beside each other in a tile of that many rows: few rows need many, to keep sums enough in flight.
constexpr int tile_vectors(int rows) { return rows <= 4 ? 4 : 2; }

template <class T>
struct Attention {
  using E = typename T::Element;
  using In = typename T::Input;
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
  template <class To>
  void rotate_head(const In* from, To* to, const float* norm, const float* rotation) const {
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

  // Rotates the queries of one token in place, and puts its keys and values into the cache.
  void write_token(long token, const int32_t* table, long position) const {
    In* row = static_cast<In*>(call.qkv) + token * qkv_width;
    const float* rotation = call.rope + position * head_dim;
    for (long h = 0; h < call.num_heads; h++)
      rotate_head(row + h * head_dim, row + h * head_dim, call.query_norm, rotation);
    const long block_id = table[position / block], slot = position % block, words = head_dim / T::PER_WORD;
    for (long h = 0; h < kv_heads; h++) {
      E key[MAX_HEAD_DIM];
      rotate_head(row + (call.num_heads + h) * head_dim, key, call.key_norm, rotation);
      uint32_t* k = reinterpret_cast<uint32_t*>(keys(block_id, h)) + slot;
      for (long w = 0; w < words; w++) memcpy(k + w * block, key + w * T::PER_WORD, 4);
      E* v = reinterpret_cast<E*>(values(block_id, h)) + slot / T::PER_WORD * head_dim * T::PER_WORD + slot % T::PER_WORD;
      const In* value = row + (call.num_heads + kv_heads + h) * head_dim;
      for (long i = 0; i < head_dim; i++) store_scalar(v + i * T::PER_WORD, widen(value[i]));
    }
  }

  // Scores of ROWS queries against VECTORS times 16 tokens; `next` is called for meanwhile: blocks lie anywhere, so
  // the processor cannot guess where reading goes on. (Full tiles are long prompts, whose keys the tile before has read.)
  template <int ROWS, int VECTORS>
  void score_tokens(const uint32_t* const (&queries)[ROWS], const char* const (&k)[VECTORS], const char* const (&next)[VECTORS],
                    float* scores, long stride) const {
    Floats sums[ROWS][VECTORS] = {};
    for (long w = 0; w < head_dim / T::PER_WORD; w++) {
      Words right[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        right[v] = load_words(k[v] + w * block * 4);
        if (ROWS < TILE_QUERIES) __builtin_prefetch(next[v] + w * block * 4);
      }
      multiply_words<T, ROWS, VECTORS>(sums, queries, w, right);
    }
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) store(scores + r * stride + v * LANES, sums[r][v]);
  }

  // Scores of ROWS queries against the first `padded` tokens of a sequence.
  template <int ROWS>
  void score(const uint32_t* const (&queries)[ROWS], const int32_t* table, long kv_head, long padded, float* scores) const {
    constexpr int VECTORS = tile_vectors(ROWS);
    const auto keys_at = [&](long t) { return t < padded ? keys(table[t / block], kv_head) + t % block * 4 : values(table[0], kv_head); };
    long t = 0;
    for (; t + VECTORS * LANES <= padded; t += VECTORS * LANES) {
      const char *k[VECTORS], *next[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        k[v] = keys_at(t + v * LANES);
        next[v] = keys_at(t + (VECTORS + v) * LANES);
      }
      score_tokens<ROWS, VECTORS>(queries, k, next, scores + t, padded);
    }
    for (; t < padded; t += LANES) {
      const char *const k[1] = {keys_at(t)}, *const next[1] = {keys_at(t + LANES)};
      score_tokens<ROWS, 1>(queries, k, next, scores + t, padded);
    }
  }

  // Softmax over the first `context` scores, in place: weights take the scores' memory, zero up to `padded`.
  static float weigh(float* scores, long context, long padded, float scale) {
    for (long t = context; t < padded; t++) scores[t] = -INFINITY;
    Floats best = splat(-INFINITY);
    for (long t = 0; t < padded; t += LANES) {
      Floats s = load_floats(scores + t);
      best = s > best ? s : best;
    }
    const float steep = scale * LOG2_E, top = max_lanes(best) * steep;
    Floats sum{};
    In* weights = reinterpret_cast<In*>(scores);
    for (long t = 0; t < padded; t += LANES) {
      const Floats e = exp2_lanes(load_floats(scores + t) * steep - top);
      sum += e;
      store(weights + t, e);
    }
    return sum_lanes(sum);
  }

  // sums[r][*] += weights[r] * values over the tokens of one block, for VECTORS times 16 of the head's dimensions;
  // the weights of the block start at word `first`.
  template <int ROWS, int VECTORS>
  void add_values(const uint32_t* const (&weights)[ROWS], long first, const char* v, const char* next, long tokens,
                  Floats (&sums)[ROWS][VECTORS]) const {
    const long words = (tokens + T::PER_WORD - 1) / T::PER_WORD;
    // the partner of an odd last token was never written: keep it out even if it is NaN
    const uint32_t last = tokens % T::PER_WORD ? 0xffffu : 0xffffffffu;
    for (long w = 0; w < words; w++) {
      Words right[VECTORS];
      for (int i = 0; i < VECTORS; i++) {
        right[i] = load_words(v + (w * head_dim + i * LANES) * 4);
        if (ROWS < TILE_QUERIES) __builtin_prefetch(next + (w * head_dim + i * LANES) * 4);
        if (w == words - 1) right[i] &= last;
      }
      multiply_words<T, ROWS, VECTORS>(sums, weights, first + w, right);
    }
  }

  // The outputs of ROWS queries in dimensions `dim ..` of the head.
  template <int ROWS, int VECTORS>
  void gather(const uint32_t* const (&weights)[ROWS], const float* inverse, const int32_t* table, long kv_head, long dim,
              long longest, In* const (&out)[ROWS]) const {
    Floats sums[ROWS][VECTORS] = {};
    for (long t = 0; t < longest; t += block) {
      const long tokens = longest - t < block ? longest - t : block;
      const char* next = values(table[(t + block < longest ? t + block : t) / block], kv_head) + dim * 4;
      add_values<ROWS, VECTORS>(weights, t / T::PER_WORD, values(table[t / block], kv_head) + dim * 4, next, tokens, sums);
    }
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) store(out[r] + dim + v * LANES, sums[r][v] * inverse[r]);
  }

  // Queries `first .. first + ROWS` of a sequence, numbered over (token, head of the group), against one key-value head.
  template <int ROWS>
  void attend_tile(long row, long kv_head, long first, std::vector<float>& scratch) const {
    constexpr int VECTORS = tile_vectors(ROWS);
    const int32_t* table = call.tables + call.rows[row] * call.table_stride;
    const long offset = call.offsets[row], start = call.starts[row];
    const long longest = start + (first + ROWS - 1) / group + 1;
    const long padded = (longest + block - 1) / block * block;
    if (long(scratch.size()) < ROWS * padded) scratch.resize(ROWS * padded);
    const uint32_t* queries[ROWS];
    In* out[ROWS];
    for (int r = 0; r < ROWS; r++) {
      const long token = offset + (first + r) / group, head = kv_head * group + (first + r) % group;
      queries[r] = reinterpret_cast<const uint32_t*>(static_cast<In*>(call.qkv) + token * qkv_width + head * head_dim);
      out[r] = static_cast<In*>(call.out) + (token * call.num_heads + head) * head_dim;
    }
    score<ROWS>(queries, table, kv_head, padded, scratch.data());
    const uint32_t* weights[ROWS];
    float inverse[ROWS];
    for (int r = 0; r < ROWS; r++) {
      weights[r] = reinterpret_cast<const uint32_t*>(scratch.data() + r * padded);
      const long context = start + (first + r) / group + 1;
      inverse[r] = 1.0f / weigh(scratch.data() + r * padded, context, padded, 1.0f / std::sqrt(float(head_dim)));
    }
    long dim = 0;
    for (; dim + VECTORS * LANES <= head_dim; dim += VECTORS * LANES)
      gather<ROWS, VECTORS>(weights, inverse, table, kv_head, dim, longest, out);
    for (; dim < head_dim; dim += 2 * LANES) gather<ROWS, 2>(weights, inverse, table, kv_head, dim, longest, out);
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
