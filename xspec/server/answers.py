"""How an answer leaves, for both endpoints: choices that gather outputs, sent as a stream or at once.

The endpoints supply how a choice looks; when it is written, and what becomes of failures, is here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import orjson
from aiohttp import web

from xspec.engine.api import TextOutput
from xspec.server.generation import Acceptance, Indexed, Usage
from xspec.server.problems import internal, problem_of
from xspec.server.schema import StreamOptions
from xspec.server.sse import ChunkFrames, SseResponse

log = logging.getLogger(__name__)


class Choice(Protocol):
    """One choice of a response."""

    def add(self, output: TextOutput) -> None: ...

    def take_chunks(self) -> Sequence[Mapping[str, Any]]:
        """`choices` entries for what was added since the last call; none if there is nothing to show."""

    def whole(self) -> Mapping[str, Any]:
        """The entry of a response that is not streamed."""


class Answer:
    """One response: its stamp, its choices in order (prompt by prompt), its token counts.

    `draft_width`: most tokens drafted in a round, 0 without a drafter.
    """

    def __init__(
        self,
        stamp: Mapping[str, Any],
        choices: Sequence[Choice],
        per_prompt: int,
        usage: Usage,
        draft_width: int,
    ) -> None:
        self.stamp = stamp
        self._choices = choices
        self._per_prompt = per_prompt
        self._usage = usage
        self._acceptance = Acceptance(draft_width, len(choices))

    def _choice(self, item: Indexed) -> Choice:
        return self._choices[item.prompt * self._per_prompt + item.output.choice]

    def _add(self, item: Indexed) -> Choice:
        self._usage.add(item)
        self._acceptance.add(item.output)
        choice = self._choice(item)
        choice.add(item.output)
        return choice

    async def whole(self, batches: AsyncIterator[list[Indexed]]) -> web.Response:
        async for batch in batches:
            for item in batch:
                self._add(item)
        body: dict[str, Any] = {**self.stamp, "choices": [choice.whole() for choice in self._choices]}
        body["usage"] = self._usage.total()
        if (metrics := self._acceptance.metrics()) is not None:
            body["metrics"] = metrics
        return json_response(body)

    async def streamed(
        self, request: web.Request, batches: AsyncIterator[list[Indexed]], options: StreamOptions
    ) -> web.StreamResponse:
        chunks = ChunkFrames(self.stamp, null_usage=options.include_usage)

        def frames(batch: list[Indexed]) -> Iterable[bytes]:
            for item in batch:
                choice = self._add(item)
                usage = self._usage.of_choice(item) if options.continuous_usage_stats else None
                for chunk in choice.take_chunks():
                    yield chunks.choice(chunk, usage)

        def ending() -> Iterable[bytes]:
            if options.include_usage:
                yield chunks.usage(self._usage.total(), self._acceptance.metrics())

        return await _send(request, batches, frames, ending)


async def _send(
    request: web.Request,
    batches: AsyncIterator[list[Indexed]],
    frames: Callable[[list[Indexed]], Iterable[bytes]],
    ending: Callable[[], Iterable[bytes]],
) -> web.StreamResponse:
    sse = SseResponse(request)
    try:
        async for batch in batches:
            await sse.write(frames(batch))
        await sse.write(ending())
        return await sse.close()
    except ConnectionError:
        raise  # the client is gone: nobody reads an error
    except Exception as error:
        if not sse.opened:
            raise
        problem = problem_of(error)
        if problem is None:
            log.exception("a stream failed")
            problem = internal()
        return await sse.fail(problem.body)


def stamp(response_id: str, kind: str, model: str) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": None,
    }


def json_response(payload: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(payload), status=status, content_type="application/json")
