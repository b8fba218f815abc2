#include <cstring>

#include "linear_int.h"

namespace xs {
namespace {

#include "linear_int_share.inc"

constexpr int64_t kHalf = kPanel / 2, kRegister = 64;

// One group of one output into its lane of the group's registers.
void pack_group(Format format, const uint8_t* q, int64_t half, int64_t lane, uint8_t* to) {
  const int64_t at = half * kRegister + lane * 4;
  if (!nibbles(format)) {
    for (int64_t step = 0; step < kIntSteps; ++step) {
      std::memcpy(to + step * 2 * kRegister + at, q + step * 4, 4);
    }
    return;
  }
  for (int64_t step = 0; step < kIntSteps / 2; ++step) {
    for (int64_t i = 0; i < 4; ++i) {
      const int low = q[step * 4 + i] & 15, high = q[(step + kIntSteps / 2) * 4 + i] & 15;
      to[step * 2 * kRegister + at + i] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

}  // namespace

int64_t packed_bytes_int(Format format, int64_t out, int64_t in, bool gated) {
  return panels_of(out, gated) * (in / kIntGroup) * weight_bytes(format);
}

int64_t scale_bytes_int(Format format, int64_t out, int64_t in, bool gated) {
  return panels_of(out, gated) * (in / kIntGroup) * scale_bytes(format);
}

void pack_int(Format format, int64_t out, int64_t in, bool gated, const uint8_t* q, const void* scale,
              const void* minimum, void* weights, void* scales) {
  const int64_t panels = panels_of(out, gated), groups = in / kIntGroup;
  const int64_t size = wide(format) ? 4 : 2, kinds = format == Format::int8 ? 1 : 2;
  auto* packed = static_cast<uint8_t*>(weights);
  auto* packed_scales = static_cast<char*>(scales);
  std::memset(packed, 0, static_cast<size_t>(packed_bytes_int(format, out, in, gated)));
  std::memset(packed_scales, 0, static_cast<size_t>(scale_bytes_int(format, out, in, gated)));
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      const int64_t half = lane / kHalf, row = source_row(panel, lane, out, gated);
      if (row < 0) continue;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t place = panel * groups + group, from = (row * groups + group) * size;
        uint8_t* group_to = packed + place * weight_bytes(format);
        pack_group(format, q + row * in + group * kIntGroup, half, lane % kHalf, group_to);
        char* to = packed_scales + ((place * 2 + half) * kinds * kHalf + lane % kHalf) * size;
        std::memcpy(to, static_cast<const char*>(scale) + from, static_cast<size_t>(size));
        if (kinds == 1) continue;
        std::memcpy(to + kHalf * size, static_cast<const char*>(minimum) + from, static_cast<size_t>(size));
      }
    }
  }
}

}  // namespace xs
