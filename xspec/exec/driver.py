"""The synchronous round: retire, observe, plan, submit. Used by the engine loop and by calibration.

One screen to protect. With two slots the policy sees round n-2 when it plans round n, and never
round n-1 early: a round retires only when the ring is full or nothing can be planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from xspec.core.request import Output
from xspec.core.round import RoundFeedback, RoundPlan, RoundResult, SpeculationPlan
from xspec.exec.pipeline import Pipeline
from xspec.policy.base import Policy, PolicyView
from xspec.sched import commit
from xspec.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Retirement:
    """What one retired round brings: outputs, and if it was lost, who it took along."""

    outputs: tuple[Output, ...] = ()
    feedback: RoundFeedback | None = None
    error: BaseException | None = None
    failed_requests: frozenset[str] = frozenset()


class Witness(Protocol):
    """Who keeps what every decision saw and brought (`xspec.trace.RoundTrace`)."""

    def planned(self, view: PolicyView, plan: SpeculationPlan, observed: int) -> None:
        """A round was submitted, its policy having observed so many."""

    def retired(
        self, plan_id: int, feedback: RoundFeedback | None, error: BaseException | None = None
    ) -> None:
        """The oldest round is done: what its policy was told, or what broke it."""


class Driver:
    """Owns the order of things. `clock_s` is only for `round_ms`; no decision reads it."""

    def __init__(
        self,
        scheduler: Scheduler,
        policy: Policy,
        pipeline: Pipeline,
        clock_s: Callable[[], float],
        witness: Witness | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.policy = policy
        self.pipeline = pipeline
        self._clock_s = clock_s
        self._witness = witness
        self._rounds = 0
        self._observed = 0
        self._last_retired_s: float | None = None

    def step(self) -> bool:
        """Plan and submit the next round if there is one. The ring must not be full."""
        view = self.scheduler.view(plan_id=self._rounds)
        if view is None:
            return False
        spec = self.policy.plan(view)
        plan = self.scheduler.plan(spec, round_id=self._rounds)
        if plan is None:
            return False
        self._rounds += 1
        if self._witness is not None:
            self._witness.planned(view, spec, self._observed)
        for bind in plan.binds:
            sequence = self.scheduler.live[bind.sequence_id]
            sequence.started_s = sequence.started_s or self._clock_s()
        self.pipeline.submit(plan)
        return True

    def retire(self) -> Retirement:
        """Commit the oldest round and tell the policy. The ring must not be empty."""
        plan, result = self.pipeline.retire()
        round_ms = self._interval_ms()
        if isinstance(result, BaseException):
            self._last_retired_s = None
            failed = commit.fail(self.scheduler, plan)
            if self._witness is not None:
                self._witness.retired(plan.spec.plan_id, None, result)
            return Retirement(error=result, failed_requests=frozenset(failed))
        retired = commit.retire(self.scheduler, result)
        feedback = _feedback(plan, result, retired, round_ms)
        self.policy.observe(feedback)
        self._observed += 1
        if self._witness is not None:
            self._witness.retired(plan.spec.plan_id, feedback)
        return Retirement(outputs=retired.outputs, feedback=feedback)

    def paused(self) -> None:
        """The engine slept: the next retirement ends no steady interval."""
        self._last_retired_s = None

    def _interval_ms(self) -> float | None:
        now = self._clock_s()
        before, self._last_retired_s = self._last_retired_s, now
        return None if before is None else (now - before) * 1e3


def _feedback(
    plan: RoundPlan, result: RoundResult, retired: commit.Retired, round_ms: float | None
) -> RoundFeedback:
    signals, matches = result.signals, result.matches
    if len(retired.told) < len(result.rows):
        told = list(retired.told)
        signals = None if signals is None else signals[told]
        matches = None if matches is None else matches[told]
    return RoundFeedback(
        plan=plan.spec,
        shape=plan.shape,
        rows=retired.rows,
        round_ms=round_ms,
        prefill_tokens=plan.shape.prefill_tokens,
        committed_tokens=retired.committed_tokens,
        signals=signals,
        matches=matches,
    )
