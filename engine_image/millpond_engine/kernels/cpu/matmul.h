// Matrix products with packed weights.
//
// Weights `[outputs, inputs]` are stored as panels of 32 outputs: `[panels][words][32]`, zero-padded.
// A tile of up to 12 rows by 32 outputs lives in registers while the inner dimension streams by. Each
// sum runs over the inner dimension in order, whatever the number of rows: a row's result does not
// depend on what else is in the batch.
#pragma once

#include "vectors.h"

namespace millpond {

constexpr int PANEL = 2 * LANES;
#ifdef __AVX512F__
constexpr int TILE_ROWS = 12;  // 24 sums, 2 weights, 1 broadcast of 32 registers
#else
constexpr int TILE_ROWS = 3;
#endif
constexpr long INPUT_BYTES = 768 << 10;  // left-hand rows that stay in the second-level cache while panels pass

// What happens to finished sums: one vector of 16 outputs at a time, or a gate with its up.
enum class Finish { STORE, ADD, GATE };

template <class T, int ROWS>
inline void multiply_tile(const uint32_t* x, long x_stride, const uint32_t* panel, long words, Floats (&sums)[ROWS][2]) {
  const uint32_t* rows[ROWS];
  for (int r = 0; r < ROWS; r++) {
    rows[r] = x + r * x_stride;
    sums[r][0] = sums[r][1] = Floats{};
  }
  for (long k = 0; k < words; k++) {
    // The next panel is called for while this one is used: it may have to come from memory.
    __builtin_prefetch(panel + (words + k) * PANEL, 0, 2);
    __builtin_prefetch(panel + (words + k) * PANEL + LANES, 0, 2);
    const Words right[2] = {load_words(panel + k * PANEL), load_words(panel + k * PANEL + LANES)};
    multiply_words<T, ROWS, 2>(sums, rows, k, right);
  }
}

template <class Out>
inline void store_some(Out* to, Floats value, long count) {
  if (count >= LANES) return store(to, value);
  for (long i = 0; i < count; i++) store_scalar(to + i, value[i]);
}

// One tile of ROWS rows; `outputs` is the width of a row of `out`.
template <class T, class Out, Finish FINISH, int ROWS>
void run_tile(const uint32_t* x, const uint32_t* panel, long words, const float* bias, Out* out, long outputs, long first) {
  Floats sums[ROWS][2];
  multiply_tile<T, ROWS>(x, words * T::PARTS, panel, words, sums);
  for (int r = 0; r < ROWS; r++) {
    Out* row = out + r * outputs + first;
    if (FINISH == Finish::GATE) {
      const Floats gate = sums[r][0], size = gate < 0.0f ? -gate : gate;
      const Floats e = exp2_lanes(size * -LOG2_E);  // of a value that cannot overflow: sigmoid(g) = e^g sigmoid(-g)
      store_some(row, gate * (gate < 0.0f ? e : splat(1.0f)) / (1.0f + e) * sums[r][1], outputs - first);
      continue;
    }
    for (int half = 0; half < 2; half++) {
      long left = outputs - first - half * LANES;
      if (left <= 0) break;
      Floats value = sums[r][half];
      if (bias) value += load_floats(bias + first + half * LANES);
      if (FINISH == Finish::ADD && left >= LANES) value += load(row + half * LANES);
      if (FINISH == Finish::ADD && left < LANES)
        for (long i = 0; i < left; i++) value[i] += widen(row[half * LANES + i]);
      store_some(row + half * LANES, value, left);
    }
  }
}

template <class T, class Out, Finish FINISH, int ROWS = TILE_ROWS>
void run_tile_of(long rows, const uint32_t* x, const uint32_t* panel, long words, const float* bias, Out* out, long outputs,
                 long first) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return run_tile_of<T, Out, FINISH, ROWS - 1>(rows, x, panel, words, bias, out, outputs, first);
  }
  run_tile<T, Out, FINISH, ROWS>(x, panel, words, bias, out, outputs, first);
}

// x `[num_rows, inputs]`, packed weights, out `[num_rows, outputs]`. With GATE, panels hold 16 gates and 16 ups.
template <class T, class Out, Finish FINISH>
void multiply(const void* x_raw, long num_rows, long inputs, const uint32_t* packed, const float* bias, Out* out, long outputs) {
  const uint32_t* x = static_cast<const uint32_t*>(x_raw);
  const long words = inputs / T::PER_WORD, width = FINISH == Finish::GATE ? LANES : PANEL;
  const long panels = (outputs + width - 1) / width;
  const long tiles_per_row = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
  const long tile = num_rows ? (num_rows + tiles_per_row - 1) / tiles_per_row : 1;  // even tiles, not full ones and a rest
  const long row_words = words * T::PARTS, fitting = INPUT_BYTES / 4 / (row_words ? row_words : 1) / tile;
  const long block = (fitting ? fitting : 1) * tile;
#pragma omp parallel
  for (long start = 0; start < num_rows; start += block) {
    const long end = start + block < num_rows ? start + block : num_rows;
#pragma omp for schedule(static) nowait
    for (long p = 0; p < panels; p++)
      for (long m = start; m < end; m += tile) {
        long rows = end - m < tile ? end - m : tile;
        run_tile_of<T, Out, FINISH>(rows, x + m * row_words, packed + p * words * PANEL, words, bias, out + m * outputs,
                                    outputs, p * width);
      }
  }
}

// Rows of `weight` `[outputs, inputs]` into panels; row_of(i) names the source row of packed column i, -1 for padding.
template <class RowOf>
void pack(const uint32_t* weight, long words, uint32_t* packed, long panels, RowOf row_of) {
#pragma omp parallel for schedule(static)
  for (long p = 0; p < panels; p++)
    for (int c = 0; c < PANEL; c++) {
      long source = row_of(p * PANEL + c);
      for (long k = 0; k < words; k++)
        packed[(p * words + k) * PANEL + c] = source < 0 ? 0 : weight[source * words + k];
    }
}

}  // namespace millpond
