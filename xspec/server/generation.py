"""The engine requests of one HTTP request: admitted together, merged into one stream, closed together.

Knows outputs and indices, nothing about response shapes. Whatever is ready together is handed over
together, so that a surface can write it at once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from xspec.core.drafts import DraftTally
from xspec.core.request import FinishReason, SamplingParams
from xspec.engine.api import Engine, Phase, TextOutput, TextStream
from xspec.errors import EngineDeadError, EngineError, OverloadedError

BUFFERED_OUTPUTS = 256
"""Beyond this a slow reader's outputs wait in the engine's own queues."""

ADMITTED_AT_A_TIME = 128
"""Choices admitted before everybody else on the event loop gets a turn (a few milliseconds' work)."""


@dataclass(frozen=True, slots=True)
class Indexed:
    """An output and the prompt it belongs to."""

    prompt: int
    output: TextOutput


@asynccontextmanager
async def generation(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, response_id: str
) -> AsyncIterator[AsyncIterator[list[Indexed]]]:
    """Admit every prompt (or none), yield the merged batches, and abort what is unfinished at the end.

    Entering raises RequestError; iterating raises EngineError or OverloadedError when a choice fails.
    """
    streams: list[TextStream] = []
    pumps: list[asyncio.Task[None]] = []
    admitted = 0
    try:
        for index, prompt in enumerate(prompts):
            if admitted >= ADMITTED_AT_A_TIME:
                admitted = 0
                await asyncio.sleep(0)
            admitted += params.n
            # Clients may repeat their ids; the engine's must differ.
            unique = f"{response_id}-{index}-{uuid.uuid4().hex[:8]}"
            streams.append(engine.generate(prompt, params, request_id=unique))
        if len(streams) == 1 and params.n == 1:
            batches = _single(streams[0])
        else:
            merged = _Merge(len(streams))
            pumps.extend(asyncio.create_task(merged.pump(i, s)) for i, s in enumerate(streams))
            batches = merged.batches()
        async with aclosing(batches), aclosing(_checked(engine, batches, len(streams) * params.n)) as checked:
            yield checked
    finally:
        await _to_the_end(_close(pumps, streams))


async def _close(pumps: list[asyncio.Task[None]], streams: list[TextStream]) -> None:
    for pump in pumps:
        pump.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
    for stream in streams:
        await stream.aclose()


async def _to_the_end(work: Coroutine[object, object, None]) -> None:
    """Finish `work`, then deliver a cancellation that came meanwhile.

    A write to a client that is gone fails first and the handler is cancelled a moment later, in the middle
    of cleaning up: the engine's requests must not be left behind then.
    """
    task = asyncio.create_task(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation


async def _single(stream: TextStream) -> AsyncGenerator[list[Indexed], None]:
    async for output in stream:
        yield [Indexed(0, output)]


class _Merge:
    """Several streams into one, without ever waiting for a stream while another has something."""

    def __init__(self, streams: int) -> None:
        self._open = streams
        self._ready: list[Indexed] = []
        self._failure: BaseException | None = None
        self._wake = asyncio.Event()
        self._room = asyncio.Event()

    async def pump(self, prompt: int, stream: TextStream) -> None:
        try:
            async for output in stream:
                while len(self._ready) >= BUFFERED_OUTPUTS:
                    self._room.clear()
                    await self._room.wait()
                self._ready.append(Indexed(prompt, output))
                self._wake.set()
        except Exception as error:
            self._failure = self._failure or error
        finally:
            self._open -= 1
            self._wake.set()

    async def batches(self) -> AsyncGenerator[list[Indexed], None]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._ready = self._ready, []
            self._room.set()
            if batch:
                yield batch
            if self._failure is not None:
                raise self._failure
            if not self._open and not self._ready:
                return


async def _checked(
    engine: Engine, batches: AsyncIterator[list[Indexed]], choices: int
) -> AsyncGenerator[list[Indexed], None]:
    """Pass on what came well; a choice that failed raises after it. Every choice must have ended."""
    async for batch in batches:
        good: list[Indexed] = []
        failure: Exception | None = None
        for item in batch:
            failure = _failure(engine, item.output)
            if failure is not None:
                break
            choices -= item.output.finish_reason is not None
            good.append(item)
        if good:
            yield good
        if failure is not None:
            raise failure
    if choices:
        raise EngineError(f"the engine ended {choices} answers without a reason")


def _failure(engine: Engine, output: TextOutput) -> Exception | None:
    if output.finish_reason is FinishReason.ERROR:
        message = output.error or "the engine failed"
        return EngineDeadError(message) if engine.phase is Phase.DEAD else EngineError(message)
    if output.finish_reason is FinishReason.ABORT:
        return OverloadedError("the request was aborted: the server is shutting down", draining=True)
    return None


class Acceptance:
    """How the drafts of one HTTP response fared, in vLLM's shape (its per-request acceptance metrics).

    `width`: most tokens drafted in a round, 0 without a drafter. Like vLLM's it describes one stream of
    tokens: a response with several choices or prompts has none.
    """

    def __init__(self, width: int, choices: int) -> None:
        self._loaded = width > 0
        self._tally = DraftTally(width) if width and choices == 1 else None

    def add(self, output: TextOutput) -> None:
        if self._tally is not None and output.drafts is not None:
            self._tally.add(output.drafts, len(output.token_ids))

    def metrics(self) -> dict[str, object] | None:
        """The `metrics` object of the response; None where it must not have one: no drafter is loaded."""
        if not self._loaded:
            return None
        return {"speculative_decoding": None if self._tally is None else acceptance(self._tally)}


def acceptance(tally: DraftTally) -> dict[str, object]:
    totals = tally.totals()
    return {
        "mean_acceptance_length": totals.mean_acceptance_length or 1.0,
        "draft_acceptance_rate": totals.acceptance_rate or 0.0,
        "acceptance_histogram": tally.histogram,
        "acceptance_histogram_by_draft_length": {str(k): row for k, row in tally.by_length.items()},
        "num_spec_steps": totals.drafts,
        "num_accepted_draft_tokens": totals.accepted_tokens,
        "num_draft_tokens": totals.draft_tokens,
        "num_spec_tokens": tally.width,
    }


class Usage:
    """Token counts of one HTTP request, as OpenAI reports them."""

    def __init__(self, prompt_lengths: Sequence[int], *, count_answers: bool = True) -> None:
        self._prompt_lengths = prompt_lengths
        self._count_answers = count_answers
        self._completion: dict[tuple[int, int], int] = {}
        self._cached: dict[int, int] = {}

    def add(self, item: Indexed) -> None:
        output = item.output
        if self._count_answers:
            self._completion[item.prompt, output.choice] = output.completion_tokens
        # Choices of one prompt share its pages; the first admission tells what the cache served.
        self._cached[item.prompt] = max(self._cached.get(item.prompt, 0), output.cached_tokens)

    def total(self) -> dict[str, object]:
        return usage(sum(self._prompt_lengths), sum(self._completion.values()), sum(self._cached.values()))

    def of_choice(self, item: Indexed) -> dict[str, object]:
        """What one choice has used so far (continuous usage)."""
        answered = self._completion.get((item.prompt, item.output.choice), 0)
        return usage(self._prompt_lengths[item.prompt], answered, self._cached[item.prompt])


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
