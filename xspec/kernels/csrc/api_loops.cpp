// The C interface of drafting by loops in one call; native_loops.py is its other side.

#include <cstring>
#include <vector>

#include "api.h"
#include "api_stack.h"
#include "loops.h"
#include "sample.h"

using xs::bf16;

struct XsLoops {
  XsLoops(const xs::LoopParts& parts, XsStack& stack) : parts(parts), stack(stack) {}

  // False: a token is none of the vocabulary.
  bool draft(XsTeam& team, const xs::RowTable& table, const xs::LoopDraft& draft) {
    reserve(draft.rows.lanes, draft.loops);
    for (int64_t step = 0; step <= draft.steps; ++step) {
      xs::decode_rows(table, draft.rows, draft.pages, step, true);
      if (!embed(table, draft, step)) return false;
      run(team, draft, table.table_stride);
      keep(draft, step);
      if (step < draft.steps) pick(team, draft, step);
    }
    return true;
  }

  void reserve(int64_t lanes, int64_t loops) {
    const int64_t wide = lanes * stack.hidden, columns = lanes * parts.head.out;
    own.begin((loops + 1) * wide + columns);
    embedded = own.take(wide);
    states = own.take(loops * wide);
    logits = own.take(columns);
    picked.resize(static_cast<size_t>(lanes));
    probability.resize(static_cast<size_t>(lanes));
  }

  bool embed(const xs::RowTable& table, const xs::LoopDraft& draft, int64_t step) {
    const int64_t hidden = stack.hidden;
    for (int64_t lane = 0; lane < draft.rows.lanes; ++lane) {
      const int64_t token = step == 0 ? table.last_token[draft.rows.row_ids[lane]]
                                      : draft.tokens[lane * draft.steps + step - 1];
      if (token < 0 || token >= parts.vocab) return false;
      std::memcpy(embedded + lane * hidden, parts.embedding + token * hidden,
                  static_cast<size_t>(hidden) * sizeof(bf16));
    }
    return true;
  }

  // states [loops, lanes, hidden]
  void run(XsTeam& team, const xs::LoopDraft& draft, int64_t table_stride) {
    xs::Pass pass = pass_over(draft.rows, table_stride, draft.slabs, draft.slab_pages, draft.block);
    pass.loops = draft.loops;
    pass.residual = embedded;
    pass.normed = states;
    stack.forward(team, pass);
  }

  const bf16* after(const xs::LoopDraft& draft, int64_t loops) const {
    return states + (loops - 1) * draft.rows.lanes * stack.hidden;
  }

  void keep(const xs::LoopDraft& draft, int64_t step) const {
    const int64_t hidden = stack.hidden;
    for (int64_t i = 0; i < draft.kept; ++i) {
      const bf16* from = after(draft, draft.depths[i]);
      for (int64_t lane = 0; lane < draft.rows.lanes; ++lane) {
        bf16* to = draft.states[i] + draft.rows.row_ids[lane] * draft.state_row + step * hidden;
        std::memcpy(to, from + lane * hidden, static_cast<size_t>(hidden) * sizeof(bf16));
      }
    }
  }

  void pick(XsTeam& team, const xs::LoopDraft& draft, int64_t step) {
    const int64_t lanes = draft.rows.lanes, columns = parts.head.out;
    run_linear(team, parts.head, after(draft, draft.loops), stack.hidden, lanes, logits, columns, nullptr, 0);
    xs::Draw greedy{};
    greedy.noise.rows = lanes;
    greedy.noise.cols = columns;
    greedy.logits = logits;
    greedy.stride = columns;
    greedy.columns = picked.data();
    team.sampler.draw(team.team, team.ops, greedy);
    team.sampler.probability(team.team, team.ops, logits, columns, lanes, columns, picked.data(),
                             probability.data());
    for (int64_t lane = 0; lane < lanes; ++lane) {
      draft.tokens[lane * draft.steps + step] = picked[static_cast<size_t>(lane)];
      draft.signals[lane * draft.steps + step] = probability[static_cast<size_t>(lane)];
    }
  }

  const xs::LoopParts parts;
  XsStack& stack;
  Scratch own;
  bf16 *embedded = nullptr, *states = nullptr, *logits = nullptr;
  std::vector<int64_t> picked;
  std::vector<float> probability;
};

XS_API void xs_loops_struct_sizes(int64_t sizes[2]) {
  sizes[0] = sizeof(xs::LoopParts);
  sizes[1] = sizeof(xs::LoopDraft);
}

// The stack and the weights that parts name must outlive it.
XS_API int32_t xs_loops_create(const xs::LoopParts* parts, XsStack* stack, XsLoops** loops) {
  if (parts == nullptr || stack == nullptr || loops == nullptr || !stack->normed) return xs::kInvalid;
  if (parts->embedding == nullptr || parts->vocab < 1 || !fits(parts->head) || parts->head.gated ||
      parts->head.in != stack->hidden || parts->head.out != parts->vocab) {
    return xs::kInvalid;
  }
  try {
    *loops = new XsLoops(*parts, *stack);
    return xs::kOk;
  } catch (...) {
    return xs::kNoMemory;
  }
}

XS_API void xs_loops_destroy(XsLoops* loops) { delete loops; }

XS_API int32_t xs_loops_draft(XsTeam* team, XsLoops* loops, const xs::RowTable* table,
                              const xs::LoopDraft* draft) {
  if (loops == nullptr || table == nullptr || draft == nullptr || draft->steps < 1 || draft->loops < 1 ||
      !fits(draft->rows, *table, 1, draft->pages) || draft->slabs == nullptr || draft->kept < 0 ||
      draft->state_row < (draft->steps + 1) * loops->stack.hidden || draft->tokens == nullptr ||
      draft->signals == nullptr || (draft->kept > 0 && (draft->depths == nullptr || draft->states == nullptr))) {
    return xs::kInvalid;
  }
  for (int64_t i = 0; i < draft->kept; ++i) {
    if (draft->depths[i] < 1 || draft->depths[i] > draft->loops || draft->states[i] == nullptr) {
      return xs::kInvalid;
    }
  }
  xs::Cache cache = loops->stack.cache;
  cache.pages = draft->slab_pages;
  cache.block = draft->block;
  for (int64_t plane = 0; plane < draft->loops * loops->stack.layers; ++plane) {
    cache.slab = draft->slabs[plane];
    if (!fits(cache)) return xs::kInvalid;
  }
  bool known = true;
  const int32_t status = guarded(team, [&] { known = loops->draft(*team, *table, *draft); });
  return status == xs::kOk && !known ? static_cast<int32_t>(xs::kInvalid) : status;
}
