#include "sequences.h"

#include <algorithm>
#include <cstring>

namespace xs {
namespace {

const int64_t* pages_of(const RowTable& table, int64_t row) {
  return table.page_table + row * table.table_stride;
}

// Writes past the pages a row was granted go where nobody reads.
int64_t slot_of(const RowTable& table, int64_t row, int64_t position, int64_t pages) {
  const int64_t index = position / table.block;
  const int64_t page = index < pages ? pages_of(table, row)[index] : kScratchPage;
  return (page == kScratchPage ? table.sink_page : page) * table.block + position % table.block;
}

// `ahead`: how far past its last token a row may be. It looks up pages that far, granted ones or not, and
// must not find there what an earlier pass left in the buffer.
void copy_pages(const RowTable& table, const PassRows& pass, int64_t pages, int64_t ahead) {
  for (int64_t lane = 0; lane < pass.lanes; ++lane) {
    const int64_t row = pass.row_ids[lane], furthest = (table.length[row] - 1 + ahead) / table.block;
    const int64_t* from = pages_of(table, row);
    const int64_t count = std::min(table.table_stride, std::max(pages, furthest + 1));
    std::copy(from, from + count, pass.page_table + lane * table.table_stride);
  }
}

// Flat row `at` belongs to no lane.
void pad(const RowTable& table, const VerifyRows& verify, int64_t at) {
  const PassRows& pass = verify.pass;
  const int64_t lane = pass.lanes - 1;
  pass.positions[at] = 0;
  pass.slots[at] = table.sink_page * table.block;
  pass.kv_lens[at] = 1;
  pass.sequences[at] = lane;
  verify.tokens[at] = 0;
  verify.owners[at] = pass.row_ids[lane];
  verify.offsets[at] = pass.width;
  if (verify.dense != nullptr) verify.flat[at] = lane * pass.width;
}

int64_t room_of(const RowTable& table, int64_t row) {
  return std::max<int64_t>(table.max_len[row] - table.length[row], 0);
}

// What is not a number is no chance.
float chance(float signal) { return signal > 0.0f ? std::min(signal, 1.0f) : 0.0f; }

void copy_state(char* to, const char* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

void decode_rows(const RowTable& table, const PassRows& pass, int64_t pages, int64_t offset, bool causal) {
  copy_pages(table, pass, pages, offset + pass.width - 1);
  int64_t at = 0;
  for (int64_t lane = 0; lane < pass.lanes; ++lane) {
    const int64_t row = pass.row_ids[lane], start = table.length[row] - 1 + offset;
    const int64_t last = std::min(start + pass.width, table.max_len[row]);
    for (int64_t position = start; position < start + pass.width; ++position, ++at) {
      pass.positions[at] = position;
      pass.slots[at] = slot_of(table, row, position, pages);
      pass.kv_lens[at] = causal ? position + 1 : last;
      pass.sequences[at] = lane;
    }
  }
}

bool verify_rows(const RowTable& table, const VerifyRows& verify, const int64_t* counts, int64_t pages) {
  const PassRows& pass = verify.pass;
  int64_t total = 0;
  for (int64_t lane = 0; lane < pass.lanes; ++lane) {
    const int64_t count = counts == nullptr ? pass.width : counts[lane];
    if (count < 0 || count > pass.width) return false;
    verify.counts[lane] = count;
    verify.first[lane] = total;
    total += count;
  }
  if (total > pass.rows) return false;
  copy_pages(table, pass, pages, pass.width - 1);
  int64_t at = 0;
  for (int64_t lane = 0; lane < pass.lanes; ++lane) {
    const int64_t row = pass.row_ids[lane], start = table.length[row] - 1;
    const int64_t* drafts = verify.drafts + lane * (pass.width - 1);
    for (int64_t offset = 0; offset < verify.counts[lane]; ++offset, ++at) {
      pass.positions[at] = start + offset;
      pass.slots[at] = slot_of(table, row, start + offset, pages);
      pass.kv_lens[at] = start + offset + 1;
      pass.sequences[at] = lane;
      verify.tokens[at] = offset == 0 ? table.last_token[row] : drafts[offset - 1];
      verify.owners[at] = row;
      verify.offsets[at] = offset;
      if (verify.dense != nullptr) verify.flat[at] = lane * pass.width + offset;
    }
    for (int64_t offset = 0; verify.dense != nullptr && offset < pass.width; ++offset) {
      verify.dense[lane * pass.width + offset] = std::min(verify.first[lane] + offset, pass.rows - 1);
    }
  }
  for (; at < pass.rows; ++at) pad(table, verify, at);
  return true;
}

// Survivals never rise along a lane: the best draft left is the next one of some lane. Those wait in a heap.
void admit(const RowTable& table, const Admit& admit) {
  int64_t *waiting = admit.waiting, count = 0;
  const auto worse = [&admit](int64_t a, int64_t b) {
    // As torch.cumprod on a CPU: multiplied in double, each product rounded to float.
    const float x = static_cast<float>(admit.products[a]), y = static_cast<float>(admit.products[b]);
    if (x != y) return x < y;
    return admit.admitted[a] != admit.admitted[b] ? admit.admitted[a] > admit.admitted[b] : a > b;
  };
  const auto enter = [&](int64_t lane) {
    const int64_t next = admit.admitted[lane], room = room_of(table, admit.row_ids[lane]);
    if (next >= std::min(admit.verify[lane], room - 1)) return;
    const float signal = admit.signals[lane * admit.lane_stride + next * admit.draft_stride];
    admit.products[lane] *= double{chance(signal)};
    waiting[count++] = lane;
    std::push_heap(waiting, waiting + count, worse);
  };
  std::fill(admit.products, admit.products + admit.lanes, 1.0);
  std::fill(admit.admitted, admit.admitted + admit.lanes, 0);
  for (int64_t lane = 0; lane < admit.lanes; ++lane) enter(lane);
  for (int64_t left = admit.target_rows - admit.lanes; left > 0 && count > 0; --left) {
    std::pop_heap(waiting, waiting + count, worse);
    const int64_t lane = waiting[--count];
    ++admit.admitted[lane];
    enter(lane);
  }
}

void settle(const RowTable& table, const Settle& settle) {
  for (int64_t lane = 0; lane < settle.lives; ++lane) {
    const int64_t row = settle.row_ids[lane], first = settle.first[lane];
    const int64_t *draws = settle.draws + first, *drafts = settle.drafts + lane * settle.draft_stride;
    int64_t count = std::min<int64_t>(settle.counts[lane], 1);
    while (count > 0 && count < settle.counts[lane] && draws[count - 1] == drafts[count - 1]) ++count;
    count = std::min(count, room_of(table, row));
    int64_t good = 0;
    while (good < count && !settle.bad[first + good]) ++good;
    int64_t* tokens = settle.tokens + lane * settle.width;
    int64_t* told = settle.told_tokens + lane * settle.told_stride;
    for (int64_t i = 0; i < settle.width; ++i) tokens[i] = told[i] = i < count ? draws[i] : -1;
    settle.committed[lane] = count;
    settle.told_counts[lane] = good;
    settle.told_bad[lane] = good < count;
    if (count > 0) table.last_token[row] = draws[count - 1];
    table.length[row] += count;
  }
  std::fill(settle.committed + settle.lives, settle.committed + settle.lanes, 0);
  for (int64_t at = 0; at < settle.rows; ++at) {
    const int64_t lane = settle.sequences[at];
    const bool fact = at - settle.first[lane] < settle.committed[lane];
    settle.fact_slots[at] = fact ? settle.slots[at] : table.sink_page * table.block;
  }
}

void carry(const Carry& carry) {
  const int64_t bytes = carry.bytes;
  for (int64_t at = 0; at < carry.rows; ++at) {
    const int64_t lane = carry.sequences[at], offset = at - carry.first[lane], position = carry.positions[at];
    const bool fact = offset < carry.committed[lane];
    const char* before = offset == 0 ? carry.boundary + carry.row_ids[lane] * bytes
                                     : carry.states + std::max<int64_t>(at - 1, 0) * bytes;
    copy_state(carry.before + at * bytes, before, bytes);
    carry.kept_slots[at] = fact && position > 0 ? carry.slots[at] : carry.sink_slot;
    if (fact && (position + 1) % carry.block == 0) {
      copy_state(carry.page_states + carry.slots[at] / carry.block * bytes, carry.states + at * bytes, bytes);
    }
  }
  for (int64_t lane = 0; lane < carry.lanes; ++lane) {
    const int64_t count = carry.committed[lane];
    if (count == 0) continue;
    const char* last = carry.states + (carry.first[lane] + count - 1) * bytes;
    copy_state(carry.boundary + carry.row_ids[lane] * bytes, last, bytes);
  }
}

}  // namespace xs
