"""A world for policy tests: costs given as a formula, and batches whose drafts are accepted at given rates.

The pipeline holds two rounds, as in the engine: round n is planned from what rounds up to n - 2 said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from xspec.core.round import RoundFeedback, RoundShape, RowFeedback, SpeculationPlan
from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.policy.base import Policy, PolicyView
from xspec.policy.geometry import PolicyGeometry

RoundMs = Callable[[int, int, int], float | None]
"""Cost of (draft steps, requests, target rows)."""


@dataclass
class FakeCosts:
    """Costs by formula; `covers` says which KV lengths were calibrated."""

    formula: RoundMs
    covers: Callable[[int], bool] = lambda _: True
    prefill_ms_per_token: float = 0.0

    def at(self, kv_lengths: Sequence[int]) -> FakeCosts | None:
        return replace(self) if all(self.covers(kv) for kv in kv_lengths) else None

    def round_ms(
        self, draft_steps: int, requests: int, target_rows: int, depth: int | None = None
    ) -> float | None:
        return self.formula(draft_steps, requests, target_rows)


def geometry(
    width: int,
    lanes: BucketGrid | None = None,
    *,
    tiers: dict[tuple[int, int], tuple[int, ...]] | None = None,
    uncovered: str = "full_width",
) -> PolicyGeometry:
    return PolicyGeometry(lanes or BucketGrid.fine(32), TargetTiers(tiers), width, uncovered)


def view(
    plan_id: int,
    rows: int | Sequence[int],
    *,
    rooms: Sequence[int] = (),
    speculative: Sequence[bool] = (),
    kv: int = 100,
    prefill_tokens: int = 0,
) -> PolicyView:
    ids = tuple(range(1, rows + 1)) if isinstance(rows, int) else tuple(rows)
    return PolicyView(
        plan_id=plan_id,
        sequence_ids=ids,
        kv_bounds=(kv,) * len(ids),
        waiting=0,
        prefill_tokens=prefill_tokens,
        rooms=tuple(rooms),
        speculative=tuple(speculative),
    )


def row(
    sequence_id: int, verified: int, accepted: int, *, censored: bool = False, proposed: int | None = None
) -> RowFeedback:
    return RowFeedback(
        sequence_id=sequence_id,
        proposed=verified if proposed is None else proposed,
        admitted=verified,
        verified=verified,
        committed=accepted if censored else accepted + 1,
        censored=censored,
    )


def feedback(
    plan: SpeculationPlan,
    rows: Sequence[RowFeedback],
    *,
    lanes: int | None = None,
    signals: Sequence[Sequence[float]] | np.ndarray | None = None,
    prefill_only: bool = False,
) -> RoundFeedback:
    lanes = lanes or len(rows)
    full = lanes * (plan.draft_steps + 1) if plan.target_rows is None else plan.target_rows
    return RoundFeedback(
        plan=plan,
        shape=RoundShape(
            draft_rows=lanes if plan.draft_steps else 0,
            target_rows=0 if prefill_only else full,
            prefill_tokens=0,
            kv_pages=1,
        ),
        rows=tuple(rows),
        round_ms=None,
        prefill_tokens=0,
        committed_tokens=sum(one.committed for one in rows),
        signals=None if signals is None else np.asarray(signals, dtype=np.float32),
    )


@dataclass
class Round:
    """One round of a simulation, in order."""

    plan: SpeculationPlan
    rows: int
    tokens: int
    start_ms: float
    ms: float


@dataclass
class World:
    """Runs a policy against true acceptance rates.

    `rates(round, rows)` [rows, K]: chance of each draft where all before it were accepted. `signals` makes of
    them what the drafter says.
    """

    policy: Policy
    costs: FakeCosts
    lanes: BucketGrid
    width: int
    rates: Callable[[int, int], np.ndarray]
    signals: Callable[[np.ndarray, np.random.Generator], np.ndarray] = lambda truth, _: truth
    seed: int = 0
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._flying: deque[RoundFeedback] = deque()
        self._now_ms = 0.0

    def run(self, count: int, rows: Callable[[int], int]) -> list[Round]:
        """`count` more rounds; `rows(n)` decode rows in round n of all. Returns those rounds."""
        first = len(self.rounds)
        for number in range(first, first + count):
            self._round(number, rows(number))
        return self.rounds[first:]

    def _round(self, number: int, rows: int) -> None:
        if len(self._flying) == 2:
            self.policy.observe(self._flying.popleft())
        plan = self.policy.plan(view(number, rows))
        lanes = self.lanes.fit(rows).rows
        truth = self.rates(number, rows)
        told = self.signals(truth, self._rng) if plan.draft_steps else None
        verified = self._admit(plan, told, rows)
        done = self._rng.random((rows, self.width)) < truth
        accepted = np.minimum(np.cumprod(done, axis=1).sum(axis=1), verified)
        made = [
            row(index + 1, int(v), int(a), proposed=plan.draft_steps)
            for index, (v, a) in enumerate(zip(verified, accepted, strict=True))
        ]
        result = feedback(plan, made, lanes=lanes, signals=told)
        ms = self.costs.round_ms(plan.draft_steps, lanes, result.shape.target_rows)
        assert ms is not None
        self.rounds.append(Round(plan, rows, result.committed_tokens, self._now_ms, ms))
        self._now_ms += ms
        self._flying.append(result)

    def _admit(self, plan: SpeculationPlan, told: np.ndarray | None, rows: int) -> np.ndarray:
        """Drafts verified for each row: all, or the best by signal that the budget has room for."""
        if told is None or plan.target_rows is None:
            return np.full(rows, plan.draft_steps)
        survival = np.cumprod(told, axis=1)
        best = np.argsort(-survival, axis=None, kind="stable")[: plan.target_rows - rows]
        return np.bincount(best // self.width, minlength=rows)


def tokens_per_ms(rounds: Sequence[Round]) -> float:
    return sum(one.tokens for one in rounds) / sum(one.ms for one in rounds)


def switches_by_minute(rounds: Sequence[Round]) -> list[int]:
    """How many rounds with the reason "switch" began in each full minute of simulated time."""
    minutes = int((rounds[-1].start_ms - rounds[0].start_ms) // 60_000.0)
    counts = [0] * minutes
    for one in rounds:
        minute = int((one.start_ms - rounds[0].start_ms) // 60_000.0)
        if one.plan.reason == "switch" and minute < minutes:
            counts[minute] += 1
    return counts
