// The ops in plain loops, for machines without the vector units and as the yardstick of those that have.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"
#include "linear.h"
#include "linear_int.h"
#include "ops.h"

namespace xs {
namespace {

float wide(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// To nearest, ties to even; NaN stays NaN.
bf16 narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (std::isnan(value)) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

bf16 finite(bf16 value) { return (value & 0x7F80) == 0x7F80 ? 0 : value; }

float silu(float x) { return x / (1.0f + std::exp(-x)); }

// Lane `lane` of a panel times x: the sum in the order of the inputs.
float dot(const Linear& linear, int64_t panel, int64_t lane, const bf16* x) {
  const bf16* weights = static_cast<const bf16*>(linear.weights) + panel * kPanel * linear.in + lane * 2;
  float sum = 0.0f;
  for (int64_t k = 0; k < linear.in; k += 2, weights += 2 * kPanel) {
    sum += wide(x[k]) * wide(weights[0]);
    sum += wide(x[k + 1]) * wide(weights[1]);
  }
  return sum;
}

float plain_output(const Linear& linear, int64_t out, const bf16* x) {
  const float bias = linear.bias == nullptr ? 0.0f : linear.bias[out];
  return dot(linear, out / kPanel, out % kPanel, x) + bias;
}

float gated_output(const Linear& linear, int64_t out, const bf16* x) {
  constexpr int64_t kHalf = kPanel / 2;
  const int64_t panel = out / kHalf, lane = out % kHalf;
  float gate = dot(linear, panel, lane, x), up = dot(linear, panel, kHalf + lane, x);
  if (linear.bias != nullptr) {  // padding has no bias: the last panel's ups follow its gates at once
    const float* bias = linear.bias + panel * kPanel + lane;
    gate += bias[0];
    up += bias[std::min(kHalf, linear.out / 2 - panel * kHalf)];
  }
  return silu(gate) * up;
}

void linear_bf16(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
                 const bf16* add, int64_t add_stride) {
  const int64_t outs = linear.gated ? linear.out / 2 : linear.out;
  for (int64_t out; (out = worker.next()) < outs;) {
    for (int64_t row = 0; row < rows; ++row) {
      const bf16* in = x.values + row * x.stride;
      float value = linear.gated ? gated_output(linear, out, in) : plain_output(linear, out, in);
      if (add != nullptr) value += wide(add[row * add_stride + out]);
      y[row * y_stride + out] = narrow(value);
    }
  }
}

void linear(Worker& worker, const Linear& linear, const Rows& x, int64_t rows, bf16* y, int64_t y_stride,
            const bf16* add, int64_t add_stride) {
  const auto run = linear.format == Format::bf16 ? linear_bf16 : portable_linear_int;
  run(worker, linear, x, rows, y, y_stride, add, add_stride);
}

// norm(x), or with `add` add + norm(x). y may be either.
void normalise(const bf16* x, const bf16* weight, float eps, bf16* y, int64_t cols,
               const bf16* add = nullptr) {
  float sum = 0.0f;
  for (int64_t i = 0; i < cols; ++i) sum += wide(x[i]) * wide(x[i]);
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(cols) + eps);
  for (int64_t i = 0; i < cols; ++i) {
    const bf16 normal = narrow(wide(narrow(wide(x[i]) * scale)) * wide(weight[i]));
    y[i] = add == nullptr ? normal : narrow(wide(add[i]) + wide(normal));
  }
}

void rms_norm(Worker& worker, const bf16* x, int64_t x_stride, const bf16* weight, float eps, bf16* y,
              int64_t y_stride, int64_t rows, int64_t cols) {
  for (int64_t row; (row = worker.next()) < rows;) {
    normalise(x + row * x_stride, weight, eps, y + row * y_stride, cols);
  }
}

void norm_sum(Worker& worker, const NormSum& step) {
  for (int64_t row; (row = worker.next()) < step.rows;) {
    const int64_t at = row * step.cols;
    bf16* sum = step.sum + at;
    const bf16* add = step.add == nullptr ? nullptr : step.add + at;
    normalise(step.x + at, step.weight, step.eps, sum, step.cols, add);
    if (step.next_weight == nullptr) continue;
    normalise(sum, step.next_weight, step.next_eps, step.next + at, step.cols);
  }
}

void rotate(bf16* head, const float* cos, const float* sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = wide(head[i]), second = wide(head[i + half]);
    head[i] = narrow(first * cos[i] + second * sin[i]);
    head[i + half] = narrow(second * cos[i + half] + first * sin[i + half]);
  }
}

void rope_store(Worker& worker, const RopeStore& step) {
  const Cache& cache = step.cache;
  const int64_t dim = cache.dim, rotated = step.heads + cache.kv_heads, all = rotated + cache.kv_heads;
  for (int64_t row; (row = worker.next()) < step.rows;) {
    bf16* qkv = step.qkv + row * step.stride;
    const int64_t page = step.slots[row] / cache.block, token = step.slots[row] % cache.block;
    for (int64_t head = step.store_queries ? 0 : step.heads; head < all; ++head) {
      bf16* values = qkv + head * dim;
      if (head < rotated) {
        if (step.head_norm != nullptr) normalise(values, step.head_norm + head * dim, step.eps, values, dim);
        rotate(values, step.cos + row * dim, step.sin + row * dim, dim);
      }
      if (head < step.heads) continue;
      const int64_t plane = head - step.heads;
      bf16* chunk = cache.slab + (plane * cache.pages + page) * cache.block * dim;
      for (int64_t d = 0; d < dim; ++d) {
        const int64_t at = plane < cache.kv_heads ? key_index(dim, token, d) : value_index(dim, token, d);
        chunk[at] = step.finite ? finite(values[d]) : values[d];
      }
    }
  }
}

struct Keys {
  const Attend& step;
  const int64_t* pages;

  const bf16* chunk(int64_t plane, int64_t key) const {
    const Cache& cache = step.cache;
    return cache.slab + (plane * cache.pages + pages[key / cache.block]) * cache.block * cache.dim;
  }
};

void attend_head(const Attend& step, int64_t row, int64_t head, float* weights) {
  const Cache& cache = step.cache;
  const int64_t dim = cache.dim, group = step.heads / cache.kv_heads, plane = head / group;
  const Keys keys{step, step.page_table + step.sequences[row] * step.table_stride};
  const int64_t end = keys_seen(step, row);
  const int64_t begin = std::min(step.first_key, end - 1);
  const bf16* q = step.q + row * step.q_stride + head * dim;
  float high = -std::numeric_limits<float>::infinity();
  for (int64_t key = begin; key < end; ++key) {
    const bf16* chunk = keys.chunk(plane, key);
    float score = 0.0f;
    for (int64_t d = 0; d < dim; ++d) score += wide(q[d]) * wide(chunk[key_index(dim, key % cache.block, d)]);
    weights[key - begin] = score * step.scale;
    high = std::max(high, weights[key - begin]);
  }
  float sum = 0.0f;
  for (int64_t i = 0; i < end - begin; ++i) sum += weights[i] = std::exp(weights[i] - high);
  for (int64_t d = 0; d < dim; ++d) {
    float mixed = 0.0f;
    for (int64_t key = begin; key < end; ++key) {
      const bf16* chunk = keys.chunk(cache.kv_heads + plane, key);
      mixed += weights[key - begin] * wide(chunk[value_index(dim, key % cache.block, d)]);
    }
    step.out[(row * step.heads + head) * dim + d] = narrow(mixed / sum);
  }
}

void attend(Worker& worker, const Attend& step) {
  int64_t longest = 1;
  for (int64_t row = 0; row < step.rows; ++row) longest = std::max(longest, keys_seen(step, row));
  float* weights = static_cast<float*>(worker.scratch(static_cast<size_t>(longest) * sizeof(float)));
  for (int64_t item; (item = worker.next()) < step.rows * step.heads;) {
    attend_head(step, item / step.heads, item % step.heads, weights);
  }
}

void argmax(Worker& worker, const bf16* x, int64_t stride, int64_t rows, int64_t cols, int64_t* index,
            float* value) {
  for (int64_t row; (row = worker.next()) < rows;) {
    const bf16* values = x + row * stride;
    int64_t best = 0;
    for (int64_t i = 1; i < cols && !std::isnan(wide(values[best])); ++i) {
      if (!(wide(values[i]) <= wide(values[best]))) best = i;
    }
    index[row] = best;
    value[row] = wide(values[best]);
  }
}

void logsumexp(Worker& worker, const bf16* x, int64_t stride, int64_t rows, int64_t cols, float* out) {
  for (int64_t row; (row = worker.next()) < rows;) {
    const bf16* values = x + row * stride;
    float high = wide(values[0]);
    for (int64_t i = 1; i < cols; ++i) high = std::max(high, wide(values[i]));
    if (!std::isfinite(high)) high = 0.0f;  // as torch: infinities come out as what they are
    float sum = 0.0f;
    for (int64_t i = 0; i < cols; ++i) sum += std::exp(wide(values[i]) - high);
    out[row] = high + std::log(sum);
  }
}

const Ops kPortable = {"portable", "portable", linear, portable_quantise, rms_norm,
                       norm_sum,   rope_store, attend, argmax,            logsumexp};

}  // namespace

const Ops& portable_ops() { return kPortable; }

}  // namespace xs
