// The C interface: opaque handles, the plain structs of ops.h and stack.h, error codes. Never throws.
//
// native.py is its other side. A team runs one call at a time; callers from several threads wait for
// each other. Of no rows nothing is looked at: their addresses may be null. Whatever changes here or in
// those structs changes kVersion.

#include <algorithm>
#include <iterator>
#include <new>

#include "api.h"
#include "api_stack.h"
#include "attention.h"
#include "cache.h"
#include "linear.h"
#include "memory.h"
#include "linear_int.h"
#include "ops.h"
#include "stack.h"

namespace {

using xs::bf16;
using xs::kFailed;
using xs::kInvalid;
using xs::kNoMemory;
using xs::kOk;

constexpr int32_t kVersion = 5;

}  // namespace

XS_API int32_t xs_version() { return kVersion; }

// Sizes of the structs as this library was compiled, for the other side to compare.
XS_API void xs_struct_sizes(int64_t sizes[7]) {
  const size_t found[] = {sizeof(xs::Linear), sizeof(xs::Cache),      sizeof(xs::RopeStore),
                          sizeof(xs::Attend), sizeof(xs::StackShape), sizeof(xs::Layer),
                          sizeof(xs::Pass)};
  std::copy(std::begin(found), std::end(found), sizes);
}

// The instruction set that `name` (null: any) means on this machine; null: not available.
XS_API const char* xs_isa(const char* name) {
  const xs::Ops* ops = xs::choose_ops(name);
  return ops == nullptr ? nullptr : ops->name;
}

XS_API int32_t xs_team_create(int32_t threads, const char* isa, XsTeam** team) {
  const xs::Ops* ops = xs::choose_ops(isa);
  if (threads < 1 || team == nullptr || ops == nullptr) return kInvalid;
  try {
    *team = new XsTeam(threads, *ops);
    return kOk;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kFailed;
  }
}

// Not while a call runs. In a forked child there are no threads to end: what little is left stays.
XS_API void xs_team_destroy(XsTeam* team) {
  if (team != nullptr && team->process == xs::process_id()) delete team;
}

// Asks for huge pages there; a hint.
XS_API void xs_advise_huge(void* address, int64_t bytes) {
  if (address != nullptr && bytes > 0) xs::advise_huge(address, static_cast<size_t>(bytes));
}

XS_API int64_t xs_packed_bytes(int32_t format, int64_t out, int64_t in, int32_t gated) {
  return xs::packed_bytes(static_cast<xs::Format>(format), out, in, gated != 0);
}

// Of an int format's packed scales.
XS_API int64_t xs_scale_bytes(int32_t format, int64_t out, int64_t in, int32_t gated) {
  const auto which = static_cast<xs::Format>(format);
  return which == xs::Format::bf16 ? 0 : xs::scale_bytes_int(which, out, in, gated != 0);
}

// weight [out, in] (where gated all gates first) -> weights [xs_packed_bytes], bias -> packed_bias [out].
XS_API int32_t xs_pack_bf16(const bf16* weight, const float* bias, int64_t out, int64_t in, int32_t gated,
                            void* weights, float* packed_bias) {
  if (weight == nullptr || weights == nullptr || out < 1 || in < 1 || in % 32 != 0) return kInvalid;
  if ((bias == nullptr) != (packed_bias == nullptr) || (gated != 0 && out % 2 != 0)) return kInvalid;
  xs::pack_bf16(weight, out, in, gated != 0, weights);
  if (bias != nullptr) xs::pack_bias(bias, out, gated != 0, packed_bias);
  return kOk;
}

// See pack_int in linear_int.h; bias as above.
XS_API int32_t xs_pack_int(int32_t format, const uint8_t* q, const void* scale, const void* minimum,
                           const float* bias, int64_t out, int64_t in, int32_t gated, void* weights,
                           void* scales, float* packed_bias) {
  const auto which = static_cast<xs::Format>(format);
  if (which < xs::Format::int8 || which > xs::Format::int4_wide) return kInvalid;
  if (q == nullptr || scale == nullptr || (minimum == nullptr && which != xs::Format::int8)) return kInvalid;
  if (weights == nullptr || scales == nullptr || out < 1 || in < 1 || in % 32 != 0) return kInvalid;
  if ((bias == nullptr) != (packed_bias == nullptr) || (gated != 0 && out % 2 != 0)) return kInvalid;
  xs::pack_int(which, out, in, gated != 0, q, scale, minimum, weights, scales);
  if (bias != nullptr) xs::pack_bias(bias, out, gated != 0, packed_bias);
  return kOk;
}

// y [rows, y_stride] = linear(x [rows, x_stride]) (+ add [rows, add_stride], which may be y).
XS_API int32_t xs_linear(XsTeam* team, const xs::Linear* linear, const bf16* x, int64_t x_stride,
                         int64_t rows, bf16* y, int64_t y_stride, const bf16* add, int64_t add_stride) {
  if (rows == 0) return kOk;
  if (linear == nullptr || !fits(*linear) || x == nullptr || y == nullptr || rows < 0) return kInvalid;
  return guarded(team, [&] { run_linear(*team, *linear, x, x_stride, rows, y, y_stride, add, add_stride); });
}

// x, y [rows, heads, cols]; weight [heads, cols].
XS_API int32_t xs_rms_norm(XsTeam* team, const bf16* x, const bf16* weight, float eps, bf16* y, int64_t rows,
                           int64_t heads, int64_t cols) {
  if (rows == 0) return kOk;
  if (x == nullptr || weight == nullptr || y == nullptr || rows < 0 || heads < 1 || cols < 1) return kInvalid;
  return guarded(team, [&] { run_norm(*team, x, weight, eps, y, rows, heads, cols); });
}

XS_API int32_t xs_rope_store(XsTeam* team, const xs::RopeStore* step) {
  if (step != nullptr && step->rows == 0) return kOk;
  if (step == nullptr || !fits(step->cache) || step->qkv == nullptr || step->rows < 0) return kInvalid;
  return guarded(team, [&] {
    team->team.run([&](xs::Worker& worker) { team->ops.rope_store(worker, *step); });
  });
}

// kv [rows, 2 * G, D]: keys, then values, stored at slots [rows] as they are.
XS_API int32_t xs_store_kv(XsTeam* team, const xs::Cache* cache, const bf16* kv, int64_t rows,
                           const int64_t* slots, int32_t finite) {
  if (rows == 0) return kOk;
  if (cache == nullptr || !fits(*cache) || kv == nullptr || slots == nullptr || rows < 0) return kInvalid;
  return guarded(team, [&] {
    team->team.run([&](xs::Worker& worker) { xs::store_kv(worker, *cache, kv, rows, slots, finite != 0); });
  });
}

XS_API int32_t xs_attend(XsTeam* team, const xs::Attend* step) {
  if (step != nullptr && step->rows == 0) return kOk;
  if (step == nullptr || !fits(step->cache) || step->q == nullptr || step->out == nullptr) return kInvalid;
  if (step->rows < 0 || step->heads < 1 || step->heads % step->cache.kv_heads != 0) return kInvalid;
  return guarded(team, [&] {
    team->team.run([&](xs::Worker& worker) { team->ops.attend(worker, *step); });
  });
}

XS_API int32_t xs_argmax(XsTeam* team, const bf16* x, int64_t stride, int64_t rows, int64_t cols,
                         int64_t* index, float* value) {
  if (rows == 0) return kOk;
  if (x == nullptr || index == nullptr || value == nullptr || rows < 0 || cols < 1) return kInvalid;
  return guarded(team, [&] {
    team->team.run(
        [&](xs::Worker& worker) { team->ops.argmax(worker, x, stride, rows, cols, index, value); });
  });
}

XS_API int32_t xs_logsumexp(XsTeam* team, const bf16* x, int64_t stride, int64_t rows, int64_t cols,
                            float* out) {
  if (rows == 0) return kOk;
  if (x == nullptr || out == nullptr || rows < 0 || cols < 1) return kInvalid;
  return guarded(team, [&] {
    team->team.run([&](xs::Worker& worker) { team->ops.logsumexp(worker, x, stride, rows, cols, out); });
  });
}

// The weights a layer names must outlive the stack.
XS_API int32_t xs_stack_create(const xs::StackShape* shape, const xs::Layer* layers, int64_t count,
                               XsStack** stack) {
  if (shape == nullptr || layers == nullptr || count < 1 || stack == nullptr) return kInvalid;
  if (shape->kv_heads < 1 || shape->heads % shape->kv_heads != 0 || shape->dim % 32 != 0) return kInvalid;
  const bool table = shape->cos != nullptr && shape->sin != nullptr && shape->positions > 0;
  if (shape->frequencies == nullptr && !table) return kInvalid;
  for (int64_t index = 0; index < count; ++index) {
    const xs::Layer& layer = layers[index];
    if (!fits(layer.qkv) || !fits(layer.output) || !fits(layer.gate_up) || !fits(layer.down)) return kInvalid;
    if (!layer.gate_up.gated || layer.input_norm == nullptr || layer.mlp_norm == nullptr) return kInvalid;
    if ((layer.attention_out_norm == nullptr) != (layer.mlp_out_norm == nullptr)) return kInvalid;
  }
  try {
    *stack = new XsStack(*shape, layers, count);
    return kOk;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kFailed;
  }
}

XS_API void xs_stack_destroy(XsStack* stack) { delete stack; }

XS_API int32_t xs_stack_forward(XsTeam* team, XsStack* stack, const xs::Pass* pass) {
  if (pass != nullptr && pass->rows == 0) return kOk;
  if (stack == nullptr || pass == nullptr || pass->loops < 1) return kInvalid;
  if (!fits(*stack, *pass, stack->layers * pass->loops)) return kInvalid;
  const bool streamed = pass->outputs != nullptr && pass->outputs[stack->layers - 1] != nullptr;
  if (pass->normed == nullptr && (!streamed || pass->loops > 1)) return kInvalid;
  if ((pass->normed != nullptr && !stack->normed) || pass->sequences == nullptr || pass->kv_lens == nullptr ||
      pass->page_table == nullptr) {
    return kInvalid;
  }
  return guarded(team, [&] { stack->forward(*team, *pass); });
}

// Stores the first layer's keys and values of the rows and does nothing else; see Stack::publish.
XS_API int32_t xs_stack_publish(XsTeam* team, XsStack* stack, const xs::Pass* pass) {
  if (pass != nullptr && pass->rows == 0) return kOk;
  if (stack == nullptr || pass == nullptr || !fits(*stack, *pass, 1)) return kInvalid;
  return guarded(team, [&] { stack->stack.publish(team->team, team->ops, *pass); });
}
