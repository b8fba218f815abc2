// Ops and stacks as the calls of the C interface run them: what fits, and on how many threads.
#pragma once

#include <algorithm>
#include <vector>

#include "api.h"
#include "attention.h"
#include "ops.h"
#include "sequences.h"
#include "stack.h"

inline bool fits(const xs::Cache& cache) {
  return cache.slab != nullptr && cache.pages > 0 && cache.block > 0 && cache.block % 16 == 0 &&
         cache.kv_heads > 0 && cache.dim > 0 && cache.dim % 32 == 0 && cache.dim <= xs::kMaxHeadDim;
}

inline bool fits(const xs::Linear& linear) {
  const bool known = linear.format == xs::Format::bf16 || linear.scales != nullptr;
  return linear.weights != nullptr && known && linear.out > 0 && linear.in > 0 && linear.in % 32 == 0 &&
         linear.out % (linear.gated ? 2 : 1) == 0;
}

// Whether buffers of `width` rows a lane are there, for lanes that are rows of the table.
inline bool fits(const xs::PassRows& rows, const xs::RowTable& table, int64_t width, int64_t pages) {
  if (table.block < 1 || pages < 0 || pages > table.table_stride || rows.lanes < 1 || rows.width != width ||
      rows.rows != rows.lanes * width || rows.row_ids == nullptr) {
    return false;
  }
  return std::all_of(rows.row_ids, rows.row_ids + rows.lanes,
                     [&](int64_t row) { return row >= 0 && row < table.rows; });
}

// Parts of one block of memory, 64-byte aligned, which grows with the widest pass.
class Scratch {
 public:
  // For up to eight parts of `numbers` in all; what was given before is lost.
  void begin(int64_t numbers) {
    const size_t size = static_cast<size_t>(numbers + 9 * kLine);
    if (memory_.size() < size) memory_.resize(size);
    at_ = reinterpret_cast<xs::bf16*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
  }

  xs::bf16* take(int64_t numbers) {
    xs::bf16* part = at_;
    at_ += (numbers + kLine - 1) / kLine * kLine;
    return part;
  }

 private:
  static constexpr int64_t kLine = 32;  // bf16 numbers of a cache line

  std::vector<xs::bf16> memory_;
  xs::bf16* at_ = nullptr;
};

// A loop over guesses at those rows. What is read and what is yielded is left out.
inline xs::Pass pass_over(const xs::PassRows& rows, int64_t table_stride, xs::bf16* const* slabs, int64_t pages,
                          int64_t block) {
  xs::Pass pass{};
  pass.rows = rows.rows;
  pass.loops = 1;
  pass.positions = rows.positions;
  pass.slots = rows.slots;
  pass.sequences = rows.sequences;
  pass.kv_lens = rows.kv_lens;
  pass.page_table = rows.page_table;
  pass.table_stride = table_stride;
  pass.slabs = slabs;
  pass.pages = pages;
  pass.block = block;
  pass.finite = 1;
  return pass;
}

struct XsStack {
  XsStack(const xs::StackShape& shape, const xs::Layer* layers, int64_t count)
      : stack(shape, layers, count), cache{nullptr, 0, 0, shape.kv_heads, shape.dim}, hidden(shape.hidden),
        layers(count), normed(shape.final_norm != nullptr), attended(2 * shape.heads * shape.dim),
        products(layers->qkv.out * layers->qkv.in + layers->output.out * layers->output.in +
                 layers->gate_up.out * layers->gate_up.in + layers->down.out * layers->down.in) {}

  // Whether a layer is through before other threads would pay for their barriers. Measured: with layers of
  // 442 thousand products (0.03 ms a row) two threads break even at about 3 rows, and lose where a core is
  // busy.
  bool light(const xs::Pass& pass) const {
    constexpr int64_t kMost = 1 << 20;
    int64_t all = pass.rows * products;
    for (int64_t row = 0; row < pass.rows && all <= kMost; ++row) all += pass.kv_lens[row] * attended;
    return all <= kMost;
  }

  void forward(XsTeam& team, const xs::Pass& pass) {
    stack.forward(light(pass) ? team.solo : team.team, team.ops, pass);
  }

  xs::Stack stack;
  const xs::Cache cache;
  const int64_t hidden;
  const int64_t layers;
  const bool normed;
  const int64_t attended;  // products of a row and key in a layer's attention
  const int64_t products;  // of a row in a layer's linears
};

inline bool fits(const XsStack& stack, const xs::Pass& pass, int64_t layers) {
  xs::Cache cache = stack.cache;
  cache.pages = pass.pages;
  cache.block = pass.block;
  if (pass.rows < 0 || pass.residual == nullptr || pass.slabs == nullptr || pass.slots == nullptr ||
      pass.positions == nullptr) {
    return false;
  }
  return std::all_of(pass.slabs, pass.slabs + layers, [&](xs::bf16* slab) {
    cache.slab = slab;
    return fits(cache);
  });
}

// y [rows, y_stride] = linear(x [rows, x_stride]) (+ add).
inline void run_linear(XsTeam& team, const xs::Linear& linear, const xs::bf16* x, int64_t x_stride,
                       int64_t rows, xs::bf16* y, int64_t y_stride, const xs::bf16* add,
                       int64_t add_stride) {
  xs::Rows in;
  in.values = x;
  in.stride = x_stride;
  xs::Quantised to{};
  const bool quantise = linear.format != xs::Format::bf16;
  if (quantise) {
    to = team.quantised(rows, linear.in);
    in.q = to.q;
    in.scale = to.scale;
    in.sum = to.sum;
  }
  team.team.run([&](xs::Worker& worker) {
    if (quantise) {
      team.ops.quantise(worker, x, x_stride, rows, linear.in, to);
      worker.barrier();
    }
    team.ops.linear(worker, linear, in, rows, y, y_stride, add, add_stride);
  });
}

// x, y [rows, heads, cols]; weight [heads, cols].
inline void run_norm(XsTeam& team, const xs::bf16* x, const xs::bf16* weight, float eps, xs::bf16* y,
                     int64_t rows, int64_t heads, int64_t cols) {
  team.hands(rows * heads * cols).run([&](xs::Worker& worker) {
    const int64_t stride = heads * cols;
    for (int64_t at = 0; at < stride; at += cols) {
      team.ops.rms_norm(worker, x + at, stride, weight + at, eps, y + at, stride, rows, cols);
      if (at + cols < stride) worker.barrier();
    }
  });
}
