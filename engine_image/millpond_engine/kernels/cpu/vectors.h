// Vectors of 16 words, each holding one float or two bfloat16 values, and the arithmetic on them.
//
// Every right-hand matrix is a run of 32-bit words: a float, or a pair of neighbouring bfloat16 values of
// the inner dimension. A word takes part in a product in PARTS multiplications, each with one 32-bit word of the
// left-hand side. That makes one set of loops serve every type and processor:
//
//   floats                          PARTS 1, the left side holds floats
//   bfloat16 by dot instructions    PARTS 1, the left side holds pairs of bfloat16
//   bfloat16 widened to floats      PARTS 2, the left side holds floats, which are never rounded
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace millpond {

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int LANES = 16;

struct Float32 {
  using Element = float;  // of weights, keys and values
  using Input = float;    // of left-hand sides
  static constexpr int PER_WORD = 1, PARTS = 1;
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int PER_WORD = 2;
#ifdef __AVX512BF16__
  using Input = uint16_t;
  static constexpr int PARTS = 1;
#else
  using Input = float;
  static constexpr int PARTS = 2;
#endif
};

inline Words load_words(const void* from) {
  Words value;
  memcpy(&value, from, sizeof value);
  return value;
}

inline Floats load_floats(const float* from) {
  Floats value;
  memcpy(&value, from, sizeof value);
  return value;
}

inline float widen(float value) { return value; }
inline float widen(uint16_t value) {
  uint32_t bits = uint32_t(value) << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

// Round to the nearest bfloat16, ties to even; not-a-number stays one.
inline uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void store_scalar(float* to, float value) { *to = value; }
inline void store_scalar(uint16_t* to, float value) { *to = narrow(value); }

inline void store(float* to, Floats value) { memcpy(to, &value, sizeof value); }
inline void store(uint16_t* to, Floats value) {
#ifdef __AVX512BF16__
  __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
  memcpy(to, &rounded, sizeof rounded);
#else
  Words bits = (Words)value;
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Words quiet = (bits >> 16) | 0x40;
  Words is_nan = (Words)(value != value);
  Halves halves = __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), Halves);
  memcpy(to, &halves, sizeof halves);
#endif
}

inline Floats load(const float* from) { return load_floats(from); }
inline Floats load(const uint16_t* from) {
  Halves halves;
  memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// The factors of 16 right-hand words in their multiplication number `p`.
template <class T>
inline Words take_part(Words words, int p) {
  if (T::PARTS == 1) return words;
  return p == 0 ? words << 16 : words & 0xffff0000u;
}

// sums + left * part: one product per lane, or two where words are pairs of bfloat16.
template <class T>
inline Floats multiply_add(Floats sums, uint32_t left, Words part) {
#ifdef __AVX512BF16__
  if (T::PER_WORD == 2)
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(int(left)), (__m512bh)part);
#endif
  float value;
  memcpy(&value, &left, 4);
#ifdef __AVX512F__
  return (Floats)_mm512_fmadd_ps(_mm512_set1_ps(value), (__m512)part, (__m512)sums);
#else
  return sums + value * (Floats)part;
#endif
}

// sums[r][v] += word k of left row r * words[v], for a tile that lives in registers.
template <class T, int ROWS, int VECTORS>
inline void multiply_words(Floats (&sums)[ROWS][VECTORS], const uint32_t* const (&left)[ROWS], long k,
                           const Words (&words)[VECTORS]) {
#pragma GCC unroll 2
  for (int p = 0; p < T::PARTS; p++) {
    Words parts[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) parts[v] = take_part<T>(words[v], p);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
      const uint32_t word = left[r][k * T::PARTS + p];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sums[r][v] = multiply_add<T>(sums[r][v], word, parts[v]);
    }
  }
}

// Pairwise, so that the result does not depend on how the compiler would order a loop.
inline float sum_lanes(Floats value) {
  float lanes[LANES];
  memcpy(lanes, &value, sizeof lanes);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float max_lanes(Floats value) {
  float best = value[0];
  for (int i = 1; i < LANES; i++) best = value[i] > best ? value[i] : best;
  return best;
}

inline Floats splat(float value) { return Floats{} + value; }

// 2 to the power x for x <= 0, 0 from x = -160 down: 2^n times a polynomial on [-1/2, 1/2], error below 2 ulp.
// Not-a-number stays one.
inline Floats exp2_lanes(Floats x) {
#ifdef __AVX512F__
  x = (Floats)_mm512_max_ps((__m512)splat(-160.0f), (__m512)x);
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const Floats low = x < -160.0f ? splat(-160.0f) : x;
  const Ints whole = __builtin_convertvector(low == low ? low - 0.5f : Floats{}, Ints);
  const Floats n = __builtin_convertvector(whole, Floats);
  x = low;
#endif
  const Floats r = x - n;
  Floats p = splat(1.525273e-5f);
  p = p * r + 1.5403530e-4f;
  p = p * r + 1.33335581e-3f;
  p = p * r + 9.61812911e-3f;
  p = p * r + 5.55041087e-2f;
  p = p * r + 2.40226507e-1f;
  p = p * r + 6.93147181e-1f;
  p = p * r + 1.0f;
#ifdef __AVX512F__
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Floats power = (Floats)((whole + 127) << 23);
  return x != x ? x : whole < -126 ? Floats{} : p * power;
#endif
}

constexpr float LOG2_E = 1.44269504088896341f;

}  // namespace millpond
