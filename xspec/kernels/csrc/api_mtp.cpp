// The C interface of drafting in one call; native_mtp.py is its other side.

#include <cstring>
#include <vector>

#include "api.h"
#include "api_stack.h"
#include "mtp.h"
#include "sample.h"

namespace {

using xs::bf16;

constexpr int64_t kLine = 32;  // bf16 numbers of a cache line

// Buffers between the ops, 64-byte aligned, of as many lanes as there ever were.
class Buffers {
 public:
  void reserve(int64_t lanes, int64_t hidden, int64_t columns) {  // without columns no logits
    const int64_t wide = (hidden + kLine - 1) / kLine * kLine, logit = (columns + kLine - 1) / kLine * kLine;
    const size_t size = static_cast<size_t>(lanes * (8 * wide + logit) + kLine);
    if (memory_.size() < size) memory_.resize(size);
    bf16* at = reinterpret_cast<bf16*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
    const auto take = [&](int64_t count) {
      bf16* part = at;
      at += lanes * count;
      return part;
    };
    pair = take(2 * wide);
    normed_pair = take(2 * wide);
    joined = take(wide);
    residual = take(wide);
    normed = take(wide);
    before = take(wide);
    logits = take(logit);
    kept.resize(static_cast<size_t>(lanes));
    columns_of.resize(static_cast<size_t>(lanes));
    probability.resize(static_cast<size_t>(lanes));
  }

  bf16 *pair, *normed_pair;  // [lanes, 2, hidden]
  bf16 *joined, *residual, *normed, *before;  // [lanes, hidden]
  bf16* logits;  // [lanes, columns]
  std::vector<int64_t> columns_of, kept;
  std::vector<float> probability;

 private:
  std::vector<bf16> memory_;
};

}  // namespace

struct XsMtp {
  XsMtp(const xs::MtpParts& parts, XsStack& stack) : parts(parts), stack(stack) {}

  // False: a token is none of the vocabulary.
  bool draft(XsTeam& team, const xs::RowTable& table, const xs::MtpDraft& draft) {
    own.reserve(draft.rows.lanes, stack.hidden, parts.head.out);
    for (int64_t step = 0; step < draft.steps; ++step) {
      xs::decode_rows(table, draft.rows, draft.pages, step, true);
      if (!pairs(table, draft, step)) return false;
      run(team, draft, table.table_stride);
      pick(team, draft, step);
    }
    return true;
  }

  // [embedding of the newest token; the state before it] of each lane.
  bool pairs(const xs::RowTable& table, const xs::MtpDraft& draft, int64_t step) {
    const int64_t hidden = stack.hidden;
    const bf16* before = parts.of_normed != 0 ? own.normed : own.residual;
    for (int64_t lane = 0; lane < draft.rows.lanes; ++lane) {
      const int64_t row = draft.rows.row_ids[lane];
      const int64_t token = step == 0 ? table.last_token[row] : draft.tokens[lane * draft.steps + step - 1];
      const bf16* state = step == 0 ? draft.boundary + row * hidden : before + lane * hidden;
      if (!put_pair(lane, token, state)) return false;
    }
    return true;
  }

  bool put_pair(int64_t at, int64_t token, const bf16* state) {
    if (token < 0 || token >= parts.vocab) return false;
    const int64_t hidden = stack.hidden;
    const size_t bytes = static_cast<size_t>(hidden) * sizeof(bf16);
    bf16* to = own.pair + at * 2 * hidden;
    std::memcpy(to, parts.embedding + token * hidden, bytes);
    std::memcpy(to + hidden, state, bytes);
    return true;
  }

  // From `rows` pairs to what the layer reads.
  void join(XsTeam& team, int64_t rows) {
    const int64_t hidden = stack.hidden;
    run_norm(team, own.pair, parts.pair_norm, parts.eps, own.normed_pair, rows, 2, hidden);
    run_linear(team, parts.join, own.normed_pair, 2 * hidden, rows, own.joined, hidden, nullptr, 0);
  }

  // False: as for draft.
  bool publish(XsTeam& team, const xs::MtpPublish& given) {
    const int64_t hidden = stack.hidden, rows = given.carry.rows;
    own.reserve(rows, hidden, 0);
    for (int64_t at = 0; at < rows; ++at) {
      if (given.tokens[at] < 0 || given.tokens[at] >= parts.vocab) return false;
    }
    xs::Carry carry = given.carry;
    carry.before = reinterpret_cast<char*>(own.before);
    carry.kept_slots = own.kept.data();
    xs::carry(carry);
    for (int64_t at = 0; at < rows; ++at) put_pair(at, given.tokens[at], own.before + at * hidden);
    join(team, rows);
    bf16* slab = given.slab;
    xs::Pass pass{};
    pass.rows = rows;
    pass.residual = own.joined;
    pass.positions = carry.positions;
    pass.slots = carry.kept_slots;
    pass.slabs = &slab;
    pass.pages = given.slab_pages;
    pass.block = given.block;
    stack.stack.publish(team.team, team.ops, pass);
    return true;
  }

  // From the pairs to logits.
  void run(XsTeam& team, const xs::MtpDraft& draft, int64_t table_stride) {
    const int64_t hidden = stack.hidden, lanes = draft.rows.lanes, columns = parts.head.out;
    join(team, lanes);
    bf16* slab = draft.slab;
    bf16* outputs[1] = {own.residual};
    xs::Pass pass = pass_over(draft.rows, table_stride, &slab, draft.slab_pages, draft.block);
    pass.residual = own.joined;
    pass.outputs = outputs;
    pass.normed = own.normed;
    stack.forward(team, pass);
    run_linear(team, parts.head, own.normed, hidden, lanes, own.logits, columns, nullptr, 0);
  }

  void pick(XsTeam& team, const xs::MtpDraft& draft, int64_t step) {
    const int64_t lanes = draft.rows.lanes, columns = parts.head.out;
    xs::Draw greedy{};
    greedy.noise.rows = lanes;
    greedy.noise.cols = columns;
    greedy.logits = own.logits;
    greedy.stride = columns;
    greedy.columns = own.columns_of.data();
    team.sampler.draw(team.team, team.ops, greedy);
    team.sampler.probability(team.team, team.ops, own.logits, columns, lanes, columns, greedy.columns,
                             own.probability.data());
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t column = own.columns_of[lane], at = lane * draft.steps + step;
      draft.tokens[at] = parts.ids == nullptr ? column : parts.ids[column];
      draft.signals[at] = own.probability[lane];
    }
  }

  const xs::MtpParts parts;
  XsStack& stack;
  Buffers own;
};

XS_API void xs_mtp_struct_sizes(int64_t sizes[3]) {
  sizes[0] = sizeof(xs::MtpParts);
  sizes[1] = sizeof(xs::MtpDraft);
  sizes[2] = sizeof(xs::MtpPublish);
}

// The stack and the weights that parts name must outlive it.
XS_API int32_t xs_mtp_create(const xs::MtpParts* parts, XsStack* stack, XsMtp** mtp) {
  if (parts == nullptr || stack == nullptr || mtp == nullptr || stack->layers != 1 || !stack->normed) {
    return xs::kInvalid;
  }
  const int64_t hidden = stack->hidden;
  if (parts->embedding == nullptr || parts->vocab < 1 || parts->pair_norm == nullptr) return xs::kInvalid;
  if (!fits(parts->join) || parts->join.in != 2 * hidden || parts->join.out != hidden) return xs::kInvalid;
  if (!fits(parts->head) || parts->head.in != hidden || parts->join.gated || parts->head.gated) {
    return xs::kInvalid;
  }
  try {
    *mtp = new XsMtp(*parts, *stack);
    return xs::kOk;
  } catch (...) {
    return xs::kNoMemory;
  }
}

XS_API void xs_mtp_destroy(XsMtp* mtp) { delete mtp; }

XS_API int32_t xs_mtp_draft(XsTeam* team, XsMtp* mtp, const xs::RowTable* table, const xs::MtpDraft* draft) {
  if (mtp == nullptr || table == nullptr || draft == nullptr || draft->steps < 1 ||
      !fits(draft->rows, *table, 1, draft->pages) || draft->boundary == nullptr || draft->tokens == nullptr ||
      draft->signals == nullptr) {
    return xs::kInvalid;
  }
  xs::Cache cache = mtp->stack.cache;
  cache.slab = draft->slab;
  cache.pages = draft->slab_pages;
  cache.block = draft->block;
  if (!fits(cache)) return xs::kInvalid;
  bool known = true;
  const int32_t status = guarded(team, [&] { known = mtp->draft(*team, *table, *draft); });
  return status == xs::kOk && !known ? static_cast<int32_t>(xs::kInvalid) : status;
}

// Moves boundary and page states on and stores the layer's keys and values of every pair.
XS_API int32_t xs_mtp_publish(XsTeam* team, XsMtp* mtp, const xs::MtpPublish* publish) {
  if (mtp == nullptr || publish == nullptr) return xs::kInvalid;
  const xs::Carry& carry = publish->carry;
  if (carry.rows == 0) return xs::kOk;
  if (carry.rows < 0 || carry.lanes < 1 || carry.block < 1 || publish->tokens == nullptr ||
      carry.bytes != mtp->stack.hidden * static_cast<int64_t>(sizeof(bf16))) {
    return xs::kInvalid;
  }
  for (int64_t at = 0; at < carry.rows; ++at) {
    if (carry.sequences[at] < 0 || carry.sequences[at] >= carry.lanes) return xs::kInvalid;
  }
  xs::Cache cache = mtp->stack.cache;
  cache.slab = publish->slab;
  cache.pages = publish->slab_pages;
  cache.block = publish->block;
  if (!fits(cache)) return xs::kInvalid;
  bool known = true;
  const int32_t status = guarded(team, [&] { known = mtp->publish(*team, *publish); });
  return status == xs::kOk && !known ? static_cast<int32_t>(xs::kInvalid) : status;
}
