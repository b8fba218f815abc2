// Random row budgets over exact buffers, for the sanitizers: who gets the rows is what a sort of all drafts
// says, and a pass of so many rows takes them.
//
// Usage: rows_main SEED ROUNDS; exits with 0 if all is well.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <tuple>
#include <vector>

#include "sequences.h"

namespace {

using Ints = std::vector<int64_t>;

std::mt19937 engine;

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine); }

Ints ints(int64_t count, int64_t low, int64_t high) {
  Ints found(static_cast<size_t>(count));
  for (int64_t& each : found) each = pick(low, high);
  return found;
}

// A table of sequences, some of which have no room left, and a budget for a few of them.
struct World {
  int64_t rows = pick(1, 9), lanes = pick(1, rows), width = pick(0, 6);
  int64_t lane_stride = width + pick(0, 3), draft_stride = 1;
  int64_t target_rows = pick(0, lanes * (width + 1) + 3), block = pick(1, 16), pages = pick(1, 4);
  Ints last_token = ints(rows, 0, 50), length = ints(rows, 1, block * pages), max_len = length;
  Ints page_table = ints(rows * pages, 0, 40), row_ids = ints(rows, 0, 0), verify = ints(lanes, 0, width);
  std::vector<float> signals;

  World() {
    for (int64_t& each : max_len) each += pick(-1, width + 2);
    for (int64_t row = 0; row < rows; ++row) row_ids[static_cast<size_t>(row)] = row;
    std::shuffle(row_ids.begin(), row_ids.end(), engine);
    row_ids.resize(static_cast<size_t>(lanes));
    row_ids.shrink_to_fit();
    const float odd[] = {0.0f, 0.5f, 0.9f, 1.0f, NAN, INFINITY, -INFINITY, -1.0f, 1e-30f};
    const bool ties = pick(0, 1) == 1;
    if (pick(0, 1) == 1) {  // draft by draft instead
      lane_stride = 1;
      draft_stride = lanes + pick(0, 3);
    }
    const int64_t last = (lanes - 1) * lane_stride + (width - 1) * draft_stride;
    signals.resize(width == 0 ? 0 : static_cast<size_t>(last + 1));
    for (float& each : signals) each = ties ? odd[pick(0, 8)] : static_cast<float>(pick(0, 1000)) / 1000;
  }

  xs::RowTable table() {
    return {rows, last_token.data(), length.data(), max_len.data(), page_table.data(), pages, block, 41};
  }
};

Ints admit(World& world) {
  const size_t lanes = static_cast<size_t>(world.lanes);
  std::vector<double> products(lanes);
  Ints waiting(lanes), admitted(lanes);
  xs::admit(world.table(), {world.row_ids.data(), world.verify.data(), world.lanes, world.signals.data(),
                            world.lane_stride, world.draft_stride, world.width, world.target_rows,
                            products.data(), waiting.data(), admitted.data()});
  return admitted;
}

// Every draft with room behind it, best first.
Ints sorted(const World& world) {
  std::vector<std::tuple<float, int64_t, int64_t>> drafts;
  for (int64_t lane = 0; lane < world.lanes; ++lane) {
    const size_t at = static_cast<size_t>(lane), row = static_cast<size_t>(world.row_ids[at]);
    double survival = 1.0;
    for (int64_t k = 0; k < world.verify[at] && k + 1 < world.max_len[row] - world.length[row]; ++k) {
      const float signal =
          world.signals[static_cast<size_t>(lane * world.lane_stride + k * world.draft_stride)];
      survival *= std::isnan(signal) ? 0.0 : std::clamp(double{signal}, 0.0, 1.0);
      drafts.emplace_back(-static_cast<float>(survival), k, lane);
    }
  }
  std::sort(drafts.begin(), drafts.end());
  Ints counts(static_cast<size_t>(world.lanes));
  const int64_t budget = std::max<int64_t>(0, world.target_rows - world.lanes);
  for (int64_t i = 0; i < std::min(budget, static_cast<int64_t>(drafts.size())); ++i) {
    ++counts[static_cast<size_t>(std::get<2>(drafts[static_cast<size_t>(i)]))];
  }
  return counts;
}

// The pass that the budget is for.
bool taken(World& world, Ints counts) {
  const int64_t rows = std::max(world.target_rows, world.lanes), width = world.width + 1;
  for (int64_t& each : counts) ++each;
  const Ints drafts = ints(world.lanes * world.width, 0, 50);
  std::vector<Ints> flat(8, Ints(static_cast<size_t>(rows))), lane(2, Ints(static_cast<size_t>(world.lanes)));
  Ints table(static_cast<size_t>(world.lanes * world.pages)), dense(static_cast<size_t>(world.lanes * width));
  const xs::PassRows pass{world.row_ids.data(), world.lanes,    width,          rows,        flat[0].data(),
                          flat[1].data(),       flat[2].data(), flat[3].data(), table.data()};
  const xs::VerifyRows verify{pass,           drafts.data(),  flat[4].data(), flat[5].data(), flat[6].data(),
                              lane[0].data(), lane[1].data(), dense.data(),   flat[7].data()};
  return xs::verify_rows(world.table(), verify, counts.data(), world.pages);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  engine.seed(static_cast<unsigned>(std::atoi(argv[1])));
  for (int round = 0; round < std::atoi(argv[2]); ++round) {
    World world;
    const Ints admitted = admit(world);
    if (admitted == sorted(world) && taken(world, admitted)) continue;
    std::printf("round %d: rows are given otherwise, or too many\n", round);
    return 1;
  }
  std::printf("ok\n");
  return 0;
}
