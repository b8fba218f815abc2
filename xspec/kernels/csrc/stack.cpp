#include "stack.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "memory.h"

namespace xs {
namespace {

constexpr int64_t kGroup = 32;  // inputs an int format's activations share a scale over

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

bool is_int(const Linear& linear) { return linear.format != Format::bf16; }

// Hands out parts of one block; with a null block it only counts.
class Carver {
 public:
  explicit Carver(char* block) : block_(block) {}

  template <typename T>
  T* take(int64_t count) {
    T* part = block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + used_);
    used_ += aligned(static_cast<size_t>(count) * sizeof(T));
    return part;
  }
  size_t used() const { return used_; }

 private:
  char* block_;
  size_t used_ = 0;
};

// To the nearest bf16, ties to even. Not for NaN.
float rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Cosines and sines of one position as RopeStore reads them. In scalars, so that no row depends on another.
void turn(int64_t position, const StackShape& shape, float* cos, float* sin) {
  if (shape.frequencies == nullptr) {
    const int64_t at = std::min(position, shape.positions - 1) * shape.dim;
    std::copy_n(shape.cos + at, shape.dim, cos);
    std::copy_n(shape.sin + at, shape.dim, sin);
    return;
  }
  const int64_t half = shape.dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * shape.frequencies[i];
    cos[i] = cos[i + half] = rounded(std::cos(angle));
    sin[i + half] = rounded(std::sin(angle));
    sin[i] = -sin[i + half];
  }
}

int64_t widest_int_input(const std::vector<Layer>& layers) {
  int64_t widest = 0;
  for (const Layer& layer : layers) {
    for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
      if (is_int(*linear)) widest = std::max(widest, linear->in);
    }
  }
  return widest;
}

// A norm of the stream for what reads it next; without weight there is none.
struct Next {
  const bf16* weight;
  float eps;
  bf16* to;
};

}  // namespace

struct Stack::Buffers {
  bf16* normed;    // [rows, hidden]
  bf16* residual;  // [rows, hidden]
  bf16* qkv;       // [rows, (H + 2 G) D]
  bf16* attended;  // [rows, H D]
  bf16* inner;     // [rows, inner]
  float* cos;      // [rows, D]
  float* sin;
  Quantised quantised;

  void carve(Carver& from, const StackShape& shape, int64_t quantised_in, int64_t rows) {
    normed = from.take<bf16>(rows * shape.hidden);
    residual = from.take<bf16>(rows * shape.hidden);
    qkv = from.take<bf16>(rows * (shape.heads + 2 * shape.kv_heads) * shape.dim);
    attended = from.take<bf16>(rows * shape.heads * shape.dim);
    inner = from.take<bf16>(rows * shape.inner);
    cos = from.take<float>(rows * shape.dim);
    sin = from.take<float>(rows * shape.dim);
    quantised.q = from.take<int8_t>(rows * quantised_in);
    quantised.scale = from.take<float>(rows * (quantised_in / kGroup));
    quantised.sum = from.take<float>(rows * (quantised_in / kGroup));
  }
};

// The steps of a pass as one worker takes them. All but the first end with a barrier.
struct Stack::Steps {
  Worker& worker;
  const Ops& ops;
  const StackShape& shape;
  const Pass& pass;
  const Buffers& own;

  void turns() {
    for (int64_t row = worker.index; row < pass.rows; row += worker.count) {
      const int64_t at = row * shape.dim;
      turn(pass.positions[row], shape, own.cos + at, own.sin + at);
    }
  }

  void norm(const bf16* x, const bf16* weight, float eps, bf16* y) {
    ops.rms_norm(worker, x, shape.hidden, weight, eps, y, shape.hidden, pass.rows, shape.hidden);
    worker.barrier();
  }

  void linear(const Linear& weights, const bf16* x, bf16* y, int64_t y_stride, const bf16* add) {
    Rows rows;
    rows.values = x;
    rows.stride = weights.in;
    if (is_int(weights)) {
      ops.quantise(worker, x, weights.in, pass.rows, weights.in, own.quantised);
      worker.barrier();
      rows.q = own.quantised.q;
      rows.scale = own.quantised.scale;
      rows.sum = own.quantised.sum;
    }
    ops.linear(worker, weights, rows, pass.rows, y, y_stride, add, y_stride);
    worker.barrier();
  }

  // to = residual + linear(x), with the norm behind the sublayer if there is one; then norm(to) for `next`.
  void join(const Layer& layer, const Linear& weights, const bf16* x, const bf16* out_norm,
            const bf16* residual, bf16* to, const Next& next) {
    if (out_norm == nullptr) {
      linear(weights, x, to, shape.hidden, residual);
      if (next.weight != nullptr) norm(to, next.weight, next.eps, next.to);
      return;
    }
    bf16* yielded = layer.of_sums ? to : own.normed;  // `normed` was read before x was made
    linear(weights, x, yielded, shape.hidden, layer.of_sums ? residual : nullptr);
    NormSum step{};
    step.x = yielded;
    step.weight = out_norm;
    step.add = layer.of_sums ? nullptr : residual;
    step.sum = to;
    step.next_weight = next.weight;
    step.next = next.to;
    step.eps = layer.eps;
    step.next_eps = next.eps;
    step.rows = pass.rows;
    step.cols = shape.hidden;
    ops.norm_sum(worker, step);
    worker.barrier();
  }

  void store(const Layer& layer, bf16* slab, bool queries) {
    RopeStore step{};
    step.qkv = own.qkv;
    step.stride = (shape.heads + 2 * shape.kv_heads) * shape.dim;
    step.rows = pass.rows;
    step.heads = shape.heads;
    step.cos = own.cos;
    step.sin = own.sin;
    step.head_norm = layer.head_norm;
    step.eps = layer.eps;
    step.slots = pass.slots;
    step.finite = pass.finite != 0;
    step.store_queries = queries;
    step.cache = cache(slab);
    ops.rope_store(worker, step);
    worker.barrier();
  }

  // Of keys and values [rows, stride] alone.
  void store_context(const Layer& layer, bf16* kv, int64_t stride, bf16* slab) {
    RopeStore step{};
    step.qkv = kv;
    step.stride = stride;
    step.rows = pass.rows;
    step.cos = own.cos;
    step.sin = own.sin;
    step.head_norm = layer.head_norm == nullptr ? nullptr : layer.head_norm + shape.heads * shape.dim;
    step.eps = layer.eps;
    step.slots = pass.slots;
    step.cache = cache(slab);
    ops.rope_store(worker, step);
    worker.barrier();
  }

  void attend(bf16* slab) {
    Attend step{};
    step.q = own.qkv;
    step.q_stride = (shape.heads + 2 * shape.kv_heads) * shape.dim;
    step.rows = pass.rows;
    step.heads = shape.heads;
    step.sequences = pass.sequences;
    step.kv_lens = pass.kv_lens;
    step.page_table = pass.page_table;
    step.table_stride = pass.table_stride;
    step.first_key = shape.first_key;
    step.scale = shape.scale;
    step.out = own.attended;
    step.cache = cache(slab);
    ops.attend(worker, step);
    worker.barrier();
  }

  Cache cache(bf16* slab) const { return Cache{slab, pass.pages, pass.block, shape.kv_heads, shape.dim}; }
};

Stack::Stack(const StackShape& shape, const Layer* layers, int64_t count)
    : shape_(shape), layers_(layers, layers + count), quantised_in_(widest_int_input(layers_)) {}

Stack::~Stack() { std::free(memory_); }

Stack::Buffers Stack::reserve(int64_t rows) {
  Buffers buffers;
  Carver counter(nullptr);
  buffers.carve(counter, shape_, quantised_in_, rows);
  if (counter.used() > bytes_) {
    std::free(memory_);
    bytes_ = 0;
    memory_ = static_cast<char*>(allocate(counter.used()));
    if (memory_ == nullptr) throw std::bad_alloc();
    bytes_ = counter.used();
  }
  Carver carver(memory_);
  buffers.carve(carver, shape_, quantised_in_, rows);
  return buffers;
}

void Stack::forward(Team& team, const Ops& ops, const Pass& pass) {
  const Buffers own = reserve(pass.rows);
  const int64_t qkv_width = (shape_.heads + 2 * shape_.kv_heads) * shape_.dim;
  team.run([&](Worker& worker) {
    Steps steps{worker, ops, shape_, pass, own};
    steps.turns();
    const bf16* residual = pass.residual;
    bf16* const* slab = pass.slabs;
    for (int64_t loop = 0; loop < pass.loops; ++loop) {
      Next last{nullptr, 0.0f, nullptr};
      if (pass.normed != nullptr) {
        last = Next{shape_.final_norm, shape_.norm_eps, pass.normed + loop * pass.rows * shape_.hidden};
      }
      steps.norm(residual, layers_.front().input_norm, layers_.front().eps, own.normed);
      for (size_t index = 0; index < layers_.size(); ++index, ++slab) {
        const Layer& layer = layers_[index];
        steps.linear(layer.qkv, own.normed, own.qkv, qkv_width, nullptr);
        steps.store(layer, *slab, true);
        steps.attend(*slab);
        steps.join(layer, layer.output, own.attended, layer.attention_out_norm, residual, own.residual,
                   Next{layer.mlp_norm, layer.eps, own.normed});
        steps.linear(layer.gate_up, own.normed, own.inner, shape_.inner, nullptr);
        // What is wanted outside is written there at once; the next layer reads it from there.
        bf16* wanted = pass.outputs == nullptr ? nullptr : pass.outputs[index];
        bf16* out = wanted == nullptr ? own.residual : wanted;
        const Next next = index + 1 < layers_.size()
                              ? Next{layers_[index + 1].input_norm, layers_[index + 1].eps, own.normed}
                              : last;
        steps.join(layer, layer.down, own.inner, layer.mlp_out_norm, own.residual, out, next);
        residual = out;
      }
      residual = last.to;
    }
  });
}

void Stack::publish(Team& team, const Ops& ops, const Pass& pass) {
  const Buffers own = reserve(pass.rows);
  const int64_t qkv_width = (shape_.heads + 2 * shape_.kv_heads) * shape_.dim;
  team.run([&](Worker& worker) {
    Steps steps{worker, ops, shape_, pass, own};
    const Layer& layer = layers_.front();
    steps.turns();
    steps.norm(pass.residual, layer.input_norm, layer.eps, own.normed);
    steps.linear(layer.qkv, own.normed, own.qkv, qkv_width, nullptr);
    steps.store(layer, pass.slabs[0], false);
  });
}

void Stack::store_context(Team& team, const Ops& ops, const Pass& pass, bf16* kv) {
  const Buffers own = reserve(pass.rows);
  const int64_t each = 2 * shape_.kv_heads * shape_.dim, stride = each * static_cast<int64_t>(layers_.size());
  team.run([&](Worker& worker) {
    Steps steps{worker, ops, shape_, pass, own};
    steps.turns();
    worker.barrier();
    for (size_t index = 0; index < layers_.size(); ++index) {
      steps.store_context(layers_[index], kv + static_cast<int64_t>(index) * each, stride, pass.slabs[index]);
    }
  });
}

}  // namespace xs
