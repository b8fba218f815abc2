#include <cstring>

#include "linear.h"

namespace xs {

int64_t panels_of(int64_t out, bool gated) {
  return gated ? (out / 2 + kPanel / 2 - 1) / (kPanel / 2) : (out + kPanel - 1) / kPanel;
}

int64_t source_row(int64_t panel, int64_t lane, int64_t out, bool gated) {
  if (!gated) {
    const int64_t row = panel * kPanel + lane;
    return row < out ? row : -1;
  }
  const int64_t half = kPanel / 2, row = panel * half + lane % half;
  if (row >= out / 2) return -1;
  return lane < half ? row : out / 2 + row;
}

int64_t packed_bytes_bf16(int64_t out, int64_t in, bool gated) {
  return panels_of(out, gated) * kPanel * in * int64_t{sizeof(bf16)};
}

void pack_bf16(const bf16* weight, int64_t out, int64_t in, bool gated, void* to) {
  auto* packed = static_cast<bf16*>(to);
  const int64_t panels = panels_of(out, gated);
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      const int64_t row = source_row(panel, lane, out, gated);
      bf16* lane_pairs = packed + panel * kPanel * in + lane * 2;
      for (int64_t pair = 0; pair < in / 2; ++pair) {
        bf16* at = lane_pairs + pair * kPanel * 2;
        if (row < 0) {
          at[0] = at[1] = 0;
        } else {
          std::memcpy(at, weight + row * in + pair * 2, 2 * sizeof(bf16));
        }
      }
    }
  }
}

void pack_bias(const float* bias, int64_t out, bool gated, float* to) {
  for (int64_t panel = 0; panel < panels_of(out, gated); ++panel) {
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      const int64_t row = source_row(panel, lane, out, gated);
      if (row >= 0) *to++ = bias[row];
    }
  }
}

}  // namespace xs
