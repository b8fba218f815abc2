"""The engine as a calibration drives it, and the policy it drives it by.

Everything in it is what serving uses; only the scheduler is one of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xspec.config import Config
from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.cost.model import Costs
from xspec.cost.settings import Point
from xspec.exec.assemble import Assembly, make_scheduler, ring_slots
from xspec.exec.driver import Retirement
from xspec.exec.pipeline import Pipeline
from xspec.platform.base import Platform
from xspec.policy.base import Policy, PolicyView
from xspec.sched.scheduler import Scheduler

Deliver = Callable[[Retirement], None]

Thinker = Callable[[Costs], Policy]
"""A fresh one of the policies that will serve, deciding by these costs."""

TOO_DEAR_MS = 1e6


def ignore(retirement: Retirement) -> None:
    """For engines whose text is nobody's concern."""


@dataclass(frozen=True, slots=True)
class Service:
    """The engine as calibration drives it, idle.

    `scheduler`: one that nobody else uses, without a prefix cache, that neither mixes prompts into decode
    rounds nor keeps pages back. `slots`: rounds the pipeline holds. `clock_s`: a steady clock. `deliver`:
    what serving does with a round's outcome once the next round is submitted. `thinker`: makes the policy
    that will decide by what is measured; None: a fixed one will.
    """

    scheduler: Scheduler
    pipeline: Pipeline
    slots: int
    clock_s: Callable[[], float]
    vocab_size: int
    max_model_len: int
    draft_block: int = 0
    deliver: Deliver = ignore
    thinker: Thinker | None = None


def service_of(
    config: Config,
    platform: Platform,
    parts: Assembly,
    pipeline: Pipeline,
    clock_s: Callable[[], float],
    deliver: Deliver = ignore,
    thinker: Thinker | None = None,
) -> Service:
    """`pipeline` is the one that will serve, or one like it; nothing may be in flight in it."""
    alone = dataclasses.replace(
        config.scheduler, enable_mix_batch=False, prefill_scheduling_memory_usage_threshold=1.0
    )
    return Service(
        scheduler=make_scheduler(dataclasses.replace(config, scheduler=alone), parts, prefix_cache=False),
        pipeline=pipeline,
        slots=ring_slots(config, platform),
        clock_s=clock_s,
        vocab_size=parts.target.spec.vocab_size,
        max_model_len=parts.max_model_len,
        draft_block=parts.drafter.spec.block,
        deliver=deliver,
        thinker=thinker,
    )


class ProbePolicy:
    """Plans the point it was last given.

    The policy that will serve (`thinker`) plans and observes every round as well. What it says is dropped: it
    is there for the time it takes, between two rounds and on the caches they leave, which is part of what a
    round costs. Of every point it is another one, under costs by which no other round is to be thought of.
    """

    name = "probe"

    def __init__(self, thinker: Thinker | None = None) -> None:
        self.point: Point | None = None
        self._thinker = thinker
        self._thinking: dict[Point, Policy] = {}
        self._planned: dict[int, Policy] = {}  # in flight: who thought about it

    def plan(self, view: PolicyView) -> SpeculationPlan:
        point = self.point
        if point is None or not view.sequence_ids:
            return SpeculationPlan(view.plan_id, self.name, draft_steps=0)
        if self._thinker is not None:
            if point not in self._thinking:
                self._thinking[point] = self._thinker(OnlyPoint(point))
            self._planned[view.plan_id] = self._thinking[point]
            self._planned[view.plan_id].plan(view)
        full = point.requests * (point.draft_steps + 1)
        return SpeculationPlan(
            view.plan_id,
            self.name,
            draft_steps=point.draft_steps,
            depth=point.depth,
            target_rows=None if point.target_rows == full else point.target_rows,
        )

    def observe(self, feedback: RoundFeedback) -> None:
        """The probe reads feedback itself."""
        if (policy := self._planned.pop(feedback.plan.plan_id, None)) is not None:
            policy.observe(feedback)

    def status(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class OnlyPoint:
    """Costs by which a policy always runs `point`: a millisecond, and one for every verify row more or less,
    which is no bargain as a row brings at most a token; anything else is far too dear."""

    point: Point
    prefill_ms_per_token: float = 0.0

    def at(self, kv_lengths: Sequence[int]) -> OnlyPoint:
        return self

    def round_ms(self, draft_steps: int, requests: int, target_rows: int, depth: int | None = None) -> float:
        point = self.point
        same = draft_steps == point.draft_steps and (depth == point.depth or not draft_steps)
        return 1.0 + abs(target_rows - point.target_rows) if same else TOO_DEAR_MS
