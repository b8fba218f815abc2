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
"""KV page that padded and dead lanes write to; never given to a sequence."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """How far to draft and how much to verify: one (K, d) for the whole batch, frozen for its round.

    `draft_steps` is K (0: a plain round), `depth` the loop depth d of a looped target, `target_rows`
    the padded verify budget (None: full width). `plan_id` ties feedback to the decision it judges.
    """

    plan_id: int
    policy: str
    draft_steps: int
    depth: int | None = None
    target_rows: int | None = None
    range_index: int | None = None
    candidate_index: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RowBind:
    """A sequence takes device row `row`: everything its choices depend on is uploaded here, once.

    `prompt_ids` are the tokens present at binding (with a preempted sequence's own answer after
    `prompt_len`), needed only to seed penalty counts.
    """

    row: int
    sequence_id: int
    params: SamplingParams
    seed: int
    choice: int
    prompt_len: int
    token_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]  # ids that min_tokens must hold back


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
    """One running sequence in a decode round. The host knows `kv_bound` >= its KV length after the round."""

    row: int
    sequence_id: int
    kv_bound: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Who takes part. Decode rows are ordered by descending page need (attention sizes its work by it)."""

    chunks: tuple[PrefillChunk, ...]
    rows: tuple[DecodeRow, ...]

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
    """What one row of a retired round yields, in order: 1 to K + 1 tokens (none for a middle chunk)."""

    sequence_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    scored: tuple[TokenLogprob, ...] = ()  # prompt logprobs of a chunk
    bad: bool = False  # logits or states were not finite: no token and no page can be trusted


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A completed round as read back from the device, before anything is committed."""

    plan: RoundPlan
    chunks: tuple[RowTokens, ...]  # aligned with plan.batch.chunks
    rows: tuple[RowTokens, ...]  # aligned with plan.batch.rows
    signals: np.ndarray | None = None  # [rows, K] acceptance signals of the drafts, float32


@dataclass(frozen=True, slots=True)
class RowFeedback:
    """Counts of one row of a retired round. `censored`: it ended (stop, budget) inside its accepted run."""

    sequence_id: int
    proposed: int
    admitted: int
    verified: int
    committed: int
    censored: bool = False


@dataclass(frozen=True, slots=True)
class RoundFeedback:
    """What a policy and the metrics learn of a round, only after its commit succeeded.

    `round_ms` is the host interval between consecutive retirements in steady state, None when the
    pipeline was empty before it (there is no such interval then).
    """

    plan: SpeculationPlan
    shape: RoundShape
    rows: tuple[RowFeedback, ...]
    round_ms: float | None
    prefill_tokens: int
    committed_tokens: int
    signals: np.ndarray | None = None
