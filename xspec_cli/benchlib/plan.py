"""The order of a benchmark's runs: levels, rounds, and targets taking turns within each round.

Targets alternate (A B A B) so that a machine that drifts treats both alike, and both get the same prompts in
the same round. Every round takes the next prompts of the set, so that a prefix cache cannot answer for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xspec_cli.benchlib.load import Level, Target, run_load
from xspec_cli.benchlib.prompts import Prompt, take
from xspec_cli.benchlib.samples import RunFigures, Sample, figures
from xspec_cli.benchlib.speculation import SpeculationFigures, speculation_figures
from xspec_cli.benchlib.stats import Ratio, paired_ratio

RATE_WARMUP = 8
"""Warm-up requests of a level that has no concurrency."""

Report = Callable[[str, int, int], None]
"""(what runs, requests done, requests in all): the form of xspec.progress.Progress."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    levels: tuple[Level, ...]
    num_prompts: int  # per run
    rounds: int
    warmup: int | None  # unmeasured requests before a target's first run at a level; None: see warmup_of
    seed: int
    settle_s: float = 0.0  # pause before another target's turn: idle threads of the last one may still spin

    @property
    def prompts_needed(self) -> int:
        """Prompts that one target is sent in all."""
        return sum(self.warmup_of(level) + self.rounds * self.num_prompts for level in self.levels)

    def warmup_of(self, level: Level) -> int:
        """Enough to fill every place of the level once: first calls at a new batch size are slow."""
        if self.warmup is not None:
            return self.warmup
        return level.concurrency if level.concurrency is not None else RATE_WARMUP


@dataclass(frozen=True, slots=True)
class Run:
    """One target, one level, one round."""

    level: Level
    round_index: int
    target: str
    samples: tuple[Sample, ...]
    figures: RunFigures
    speculation: SpeculationFigures | None = None


async def run_plan(
    targets: Sequence[Target], prompts: Sequence[Prompt], options: PlanOptions, report: Report
) -> list[Run]:
    runs: list[Run] = []
    cursor = 0
    for level in options.levels:
        warm = take(prompts, cursor, options.warmup_of(level))
        cursor += len(warm)
        for round_index in range(options.rounds):
            chosen = take(prompts, cursor, options.num_prompts)
            cursor += options.num_prompts
            for target in targets:
                if runs and runs[-1].target != target.name:
                    await asyncio.sleep(options.settle_s)
                if round_index == 0 and warm:
                    await _reported(
                        target, warm, level, options.seed, f"{target.name}, {level}: warm-up", report
                    )
                what = f"{target.name}, {level}, round {round_index + 1} of {options.rounds}"
                before = await target.draft_totals()
                samples = await _reported(target, chosen, level, options.seed + round_index, what, report)
                drafted = speculation_figures(before, await target.draft_totals())
                runs.append(Run(level, round_index, target.name, tuple(samples), figures(samples), drafted))
    return runs


async def _reported(
    target: Target, prompts: Sequence[Prompt], level: Level, seed: int, what: str, report: Report
) -> list[Sample]:
    finished = 0

    def count(sample: Sample) -> None:
        nonlocal finished
        finished += 1
        report(what, finished, len(prompts))

    report(what, 0, len(prompts))
    return await run_load(target, prompts, level, seed=seed, done=count)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Second target over first at one level, by output tokens per second."""

    level: Level
    target: str
    baseline: str
    ratio: Ratio


def runs_of(runs: Sequence[Run], level: Level, target: str) -> list[Run]:
    return [run for run in runs if run.level == level and run.target == target]


def compare(runs: Sequence[Run], options: PlanOptions, targets: Sequence[str]) -> list[Comparison]:
    """One comparison per level for exactly two targets that both produced tokens in every round."""
    if len(targets) != 2:
        return []
    baseline, other = targets
    found = []
    for level in options.levels:
        below = [run.figures.output_tokens_per_s for run in runs_of(runs, level, baseline)]
        above = [run.figures.output_tokens_per_s for run in runs_of(runs, level, other)]
        if all(value > 0.0 for value in (*below, *above)):
            found.append(Comparison(level, other, baseline, paired_ratio(above, below, seed=options.seed)))
    return found
