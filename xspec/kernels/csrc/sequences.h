// Running sequences as a round sees them: what a pass is fed, and what is committed. Integers, and rows of
// states that are copied as they are. exec/rows.py is the same in torch and says what each number means.
#pragma once

#include <cstdint>

namespace xs {

constexpr int64_t kScratchPage = 0;

// Persistent rows, one a sequence; row 0 is padding.
struct RowTable {
  int64_t rows;               // padding included
  int64_t* last_token;        // [rows]
  int64_t* length;            // [rows] tokens, the last one included
  const int64_t* max_len;     // [rows]
  const int64_t* page_table;  // [rows, table_stride]
  int64_t table_stride;
  int64_t block;
  int64_t sink_page;
};

// Inputs of a pass over some lanes, each a row of the table. Flat rows are lane by lane, padding last.
struct PassRows {
  const int64_t* row_ids;  // [lanes]
  int64_t lanes;
  int64_t width;    // flat rows of each lane, or the most that one has
  int64_t rows;     // flat rows in all
  int64_t* positions;   // [rows]
  int64_t* slots;       // [rows]
  int64_t* kv_lens;     // [rows]
  int64_t* sequences;   // [rows] lane of each
  int64_t* page_table;  // [lanes, table_stride] the lanes' pages
};

// `width` positions of each lane, `offset` past its last token. Not causal: a row sees all of its lane's.
void decode_rows(const RowTable& table, const PassRows& pass, int64_t pages, int64_t offset, bool causal);

// What a verify pass has besides: tokens, and whose each row is.
struct VerifyRows {
  PassRows pass;
  const int64_t* drafts;  // [lanes, width - 1]
  int64_t* tokens;   // [rows] the lane's last token, then its drafts
  int64_t* owners;   // [rows] row of the table
  int64_t* offsets;  // [rows] positions past the last token; `width` of padding
  int64_t* first;    // [lanes] first flat row
  int64_t* counts;   // [lanes] flat rows
  int64_t* dense;    // [lanes * width] flat row of each slot of a rectangle; null: not wanted
  int64_t* flat;     // [rows] slot of each flat row
};

// counts [lanes] flat rows of each lane, or null: `width` each. False: they do not fit the pass.
bool verify_rows(const RowTable& table, const VerifyRows& verify, const int64_t* counts, int64_t pages);

// Which drafts are verified where rows are fewer than drafts (verify/admit.py). Every lane is live and keeps
// the row of its last token.
struct Admit {
  const int64_t* row_ids;  // [lanes]
  const int64_t* verify;   // [lanes] drafts a lane verifies at most, of `width`
  int64_t lanes;
  const float* signals;    // [lanes, width] chance of each draft after those before it
  int64_t lane_stride, draft_stride, width;
  int64_t target_rows;     // to share out, the lanes' own included
  double* products;        // [lanes] for use here: survival of a lane's next draft
  int64_t* waiting;        // [lanes] for use here
  int64_t* admitted;       // [lanes] out: drafts of each lane
};

void admit(const RowTable& table, const Admit& admit);

// Acceptance: the draws of a pass against its drafts. Of the first `lives` lanes, each with a draw or more.
struct Settle {
  const int64_t* row_ids;  // [lanes]
  const int64_t* first;    // [lanes]
  const int64_t* counts;   // [lanes]
  int64_t lives, lanes;
  const int64_t* draws;    // [rows]
  const bool* bad;         // [rows]
  const int64_t* drafts;   // [lives, draft_stride]
  int64_t draft_stride;
  int64_t width;           // draws of a lane at most
  int64_t* tokens;         // [lives, width] committed, -1 beyond
  int64_t* committed;      // [lanes] how many; 0 of padding
  const int64_t* slots;      // [rows] of the pass
  const int64_t* sequences;  // [rows]
  int64_t rows;
  int64_t* fact_slots;     // [rows] the slots of rows that are committed, the sink of others
  int64_t* told_tokens;    // [lives, told_stride] as `tokens`
  int64_t told_stride;
  int64_t* told_counts;    // [lives] how many before the first bad draw
  bool* told_bad;          // [lives] whether there was one among the committed
};

// Commits to the table too.
void settle(const RowTable& table, const Settle& settle);

// Facts of a pass move on in a drafter that pairs each token with the state before it.
struct Carry {
  const char* states;     // [rows, bytes] of the pass
  int64_t bytes;
  int64_t rows, lanes;
  const int64_t* positions;  // [rows]
  const int64_t* slots;      // [rows]
  const int64_t* sequences;  // [rows]
  const int64_t* row_ids;    // [lanes]
  const int64_t* first;      // [lanes]
  const int64_t* committed;  // [lanes]
  int64_t block, sink_slot;
  char* boundary;      // [*, bytes] by row: state of the last fact; moved on
  char* page_states;   // [*, bytes] by page: state of its last token; written where a fact fills one
  char* before;        // [rows, bytes] out: state of the position before each row
  int64_t* kept_slots;  // [rows] out: where its pair is stored
};

void carry(const Carry& carry);

}  // namespace xs
