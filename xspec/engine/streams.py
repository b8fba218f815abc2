"""What the engine keeps of a request on its way, and the client's end of it.

On the event loop thread only, like the engine. Knows nothing about scheduling.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from xspec.core.request import FinishReason, Output, Request
from xspec.core.sequence import Sequence as LiveSequence
from xspec.engine.api import TextOutput
from xspec.engine.text import ChoiceText


class Mailbox:
    """What is on its way to a client: as asyncio.Queue, for one reader, at half the cost a token."""

    __slots__ = ("_outputs", "_reader")

    def __init__(self) -> None:
        self._outputs: deque[TextOutput] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: TextOutput) -> None:
        self._outputs.append(output)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> TextOutput:
        """The oldest output. RuntimeError while somebody else waits for it."""
        if self._reader is not None:
            raise RuntimeError("a stream has one reader at a time")
        if not self._outputs:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._outputs.popleft()


@dataclass(slots=True)
class Live:
    """A request on its way: one sequence and one text per choice, one mailbox of its client."""

    request: Request
    sequences: list[LiveSequence]
    texts: list[ChoiceText]
    mail: Mailbox = field(default_factory=Mailbox)
    open_choices: int = 0
    first_token_s: float | None = None
    last_token_s: list[float | None] = field(default_factory=list)  # by choice
    generated_tokens: int = 0


class Stream:
    """The client's end of a request. Implements `engine.api.TextStream`."""

    def __init__(self, live: Live, abort: Callable[[Live], None]) -> None:
        self._live = live
        self._abort = abort
        self._open_choices = live.request.params.n

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> TextOutput:
        if not self._open_choices:
            raise StopAsyncIteration
        try:
            output = await self._live.mail.get()
        except asyncio.CancelledError:
            self._abort(self._live)
            raise
        self._open_choices -= output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        self._open_choices = 0
        self._abort(self._live)


def last_output(text: ChoiceText, request_id: str, reason: FinishReason, error: str | None) -> TextOutput:
    """The end of a choice, with what text was held back; bare where the text itself is what failed."""
    try:
        return text.push(Output(request_id, text.choice, (), finish_reason=reason, error=error))
    except Exception:
        text.finished = True
        return TextOutput(request_id, text.choice, "", (), finish_reason=reason, error=error)
