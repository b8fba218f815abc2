"""Server-sent events: frames of `data: {json}` and a response that carries them.

Knows nothing about what is inside a frame. Frames that are ready together go out in one write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from aiohttp import web

DONE = b"data: [DONE]\n\n"


def frame(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(payload) + b"\n\n"


class ChunkFrames:
    """Frames of one response, whose chunks differ only in `choices` and `usage`.

    `stamp` is what all chunks share. With `null_usage` every chunk says `"usage": null`, as OpenAI's do
    when a usage chunk will follow.
    """

    __slots__ = ("_end", "_head")

    def __init__(self, stamp: Mapping[str, Any], *, null_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(stamp)[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if null_usage else b"]}\n\n"

    def choice(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None = None) -> bytes:
        if usage is None:
            return self._head + orjson.dumps(choice) + self._end
        return self._head + orjson.dumps(choice) + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def usage(self, usage: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> bytes:
        """The chunk without choices that closes a stream with usage; `metrics` ride along if any."""
        more = b"" if metrics is None else b',"metrics":' + orjson.dumps(metrics)
        return self._head + b'],"usage":' + orjson.dumps(usage) + more + b"}\n\n"


class SseResponse:
    """Opened by the first write, so that a failure before it can still be an HTTP status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None

    @property
    def opened(self) -> bool:
        return self._response is not None

    async def write(self, frames: Iterable[bytes]) -> None:
        """Waits while the client reads slower than the text comes (the transport's buffer is full)."""
        data = b"".join(frames)
        if data:
            await (await self._open()).write(data)

    async def close(self) -> web.StreamResponse:
        response = await self._open()
        await response.write(DONE)
        await response.write_eof()
        return response

    async def fail(self, body: Mapping[str, Any]) -> web.StreamResponse:
        """End a stream with an error object: its status is long gone."""
        response = await self._open()
        await response.write(frame(body) + DONE)
        await response.write_eof()
        return response

    async def _open(self) -> web.StreamResponse:
        if self._response is None:
            self._response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream; charset=utf-8",
                    "Cache-Control": "no-cache",
                    "X-Accel-Buffering": "no",  # nginx would hold chunks back
                }
            )
            await self._response.prepare(self._request)
        return self._response
