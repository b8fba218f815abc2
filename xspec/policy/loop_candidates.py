"""The `acceptance_ema` policy: a (K, d) by batch range, moved by acceptance, switched off where it costs.

AdaptiveController finds the range of a batch, turns its present candidate into a plan and credits feedback
to the plan that made it. How candidates move is in `candidates.py`, switching off in `off_switch.py`. Source:
the RFC "Support Adaptive Speculation for Ouro"; docs/looped.md lists every decision beyond it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.cost.model import Costs
from xspec.policy.base import PolicyView
from xspec.policy.candidates import AcceptanceEma, BucketState, CandidatePolicy, acceptance_counts
from xspec.policy.geometry import CandidateGeometry, draft_limits
from xspec.policy.off_switch import Allowance, OffSwitch, extra_cost
from xspec.policy.quota import LATE_ROUNDS
from xspec.policy.round_costs import RoundCosts, gain_from
from xspec.policy.spec_config import AdaptiveSpecConfig, BatchRange

RANGE_ROUNDS = 4
"""So many rounds in a row a batch must lie in another range: a gap between two requests is no new load."""

RANGE_FACTOR = 1.5
"""Beyond a range's end by that factor it counts at once."""


@dataclass(frozen=True, slots=True)
class RangeTurn:
    """The range that holds, and for how many rounds in a row batches have lain outside it."""

    index: int
    strange_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A decode round as planned. `candidate` None: plain because the range is off. `ratios`: T_spec /
    T_native of every candidate of the range, None where nothing is known."""

    range_index: int
    candidate: int | None
    probe: bool
    ratios: tuple[float | None, ...]


def range_of(ranges: tuple[BatchRange, ...], requests: int) -> int:
    """The range of a batch: below the first it is the first, above a range's end and before the next begins
    the one below."""
    at_or_below = [index for index, one in enumerate(ranges) if one.min_requests <= requests]
    return at_or_below[-1] if at_or_below else 0


def turn_range(ranges: tuple[BatchRange, ...], turn: RangeTurn | None, requests: int) -> RangeTurn:
    """The range for the coming round."""
    there = range_of(ranges, requests)
    if turn is None or there == turn.index:
        return RangeTurn(there)
    one = ranges[turn.index]
    # what lies between two ranges belongs to the one below, so that one reaches up to the next
    end = ranges[turn.index + 1].min_requests - 1 if turn.index + 1 < len(ranges) else one.max_requests
    far = (
        requests >= RANGE_FACTOR * end if there > turn.index else requests * RANGE_FACTOR <= one.min_requests
    )
    if far or turn.strange_rounds + 1 >= RANGE_ROUNDS:
        return RangeTurn(there)
    return replace(turn, strange_rounds=turn.strange_rounds + 1)


class AdaptiveController:
    """The RFC's controller, as an engine's policy."""

    name = "acceptance_ema"

    def __init__(self, config: AdaptiveSpecConfig, costs: Costs | None, geometry: CandidateGeometry) -> None:
        """`costs` None: gains follow from each candidate's `off`, or from the idealized model."""
        self._config = config
        self._ranges = config.ranges
        self._width = geometry.max_steps
        self._costs = RoundCosts(costs, geometry)
        self._buckets = [BucketState.of(one) for one in self._ranges]
        self._policies: list[CandidatePolicy] = [
            AcceptanceEma(one.candidates, config.ema_of(index)) for index, one in enumerate(self._ranges)
        ]
        self._switches = [OffSwitch(config.disable, off=one.initial_off) for one in self._ranges]
        self._purse = Allowance(config.disable)
        self._planned: dict[int, Planned] = {}
        self._plan_id: int | None = None
        self._turn_before: RangeTurn | None = None
        self._turn: RangeTurn | None = None
        self._observed_range: int | None = None
        self._ignored = 0
        self._reasons: Counter[str] = Counter()
        self._last: SpeculationPlan | None = None

    # -- plans --------------------------------------------------------------------------------

    def plan(self, view: PolicyView) -> SpeculationPlan:
        self._begin(view.plan_id)
        self._last = self._decide(view)
        return self._last

    def _begin(self, plan_id: int) -> None:
        """Asked again for a plan that no round came of, everything starts from before it."""
        if plan_id != self._plan_id:
            self._plan_id, self._turn_before = plan_id, self._turn
        self._turn = self._turn_before
        self._planned.pop(plan_id, None)
        for switch in self._switches:
            switch.quota.release(plan_id)

    def _decide(self, view: PolicyView) -> SpeculationPlan:
        if not view.sequence_ids:
            return self._plain(view, "prefill_only")
        if not any(draft_limits(view, self._width)):
            return self._plain(view, "nothing_to_draft")
        self._turn = turn_range(self._ranges, self._turn, len(view.sequence_ids))
        index = self._turn.index
        switch, candidates = self._switches[index], self._ranges[index].candidates
        prices = self._costs.of(view, candidates)
        probing = switch.off and switch.probe is not None and switch.quota.take(view.plan_id)
        if switch.off and not probing:
            self._planned[view.plan_id] = Planned(index, None, False, prices.ratios)
            return self._plain(view, "off", index, prices.plain_ms)
        chosen = self._buckets[index].index
        if probing:
            assert switch.probe is not None
            chosen = switch.probe.candidate
        self._planned[view.plan_id] = Planned(index, chosen, probing, prices.ratios)
        return SpeculationPlan(
            plan_id=view.plan_id,
            policy=self.name,
            draft_steps=candidates[chosen].draft_steps,
            depth=candidates[chosen].draft_loops,
            range_index=index,
            candidate_index=chosen,
            reason="probe" if probing else "candidate",
            predicted_ms=prices.spec_ms[chosen],
        )

    def _plain(
        self, view: PolicyView, reason: str, range_index: int | None = None, ms: float | None = None
    ) -> SpeculationPlan:
        return SpeculationPlan(
            plan_id=view.plan_id,
            policy=self.name,
            draft_steps=0,
            range_index=range_index,
            reason=reason,
            predicted_ms=ms,
        )

    # -- feedback -----------------------------------------------------------------------------

    def observe(self, feedback: RoundFeedback) -> None:
        """Credited to range and candidate of the plan that made it, whatever holds by now."""
        plan_id = feedback.plan.plan_id
        if feedback.shape.target_rows:
            self._reasons[feedback.plan.reason] += 1
        planned = self._planned.pop(plan_id, None)
        for lost in [one for one in self._planned if one < plan_id - LATE_ROUNDS]:
            del self._planned[lost]  # rounds that failed have no feedback
        if planned is None or not feedback.shape.target_rows:
            self._ignored += planned is None and feedback.plan.range_index is not None
            return
        bucket, switch = self._buckets[planned.range_index], self._switches[planned.range_index]
        one = self._ranges[planned.range_index]

        def gain(candidate: int, acceptance: float) -> float | None:
            return gain_from(one.candidates[candidate], acceptance, planned.ratios[candidate])

        if planned.range_index != self._observed_range:
            switch.entered()
        self._observed_range = planned.range_index
        self._purse.earn(extra_cost(gain, 0))
        counts = acceptance_counts(feedback.rows, feedback.plan.draft_steps)
        if planned.probe:
            switch.probe_round(plan_id, bucket, gain, counts, self._purse)
            return
        switch.settle_lost(plan_id, bucket, gain)
        if planned.candidate is None:
            if switch.off:
                requests = frozenset(row.sequence_id for row in feedback.rows)
                switch.plain_round(bucket, gain, requests, self._purse)
        elif counts[1] and not switch.off:
            self._learn(planned.range_index, planned.candidate, counts, gain)

    def _learn(self, index: int, candidate: int, counts: tuple[int, int], gain: Any) -> None:
        bucket, switch, policy = self._buckets[index], self._switches[index], self._policies[index]
        if not policy.learn(bucket, candidate, *counts):
            return
        value = bucket.value(bucket.index)
        assert value is not None  # its feedback has just come
        wanted = policy.next_index(bucket, gain)
        # A candidate on its way down is not judged yet: a cheaper one may still pay.
        switch.look(gain(bucket.index, value), last=wanted >= bucket.index)
        if wanted != bucket.index and not switch.off:
            bucket.moves["up" if wanted > bucket.index else "down"] += 1
            bucket.enter(wanted)

    # -- status -------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        last = self._last
        return {
            "control": self.name,
            "draft_steps": None if last is None else last.draft_steps,
            "draft_loops": None if last is None else last.depth,
            "range_index": None if self._turn is None else self._turn.index,
            "reason": None if last is None else last.reason,
            "predicted_ms": None if last is None else last.predicted_ms,
            "gains_from": self._costs.source,
            "ranges": [self._range_status(index) for index in range(len(self._ranges))],
            "rounds": dict(self._reasons),
            "feedback_ignored": self._ignored,
            "probe_allowance_rounds": self._purse.left,
        }

    def _range_status(self, index: int) -> dict[str, Any]:
        one, bucket = self._ranges[index], self._buckets[index]
        return {
            "requests": [one.min_requests, one.max_requests],
            "candidates": [str(candidate) for candidate in one.candidates],
            "candidate_index": bucket.index,
            "acceptance": [bucket.value(j) for j in range(len(one.candidates))],
            "feedback_rounds": bucket.clock,
            "moves": dict(bucket.moves),
            **self._switches[index].status(),
        }
