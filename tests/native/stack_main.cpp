// Random stacks of decoder layers, and loops over them, in exact buffers, for the sanitizers: any read or
// write out of place is caught. All instruction sets of this machine must also come close to portable loops.
//
// Usage: stack_main SEED ROUNDS; exits with 0 if all is well.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cache.h"
#include "linear.h"
#include "linear_int.h"
#include "stack.h"

namespace {

using xs::bf16;

std::mt19937 engine;

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine); }

float normal(float scale) { return std::normal_distribution<float>(0.0f, scale)(engine); }

bf16 narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>((bits + 0x8000) >> 16);
}

float wide(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Exactly as long as asked for, so that the first byte past the end is poisoned.
template <typename T>
struct Buffer {
  explicit Buffer(int64_t count) : size(count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    memory.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
  }
  struct Free {
    void operator()(T* at) const { std::free(at); }
  };
  T* get() const { return memory.get(); }
  T& operator[](int64_t at) { return memory.get()[at]; }
  int64_t size;
  std::unique_ptr<T, Free> memory;
};

Buffer<bf16> random_bf16(int64_t count, float scale, float mean = 0.0f) {
  Buffer<bf16> buffer(count);
  for (int64_t i = 0; i < count; ++i) buffer[i] = narrow(mean + normal(scale));
  return buffer;
}

struct Weights {
  xs::Linear linear;
  Buffer<char> packed{0}, scales{0};
  Buffer<float> bias{0};
};

Weights random_linear(xs::Format format, int64_t out, int64_t in, bool gated) {
  Weights made;
  made.linear.format = format;
  made.linear.gated = gated;
  made.linear.out = out;
  made.linear.in = in;
  made.packed = Buffer<char>(xs::packed_bytes(format, out, in, gated));
  const float scale = 1.0f / std::sqrt(static_cast<float>(in));
  if (format == xs::Format::bf16) {
    xs::pack_bf16(random_bf16(out * in, scale).get(), out, in, gated, made.packed.get());
  } else {  // wide formats alone: their scales are plain floats
    const int64_t groups = out * in / 32;
    Buffer<uint8_t> q(out * in);
    Buffer<float> scales(groups), minima(groups);
    const int64_t top = format == xs::Format::int4_wide ? 15 : 255;
    for (int64_t i = 0; i < out * in; ++i) q[i] = static_cast<uint8_t>(pick(0, top));
    for (int64_t i = 0; i < groups; ++i) {
      scales[i] = scale * 4.0f / static_cast<float>(top);
      minima[i] = -2.0f * scale;
    }
    made.scales = Buffer<char>(xs::scale_bytes_int(format, out, in, gated));
    xs::pack_int(format, out, in, gated, q.get(), scales.get(), minima.get(), made.packed.get(),
                 made.scales.get());
    made.linear.scales = made.scales.get();
  }
  if (pick(0, 1) == 1) {
    Buffer<float> plain(out);
    for (int64_t i = 0; i < out; ++i) plain[i] = normal(0.1f);
    made.bias = Buffer<float>(out);
    xs::pack_bias(plain.get(), out, gated, made.bias.get());
    made.linear.bias = made.bias.get();
  }
  made.linear.weights = made.packed.get();
  return made;
}

// One random model, cache and batch of rows.
struct World {
  xs::StackShape shape{};
  std::vector<xs::Layer> layers;
  std::vector<Weights> weights;
  std::vector<Buffer<bf16>> vectors;
  std::vector<float> frequencies;
  Buffer<float> cos{0}, sin{0};
  int64_t loops, rows, sequences, width, block, pages;
  std::vector<int64_t> positions, slots, owners, lens, table;

  const bf16* vector(int64_t count) {
    vectors.push_back(random_bf16(count, 0.1f, 1.0f));
    return vectors.back().get();
  }

  const xs::Linear& linear(int64_t out, int64_t in, bool gated = false) {
    const xs::Format formats[] = {xs::Format::bf16, xs::Format::bf16, xs::Format::int8_wide,
                                  xs::Format::int4_wide};
    weights.push_back(random_linear(formats[pick(0, 3)], out, in, gated));
    return weights.back().linear;
  }

  World() {
    shape.dim = 32 * pick(1, 4);
    shape.kv_heads = pick(1, 3);
    shape.heads = shape.kv_heads * pick(1, 4);
    shape.hidden = 32 * pick(1, 5);
    shape.inner = 32 * pick(1, 6);
    shape.first_key = pick(0, 1);
    shape.scale = 1.0f / std::sqrt(static_cast<float>(shape.dim));
    shape.norm_eps = 1e-5f;
    shape.final_norm = vector(shape.hidden);
    loops = pick(1, 3);
    for (int64_t i = 0; i < shape.dim / 2; ++i) frequencies.push_back(std::pow(1e4f, -2.0f * i / shape.dim));
    if (pick(0, 1) == 1) {
      shape.frequencies = frequencies.data();
    } else {
      tabulate(pick(1, 60));  // some positions are past it
    }
    const int64_t count = pick(1, 3), attended = shape.heads * shape.dim;
    const bool head_norm = pick(0, 1) == 1, behind = pick(0, 2) > 0, of_sums = pick(0, 1) == 1;
    for (int64_t i = 0; i < count; ++i) {
      xs::Layer layer{};
      layer.qkv = linear((shape.heads + 2 * shape.kv_heads) * shape.dim, shape.hidden);
      layer.output = linear(shape.hidden, attended);
      layer.gate_up = linear(2 * shape.inner, shape.hidden, true);
      layer.down = linear(shape.hidden, shape.inner);
      layer.input_norm = vector(shape.hidden);
      layer.mlp_norm = vector(shape.hidden);
      if (head_norm) layer.head_norm = vector((shape.heads + shape.kv_heads) * shape.dim);
      if (behind) {
        layer.attention_out_norm = vector(shape.hidden);
        layer.mlp_out_norm = vector(shape.hidden);
        layer.of_sums = of_sums;
      }
      layer.eps = 1e-6f;
      layers.push_back(layer);
    }
    lay_out();
  }

  void tabulate(int64_t positions) {
    cos = Buffer<float>(positions * shape.dim);
    sin = Buffer<float>(positions * shape.dim);
    const int64_t half = shape.dim / 2;
    for (int64_t i = 0; i < positions * shape.dim; ++i) {
      const float angle = static_cast<float>(i / shape.dim) * frequencies[static_cast<size_t>(i % half)];
      cos[i] = std::cos(angle);
      sin[i] = i % shape.dim < half ? -std::sin(angle) : std::sin(angle);
    }
    shape.cos = cos.get();
    shape.sin = sin.get();
    shape.positions = positions;
  }

  // Sequences of unequal length, their last few tokens in this pass.
  void lay_out() {
    block = 16 * pick(1, 3);
    sequences = pick(1, 4);
    width = pick(1, 4);
    pages = sequences * width + 1;
    std::vector<int64_t> shuffled(static_cast<size_t>(pages - 1));
    for (int64_t i = 0; i < pages - 1; ++i) shuffled[static_cast<size_t>(i)] = i + 1;
    std::shuffle(shuffled.begin(), shuffled.end(), engine);
    table = shuffled;
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
      const int64_t length = pick(1, width * block), fresh = pick(1, std::min<int64_t>(length, 40));
      for (int64_t at = length - fresh; at < length; ++at) {
        positions.push_back(at);
        slots.push_back(table[static_cast<size_t>(sequence * width + at / block)] * block + at % block);
        owners.push_back(sequence);
        lens.push_back(pick(0, 9) == 0 ? 0 : at + 1);
      }
    }
    rows = static_cast<int64_t>(positions.size());
  }
};

struct Result {
  std::vector<bf16> normed, cache;
};

Result run(const World& world, const xs::Ops& ops, int threads, const bf16* residual) {
  xs::Team team(threads);
  const int64_t count = static_cast<int64_t>(world.layers.size()), hidden = world.shape.hidden;
  xs::Stack stack(world.shape, world.layers.data(), count);
  const int64_t elements = 2 * world.shape.kv_heads * world.pages * world.block * world.shape.dim;
  std::vector<Buffer<bf16>> slabs, outputs;
  std::vector<bf16*> slab_at, output_at;
  for (int64_t i = 0; i < count * world.loops; ++i) {
    slabs.emplace_back(elements);
    std::fill_n(slabs.back().get(), elements, bf16{0x3e80});  // what earlier passes left
    slab_at.push_back(slabs.back().get());
  }
  for (int64_t i = 0; i < count; ++i) {
    outputs.emplace_back(world.rows * hidden);
    output_at.push_back(i % 2 == 1 ? outputs.back().get() : nullptr);
  }
  Buffer<bf16> normed(world.loops * world.rows * hidden);
  Buffer<bf16> kv(world.rows * 2 * world.shape.kv_heads * world.shape.dim);
  xs::Pass pass{};
  pass.rows = world.rows;
  pass.loops = world.loops;
  pass.residual = residual;
  pass.outputs = world.rows % 2 == 1 ? output_at.data() : nullptr;
  pass.normed = normed.get();
  pass.positions = world.positions.data();
  pass.slots = world.slots.data();
  pass.sequences = world.owners.data();
  pass.kv_lens = world.lens.data();
  pass.page_table = world.table.data();
  pass.table_stride = world.width;
  pass.slabs = slab_at.data();
  pass.pages = world.pages;
  pass.block = world.block;
  pass.finite = 1;
  stack.forward(team, ops, pass);
  pass.rows = std::min<int64_t>(pass.rows, 3);
  stack.publish(team, ops, pass);
  std::fill_n(kv.get(), kv.size, bf16{0x3f80});
  const xs::Cache cache{slab_at[0], world.pages, world.block, world.shape.kv_heads, world.shape.dim};
  const int64_t sink = 0;
  team.run([&](xs::Worker& worker) { xs::store_kv(worker, cache, kv.get(), 1, &sink, true); });
  Result result;
  result.normed.assign(normed.get(), normed.get() + normed.size);
  result.cache.assign(slab_at[0], slab_at[0] + elements);
  return result;
}

double distance(const std::vector<bf16>& one, const std::vector<bf16>& two) {
  double error = 0.0, size = 1e-9;
  for (size_t i = 0; i < one.size(); ++i) {
    error += std::pow(double{wide(one[i])} - double{wide(two[i])}, 2);
    size += std::pow(double{wide(two[i])}, 2);
  }
  return std::sqrt(error / size);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  engine.seed(static_cast<unsigned>(std::atoi(argv[1])));
  for (int round = 0; round < std::atoi(argv[2]); ++round) {
    const World world;
    const Buffer<bf16> residual = random_bf16(world.rows * world.shape.hidden, 1.0f);
    const Result expected = run(world, xs::portable_ops(), 1, residual.get());
    const double allowed = 0.03 * static_cast<double>(world.loops);  // a loop reads what the last one rounded
    for (const char* name : {"portable", "avx2", "avx512", "avx512_fma", "amx"}) {
      const xs::Ops* ops = xs::choose_ops(name);
      if (ops == nullptr) continue;
      const Result one = run(world, *ops, 1, residual.get()), three = run(world, *ops, 3, residual.get());
      const double off = std::max(distance(one.normed, expected.normed), distance(one.cache, expected.cache));
      if (one.normed != three.normed || one.cache != three.cache || !(off < allowed)) {
        std::printf("round %d: %s is off by %g, threads %s\n", round, name, off,
                    one.normed == three.normed ? "agree" : "differ");
        return 1;
      }
    }
  }
  std::printf("ok\n");
  return 0;
}
