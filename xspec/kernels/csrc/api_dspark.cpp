// The C interface of drafting a block in one call; native_dspark.py is its other side.

#include <cmath>
#include <cstring>
#include <vector>

#include "api.h"
#include "api_stack.h"
#include "dspark.h"
#include "sample.h"

namespace {

using xs::bf16;

float wide(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// In eight chains, so that they overlap.
float dot(const bf16* x, const float* weight, int64_t count) {
  constexpr int64_t kChains = 8;
  float sum[kChains] = {};
  int64_t i = 0;
  for (; i + kChains <= count; i += kChains) {
    for (int64_t c = 0; c < kChains; ++c) sum[c] += wide(x[i + c]) * weight[i + c];
  }
  for (; i < count; ++i) sum[0] += wide(x[i]) * weight[i];
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

}  // namespace

struct XsBlock {
  XsBlock(const xs::BlockParts& parts, XsStack& stack) : parts(parts), stack(stack) {}

  // False: a token is none of the vocabulary.
  bool draft(XsTeam& team, const xs::RowTable& table, const xs::BlockDraft& draft) {
    const int64_t lanes = draft.rows.lanes, flat = draft.rows.rows, hidden = stack.hidden;
    const int64_t columns = parts.head.out;
    own.begin(flat * (2 * hidden + columns) + lanes * (columns + parts.rank));
    block = own.take(flat * hidden);
    normed = own.take(flat * hidden);
    base = own.take(flat * columns);
    logits = own.take(lanes * columns);
    embedded = own.take(lanes * parts.rank);
    picked.resize(static_cast<size_t>(lanes));
    previous.resize(static_cast<size_t>(lanes));
    probability.resize(static_cast<size_t>(lanes));
    xs::decode_rows(table, draft.rows, draft.pages, 0, false);
    if (!put_block(table, draft)) return false;
    run(team, draft, table.table_stride);
    for (int64_t slot = 0; slot < parts.slots; ++slot) pick(team, draft, slot);
    return true;
  }

  // [embedding of the last token, mask, mask ..] of each lane.
  bool put_block(const xs::RowTable& table, const xs::BlockDraft& draft) {
    const size_t bytes = static_cast<size_t>(stack.hidden) * sizeof(bf16);
    bf16* to = block;
    for (int64_t lane = 0; lane < draft.rows.lanes; ++lane) {
      const int64_t token = table.last_token[draft.rows.row_ids[lane]];
      if (token < 0 || token >= parts.vocab) return false;
      previous[static_cast<size_t>(lane)] = token;
      for (int64_t slot = 0; slot < parts.slots; ++slot, to += stack.hidden) {
        std::memcpy(to, slot == 0 ? parts.embedding + token * stack.hidden : parts.mask, bytes);
      }
    }
    return true;
  }

  // From the block to its logits, without what the slots know of each other.
  void run(XsTeam& team, const xs::BlockDraft& draft, int64_t table_stride) {
    xs::Pass pass = pass_over(draft.rows, table_stride, draft.slabs, draft.slab_pages, draft.block);
    pass.residual = block;
    pass.normed = normed;
    stack.forward(team, pass);
    run_linear(team, parts.head, normed, stack.hidden, pass.rows, base, parts.head.out, nullptr, 0);
  }

  void pick(XsTeam& team, const xs::BlockDraft& draft, int64_t slot) {
    const int64_t lanes = draft.rows.lanes, columns = parts.head.out, between = parts.slots * columns;
    const bf16* own_base = base + slot * columns;
    xs::Draw greedy{};
    greedy.noise.rows = lanes;
    greedy.noise.cols = columns;
    greedy.logits = own_base;
    greedy.stride = between;
    greedy.columns = picked.data();
    if (parts.markov_table != nullptr) {
      const size_t bytes = static_cast<size_t>(parts.rank) * sizeof(bf16);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t token = previous[static_cast<size_t>(lane)];
        std::memcpy(embedded + lane * parts.rank, parts.markov_table + token * parts.rank, bytes);
      }
      run_linear(team, parts.markov, embedded, parts.rank, lanes, logits, columns, own_base, between);
      greedy.logits = logits;
      greedy.stride = columns;
    }
    team.sampler.draw(team.team, team.ops, greedy);
    if (parts.confidence == nullptr) {
      team.sampler.probability(team.team, team.ops, greedy.logits, greedy.stride, lanes, columns,
                               picked.data(), probability.data());
    }
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const size_t at = static_cast<size_t>(lane);
      const int64_t token = parts.ids == nullptr ? picked[at] : parts.ids[picked[at]];
      const int64_t to = lane * parts.slots + slot;
      draft.tokens[to] = previous[at] = token;
      const bool sampled = draft.sampled != nullptr && draft.sampled[lane];
      draft.signals[to] = parts.confidence == nullptr ? probability[at] : confidence(lane, slot, sampled);
    }
  }

  // Of the token picked, which it does not see.
  float confidence(int64_t lane, int64_t slot, bool sampled) const {
    const int64_t hidden = stack.hidden, at = (sampled ? parts.slots : 0) + slot;
    float logit = dot(normed + (lane * parts.slots + slot) * hidden, parts.confidence, hidden);
    if (parts.with_markov != 0) {
      logit += dot(embedded + lane * parts.rank, parts.confidence + hidden, parts.rank);
    }
    logit = (logit + parts.confidence_bias) / parts.temperatures[at] + parts.offsets[at];
    return 1.0f / (1.0f + std::exp(-logit));
  }

  void publish(XsTeam& team, const xs::BlockPublish& given) {
    const int64_t hidden = stack.hidden, rows = given.rows, wide_in = parts.taps * hidden;
    const int64_t width = parts.kv.out;
    own.begin(rows * (wide_in + 2 * hidden + width));
    bf16 *joined = own.take(rows * wide_in), *context = own.take(rows * hidden);
    bf16 *normal = own.take(rows * hidden), *kv = own.take(rows * width);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t tap = 0; tap < parts.taps; ++tap) {
        std::memcpy(joined + row * wide_in + tap * hidden, given.taps[tap] + row * hidden,
                    static_cast<size_t>(hidden) * sizeof(bf16));
      }
    }
    run_linear(team, parts.context, joined, wide_in, rows, context, hidden, nullptr, 0);
    run_norm(team, context, parts.context_norm, parts.eps, normal, rows, 1, hidden);
    run_linear(team, parts.kv, normal, hidden, rows, kv, width, nullptr, 0);
    xs::Pass pass{};
    pass.rows = rows;
    pass.positions = given.positions;
    pass.slots = given.slots;
    pass.slabs = given.slabs;
    pass.pages = given.slab_pages;
    pass.block = given.block;
    stack.stack.store_context(team.hands(rows * width), team.ops, pass, kv);
  }

  const xs::BlockParts parts;
  XsStack& stack;
  Scratch own;
  bf16 *block = nullptr, *normed = nullptr;    // [lanes * slots, hidden]
  bf16 *base = nullptr, *logits = nullptr;     // [lanes * slots, D], [lanes, D]
  bf16* embedded = nullptr;                    // [lanes, rank] of the tokens before the present slot's
  std::vector<int64_t> picked, previous;       // [lanes] columns; tokens of the slot before
  std::vector<float> probability;              // [lanes]
};

XS_API void xs_dspark_struct_sizes(int64_t sizes[3]) {
  sizes[0] = sizeof(xs::BlockParts);
  sizes[1] = sizeof(xs::BlockDraft);
  sizes[2] = sizeof(xs::BlockPublish);
}

// The stack and the weights that parts name must outlive it.
XS_API int32_t xs_dspark_create(const xs::BlockParts* parts, XsStack* stack, XsBlock** block) {
  if (parts == nullptr || stack == nullptr || block == nullptr || !stack->normed) return xs::kInvalid;
  const int64_t hidden = stack->hidden, each = 2 * stack->cache.kv_heads * stack->cache.dim;
  for (const xs::Linear* linear : {&parts->head, &parts->context, &parts->kv}) {
    if (!fits(*linear) || linear->gated) return xs::kInvalid;
  }
  if (parts->embedding == nullptr || parts->vocab < 1 || parts->mask == nullptr || parts->slots < 1 ||
      parts->head.in != hidden || parts->taps < 1 || parts->context.in != parts->taps * hidden ||
      parts->context.out != hidden || parts->context_norm == nullptr || parts->kv.in != hidden ||
      parts->kv.out != stack->layers * each) {
    return xs::kInvalid;
  }
  const bool markov = parts->markov_table != nullptr;
  if (markov && (!fits(parts->markov) || parts->markov.gated || parts->markov.in != parts->rank ||
                 parts->markov.out != parts->head.out)) {
    return xs::kInvalid;
  }
  if (!markov && parts->rank != 0) return xs::kInvalid;
  if (parts->confidence != nullptr && (parts->temperatures == nullptr || parts->offsets == nullptr)) {
    return xs::kInvalid;
  }
  try {
    *block = new XsBlock(*parts, *stack);
    return xs::kOk;
  } catch (...) {
    return xs::kNoMemory;
  }
}

XS_API void xs_dspark_destroy(XsBlock* block) { delete block; }

namespace {

bool slabs_fit(const XsStack& stack, bf16* const* slabs, int64_t pages, int64_t block) {
  xs::Cache cache = stack.cache;
  cache.pages = pages;
  cache.block = block;
  return slabs != nullptr && std::all_of(slabs, slabs + stack.layers, [&](bf16* slab) {
    cache.slab = slab;
    return fits(cache);
  });
}

}  // namespace

XS_API int32_t xs_dspark_draft(XsTeam* team, XsBlock* block, const xs::RowTable* table,
                               const xs::BlockDraft* draft) {
  if (block == nullptr || table == nullptr || draft == nullptr ||
      !fits(draft->rows, *table, block->parts.slots, draft->pages) || draft->tokens == nullptr ||
      draft->signals == nullptr) {
    return xs::kInvalid;
  }
  if (!slabs_fit(block->stack, draft->slabs, draft->slab_pages, draft->block)) return xs::kInvalid;
  bool known = true;
  const int32_t status = guarded(team, [&] { known = block->draft(*team, *table, *draft); });
  return status == xs::kOk && !known ? static_cast<int32_t>(xs::kInvalid) : status;
}

// Stores the context's keys and values of every row.
XS_API int32_t xs_dspark_publish(XsTeam* team, XsBlock* block, const xs::BlockPublish* publish) {
  if (block == nullptr || publish == nullptr) return xs::kInvalid;
  if (publish->rows == 0) return xs::kOk;
  if (publish->rows < 0 || publish->taps == nullptr || publish->positions == nullptr ||
      publish->slots == nullptr ||
      std::any_of(publish->taps, publish->taps + block->parts.taps, [](const bf16* tap) { return !tap; }) ||
      !slabs_fit(block->stack, publish->slabs, publish->slab_pages, publish->block)) {
    return xs::kInvalid;
  }
  return guarded(team, [&] { block->publish(*team, *publish); });
}
