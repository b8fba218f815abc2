"""A target behind a URL: any server that streams OpenAI completions and reports usage.

The stream is read as bytes and cut at event boundaries, so tokens are timed by arrival, not by parsing.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from xspec.core.drafts import DraftTotals
from xspec.errors import ConfigError
from xspec_cli.benchlib.load import Answer, AskOptions, Clock, TargetError
from xspec_cli.benchlib.prompts import Prompt
from xspec_cli.benchlib.rounds import RoundFigures
from xspec_cli.benchlib.speculation import read_draft_totals, told_drafts

NO_USAGE = "the stream carried no usage; the server must honour stream_options.include_usage"


def request_body(prompt: Prompt, model: str, options: AskOptions, seed: int) -> dict[str, Any]:
    temperature = options.temperature if prompt.temperature is None else prompt.temperature
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.chat:
        body["messages"] = prompt.as_messages()
    else:
        body["prompt"] = prompt.text
    # Extensions are only sent when they say something: plain OpenAI servers refuse unknown fields.
    if options.ignore_eos:
        body["ignore_eos"] = True
    if temperature > 0.0:
        body["seed"] = seed
    return body


async def sse_data(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Other fields are skipped; CRLF and LF both end lines."""
    buffered = b""
    data: list[bytes] = []
    async for piece in stream:
        buffered += piece
        *lines, buffered = buffered.split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and data:
                yield b"\n".join(data)
                data = []
            elif line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))


class StreamReader:
    """Collects one answer from the events of its stream."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._chunk_s: list[float] = []
        self._usage: dict[str, Any] | None = None
        self._metrics: object = None
        self._text = hashlib.sha256()
        self._finish_reason: str | None = None
        self.done = False

    def feed(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = orjson.loads(data)
            if event.get("error"):
                raise TargetError(f"error in the stream: {error_message(event)}")
            self._usage = event.get("usage") or self._usage
            self._metrics = event.get("metrics") or self._metrics
            for choice in event.get("choices") or ():
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
                if text := _text_of(choice):
                    self._chunk_s.append(self._clock())
                    self._text.update(text.encode())
        except (orjson.JSONDecodeError, AttributeError, TypeError) as error:
            raise TargetError(f"an event is not an OpenAI chunk: {data[:80]!r}") from error

    def answer(self) -> Answer:
        if not self.done:
            raise TargetError("the stream ended without [DONE]")
        if self._usage is None:
            raise TargetError(NO_USAGE)
        if self._finish_reason in ("error", "abort"):
            raise TargetError(f"the server ended the request: {self._finish_reason}")
        prompt_tokens, completion_tokens = map(self._usage.get, ("prompt_tokens", "completion_tokens"))
        if not isinstance(prompt_tokens, int) or not isinstance(completion_tokens, int):
            raise TargetError(f"the usage has no token counts: {self._usage}")
        return Answer(
            chunk_s=tuple(self._chunk_s),
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            finish_reason=self._finish_reason,
            digest=self._text.hexdigest()[:16],
            drafts=told_drafts(self._metrics, completion_tokens),
        )


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def error_message(body: object) -> str:
    """The message of an OpenAI error body, or the body itself where it is not one."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]


class HttpTarget:
    """One server. `open` asks it for its model; every request then names it."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, options: AskOptions, model: str = ""
    ) -> None:
        self.name = url
        self.model = model
        self._url = url
        self._session = session
        self._options = options

    async def open(self) -> dict[str, Any]:
        """Check that the server answers and settle the model name. Returns what it says of itself."""
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                body = await response.read()
                if response.status != 200:
                    raise ConfigError(
                        f"--url={self._url}: /v1/models answered {response.status}: {body[:200]!r}"
                    )
            served = [str(entry["id"]) for entry in orjson.loads(body)["data"]]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConfigError(
                f"--url={self._url} cannot be reached: {error or type(error).__name__}"
            ) from error
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"--url={self._url}: /v1/models is not an OpenAI model list") from error
        if not self.model and not served:
            raise ConfigError(f"--url={self._url} serves no model")
        if self.model and self.model not in served:
            raise ConfigError(
                f"--model_id={self.model} is not served by {self._url}; it has {', '.join(served)}"
            )
        self.model = self.model or served[0]
        return {"url": self._url, "model": self.model, "version": await self._version()}

    async def _version(self) -> str | None:
        """/version is a custom of xspec and vLLM, not of OpenAI: None where nothing of the kind answers."""
        try:
            async with self._session.get(f"{self._url}/version") as response:
                body = orjson.loads(await response.read()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError):
            return None
        return str(body["version"]) if isinstance(body, dict) and "version" in body else None

    async def begin_turn(self) -> None:
        """A server is as it is."""

    def round_figures(self, begin_s: float, end_s: float) -> RoundFigures | None:
        """A server does not show its rounds."""
        return None

    async def draft_totals(self) -> DraftTotals | None:
        """/metrics is a custom of vLLM, xspec and others: None where nothing of the kind answers.

        It counts all that the server does: figures of a run are right as long as nobody else asks it.
        """
        try:
            async with self._session.get(f"{self._url}/metrics") as response:
                return read_draft_totals(await response.text()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, OverflowError):
            return None

    async def ask(self, prompt: Prompt, seed: int, clock: Clock) -> Answer:
        path = "/v1/chat/completions" if self._options.chat else "/v1/completions"
        body = orjson.dumps(request_body(prompt, self.model, self._options, seed))
        headers = {"Content-Type": "application/json"}
        reader = StreamReader(clock)
        try:
            async with self._session.post(self._url + path, data=body, headers=headers) as response:
                if response.status != 200:
                    raise TargetError(f"HTTP {response.status}: {_readable(await response.read())}")
                async for data in sse_data(response.content.iter_any()):
                    reader.feed(data)
        except TimeoutError as error:
            raise TargetError("no answer within --request_timeout_s") from error
        except aiohttp.ClientError as error:
            raise TargetError(f"{type(error).__name__}: {error}") from error
        return reader.answer()


def _readable(body: bytes) -> str:
    try:
        return error_message(orjson.loads(body))
    except orjson.JSONDecodeError:
        return body[:200].decode("utf-8", "replace")
