"""One round, as decided (RoundPlan) and as it went (RoundFeedback). Plain ints, no tensors.

A plan is frozen before submission and is all a rank needs to execute the round: which rows join,
which pages they gain, which prompt chunks run, how far to draft and how much to verify.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xspec.core.request import SamplingParams, TokenLogprob
from xspec.core.shapes import RoundShape

if TYPE_CHECKING:
    import numpy as np

PADDING_ROW = 0
"""Device row that padded lanes point at; never given to a sequence."""

SCRATCH_PAGE = 0
"""KV page that unfilled page-table entries name; never given to a sequence, never written."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """How far to draft and how much to verify: one (K, d) for the whole batch, frozen for its round.

    `draft_steps` is K (0: a plain round), `verify_steps` how many of the K each request verifies (None:
    all), `depth` the loop depth d of a looped target, `target_rows` the padded verify budget (None: full
    width). `plan_id` ties feedback to the decision it judges.
    """

    plan_id: int
    policy: str
    draft_steps: int
    verify_steps: int | None = None
    depth: int | None = None
    target_rows: int | None = None
    range_index: int | None = None
    candidate_index: int | None = None
    reason: str = ""
    predicted_ms: float | None = None  # what the policy's costs say of the round's decode part
    shadow: bool = False  # a looped round also tells what every depth of the drafter would have picked

    @property
    def width(self) -> int:
        """Drafts a request verifies at most."""
        return self.draft_steps if self.verify_steps is None else min(self.draft_steps, self.verify_steps)


@dataclass(frozen=True, slots=True)
class RowBind:
    """A sequence takes device row `row`: everything its choices depend on is uploaded here, once.

    `token_ids` are the tokens present at binding (with a preempted sequence's own answer after
    `prompt_len`), needed only to seed penalty counts. `hit_page`: the last page of its prefix-cache hit.
    """

    row: int
    sequence_id: int
    params: SamplingParams
    seed: int
    choice: int
    prompt_len: int
    token_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]  # ids that min_tokens must hold back
    max_len: int  # tokens it may have in all
    hit_page: int | None = None


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Pages appended to a row's page table at index `first`."""

    row: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, start + len(token_ids)) of a sequence. `samples`: the last one yields its next token.

    `scored_ids`: with prompt logprobs, the token that follows each of the chunk's tokens.
    """

    row: int
    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    scored_ids: tuple[int, ...] | None = None
    scored_top: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One running sequence in a decode round. `kv_bound` >= its KV length with all the round may write."""

    row: int
    sequence_id: int
    kv_bound: int
    verify: int = 0  # leading drafts that are verified for it


@dataclass(frozen=True, slots=True)
class Batch:
    """Who takes part. Decode rows are ordered by descending page need (attention sizes its work by it)."""

    chunks: tuple[PrefillChunk, ...]
    rows: tuple[DecodeRow, ...]

    @property
    def verify(self) -> int:
        """Most drafts that any row verifies; 0: a plain round, nothing is drafted."""
        return max((row.verify for row in self.rows), default=0)

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        return (*(c.sequence_id for c in self.chunks), *(r.sequence_id for r in self.rows))


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Everything the device side needs for round `round_id`."""

    round_id: int
    spec: SpeculationPlan
    batch: Batch
    shape: RoundShape
    scrubs: tuple[int, ...] = ()  # pages to zero first: a failed sequence may have left NaN in them
    binds: tuple[RowBind, ...] = ()
    grants: tuple[PageGrant, ...] = ()


@dataclass(frozen=True, slots=True)
class RowTokens:
    """What one row of a retired round yields, in order: 1 to K + 1 tokens (none for a middle chunk).

    `admitted`: drafts that the device let into verification where the host left it the choice (a round with a
    row budget); None: all of `DecodeRow.verify`.
    `bad`: what follows `token_ids` came of logits or states that are not finite. No page can be trusted, and
    the sequence fails unless one of these tokens ends it.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    scored: tuple[TokenLogprob, ...] = ()  # prompt logprobs of a chunk
    bad: bool = False
    admitted: int | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A completed round as read back from the device, before anything is committed."""

    plan: RoundPlan
    chunks: tuple[RowTokens, ...]  # aligned with plan.batch.chunks
    rows: tuple[RowTokens, ...]  # aligned with plan.batch.rows
    signals: np.ndarray | None = None  # [rows, K] acceptance signals of the drafts, float32
    matches: np.ndarray | None = None  # a shadow round: [rows, width + 1, depths] bool, see RoundFeedback


@dataclass(frozen=True, slots=True)
class RowFeedback:
    """Counts of one row of a retired round, tokens taken in order; what follows a stop does not count.

    With w drafts made for the row, v of them verified, r tokens of room before the round, n returned by
    the device and kept <= n of them:

    - proposed = min(w, r - 1): the token that fills the sequence is the target's own whatever was
      drafted. If the sequence ended, at most `kept`: positions behind its last token do not exist.
    - admitted = min(v, r - 1): what the target was asked to verify.
    - verified: the same, cut at the end of the sequence like proposed.
    - committed = kept; accepted = min(kept, n - 1), the n-th token being the target's own.
    - censored: it ended inside its accepted run (kept < n), so the run might have gone on. A stop at the
      n-th token or a full budget is no censoring: every position that counts was decided.

    A row whose sequence had left before, or that failed, has no feedback.
    """

    sequence_id: int
    proposed: int
    admitted: int
    verified: int
    committed: int
    censored: bool = False

    @property
    def accepted(self) -> int:
        return self.committed if self.censored else max(0, self.committed - 1)


@dataclass(frozen=True, slots=True)
class RoundFeedback:
    """What a policy and the metrics learn of a round, only after its commit succeeded.

    `round_ms` is the host interval between consecutive retirements in steady state, None when the
    pipeline was empty before it (there is no such interval then). `signals` [len(rows), K] float32: estimate
    for each of `rows` that draft k is accepted if all before it were; None in a plain round.
    `matches` [len(rows), width + 1, len(depths)] bool, only of a shadow round: whether the head after that
    many loops picks, at a verified row, the token that the target draws there. Of row i the entries before
    min(committed, width + 1) are on the text; the others follow a rejected draft and mean nothing.
    """

    plan: SpeculationPlan
    shape: RoundShape
    rows: tuple[RowFeedback, ...]
    round_ms: float | None
    prefill_tokens: int
    committed_tokens: int
    signals: np.ndarray | None = None
    matches: np.ndarray | None = None
