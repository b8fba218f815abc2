"""A load that changes while it runs: phases of so many clients for so long, and what happened in each.

Clients come at once where a phase wants more; where it wants fewer, some finish their request and leave.
Tokens belong to the phase in which their chunk arrived, whenever their request began or ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xspec.errors import ConfigError
from xspec.setting import Kind
from xspec_cli.benchlib.load import Clock, Phase, Target, ask_once
from xspec_cli.benchlib.prompts import Prompt
from xspec_cli.benchlib.rounds import RoundFigures
from xspec_cli.benchlib.samples import Sample
from xspec_cli.gflags import parse_value

FAILURE_PAUSE_S = 0.1
"""A client waits so long after a failed request: a target that refuses everything must not be flooded."""

EDGE_S = 1e-6
"""A phase that has so little time left is over: what is left may be too little to move the clock."""

TICKS = 50
"""Reports of progress per run."""


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase of one run. `finished` are requests that ended in it without failing."""

    concurrency: int
    begin_s: float
    seconds: float
    tokens: float
    tokens_per_s: float
    finished: int
    rounds: RoundFigures | None = None


def parse_phases(words: Sequence[str], *, max_concurrency: int) -> tuple[Phase, ...]:
    """Phases written as concurrency:seconds; ConfigError names the one that is wrong."""
    phases = []
    for word in words:
        clients, _, length = word.partition(":")
        concurrency, seconds = parse_value(Kind.INT32, clients), parse_value(Kind.DOUBLE, length)
        if not (isinstance(concurrency, int) and 1 <= concurrency <= max_concurrency):
            raise _refusal(word, max_concurrency)
        if not (isinstance(seconds, float) and 0.0 < seconds <= 1e6):
            raise _refusal(word, max_concurrency)
        phases.append(Phase(concurrency, seconds))
    return tuple(phases)


def _refusal(word: str, max_concurrency: int) -> ConfigError:
    return ConfigError(
        f"--phases={word}: allowed: concurrency:seconds, as in 8:30 "
        f"(1 to {max_concurrency} clients, above 0 to 1000000 seconds)"
    )


async def run_phases(
    target: Target,
    prompts: Sequence[Prompt],
    phases: Sequence[Phase],
    *,
    seed: int,
    clock: Clock,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Sample]:
    """Ask for `prompts` over and over until the last phase ends; samples come back in the order asked.

    `clock` is 0 where the first phase begins. Requests in flight at the end are finished, their late tokens
    belong to no phase. `report` is told of seconds.
    """
    numbers = itertools.count()
    samples: dict[int, Sample] = {}
    wanted = present = 0

    async def client() -> None:
        nonlocal present
        while present <= wanted:
            index = next(numbers)
            prompt = prompts[index % len(prompts)]
            samples[index] = await ask_once(target, prompt, index, seed + index, clock)
            # even an answer that came without any wait lets the next phase begin
            await asyncio.sleep(0.0 if samples[index].ok else FAILURE_PAUSE_S)
        present -= 1

    total_s = sum(phase.seconds for phase in phases)
    end_s = 0.0
    async with asyncio.TaskGroup() as group:
        for phase in phases:
            wanted = phase.concurrency
            while present < wanted:
                present += 1
                group.create_task(client())
            end_s += phase.seconds
            while (left_s := end_s - clock()) > EDGE_S:
                report(int(clock()), max(1, round(total_s)))
                await asyncio.sleep(min(left_s, max(1.0, total_s / TICKS)))
        wanted = 0
    report(max(1, round(total_s)), max(1, round(total_s)))
    return [samples[index] for index in range(len(samples))]


def phase_figures(
    phases: Sequence[Phase],
    samples: Sequence[Sample],
    rounds: Callable[[float, float], RoundFigures | None] = lambda begin_s, end_s: None,
) -> tuple[PhaseFigures, ...]:
    """`rounds` gives the figures of rounds between two times of the samples' clock."""
    found = []
    begin_s = 0.0
    for phase in phases:
        end_s = begin_s + phase.seconds
        tokens = sum(sample.tokens_within(begin_s, end_s) for sample in samples)
        found.append(
            PhaseFigures(
                concurrency=phase.concurrency,
                begin_s=begin_s,
                seconds=phase.seconds,
                tokens=tokens,
                tokens_per_s=tokens / phase.seconds,
                finished=sum(sample.ok and begin_s <= sample.end_s < end_s for sample in samples),
                rounds=rounds(begin_s, end_s),
            )
        )
        begin_s = end_s
    return tuple(found)
