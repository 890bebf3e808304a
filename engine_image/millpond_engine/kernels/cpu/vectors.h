// Vectors of 16 words, each holding one float or two bfloat16 values, and the arithmetic on them.
//
// Every matrix here is a run of 32-bit words: a float, or a pair of neighbouring bfloat16 values of
// the inner dimension. That makes one set of loops serve both types: `dot` multiplies a word with
// 16 words and adds to 16 float sums, whatever the words hold.
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
  using Element = float;
  static constexpr int PER_WORD = 1;
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int PER_WORD = 2;
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

// sums + word * words: one product per lane for floats, two for pairs of bfloat16.
template <class T>
inline Floats dot(Floats sums, uint32_t word, Words words);

template <>
inline Floats dot<Float32>(Floats sums, uint32_t word, Words words) {
  float value;
  memcpy(&value, &word, 4);
#ifdef __AVX512F__
  return (Floats)_mm512_fmadd_ps(_mm512_set1_ps(value), (__m512)words, (__m512)sums);
#else
  return sums + value * (Floats)words;
#endif
}

template <>
inline Floats dot<BFloat16>(Floats sums, uint32_t word, Words words) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(int(word)), (__m512bh)words);
#else
  sums += widen(uint16_t(word)) * (Floats)(words << 16);
  return sums + widen(uint16_t(word >> 16)) * (Floats)(words & 0xffff0000u);
#endif
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

// e to the power x for x <= 0 (and a little above): 2^n times a polynomial on [-ln2/2, ln2/2], error below 2 ulp.
inline Floats exp_lanes(Floats x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  Floats scaled = x * 1.44269504088896341f;
  Ints n = __builtin_convertvector(scaled + (scaled < 0.0f ? splat(-0.5f) : splat(0.5f)), Ints);
  Floats whole = __builtin_convertvector(n, Floats);
  Floats r = x - whole * 0.693359375f;
  r = r - whole * -2.12194440e-4f;
  Floats p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (Floats)((Ints)p + (n << 23));
}

}  // namespace millpond
