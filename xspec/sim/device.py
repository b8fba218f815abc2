"""A device without arithmetic: it knows which drafts the target would accept and what rounds cost.

Executes the RoundPlans that the real scheduler makes, with the real rules for row budgets and room.
Knows nothing about policies or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xspec.core.round import DecodeRow, RoundPlan, RoundResult, RowTokens
from xspec.core.shapes import BucketGrid
from xspec.cost.model import Costs
from xspec.errors import ConfigError
from xspec.sim.world import LoopFlags, SimRequest

TOKEN_ID = 0
"""Every token of every answer. Requests end by their length alone, so it is no stop id."""


class UncoveredError(ConfigError):
    """A round was run whose cost was not measured."""


def allocate(signals: np.ndarray, caps: Sequence[int], anchors: int, target_rows: int) -> list[int]:
    """Drafts verified per row where there are fewer rows than drafts: what the device does in such a round.

    signals [L, K], caps [L]. `anchors` rows hold last tokens; the other target_rows - anchors go to the
    drafts of highest survival (cumulative product of a row's signals), ties to the earlier position, then row
    (architecture decision 3).
    """
    rows, width = signals.shape
    survival = np.cumprod(signals.clip(0.0, 1.0), axis=1, dtype=np.float32)
    position, row = np.divmod(np.arange(rows * width), rows)
    allowed = position < np.asarray(caps)[row]
    position, row = position[allowed], row[allowed]
    best = np.argsort(-survival[row, position], kind="stable")[: max(0, target_rows - anchors)]
    return [int(count) for count in np.bincount(row[best], minlength=rows)]


@dataclass(slots=True, eq=False)
class Resident:
    """A request on the device. `tokens`: prompt and answer so far, which the host only has bounds of."""

    request: SimRequest
    tokens: int = 0

    @property
    def answered(self) -> int:
        return self.tokens - self.request.prompt_tokens

    @property
    def room(self) -> int:
        return self.request.total_tokens - self.tokens


@dataclass(frozen=True, slots=True)
class Executed:
    """A round as it went. `decode_ms` is what the costs say of it, `ms` that and its prompt tokens."""

    result: RoundResult
    decode_ms: float
    ms: float


class VirtualDevice:
    """Holds the residents by sequence id; `execute` moves them on at once, in the order of submission."""

    def __init__(self, costs: Costs, lanes: BucketGrid, shadow_cost: float = 0.0) -> None:
        """`shadow_cost`: what a shadow round takes longer, as a share of its decode part."""
        self._costs = costs
        self._lanes = lanes
        self._shadow_cost = shadow_cost
        self._residents: dict[int, Resident] = {}

    @property
    def residents(self) -> Mapping[int, Resident]:
        return self._residents

    def take(self, sequence_id: int, request: SimRequest) -> None:
        self._residents[sequence_id] = Resident(request)

    def drop(self, sequence_id: int) -> None:
        del self._residents[sequence_id]

    def execute(self, plan: RoundPlan) -> Executed:
        """Run a round. UncoveredError where its cost was not measured."""
        decode_ms = self._decode_ms(plan)
        chunks = []
        for chunk in plan.batch.chunks:
            self._residents[chunk.sequence_id].tokens = chunk.end + (1 if chunk.samples else 0)
            chunks.append(RowTokens(chunk.sequence_id, (TOKEN_ID,) if chunk.samples else ()))
        matches = self._matches(plan) if plan.spec.shadow and plan.batch.rows else None
        rows, signals = self._decode(plan)
        result = RoundResult(plan, tuple(chunks), rows, signals, matches)
        prefill_ms = self._costs.prefill_ms_per_token * plan.shape.prefill_tokens
        return Executed(result, decode_ms, decode_ms + prefill_ms)

    def _decode(self, plan: RoundPlan) -> tuple[tuple[RowTokens, ...], np.ndarray | None]:
        rows = plan.batch.rows
        width = plan.batch.verify
        if not width or plan.spec.depth is not None:
            depth = plan.spec.depth
            return tuple(self._advance(row, row.verify, None, depth) for row in rows), None
        signals = self.signals([row.sequence_id for row in rows], plan.spec.draft_steps)
        if plan.shape.target_rows >= plan.shape.draft_rows * (width + 1):
            return tuple(self._advance(row, row.verify, None) for row in rows), signals
        admitted = allocate(signals[:, :width], self.caps(rows), len(rows), plan.shape.target_rows)
        return tuple(map(self._advance, rows, admitted, admitted)), signals

    def _matches(self, plan: RoundPlan) -> np.ndarray:
        """[rows, width + 1, depths]: whether each depth would pick what the target draws, at every row that
        is verified. Places past the end of an answer are False."""
        found = []
        for row in plan.batch.rows:
            loops = self._looped(row.sequence_id)
            place, told = self._place(row.sequence_id), plan.batch.verify + 1
            here = loops.flags[place : place + told]
            found.append(np.pad(here, ((0, told - len(here)), (0, 0))))
        return np.stack(found).astype(np.bool_)

    def _looped(self, sequence_id: int) -> LoopFlags:
        loops = self._at(sequence_id).request.loops
        if loops is None:
            raise ConfigError(
                "a looped round was planned, but the requests of this world have no match flags"
            )
        return loops

    def caps(self, rows: Sequence[DecodeRow]) -> list[int]:
        """Drafts that each row may verify: the last token of an answer is always the target's own."""
        return [min(row.verify, max(0, self._residents[row.sequence_id].room - 1)) for row in rows]

    def signals(self, sequence_ids: Sequence[int], draft_steps: int) -> np.ndarray:
        """What the drafter will say of the next drafts [rows, draft_steps]."""
        return np.stack([self._at(i).request.signals[self._place(i), :draft_steps] for i in sequence_ids])

    def chances(self, sequence_ids: Sequence[int], draft_steps: int) -> np.ndarray:
        """The truth of the same."""
        return np.stack([self._at(i).request.chances[self._place(i), :draft_steps] for i in sequence_ids])

    def _at(self, sequence_id: int) -> Resident:
        return self._residents[sequence_id]

    def _place(self, sequence_id: int) -> int:
        """Answer tokens so far; of a row that is full, the last place there is (nothing of it counts)."""
        resident = self._residents[sequence_id]
        return min(resident.answered, resident.request.answer_tokens - 1)

    def _advance(
        self, row: DecodeRow, verified: int, admitted: int | None, depth: int | None = None
    ) -> RowTokens:
        resident = self._residents[row.sequence_id]
        if resident.room < 1:  # an earlier round filled it; the host could not know
            return RowTokens(row.sequence_id, (), admitted=admitted)
        run = 0
        if verified:
            runs = resident.request.runs if depth is None else self._looped(row.sequence_id).runs[depth]
            run = runs[resident.answered]
        accepted = min(run, verified)
        count = min(accepted + 1, resident.room)
        resident.tokens += count
        return RowTokens(row.sequence_id, (TOKEN_ID,) * count, admitted=admitted)

    def _decode_ms(self, plan: RoundPlan) -> float:
        rows = plan.batch.rows
        if not rows:
            return 0.0
        kv_lengths = [self._residents[row.sequence_id].tokens for row in rows]
        costs = self._costs.at(kv_lengths)
        if costs is None:
            raise UncoveredError(
                f"the cost table covers no requests of {min(kv_lengths)} to {max(kv_lengths)} tokens; use "
                "shorter requests or a table measured for such lengths"
            )
        lanes = self._lanes.fit(len(rows)).rows
        draft_steps = plan.spec.draft_steps if plan.batch.verify else 0
        depth = plan.spec.depth if draft_steps else None
        ms = costs.round_ms(draft_steps, lanes, plan.shape.target_rows, depth)
        if ms is None:
            raise UncoveredError(
                f"the cost table has no round of {len(rows)} requests in bucket {lanes} with {draft_steps} "
                f"drafts on {plan.shape.target_rows} rows at {min(kv_lengths)} to {max(kv_lengths)} tokens"
            )
        return ms * (1.0 + self._shadow_cost) if plan.spec.shadow else ms
