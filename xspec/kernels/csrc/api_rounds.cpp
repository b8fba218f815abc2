// The C interface of what a round does besides its layers; native_rows.py and native_draws.py are its
// other side.

#include <algorithm>
#include <iterator>

#include "api.h"
#include "sample.h"
#include "sequences.h"

namespace {

using xs::bf16;

bool within(const int64_t* ids, int64_t count, int64_t end) {
  return ids != nullptr && std::all_of(ids, ids + count, [end](int64_t id) { return 0 <= id && id < end; });
}

bool fits(const xs::RowTable* table, const xs::PassRows& pass, int64_t pages) {
  return table != nullptr && table->block > 0 && pass.lanes > 0 && pass.width > 0 && pass.rows >= 0 &&
         0 <= pages && pages <= table->table_stride && within(pass.row_ids, pass.lanes, table->rows);
}

}  // namespace

// Sizes of the structs as this library was compiled, for the other side to compare.
XS_API void xs_round_struct_sizes(int64_t sizes[7]) {
  const size_t found[] = {sizeof(xs::RowTable), sizeof(xs::PassRows), sizeof(xs::VerifyRows),
                          sizeof(xs::Settle),   sizeof(xs::Carry),    sizeof(xs::Draw),
                          sizeof(xs::Admit)};
  std::copy(std::begin(found), std::end(found), sizes);
}

// See Sampler::draw. noise.ids [cols] token of each column, or null: the column, as it must be in a chain.
// Keys and positions may be null where temperatures are.
XS_API int32_t xs_draw(XsTeam* team, const xs::Draw* draw) {
  if (draw == nullptr) return xs::kInvalid;
  const xs::Noise& noise = draw->noise;
  const xs::Settings& settings = draw->settings;
  if (noise.rows == 0) return xs::kOk;
  if (draw->logits == nullptr || draw->columns == nullptr || noise.rows < 0 || noise.cols < 1 ||
      noise.cols > INT32_MAX || noise.id_stride != 0) {
    return xs::kInvalid;
  }
  if (settings.temperature != nullptr && (noise.keys == nullptr || noise.positions == nullptr)) {
    return xs::kInvalid;
  }
  if (settings.top_k != nullptr && (settings.top_p == nullptr || settings.min_p == nullptr)) {
    return xs::kInvalid;
  }
  const bool chained = draw->chain.fed != nullptr;
  if (chained && (draw->chain.offsets == nullptr || noise.ids != nullptr)) return xs::kInvalid;
  return guarded(team, [&] { team->sampler.draw(team->team, team->ops, *draw); });
}

// See Sampler::probability.
XS_API int32_t xs_selected_probability(XsTeam* team, const bf16* logits, int64_t stride, int64_t rows,
                                       int64_t cols, const int64_t* columns, float* out) {
  if (rows == 0) return xs::kOk;
  if (logits == nullptr || out == nullptr || rows < 0 || cols < 1 || !within(columns, rows, cols)) {
    return xs::kInvalid;
  }
  return guarded(team, [&] {
    team->sampler.probability(team->team, team->ops, logits, stride, rows, cols, columns, out);
  });
}

// out [rows, cols]; ids [rows, id_stride] or null: 0, 1, 2, ...
XS_API int32_t xs_gumbel(XsTeam* team, const int32_t* keys, const int64_t* positions, const int64_t* ids,
                         int64_t id_stride, int64_t rows, int64_t cols, float* out) {
  if (rows == 0 || cols == 0) return xs::kOk;
  if (keys == nullptr || positions == nullptr || out == nullptr || rows < 0 || cols < 1) return xs::kInvalid;
  return guarded(team, [&] {
    const xs::Noise noise{keys, nullptr, positions, ids, id_stride, rows, cols};
    team->sampler.gumbel(team->team, team->ops, noise, out);
  });
}

XS_API int32_t xs_decode_rows(const xs::RowTable* table, const xs::PassRows* pass, int64_t pages,
                              int64_t offset, int32_t causal) {
  if (pass == nullptr || !fits(table, *pass, pages) || offset < 0) return xs::kInvalid;
  if (pass->rows != pass->lanes * pass->width) return xs::kInvalid;
  xs::decode_rows(*table, *pass, pages, offset, causal != 0);
  return xs::kOk;
}

XS_API int32_t xs_verify_rows(const xs::RowTable* table, const xs::VerifyRows* verify, const int64_t* counts,
                              int64_t pages) {
  if (verify == nullptr || !fits(table, verify->pass, pages)) return xs::kInvalid;
  return xs::verify_rows(*table, *verify, counts, pages) ? xs::kOk : xs::kInvalid;
}

XS_API int32_t xs_admit(const xs::RowTable* table, const xs::Admit* admit) {
  if (table == nullptr || admit == nullptr || admit->lanes < 0 || admit->width < 0 ||
      !within(admit->row_ids, admit->lanes, table->rows) ||
      !within(admit->verify, admit->lanes, admit->width + 1)) {
    return xs::kInvalid;
  }
  xs::admit(*table, *admit);
  return xs::kOk;
}

XS_API int32_t xs_settle(const xs::RowTable* table, const xs::Settle* settle) {
  if (table == nullptr || settle == nullptr || settle->lives < 0 || settle->lives > settle->lanes ||
      settle->width < 1 || !within(settle->row_ids, settle->lives, table->rows)) {
    return xs::kInvalid;
  }
  xs::settle(*table, *settle);
  return xs::kOk;
}

XS_API int32_t xs_carry(const xs::Carry* carry) {
  if (carry == nullptr || carry->bytes < 1 || carry->block < 1 || carry->rows < 0 || carry->lanes < 0 ||
      !within(carry->sequences, carry->rows, carry->lanes)) {
    return xs::kInvalid;
  }
  xs::carry(*carry);
  return xs::kOk;
}
