// Entry points of the CPU kernels, in C's calling convention so that no Python or torch header is needed.
#include "attention.h"
#include "matmul.h"

using namespace millpond;

namespace {

template <class T>
void multiply_any(const void* x, long rows, long inputs, const void* packed, const float* bias, void* out, long outputs,
                  int finish) {
  const uint32_t* panels = static_cast<const uint32_t*>(packed);
  using In = typename T::Input;
  if (finish == 0) multiply<T, In, Finish::STORE>(x, rows, inputs, panels, bias, static_cast<In*>(out), outputs);
  if (finish == 1) multiply<T, float, Finish::ADD>(x, rows, inputs, panels, bias, static_cast<float*>(out), outputs);
  if (finish == 2) multiply<T, In, Finish::GATE>(x, rows, inputs, panels, bias, static_cast<In*>(out), outputs);
  if (finish == 3) multiply<T, float, Finish::STORE>(x, rows, inputs, panels, bias, static_cast<float*>(out), outputs);
}

template <class E>
void norm_rows(const float* x, const float* weight, void* out_raw, long rows, long width, float eps) {
  E* out = static_cast<E*>(out_raw);
#pragma omp parallel for schedule(static) if (rows > 16)
  for (long r = 0; r < rows; r++) {
    const float* from = x + r * width;
    Floats squares{};
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
      Floats part = load_floats(from + i);
      squares += part * part;
    }
    float sum = sum_lanes(squares);
    for (long j = i; j < width; j++) sum += from[j] * from[j];
    const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
    for (long j = 0; j + LANES <= width; j += LANES)
      store(out + r * width + j, load_floats(from + j) * scale * load_floats(weight + j));
    for (; i < width; i++) store_scalar(out + r * width + i, from[i] * scale * weight[i]);
  }
}

template <class E>
void embed_rows(const int32_t* tokens, const void* table_raw, float* out, long rows, long width) {
  const E* table = static_cast<const E*>(table_raw);
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < width; i++) out[r * width + i] = widen(table[long(tokens[r]) * width + i]);
}

}  // namespace

extern "C" {

// Bytes of an element of left-hand sides when weights are bfloat16.
int millpond_input_bytes() { return sizeof(BFloat16::Input); }

// `finish`: 0 store, 1 add to float32, 2 gate, 3 store float32.
void millpond_multiply(int bf16, const void* x, long rows, long inputs, const void* packed, const float* bias, void* out,
                       long outputs, int finish) {
  if (bf16) multiply_any<BFloat16>(x, rows, inputs, packed, bias, out, outputs, finish);
  else multiply_any<Float32>(x, rows, inputs, packed, bias, out, outputs, finish);
}

// `gated`: the weight holds gates above ups, and each panel takes 16 of both.
void millpond_pack(const void* weight, long outputs, long words, void* packed, int gated) {
  const uint32_t* from = static_cast<const uint32_t*>(weight);
  uint32_t* to = static_cast<uint32_t*>(packed);
  if (!gated) {
    pack(from, words, to, (outputs + PANEL - 1) / PANEL, [=](long i) { return i < outputs ? i : -1; });
    return;
  }
  const long width = outputs / 2;
  pack(from, words, to, (width + LANES - 1) / LANES, [=](long i) {
    long column = i / PANEL * LANES + i % LANES;
    return column >= width ? -1 : i % PANEL < LANES ? column : width + column;
  });
}

void millpond_norm(int bf16, const float* x, const float* weight, void* out, long rows, long width, float eps) {
  if (bf16) norm_rows<BFloat16::Input>(x, weight, out, rows, width, eps);
  else norm_rows<float>(x, weight, out, rows, width, eps);
}

void millpond_embed(int bf16, const int32_t* tokens, const void* table, float* out, long rows, long width) {
  if (bf16) embed_rows<uint16_t>(tokens, table, out, rows, width);
  else embed_rows<float>(tokens, table, out, rows, width);
}

void millpond_attend(int bf16, const AttentionCall* call) {
  if (bf16) Attention<BFloat16>(*call).run();
  else Attention<Float32>(*call).run();
}

// The largest value of each row and its first index; a row with a NaN gets NaN.
void millpond_argmax(const float* x, long rows, long width, float* best, int64_t* index) {
#pragma omp parallel for schedule(static)
  for (long r = 0; r < rows; r++) {
    const float* from = x + r * width;
    Floats top = splat(-INFINITY), bad{};
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
      Floats part = load_floats(from + i);
      top = part > top ? part : top;
      bad += part - part;  // NaN for NaN and for infinities of both signs
    }
    float most = max_lanes(top), odd = sum_lanes(bad);
    for (long j = i; j < width; j++) {
      most = from[j] > most ? from[j] : most;
      odd += from[j] - from[j];
    }
    long where = 0;
    if (odd != odd)  // rare: look properly
      for (long j = 0; j < width; j++)
        if (from[j] != from[j]) most = from[j];
    while (where < width - 1 && from[where] != most) where++;
    best[r] = most;
    index[r] = where;
  }
}

}  // extern "C"
