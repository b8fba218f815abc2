"""The real engine of a tiny model under a made-up clock: rounds take what a test says, by what they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tiny import make_checkpoint
from tiny_drafters import make_mtp
from tiny_looped import write_ouro

from xspec.calib.calibrate import Calibrated, calibrated_costs
from xspec.calib.choose import Adaptation, speculation_of
from xspec.calib.service import Service, service_of
from xspec.config import Config
from xspec.core.request import Request, SamplingParams
from xspec.core.round import RoundPlan
from xspec.core.sequence import Sequence as LiveSequence
from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.cost.settings import ContextInterval, Control, Effective, Geometry, Point
from xspec.draft.choose import DraftChoice
from xspec.exec.assemble import Assembly, Speculation, assemble, make_drafter, make_scheduler, ring_slots
from xspec.exec.driver import Driver
from xspec.exec.pipeline import Pipeline
from xspec.exec.slots import Slot
from xspec.kv.pool import RESERVED_PAGES
from xspec.platform.base import Event
from xspec.platform.cpu import CpuPlatform
from xspec.policy.fixed import FixedPolicy
from xspec.progress import Progress, silent
from xspec.train.offline import Inline

BLOCK_SIZE = 8
PAGE_BYTES = BLOCK_SIZE * 3 * 2 * 2 * 16 * 8 + 64 * 8
"""Three layers, the drafter's among them, of keys and values: 2 heads of 16 numbers of 8 bytes. And a state.
"""

LOOPED_PAGE_BYTES = BLOCK_SIZE * 4 * 2 * 2 * 4 * 16 * 8
"""Four loops of two layers: 4 heads of 16 numbers of 8 bytes."""

CostOf = Callable[[RoundPlan], float]
"""Milliseconds that the device takes for a round."""


@dataclass
class Device:
    """Runs rounds at once and says when they would have been done: one after another, never two at a time."""

    runner: Any
    cost_ms: CostOf
    now_ms: float = 0.0
    free_ms: float = 0.0  # when it has done all that was submitted
    plans: list[RoundPlan] = field(default_factory=list)

    def clock_s(self) -> float:
        return self.now_ms / 1e3

    def execute(self, plan: RoundPlan, slot: Slot) -> Event:
        self.runner.execute(plan, slot)
        self.plans.append(plan)
        self.free_ms = max(self.free_ms, self.now_ms) + self.cost_ms(plan)
        return Done(self, self.free_ms)

    def make_slots(self, count: int) -> list[Slot]:
        return self.runner.make_slots(count)


@dataclass
class Done:
    device: Device
    at_ms: float

    def done(self) -> bool:
        return self.at_ms <= self.device.now_ms

    def wait(self) -> None:
        self.device.now_ms = max(self.device.now_ms, self.at_ms)


@dataclass
class Rig:
    config: Config
    platform: CpuPlatform
    parts: Assembly
    choice: DraftChoice
    model: Path

    def device(self, cost_ms: CostOf) -> Device:
        return Device(self.parts.runner, cost_ms)

    def costs(self, adaptation: Adaptation, device: Any, progress: Progress = silent) -> Calibrated:
        """What a start of this engine on `device` adapts by."""
        return calibrated_costs(
            adaptation,
            self.config,
            self.platform,
            replace(self.parts, runner=device),
            self.choice,
            Inline(),
            model=self.model,
            progress=progress,
            clock_s=device.clock_s,
        )

    def service(self, device: Any) -> Service:
        pipeline = Pipeline(device, Inline(), ring_slots(self.config, self.platform))
        return service_of(self.config, self.platform, self.parts, pipeline, device.clock_s)


def make_rig(
    folder: Path,
    *,
    steps: int = 2,
    tiers: TargetTiers | None = None,
    adaptation: Adaptation | None = None,
    pages: int = 512,
    **flags: Any,
) -> Rig:
    """A tiny llama with an MTP drafter in float64, `pages` usable KV pages. Prepared is what `adaptation`
    needs, without one all depths and `tiers`."""
    model = folder / "target"
    if not model.exists():
        make_checkpoint(model, "llama")
        make_mtp(folder / "mtp", "llama")
    values = {
        "model": str(model),
        "draft_model": str(folder / "mtp"),
        "num_speculative_tokens": steps,
        "dtype": "float64",
        "max_seqs_per_batch": 4,
        "max_cache_size": (pages + RESERVED_PAGES) * PAGE_BYTES,
        "max_tokens_per_batch": 32,
        "block_size": BLOCK_SIZE,
    }
    config, platform = Config.from_mapping(values | flags), CpuPlatform()
    choice = DraftChoice("MTP", folder / "mtp", steps, steps)
    depths = tuple(range(1, steps + 1))
    prepared = Speculation(depths, depths, tiers or TargetTiers())
    return _assembled(config, platform, choice, model, adaptation, prepared)


def make_looped_rig(
    folder: Path,
    *,
    widths: tuple[int, ...] = (1, 2),
    depths: tuple[int, ...] = (1, 3),
    adaptation: Adaptation,
    pages: int = 512,
    **flags: Any,
) -> Rig:
    """A tiny ouro of four loops, float64, that drafts for itself: any K of `widths` and d of `depths`."""
    model = folder / "ouro"
    if not model.exists():
        write_ouro(model)
    values = {
        "model": str(model),
        "speculative_algorithm": "Looped",
        "speculation_policy": "goodput",
        "dtype": "float64",
        "max_seqs_per_batch": 4,
        "max_cache_size": (pages + RESERVED_PAGES) * LOOPED_PAGE_BYTES,
        "max_tokens_per_batch": 32,
        "block_size": BLOCK_SIZE,
    }
    config, platform = Config.from_mapping(values | flags), CpuPlatform()
    choice = DraftChoice("Looped", None, widths[-1], widths[-1], loops=depths, widths=widths)
    return _assembled(config, platform, choice, model, adaptation, Speculation())


def _assembled(
    config: Config,
    platform: CpuPlatform,
    choice: DraftChoice,
    model: Path,
    adaptation: Adaptation | None,
    prepared: Speculation,
) -> Rig:
    """`prepared`: without an adaptation."""

    def speculation(grid: BucketGrid) -> Speculation:
        if adaptation is not None:
            return speculation_of(adaptation, choice, platform, grid)
        return prepared

    parts = assemble(
        config,
        platform,
        model,
        lambda target: make_drafter(config, platform, model, choice, target),
        speculation,
        silent,
    )
    return Rig(config, platform, parts, choice, model)


def effective_of(
    points: Sequence[Point],
    contexts: Sequence[ContextInterval],
    *,
    warmup_steps: int = 3,
    window_steps: int = 4,
    windows_per_point: int = 3,
    token_seed: int = 1,
    kv_growth: int | None = None,
    least_point_ms: int | None = None,
) -> Effective:
    """Points to measure, with no regard to what `resolve` would make of them."""
    buckets = tuple(sorted({point.requests for point in points}))
    return Effective(
        model="additive",
        draft_width=2,
        request_buckets=buckets,
        target_rows={},
        contexts=tuple(contexts),
        warmup_steps=warmup_steps,
        window_steps=window_steps,
        windows_per_point=windows_per_point,
        token_seed=token_seed,
        plain_rounds=True,
        max_target_rows=None,
        uncovered="full_width",
        geometry=Geometry(Control.TARGET_VERIFY, 2, buckets, 512, 4096, 8, 2),
        captured_tiers={},
        points=tuple(points),
        kv_growth=kv_growth,
        least_point_ms=least_point_ms,
    )


def answers(rig: Rig, prompts: Sequence[tuple[int, ...]], tokens: int = 24) -> list[list[int]]:
    """What serving says to the prompts, drafting all it can."""
    device = rig.device(lambda plan: 1.0)
    pipeline = Pipeline(device, Inline(), ring_slots(rig.config, rig.platform))
    scheduler = make_scheduler(rig.config, rig.parts)
    policy = FixedPolicy(rig.choice.steps, depth=rig.choice.loops[-1] if rig.choice.loops else None)
    driver = Driver(scheduler, policy, pipeline, device.clock_s)
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, temperature=0.8, seed=index)
        scheduler.add(
            LiveSequence(
                id=index + 1,
                request=Request(str(index), prompt, params),
                choice=0,
                seed=index,
                max_len=len(prompt) + tokens,
                stop_ids=frozenset(),
            )
        )
    said: list[list[int]] = [[] for _ in prompts]
    while True:
        while not pipeline.full and driver.step():
            pass
        if pipeline.empty:
            return said
        for output in driver.retire().outputs:
            said[int(output.request_id)].extend(output.token_ids)
