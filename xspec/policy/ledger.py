"""What a policy remembers of rounds: those it planned, and what their retirement adds up to.

What counts changes only when a round retires, so it does not depend on how often a plan was asked for. Time
is predicted time: policies have no clock, and a replay must count the same.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.policy.switching import Held, Moment

PLAIN_PROBE_SHARE, DRAFTING_PROBE_SHARE = 0.01, 0.005
"""Predicted time that probes may cost: in plain rounds, which show nothing, and where drafts are seen."""

CLEAR_LOSS, TELLING_ROWS, MAX_PROBE_STRETCH = 0.9, 8, 4
"""Where what is probed promises less than that of plain rounds, each probe halves their share, to a quarter;
not below one for so many requests: a probe of 32 of them tells as much as four of 8."""

RECENT_MS = 2_000.0
RECENT_ROUNDS = 64
"""Rounds of the last 2 s, 64 at most, stand for the present load."""

SEEN_MS = 20_000.0
"""How long a number of rows counts as seen of late."""

LoadT = TypeVar("LoadT")


@dataclass(slots=True)
class Planned(Generic[LoadT]):
    """A decode round as it was planned. `load`: what scores are made of, None where it could not be scored.

    `probe_ms`: what the round costs more than one of the held choice; `probe_cap_ms`: the dearest probe;
    `hopeless`: it is a probe of what promises clearly less. `cause`: why the held choice changed, if it did.
    """

    rows: int
    load: LoadT | None = None
    probe_ms: float = 0.0
    probe_cap_ms: float = 0.0
    hopeless: bool = False
    cause: str | None = None


class Ledger(Generic[LoadT]):
    """Decode batches, predicted time, probe allowance, recent loads and counts of reasons."""

    def __init__(self) -> None:
        self.batches = 0
        self.elapsed_ms = 0.0
        self.allowance_ms = 0.0
        self.retired_id = -1
        self._probe_stretch = 1
        self.reasons: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self._planned: dict[int, Planned[LoadT]] = {}
        self._recent: deque[tuple[int, float, LoadT]] = deque(maxlen=RECENT_ROUNDS)
        self._seen: dict[int, tuple[int, float]] = {}  # rows -> last plan id and end of its round

    def plan(self, plan_id: int, planned: Planned[LoadT] | None) -> None:
        """Notes the coming round; planned again, the last time counts. None: it has no decode rows."""
        if planned is None:
            self._planned.pop(plan_id, None)
        else:
            self._planned[plan_id] = planned

    def retire(self, feedback: RoundFeedback) -> bool:
        """Whether it was a decode batch. Rounds that ran prompts alone teach nothing."""
        plan = feedback.plan
        self.retired_id = plan.plan_id
        planned = self._planned.pop(plan.plan_id, None)
        if planned is not None and planned.cause is not None:
            self.causes[planned.cause] += 1
        while self._planned and (oldest := next(iter(self._planned))) < plan.plan_id:
            del self._planned[oldest]  # rounds that failed have no feedback
        if feedback.shape.target_rows == 0:
            return False
        self.batches += 1
        self.reasons[plan.reason] += 1
        if planned is not None:
            self._settle(plan, planned)
        return True

    def recent(self, since_id: int) -> list[LoadT]:
        """Loads of the last 2 s, of rounds planned as `since_id` or later."""
        return [
            load
            for plan_id, ended_ms, load in self._recent
            if plan_id >= since_id and self.elapsed_ms - ended_ms <= RECENT_MS
        ]

    def moment(self, plan_id: int, rows: int, lanes: int, held: Held | None) -> Moment:
        """The coming round, with the least and most rows of the last 20 s that count for what is held."""
        seen_rows = None
        if held is not None and rows != held.rows:
            seen = [
                rows
                for rows, (seen_id, ended_ms) in self._seen.items()
                if seen_id >= held.range_id and self.elapsed_ms - ended_ms <= SEEN_MS
            ]
            seen_rows = (min(seen), max(seen)) if seen else None
        return Moment(
            plan_id=plan_id,
            rows=rows,
            lanes=lanes,
            batches=self.batches,
            elapsed_ms=self.elapsed_ms,
            seen_rows=seen_rows,
        )

    def counts(self) -> dict[str, Any]:
        return {
            "switches": dict(self.causes),
            "probes": self.reasons["probe"],
            "uncovered": {reason: self.reasons[f"uncovered_{reason}"] for reason in ("kv", "bucket")},
            "decode_batches": self.batches,
            "predicted_total_ms": self.elapsed_ms,
            "probe_allowance_ms": self.allowance_ms,
        }

    def _settle(self, plan: SpeculationPlan, planned: Planned[LoadT]) -> None:
        if plan.predicted_ms is not None:
            self.elapsed_ms += plan.predicted_ms
            share = DRAFTING_PROBE_SHARE
            if not plan.draft_steps:
                telling = max(1, planned.rows // TELLING_ROWS)
                share = PLAIN_PROBE_SHARE / min(self._probe_stretch, telling)
            earned = self.allowance_ms + share * plan.predicted_ms
            # What is lent to a probe is taken in full; what is saved up pays one probe of the dearest kind.
            self.allowance_ms = min(earned, max(planned.probe_cap_ms, 0.0)) - planned.probe_ms
        if planned.hopeless:
            self._probe_stretch = min(2 * self._probe_stretch, MAX_PROBE_STRETCH)
        elif planned.cause is not None or plan.reason == "probe":
            self._probe_stretch = 1
        if planned.load is not None:
            self._recent.append((plan.plan_id, self.elapsed_ms, planned.load))
        self._seen[planned.rows] = (plan.plan_id, self.elapsed_ms)
