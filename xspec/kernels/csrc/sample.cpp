#include "sample.h"

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

}  // namespace

const SampleOps& sample_ops(const Ops& ops) {
  for (const SampleOps* own : {avx512_sample_ops(), avx2_sample_ops()}) {
    if (own != nullptr && std::strcmp(own->name, ops.name) == 0) return *own;
  }
  return portable_sample_ops();
}

void Sampler::draw(Team& team, const Ops& ops, const Noise& noise, const bf16* logits, int64_t stride,
                   const float* temperature, int64_t temperature_stride, int64_t* columns, bool* bad) {
  const int64_t rows = noise.rows, cols = noise.cols;
  high_.resize(static_cast<size_t>(rows));
  hands(team, rows * cols, kScanAlone).run([&](Worker& worker) {
    ops.argmax(worker, logits, stride, rows, cols, columns, high_.data());
  });
  for (int64_t row = 0; bad != nullptr && row < rows; ++row) bad[row] = !std::isfinite(high_[row]);
  if (temperature == nullptr) return;
  row_.assign(static_cast<size_t>(rows), 0.0f);
  int64_t drawn = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t owner = noise.owners == nullptr ? row : noise.owners[row];
    if (std::isfinite(high_[row])) row_[row] = temperature[owner * temperature_stride];
    drawn += row_[row] > 0.0f;
  }
  if (drawn == 0) return;
  const int64_t pieces = (cols + kSampleColumns - 1) / kSampleColumns;
  parts_.resize(static_cast<size_t>(rows * pieces));
  const SampleOps& own = sample_ops(ops);
  hands(team, drawn * cols, kNoiseAlone).run([&](Worker& worker) {
    own.scores(worker, noise, logits, stride, high_.data(), columns, row_.data(), parts_.data());
  });
  for (int64_t row = 0; row < rows; ++row) {
    if (row_[row] == 0.0f) continue;
    const Best* best = &parts_[row * pieces];
    for (int64_t piece = 1; piece < pieces; ++piece) {
      const Best& part = parts_[row * pieces + piece];
      if (part.score > best->score) best = &part;
    }
    columns[row] = best->column;
  }
}

void Sampler::probability(Team& team, const Ops& ops, const bf16* logits, int64_t stride, int64_t rows,
                          int64_t cols, const int64_t* columns, float* out) {
  row_.resize(static_cast<size_t>(rows));
  hands(team, rows * cols, kSumAlone).run([&](Worker& worker) {
    ops.logsumexp(worker, logits, stride, rows, cols, row_.data());
  });
  for (int64_t row = 0; row < rows; ++row) {
    out[row] = std::exp(wide(logits[row * stride + columns[row]]) - row_[row]);
  }
}

void Sampler::gumbel(Team& team, const Ops& ops, const Noise& noise, float* out) {
  const SampleOps& own = sample_ops(ops);
  Team& chosen = hands(team, noise.rows * noise.cols, kNoiseAlone);
  chosen.run([&](Worker& worker) { own.gumbel(worker, noise, out); });
}

}  // namespace xs
