"""The order of a benchmark's runs: levels, rounds, and targets taking turns within each round.

Targets alternate (A B A B) so that a machine that drifts treats both alike, and both get the same prompts in
the same round. Every round takes the next prompts of the set, so that a prefix cache cannot answer for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from xspec_cli.benchlib.load import Level, Target, run_load, stopwatch
from xspec_cli.benchlib.phases import PhaseFigures, phase_figures, run_phases
from xspec_cli.benchlib.prompts import Prompt, halves, take
from xspec_cli.benchlib.rounds import RoundFigures
from xspec_cli.benchlib.samples import RunFigures, Sample, figures
from xspec_cli.benchlib.speculation import SpeculationFigures, speculation_figures
from xspec_cli.benchlib.stats import Ratio, paired_ratio

RATE_WARMUP = 8
"""Warm-up requests of a level that has no concurrency."""

MAX_PHASE_PROMPTS = 4096
"""Prompts that phases go round in: more are asked in no phase plan that anybody waits for."""

Report = Callable[[str, int, int], None]
"""(what runs, done, in all), of requests or of seconds: the form of xspec.progress.Progress."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    levels: tuple[Level, ...]
    num_prompts: int  # per run
    rounds: int
    warmup: int | None  # unmeasured requests before a target's first run at a level; None: see warmup_of
    seed: int
    settle_s: float = 0.0  # pause before another target's turn: idle threads of the last one may still spin
    rotate: bool = False  # each round begins with the next target
    hindsight: bool = False  # odd rounds use one half of the prompts, even rounds the other
    least_per_client: int = 0  # prompts of a run per client of its level, where num_prompts are fewer

    @property
    def prompts_needed(self) -> int:
        """Prompts that one target is sent in all; phases recycle theirs."""
        return sum(
            self.warmup_of(level) + (0 if level.phases else self.rounds * self.prompts_of(level))
            for level in self.levels
        )

    def prompts_of(self, level: Level) -> int:
        """Prompts of one run at a level without phases."""
        return max(self.num_prompts, self.least_per_client * (level.concurrency or 0))

    def warmup_of(self, level: Level) -> int:
        """Enough to fill every place of the level once: first calls at a new batch size are slow."""
        if self.warmup is not None:
            return self.warmup
        concurrency = warm_level(level).concurrency
        return RATE_WARMUP if concurrency is None else concurrency


def warm_level(level: Level) -> Level:
    """The load of the warm-up: for phases that of the fullest one."""
    if level.phases:
        return Level(concurrency=max(phase.concurrency for phase in level.phases))
    return level


@dataclass(frozen=True, slots=True)
class Turn:
    """What one target did in one run."""

    samples: tuple[Sample, ...]
    speculation: SpeculationFigures | None = None
    rounds: RoundFigures | None = None
    phases: tuple[PhaseFigures, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One target, one level, one round."""

    level: Level
    round_index: int
    target: str
    samples: tuple[Sample, ...]
    figures: RunFigures
    speculation: SpeculationFigures | None = None
    rounds: RoundFigures | None = None
    phases: tuple[PhaseFigures, ...] = ()

    @property
    def seconds(self) -> float:
        """What the throughput is measured over: phases without the tail of requests that outlast them."""
        return sum(phase.seconds for phase in self.phases) if self.phases else self.figures.duration_s

    @property
    def tokens_per_s(self) -> float:
        if not self.phases:
            return self.figures.output_tokens_per_s
        return sum(phase.tokens for phase in self.phases) / self.seconds


Take = Callable[[T, Sequence[Prompt], Level, int, Callable[[int, int], None]], Awaitable[Turn]]
"""Runs (target, prompts, level, seed) and tells a report how far it is."""


async def local_turn(
    target: Target, prompts: Sequence[Prompt], level: Level, seed: int, report: Callable[[int, int], None]
) -> Turn:
    """Drives a target from this process."""
    await target.begin_turn()
    loop = asyncio.get_running_loop()
    before = await target.draft_totals()
    clock, begin_s = stopwatch(), loop.time()
    phases: tuple[PhaseFigures, ...] = ()
    if level.phases:
        samples = await run_phases(target, prompts, level.phases, seed=seed, clock=clock, report=report)

        def rounds_within(first_s: float, last_s: float) -> RoundFigures | None:
            return target.round_figures(begin_s + first_s, begin_s + last_s)

        phases = phase_figures(level.phases, samples, rounds_within)
        end_s = begin_s + sum(phase.seconds for phase in level.phases)
    else:
        samples = await _counted(target, prompts, level, seed, report)
        end_s = loop.time()
    drafted = speculation_figures(before, await target.draft_totals())
    return Turn(tuple(samples), drafted, target.round_figures(begin_s, end_s), phases)


async def _counted(
    target: Target, prompts: Sequence[Prompt], level: Level, seed: int, report: Callable[[int, int], None]
) -> list[Sample]:
    finished = 0

    def count(sample: Sample) -> None:
        nonlocal finished
        finished += 1
        report(finished, len(prompts))

    report(0, len(prompts))
    return await run_load(target, prompts, level, seed=seed, done=count)


async def run_plan(
    targets: Sequence[Target], prompts: Sequence[Prompt], options: PlanOptions, report: Report
) -> list[Run]:
    """Every target at every level in every round, driven from this process."""
    return await run_turns(targets, prompts, options, report, local_turn)


async def run_turns(
    targets: Sequence[T], prompts: Sequence[Prompt], options: PlanOptions, report: Report, turn: Take[T]
) -> list[Run]:
    """The plan itself, whoever takes the turns."""
    parts = halves(prompts) if options.hindsight else (prompts,)
    cursors = [0] * len(parts)
    runs: list[Run] = []
    for level in options.levels:
        warm = take(parts[0], cursors[0], options.warmup_of(level))
        cursors[0] += len(warm)
        for round_index in range(options.rounds):
            half = round_index % len(parts)
            count = min(len(parts[half]), MAX_PHASE_PROMPTS) if level.phases else options.prompts_of(level)
            chosen = take(parts[half], cursors[half], count)
            first = round_index % len(targets) if options.rotate else 0
            asked = 0
            for target in (*targets[first:], *targets[:first]):
                if runs and runs[-1].target != target.name:
                    await asyncio.sleep(options.settle_s)
                what = f"{target.name}, {level}"
                if round_index == 0 and warm:
                    told = _under(f"{what}: warm-up", report)
                    await turn(target, warm, warm_level(level), options.seed, told)
                told = _under(f"{what}, round {round_index + 1} of {options.rounds}", report)
                done = await turn(target, chosen, level, options.seed + round_index, told)
                runs.append(_run(level, round_index, target.name, done))
                asked = max(asked, len(done.samples))
            cursors[half] += asked
    return runs


def _under(what: str, report: Report) -> Callable[[int, int], None]:
    return lambda done, total: report(what, done, total)


def _run(level: Level, round_index: int, target: str, done: Turn) -> Run:
    return Run(
        level=level,
        round_index=round_index,
        target=target,
        samples=done.samples,
        figures=figures(done.samples),
        speculation=done.speculation,
        rounds=done.rounds,
        phases=done.phases,
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """A target over the first one at one level, by output tokens per second."""

    level: Level
    target: str
    baseline: str
    ratio: Ratio


def runs_of(runs: Sequence[Run], level: Level, target: str) -> list[Run]:
    return [run for run in runs if run.level == level and run.target == target]


def compare(runs: Sequence[Run], options: PlanOptions, targets: Sequence[str]) -> list[Comparison]:
    """Per level, every target but the first over the first, where both produced tokens in every round."""
    baseline, *others = targets
    found = []
    for level in options.levels:
        below = [run.tokens_per_s for run in runs_of(runs, level, baseline)]
        for other in others:
            above = [run.tokens_per_s for run in runs_of(runs, level, other)]
            if below and len(below) == len(above) and all(value > 0.0 for value in (*below, *above)):
                ratio = paired_ratio(above, below, seed=options.seed)
                found.append(Comparison(level, other, baseline, ratio))
    return found
