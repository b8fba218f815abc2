// Random draws from exact buffers, for the sanitizers: filters, noise, and chains of guesses. Every
// instruction set of this machine and any number of threads must draw the same tokens.
//
// Usage: draw_main SEED ROUNDS; exits with 0 if all is well.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "sample.h"

namespace {

using xs::bf16;

std::mt19937 engine;

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine); }

bf16 narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>(bits >> 16);
}

// Some lanes of up to six rows over a vocabulary, each with settings of its own.
struct World {
  int64_t rows = 0, cols, owners_count;
  std::unique_ptr<bf16[]> logits;  // as long as they are: the first byte past the end is poisoned
  std::vector<int32_t> keys;
  std::vector<int64_t> owners, positions, fed, offsets, top_k;
  std::vector<float> temperature, top_p, min_p;
  bool chained, filtered;

  World() {
    const int64_t most = pick(0, 3) == 0 ? 9000 : 200;
    cols = pick(1, most);
    owners_count = pick(1, 6);
    chained = pick(0, 2) > 0;
    filtered = pick(0, 2) > 0;
    for (int64_t owner = 0; owner < owners_count; ++owner) {
      for (int word = 0; word < 2; ++word) keys.push_back(static_cast<int32_t>(engine()));
      temperature.push_back(pick(0, 2) == 0 ? 0.0f : 0.1f * static_cast<float>(pick(1, 20)));
      top_k.push_back(pick(0, 1) * pick(1, 2 * cols));
      top_p.push_back(pick(0, 1) == 0 ? 1.0f : 0.01f * static_cast<float>(pick(0, 100)));
      min_p.push_back(pick(0, 1) == 0 ? 0.0f : 0.01f * static_cast<float>(pick(1, 100)));
      const int64_t count = pick(1, 6), start = pick(0, 1 << 20);
      for (int64_t offset = 0; offset < count; ++offset, ++rows) {
        owners.push_back(owner);
        positions.push_back(start + offset);
        offsets.push_back(offset);
        fed.push_back(pick(0, cols - 1));
      }
    }
    const float scale = 0.1f * static_cast<float>(pick(0, 60));
    std::normal_distribution<float> normal(0.0f, 1.0f);
    logits.reset(new bf16[rows * cols]);
    for (int64_t i = 0; i < rows * cols; ++i) logits[i] = narrow(scale * normal(engine));
    const float odd[] = {NAN, INFINITY, -INFINITY};
    for (int64_t i = pick(0, 3); i > 0; --i) logits[pick(0, rows * cols - 1)] = narrow(odd[pick(0, 2)]);
  }
};

struct Result {
  std::vector<int64_t> columns;
  std::unique_ptr<bool[]> bad;
};

Result run(const World& world, const xs::Ops& ops, int threads, bool chained) {
  xs::Team team(threads);
  xs::Sampler sampler;
  Result found{std::vector<int64_t>(static_cast<size_t>(world.rows)),
               std::unique_ptr<bool[]>(new bool[world.rows])};
  xs::Draw draw{};
  draw.noise = {world.keys.data(), world.owners.data(), world.positions.data(), nullptr, 0, world.rows,
                world.cols};
  draw.settings = {world.temperature.data(), nullptr, nullptr, 1, nullptr, 1};
  if (world.filtered) {
    draw.settings.top_p = world.top_p.data();
    draw.settings.min_p = world.min_p.data();
    draw.settings.top_k = world.top_k.data();
  }
  if (chained) draw.chain = {world.fed.data(), world.offsets.data()};
  draw.logits = world.logits.get();
  draw.stride = world.cols;
  draw.columns = found.columns.data();
  draw.bad = found.bad.get();
  sampler.draw(team, ops, draw);
  return found;
}

bool same(const Result& a, const Result& b) {
  return a.columns == b.columns && std::memcmp(a.bad.get(), b.bad.get(), a.columns.size()) == 0;
}

// A row is drawn, as in a full draw, if those before it in its lane drew what their successors were fed.
bool follows(const World& world, const Result& full, const Result& lazy) {
  bool right = true;
  for (int64_t row = 0; row < world.rows; ++row) {
    const bool guess = world.offsets[row] > 0;
    right = !guess || (right && full.columns[row - 1] == world.fed[row]);
    if (lazy.columns[row] != (right ? full.columns[row] : xs::kNotDrawn)) return false;
    if (lazy.bad[row] != (right && full.bad[row])) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  engine.seed(static_cast<unsigned>(std::atoi(argv[1])));
  for (int round = 0; round < std::atoi(argv[2]); ++round) {
    World world;
    const Result full = run(world, xs::portable_ops(), 1, false);
    for (int64_t row = 0; row + 1 < world.rows; ++row) {  // two guesses of three are right
      if (world.offsets[row + 1] > 0 && pick(0, 2) > 0) world.fed[row + 1] = full.columns[row];
    }
    for (const char* name : {"portable", "avx2", "avx512", "avx512_fma", "amx"}) {
      const xs::Ops* ops = xs::choose_ops(name);
      if (ops == nullptr) continue;
      for (const int threads : {1, 3}) {
        const Result found = run(world, *ops, threads, world.chained);
        if (world.chained ? follows(world, full, found) : same(full, found)) continue;
        std::printf("round %d: %s with %d threads draws otherwise\n", round, name, threads);
        return 1;
      }
    }
  }
  std::printf("ok\n");
  return 0;
}
