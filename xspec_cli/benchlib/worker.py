"""An engine in a process of its own that takes turns with others: two engines' compute threads in one process
would slow each other down. It sleeps while another one has its turn.

The load generator runs in that process too, beside its engine; turns and results are pickled over a pipe.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from xspec.config import Config
from xspec.errors import XspecError
from xspec.threads import settle_threads
from xspec_cli.benchlib.load import AskOptions, Level, Target
from xspec_cli.benchlib.plan import Turn, local_turn
from xspec_cli.benchlib.prompts import Prompt
from xspec_cli.progress import set_up_output


class WorkerError(XspecError):
    """A worker did not start, or ended before its turn did."""


@dataclass(frozen=True, slots=True)
class Job:
    """One turn to take."""

    prompts: tuple[Prompt, ...]
    level: Level
    seed: int


class Worker:
    """The end of the pipe that gives out turns. Returns once the engine of `flags` is ready."""

    def __init__(self, flags: Mapping[str, Any], ask: AskOptions, *, log_level: str = "warning") -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, dict(flags), ask, log_level), daemon=True)
        self._process.start()
        theirs.close()
        if (problem := self._receive()) is not None:
            raise WorkerError(str(problem))

    async def turn(
        self, prompts: Sequence[Prompt], level: Level, seed: int, report: Callable[[int, int], None]
    ) -> Turn:
        report(0, 1)
        self._connection.send(Job(tuple(prompts), level, seed))
        done = await asyncio.to_thread(self._receive)
        if not isinstance(done, Turn):
            raise WorkerError(str(done))
        report(1, 1)
        return done

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            raise WorkerError("a worker ended early; its message stands above") from None

    def close(self) -> None:
        self._connection.close()
        self._process.join()


def _main(connection: Connection, flags: Mapping[str, Any], ask: AskOptions, log_level: str) -> None:
    progress = set_up_output(log_level, sys.stderr)
    settle_threads(0)

    async def life() -> None:
        try:
            config = Config.from_mapping(flags)
            # imported late: it loads torch, which has to see the threads just settled
            from xspec.engine.build import build_engine
            from xspec_cli.benchlib.local import EngineTarget

            engine = await build_engine(config, progress=progress)
        except XspecError as error:
            connection.send(f"{type(error).__name__}: {error}")
            return
        try:
            await take_turns(connection, EngineTarget(engine, ask))
        finally:
            await engine.close()

    asyncio.run(life())


async def take_turns(connection: Connection, target: Target) -> None:
    """The other end of the pipe: says that it is ready (None), then takes turns until the pipe is closed."""
    connection.send(None)
    while True:
        try:
            job: Job = await asyncio.to_thread(connection.recv)
        except EOFError:
            return
        turn = await local_turn(target, job.prompts, job.level, job.seed, lambda done, total: None)
        connection.send(turn)
