#include <algorithm>
#include <cmath>
#include <cstring>

#include "linear_int.h"

namespace xs {
namespace {

#include "linear_int_share.inc"

constexpr int64_t kHalf = kPanel / 2;

float from_bf16(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// To nearest, ties to even; NaN stays NaN.
bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float from_half(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16, rest = value & 0x7FFF;
  float out;
  if (rest >= 0x0400) {  // a normal number, or with the topmost exponent infinity or NaN
    const uint32_t bits = sign | ((rest << 13) + ((rest < 0x7C00 ? 112u : 224u) << 23));
    std::memcpy(&out, &bits, sizeof out);
    return out;
  }
  out = static_cast<float>(rest) * 0x1p-24f;
  return sign == 0 ? out : -out;
}

// Scale number `index` of the packed scales.
float scale_at(Format format, const char* scales, int64_t index) {
  if (wide(format)) {
    float out;
    std::memcpy(&out, scales + index * 4, sizeof out);
    return out;
  }
  uint16_t bits;
  std::memcpy(&bits, scales + index * 2, sizeof bits);
  return from_half(bits);
}

// dot [16] of one half of a group with a row's 32 inputs; of int8 with q - 128.
void group_dot(Format format, const uint8_t* weights, const int8_t* q, int32_t* dot) {
  const int zero = format == Format::int8 ? 128 : 0;
  std::fill(dot, dot + kHalf, 0);
  for (int64_t step = 0; step < kIntSteps; ++step) {
    const bool high = nibbles(format) && step >= kIntSteps / 2;
    const uint8_t* part = weights + (high ? step - kIntSteps / 2 : step) * kPanel * 4;
    const int8_t* x = q + step * 4;
    for (int64_t lane = 0; lane < kHalf; ++lane) {
      int32_t sum = 0;
      for (int64_t i = 0; i < 4; ++i) {
        const int w = part[lane * 4 + i];
        sum += ((high ? w >> 4 : nibbles(format) ? w & 15 : w) - zero) * x[i];
      }
      dot[lane] += sum;
    }
  }
}

// sums [32] of one row times one panel.
void multiply(const Linear& linear, int64_t panel, const Rows& x, int64_t row, float* sums) {
  const Format format = linear.format;
  const int64_t groups = linear.in / kIntGroup, kinds = format == Format::int8 ? 1 : 2;
  const auto* weights = static_cast<const uint8_t*>(linear.weights) + panel * groups * weight_bytes(format);
  const char* scales = static_cast<const char*>(linear.scales) + panel * groups * scale_bytes(format);
  std::fill(sums, sums + kPanel, 0.0f);
  for (int64_t group = 0; group < groups; ++group) {
    const float row_scale = x.scale[row * groups + group], row_sum = x.sum[row * groups + group];
    for (int64_t half = 0; half < 2; ++half) {
      int32_t dot[kHalf];
      group_dot(format, weights + group * weight_bytes(format) + half * kHalf * 4,
                x.q + row * linear.in + group * kIntGroup, dot);
      for (int64_t lane = 0; lane < kHalf; ++lane) {
        const int64_t at = (half * kinds) * kHalf + lane;
        const char* from = scales + group * scale_bytes(format);
        const float scale = scale_at(format, from, at);
        float& sum = sums[half * kHalf + lane];
        sum += scale * static_cast<float>(dot[lane]) * row_scale;
        if (kinds == 2) sum += scale_at(format, from, at + kHalf) * row_sum;
      }
    }
  }
}

float silu(float x) { return x / (1.0f + std::exp(-x)); }

// Adds the bias, gates, adds the residual, rounds and stores a row's part of one panel.
void finish(const Linear& linear, int64_t panel, float* sums, bf16* y, const bf16* add) {
  const int64_t lanes = linear.gated ? kHalf : kPanel, first = panel * lanes;
  const int64_t count = std::min(lanes, (linear.gated ? linear.out / 2 : linear.out) - first);
  for (int64_t lane = 0; lane < count; ++lane) {
    float value = sums[lane];
    if (linear.bias != nullptr) value += linear.bias[panel * kPanel + lane];
    if (linear.gated) {  // padding has no bias: the last panel's ups follow its gates at once
      float up = sums[kHalf + lane];
      if (linear.bias != nullptr) up += linear.bias[panel * kPanel + count + lane];
      value = silu(value) * up;
    }
    if (add != nullptr) value += from_bf16(add[first + lane]);
    y[first + lane] = to_bf16(value);
  }
}

void quantise_group(const bf16* x, int8_t* q, float* scale, float* sum) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < kIntGroup; ++i) bits = std::max<uint32_t>(bits, x[i] & 0x7FFF);
  const float most = from_bf16(static_cast<bf16>(bits));  // a NaN, if there is one
  const bool nothing = most < kLeast;
  const float inverse = nothing ? 0.0f : 127.0f / most;
  int32_t total = 0;
  for (int64_t i = 0; i < kIntGroup; ++i) {
    const float value = from_bf16(x[i]) * inverse;
    q[i] = std::isnan(value) ? 0 : static_cast<int8_t>(std::lrint(value));
    total += q[i];
  }
  *scale = nothing ? 0.0f : most / 127.0f;
  *sum = *scale * static_cast<float>(total);
}

}  // namespace

void portable_linear_int(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y,
                         int64_t y_stride, const bf16* add, int64_t add_stride) {
  const int64_t lanes = linear.gated ? kHalf : kPanel, width = linear.gated ? linear.out / 2 : linear.out;
  const int64_t panels = (width + lanes - 1) / lanes;
  for (int64_t panel; (panel = worker.next()) < panels;) {
    for (int64_t row = 0; row < rows; ++row) {
      float sums[kPanel];
      multiply(linear, panel, x, row, sums);
      finish(linear, panel, sums, y + row * y_stride, add == nullptr ? nullptr : add + row * add_stride);
    }
  }
}

void portable_quantise(Worker& worker, const bf16* x, int64_t stride, int64_t rows, int64_t in,
                       Quantised to) {
  const int64_t groups = in / kIntGroup;
  for (int64_t row; (row = worker.next()) < rows;) {
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t at = row * groups + group;
      quantise_group(x + row * stride + group * kIntGroup, to.q + at * kIntGroup, to.scale + at, to.sum + at);
    }
  }
}

}  // namespace xs
