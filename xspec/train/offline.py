"""The engine without asyncio: prompts in, answers out, one batch after another on the calling thread.

Training makes its data and its figures with it. Knows nothing about text, files or what answers are for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from xspec.config import Config
from xspec.core.request import FinishReason, Request, SamplingParams
from xspec.core.sequence import Sequence as LiveSequence
from xspec.errors import EngineError
from xspec.exec.assemble import MakeDrafter, Speculation, assemble, make_scheduler, ring_slots
from xspec.exec.driver import Driver, Retirement
from xspec.exec.pipeline import Pipeline
from xspec.platform.base import Platform
from xspec.policy.base import Policy
from xspec.progress import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt; `temperature` 0 is greedy. The answer ends at one of the engine's stop ids."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    top_p: float = 1.0


class Inline:
    """A Launcher that launches at once, on the thread that submits."""

    def submit(self, fn: Callable[[], T], /) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn())
        except Exception as error:  # the pipeline raises it where the round retires
            future.set_exception(error)
        return future


class OfflineEngine:
    """Equal batches in equal order give equal answers: nothing here depends on time."""

    def __init__(
        self,
        config: Config,
        platform: Platform,
        path: Path,
        *,
        make_drafter: MakeDrafter,
        policy: Policy,
        speculation: Speculation,
        stop_ids: frozenset[int],
        progress: Progress,
    ) -> None:
        """`path` is the target's; `stop_ids` end an answer. ConfigError names the flag that does not fit."""
        self.parts = assemble(config, platform, path, make_drafter, lambda _: speculation, progress)
        pipeline = Pipeline(self.parts.runner, Inline(), ring_slots(config, platform))
        self._driver = Driver(make_scheduler(config, self.parts), policy, pipeline, clock_s=time.monotonic)
        self._stop_ids = stop_ids
        self._sequences = 0

    def answer(
        self, asks: Sequence[Ask], told: Callable[[int, int], None] = lambda complete, tokens: None
    ) -> list[tuple[int, ...]]:
        """The answers, in order. EngineError if a round failed.

        `told` hears after every round how many answers are complete and how many tokens there are.
        """
        answers: list[list[int]] = [[] for _ in asks]
        for index, ask in enumerate(asks):
            self._driver.scheduler.add(self._sequence(index, ask))
        complete = tokens = 0
        while (retirement := self._next()) is not None:
            if retirement.error is not None:
                raise EngineError(f"a round failed: {retirement.error}") from retirement.error
            for output in retirement.outputs:
                if output.finish_reason is FinishReason.ERROR:
                    raise EngineError(output.error or "the engine failed")
                answers[int(output.request_id)].extend(output.token_ids)
                tokens += len(output.token_ids)
                complete += output.finish_reason is not None
            told(complete, tokens)
        self._driver.scheduler.pages.check_idle()
        return [tuple(answer) for answer in answers]

    def _next(self) -> Retirement | None:
        """The next round to retire; None when nothing is left to do."""
        driver = self._driver
        while not driver.pipeline.full and driver.step():
            pass
        if not driver.pipeline.empty:
            return driver.retire()
        if not driver.scheduler.idle:
            raise EngineError(f"{len(driver.scheduler.live)} sequences wait but no round can be planned")
        driver.paused()
        return None

    def _sequence(self, index: int, ask: Ask) -> LiveSequence:
        room = self.parts.max_model_len - len(ask.prompt_ids)
        if room < 1 or not ask.prompt_ids:
            raise EngineError(
                f"a prompt of {len(ask.prompt_ids)} tokens in a context of {self.parts.max_model_len}"
            )
        self._sequences += 1
        params = SamplingParams(
            max_tokens=ask.max_tokens, temperature=ask.temperature, top_p=ask.top_p, seed=ask.seed
        )
        return LiveSequence(
            id=self._sequences,
            request=Request(str(index), ask.prompt_ids, params),
            choice=0,
            seed=ask.seed,
            max_len=len(ask.prompt_ids) + min(room, ask.max_tokens),
            stop_ids=self._stop_ids,
        )
