"""The engine as a calibration drives it, and the policy it drives it by.

Everything in it is what serving uses; only the scheduler is one of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xspec.config import Config
from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.cost.settings import Point
from xspec.exec.assemble import Assembly, make_scheduler, ring_slots
from xspec.exec.driver import Retirement
from xspec.exec.pipeline import Pipeline
from xspec.platform.base import Platform
from xspec.policy.base import PolicyView
from xspec.sched.scheduler import Scheduler

Deliver = Callable[[Retirement], None]


def ignore(retirement: Retirement) -> None:
    """For engines whose text is nobody's concern."""


@dataclass(frozen=True, slots=True)
class Service:
    """The engine as calibration drives it, idle.

    `scheduler`: one that nobody else uses, without a prefix cache, that neither mixes prompts into decode
    rounds nor keeps pages back. `slots`: rounds the pipeline holds. `clock_s`: a steady clock. `deliver`:
    what serving does with a round's outcome once the next round is submitted.
    """

    scheduler: Scheduler
    pipeline: Pipeline
    slots: int
    clock_s: Callable[[], float]
    vocab_size: int
    max_model_len: int
    draft_block: int = 0
    deliver: Deliver = ignore


def service_of(
    config: Config,
    platform: Platform,
    parts: Assembly,
    pipeline: Pipeline,
    clock_s: Callable[[], float],
    deliver: Deliver = ignore,
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
    )


class ProbePolicy:
    """Plans the point it was last given."""

    name = "probe"

    def __init__(self) -> None:
        self.point: Point | None = None

    def plan(self, view: PolicyView) -> SpeculationPlan:
        point = self.point
        if point is None or not view.sequence_ids:
            return SpeculationPlan(view.plan_id, self.name, draft_steps=0)
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

    def status(self) -> dict[str, Any]:
        return {}
