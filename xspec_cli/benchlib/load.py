"""Drives a target: closed loop (a fixed number of requests in flight) or Poisson arrivals.

Knows only the Target protocol; whether an answer comes over HTTP or from this process is the target's affair.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from xspec.core.drafts import DraftTotals
from xspec_cli.benchlib.prompts import Prompt
from xspec_cli.benchlib.rounds import RoundFigures
from xspec_cli.benchlib.samples import Sample
from xspec_cli.benchlib.speculation import AnswerDrafts

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a changing load: so many clients for so long."""

    concurrency: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.concurrency}:{self.seconds:g}"


@dataclass(frozen=True, slots=True)
class Level:
    """One load: `concurrency` requests always in flight, `rate_rps` Poisson arrivals a second or `phases`."""

    concurrency: int | None = None
    rate_rps: float | None = None
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        if (self.concurrency is not None) + (self.rate_rps is not None) + bool(self.phases) != 1:
            raise ValueError("a level is either a concurrency or a rate or phases")

    def __str__(self) -> str:
        if self.phases:
            return f"phases {','.join(map(str, self.phases))}"
        return (
            f"concurrency {self.concurrency}" if self.concurrency is not None else f"rate {self.rate_rps:g}/s"
        )


@dataclass(frozen=True, slots=True)
class AskOptions:
    """How every request of a run is asked."""

    max_tokens: int
    temperature: float
    ignore_eos: bool
    chat: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished stream as the target saw it. Times come from the clock it was given."""

    chunk_s: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str | None
    chunk_tokens: tuple[int, ...] = ()  # empty: not told
    digest: str = ""
    drafts: AnswerDrafts | None = None


class TargetError(Exception):
    """One request failed. The run goes on and counts it."""


class Target(Protocol):
    name: str

    async def begin_turn(self) -> None:
        """Called before each of its runs, while it has nothing to do."""

    async def ask(self, prompt: Prompt, seed: int, clock: Clock) -> Answer:
        """Send one prompt and read its stream to the end; TargetError if it fails."""

    async def draft_totals(self) -> DraftTotals | None:
        """Counters of speculation since the target's start; None where there are none to be read."""

    def round_figures(self, begin_s: float, end_s: float) -> RoundFigures | None:
        """Rounds that ended in [begin_s, end_s) of the event loop's clock; None where nobody can see them."""


def stopwatch() -> Clock:
    """Seconds from now on, by the clock of the running event loop."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    return lambda: loop.time() - begin_s


def poisson_arrivals(count: int, rate_rps: float, seed: int) -> list[float]:
    """`count` arrival times in seconds, the first at 0: exponential gaps of mean 1 / rate."""
    if not rate_rps > 0.0:
        raise ValueError(f"a request rate must be positive, got {rate_rps}")
    rng = random.Random(seed)
    arrivals = [0.0]
    while len(arrivals) < count:
        arrivals.append(arrivals[-1] + rng.expovariate(rate_rps))
    return arrivals[:count]


async def run_load(
    target: Target,
    prompts: Sequence[Prompt],
    level: Level,
    *,
    seed: int,
    done: Callable[[Sample], None] = lambda sample: None,
) -> list[Sample]:
    """Send every prompt once under `level`; samples come back in prompt order. `done` is told of each."""
    if level.phases:
        raise ValueError("phases are driven by phases.run_phases")
    clock = stopwatch()

    async def one(index: int, start_s: float | None = None) -> Sample:
        sample = await ask_once(target, prompts[index], index, seed + index, clock, start_s)
        done(sample)
        return sample

    if level.concurrency is not None:
        return await _closed_loop(one, len(prompts), level.concurrency)
    assert level.rate_rps is not None
    return await _open_loop(one, poisson_arrivals(len(prompts), level.rate_rps, seed), clock)


async def ask_once(
    target: Target, prompt: Prompt, index: int, seed: int, clock: Clock, due_s: float | None = None
) -> Sample:
    """A Poisson arrival starts when it was due: a late client must not look like a fast server."""
    start_s = clock() if due_s is None else due_s
    try:
        answer = await target.ask(prompt, seed, clock)
    except TargetError as error:
        return Sample(index, start_s, clock(), error=str(error), traffic=prompt.traffic)
    return Sample(
        prompt_index=index,
        start_s=start_s,
        end_s=clock(),
        chunk_s=answer.chunk_s,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        finish_reason=answer.finish_reason,
        chunk_tokens=answer.chunk_tokens,
        traffic=prompt.traffic,
        digest=answer.digest,
        drafts=answer.drafts,
    )


async def _closed_loop(one: Callable[[int], Awaitable[Sample]], count: int, concurrency: int) -> list[Sample]:
    """`concurrency` workers take the next prompt as soon as their last one is answered."""
    samples: dict[int, Sample] = {}
    waiting = iter(range(count))

    async def worker() -> None:
        for index in waiting:
            samples[index] = await one(index)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, count)):
            group.create_task(worker())
    return [samples[index] for index in range(count)]


async def _open_loop(
    one: Callable[[int, float], Coroutine[None, None, Sample]], arrivals: Sequence[float], clock: Clock
) -> list[Sample]:
    """Requests leave at their arrival times, however many are still in flight."""
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, due_s in enumerate(arrivals):
            await asyncio.sleep(max(0.0, due_s - clock()))
            tasks.append(group.create_task(one(index, due_s)))
    return [task.result() for task in tasks]
