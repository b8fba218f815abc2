#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace xs {
namespace {

// Elements worked through in about the time it takes to wake a sleeping thread and wait for it.
constexpr int64_t kNoiseAlone = 1 << 16, kSumAlone = 1 << 17, kScanAlone = 1 << 19;

float wide(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

bool on_guess(const Chain& chain, int64_t row) { return chain.fed != nullptr && chain.offsets[row] > 0; }

// Its heat is 0 if it takes its highest logit.
Drawn drawn_row(const Draw& draw, int64_t row, float high, int64_t highest) {
  const Settings& all = draw.settings;
  const int64_t owner = draw.noise.owners == nullptr ? row : draw.noise.owners[row];
  Drawn drawn{row, draw.logits + row * draw.stride, high, 0.0f, highest, Filter{}, -INFINITY};
  if (all.temperature == nullptr || !std::isfinite(high)) return drawn;
  drawn.heat = all.temperature[owner * all.stride];
  if (all.top_k != nullptr) {
    drawn.filter = {all.top_k[owner * all.top_k_stride], all.top_p[owner * all.stride],
                    all.min_p[owner * all.stride]};
  }
  return drawn;
}

}  // namespace

const SampleOps& sample_ops(const Ops& ops) {
  for (const SampleOps* own : {avx512_sample_ops(), avx2_sample_ops()}) {
    if (own != nullptr && std::strcmp(own->name, ops.lanes) == 0) return *own;
  }
  return portable_sample_ops();
}

void Sampler::draw(Team& team, const Ops& ops, const Draw& draw) {
  const int64_t rows = draw.noise.rows, cols = draw.noise.cols;
  high_.resize(static_cast<size_t>(rows));
  highest_.resize(static_cast<size_t>(rows));
  hands(team, rows * cols, kScanAlone).run([&](Worker& worker) {
    ops.argmax(worker, draw.logits, draw.stride, rows, cols, highest_.data(), high_.data());
  });
  std::fill(draw.columns, draw.columns + rows, kNotDrawn);
  reached_.clear();
  for (int64_t row = 0; row < rows; ++row) {
    if (!on_guess(draw.chain, row)) reached_.push_back(row);
  }
  while (!reached_.empty()) {
    wave_.clear();
    for (const int64_t row : reached_) {
      draw.columns[row] = highest_[row];
      Drawn drawn = drawn_row(draw, row, high_[row], highest_[row]);
      if (drawn.heat > 0.0f) wave_.push_back(drawn);
    }
    if (!wave_.empty()) draw_wave(team, ops, draw);
    size_t right = 0;
    for (const int64_t row : reached_) {
      const int64_t next = row + 1;
      const bool guess = next < rows && on_guess(draw.chain, next);
      if (guess && draw.chain.fed[next] == draw.columns[row]) reached_[right++] = next;
    }
    reached_.resize(right);
  }
  for (int64_t row = 0; draw.bad != nullptr && row < rows; ++row) {
    draw.bad[row] = draw.columns[row] != kNotDrawn && !std::isfinite(high_[row]);
  }
}

void Sampler::draw_wave(Team& team, const Ops& ops, const Draw& draw) {
  const int64_t count = static_cast<int64_t>(wave_.size()), cols = draw.noise.cols;
  const int64_t pieces = (cols + kSampleColumns - 1) / kSampleColumns;
  parts_.resize(static_cast<size_t>(count * pieces));
  const bool filtered =
      std::any_of(wave_.begin(), wave_.end(), [](const Drawn& drawn) { return !drawn.filter.neutral(); });
  const SampleOps& own = sample_ops(ops);
  hands(team, count * cols, kNoiseAlone).run([&](Worker& worker) {
    for (int64_t at; filtered && (at = worker.next()) < count;) {
      Drawn& drawn = wave_[at];
      drawn.lowest = lowest_kept(worker, drawn.logits, cols, drawn.high, drawn.heat, drawn.filter);
    }
    if (filtered) worker.barrier();
    own.scores(worker, draw.noise, wave_.data(), count, parts_.data());
  });
  for (int64_t at = 0; at < count; ++at) {
    const Best* best = &parts_[at * pieces];
    for (int64_t piece = 1; piece < pieces; ++piece) {
      const Best& part = parts_[at * pieces + piece];
      if (part.score > best->score) best = &part;
    }
    draw.columns[wave_[at].row] = best->column;
  }
}

void Sampler::probability(Team& team, const Ops& ops, const bf16* logits, int64_t stride, int64_t rows,
                          int64_t cols, const int64_t* columns, float* out) {
  sums_.resize(static_cast<size_t>(rows));
  hands(team, rows * cols, kSumAlone).run([&](Worker& worker) {
    ops.logsumexp(worker, logits, stride, rows, cols, sums_.data());
  });
  for (int64_t row = 0; row < rows; ++row) {
    out[row] = std::exp(wide(logits[row * stride + columns[row]]) - sums_[row]);
  }
}

void Sampler::gumbel(Team& team, const Ops& ops, const Noise& noise, float* out) {
  const SampleOps& own = sample_ops(ops);
  Team& chosen = hands(team, noise.rows * noise.cols, kNoiseAlone);
  chosen.run([&](Worker& worker) { own.gumbel(worker, noise, out); });
}

}  // namespace xs
