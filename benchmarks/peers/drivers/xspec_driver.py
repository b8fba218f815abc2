"""xspec as a peer like the others: its asyncio engine in a process of its own. Options are its flags.

Runs in the project's environment. `tables` is a folder of measured costs for flags that adapt: the first
start writes the table, later ones load it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xspec
from benchmarks.peers.drivers.protocol import Answer, Job, Peer, Turn, main
from xspec.config import Config
from xspec.core.request import FinishReason, SamplingParams
from xspec.engine.api import Engine
from xspec.errors import EngineError
from xspec.threads import settle_threads

CONTROLS = ("adaptive_draft_step", "adaptive_target_verify")


class XspecPeer:
    def __init__(self, flags: Mapping[str, Any]) -> None:
        config = Config.from_mapping(flags)
        settle_threads(config.execution.num_compute_threads)
        # imported late: it loads torch, which has to see the threads just settled
        from xspec.engine.build import build_engine

        self._numbers = itertools.count()
        self._loop = asyncio.Runner()
        try:
            self._engine: Engine = self._loop.run(build_engine(config))
        except BaseException:
            self._loop.close()
            raise
        self.about = {
            "version": xspec.__version__,
            "flags": json.dumps(config.to_flat(non_default_only=True)),
        }

    def run(self, job: Job) -> Turn:
        return self._loop.run(self._turn(job))

    def close(self) -> None:
        self._loop.run(self._engine.close())
        self._loop.close()

    async def _turn(self, job: Job) -> Turn:
        """What protocol.closed_loop does, by a task for every place."""
        answers = tuple(Answer() for _ in job.prompts)
        waiting = iter(range(len(job.prompts)))

        async def place() -> None:
            for number in waiting:
                await self._answer(job.prompts[number], job.max_tokens, answers[number])

        begin_s = time.perf_counter()
        places = [asyncio.create_task(place()) for _ in range(job.concurrency)]
        ended, others = await asyncio.wait(places, return_when=asyncio.FIRST_COMPLETED)
        seconds = time.perf_counter() - begin_s
        turn = Turn(seconds, tuple(Answer(list(answer.tokens), answer.finished) for answer in answers))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for task in ended:
            task.result()
        return turn

    async def _answer(self, prompt: tuple[int, ...], max_tokens: int, answer: Answer) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        stream = self._engine.generate(prompt, params, request_id=f"turn-{next(self._numbers)}")
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise EngineError(output.error or f"the engine ended the request: {output.finish_reason}")
                answer.tokens += output.token_ids
                answer.finished = output.finish_reason is not None


def flags_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of one engine, from what the runner says to every peer and the options of this one."""
    given = dict(options)
    tables = Path(given.pop("tables"))
    flags: dict[str, Any] = {
        "model": given.pop("model"),
        "num_compute_threads": given.pop("threads"),
        "max_seqs_per_batch": given.pop("concurrency"),
        "enable_prefix_cache": False,
        "max_cache_size": 2**30,
        **given,
    }
    for control in CONTROLS:
        if flags.get(f"enable_{control}"):
            name = hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:12]
            tables.mkdir(parents=True, exist_ok=True)
            table = tables / f"{control}-{flags['max_seqs_per_batch']}-{name}.json"
            flags[f"{control}_cost_table" if table.exists() else f"{control}_cost_table_output"] = str(table)
    return flags


def load(options: dict[str, Any]) -> Peer:
    return XspecPeer(flags_of(options))


if __name__ == "__main__":
    sys.exit(main(load))
