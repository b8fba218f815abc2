"""A scripted engine behind the real server: byte-level tokens, known text, failures on demand.

`FakeEngine` implements `engine.api.Engine`. Every choice c of a request answers
`<c>:<prompt text>` one token (one byte) per step, or what `script` says. With a `draft_width`, every step
after the first is a draft of which all tokens but the last were accepted.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers

from xspec.core.drafts import DraftCounts
from xspec.core.request import FinishReason, SamplingParams, TokenLogprob
from xspec.engine.api import Phase, TextOutput
from xspec.errors import EngineDeadError, OverloadedError, PromptTooLongError
from xspec.metrics import Metrics
from xspec.server.app import make_app, make_runner
from xspec.server.handle import EngineHandle, ServiceSettings
from xspec.text.chat import ChatTemplate
from xspec.text.tokenizer import TextAssets, Tokenizer

MODEL = "org/fake-1"
MAX_LEN = 256
EOS = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if thinking is defined %}{{ thinking }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, in byte order, and one special token after them."""
    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return Tokenizer(backend, eos_id=256)


def top_of(token: int) -> TokenLogprob:
    """What the fake says of a token: itself at -0.5, its neighbours behind it."""
    likely = tuple(((token + i) % 256, -0.5 - i) for i in range(20))
    return TokenLogprob(token, -0.5, likely)


@dataclass
class Script:
    """How requests go. `texts[c]` overrides the answer of choice c."""

    texts: Sequence[str] | None = None
    step_tokens: int = 1
    delay_s: float = 0.0
    fail_after: int | None = None  # steps before the request fails
    failure: str = "boom"
    finish: FinishReason = FinishReason.STOP
    hold_back: int = 0  # steps whose text comes with the next one


@dataclass
class Call:
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    request_id: str
    steps: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    completed: bool = False


class FakeStream:
    def __init__(self, engine: FakeEngine, call: Call) -> None:
        self._engine, self._call = engine, call
        self._outputs = self._run()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> TextOutput:
        return await self._outputs.__anext__()

    async def aclose(self) -> None:
        await self._outputs.aclose()
        self._call.closed.set()
        self._engine.live.discard(self._call.request_id)

    async def _run(self) -> AsyncIterator[TextOutput]:
        script, call = self._engine.script, self._call
        answers = [_Answer(self._engine, call, choice) for choice in range(call.params.n)]
        while any(answer.open for answer in answers):
            if script.delay_s:
                await asyncio.sleep(script.delay_s)
            call.steps += 1
            if self._engine.dead:
                raise EngineDeadError("the device is gone")
            for answer in answers:
                if answer.open:
                    yield answer.step(self._engine.aborting)
        call.completed = True
        self._engine.live.discard(call.request_id)


class _Answer:
    def __init__(self, engine: FakeEngine, call: Call, choice: int) -> None:
        self.script, self.call, self.choice, self.open = engine.script, call, choice, True
        self.metrics = engine.metrics
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tokenizer = engine.text.tokenizer
        prompt = tokenizer.decode(call.prompt_ids)
        text = f"{choice}:{prompt}" if self.script.texts is None else self.script.texts[choice]
        self.ids = tokenizer.encode(text)
        self.bytes = [tokenizer.token_bytes(token) for token in self.ids]
        self.given = self.steps = 0
        self.held = ""

    def step(self, aborting: bool) -> TextOutput:
        script, params = self.script, self.call.params
        if aborting:
            return self._end(FinishReason.ABORT)
        if script.fail_after is not None and self.steps >= script.fail_after:
            return self._end(FinishReason.ERROR, script.failure)
        self.steps += 1
        room = len(self.ids) if params.max_tokens is None else params.max_tokens
        last = min(self.given + script.step_tokens, room, len(self.ids))
        ids = tuple(self.ids[self.given : last])
        raw = b"".join(self.bytes[self.given : last])
        first, self.given = self.given == 0, last
        ended = last == len(self.ids) or last == room
        reason = (script.finish if last == len(self.ids) else FinishReason.LENGTH) if ended else None
        self.held += self.decoder.decode(raw, final=ended)
        text = ""
        if ended or not script.hold_back or self.steps % (script.hold_back + 1) == 0:
            text, self.held = self.held, ""
        self.open = not ended
        scored: tuple[TokenLogprob | None, ...] | None = None
        if first and params.prompt_logprobs is not None:
            scored = (None, *map(top_of, self.call.prompt_ids[1:]))
        drafts = None if first else self._drafts(len(ids), ended)
        self.metrics.delivered(len(ids), drafts)
        return TextOutput(
            request_id=self.call.request_id,
            choice=self.choice,
            text=text,
            token_ids=ids,
            logprobs=tuple(map(top_of, ids)) if params.logprobs is not None else (),
            prompt_logprobs=scored,
            finish_reason=reason,
            prompt_tokens=len(self.call.prompt_ids),
            completion_tokens=self.given,
            cached_tokens=len(self.call.prompt_ids) // 2,
            drafts=drafts,
        )

    def _drafts(self, tokens: int, ended: bool) -> DraftCounts | None:
        width = self.metrics.draft_width if self.call.params.speculative else 0
        if not width or not tokens:
            return None
        counts = DraftCounts(width, width, tokens - 1)
        return counts.until(tokens) if ended else counts

    def _end(self, reason: FinishReason, error: str | None = None) -> TextOutput:
        self.open = False
        return TextOutput(self.call.request_id, self.choice, "", (), finish_reason=reason, error=error)


class FakeEngine:
    def __init__(
        self, script: Script | None = None, *, capacity: int = 0, chat: bool = True, draft_width: int = 0
    ) -> None:
        self.model_id = MODEL
        self.max_model_len = MAX_LEN
        template = ChatTemplate(TEMPLATE) if chat else None
        self.defaults: dict[str, Any] = {}
        self.text = TextAssets(byte_tokenizer(), template, frozenset({256}), self.defaults)
        self.metrics = Metrics(MODEL, draft_width=draft_width)
        self.draft_width = draft_width
        self.script = script or Script()
        self.capacity = capacity
        self.calls: list[Call] = []
        self.live: set[str] = set()
        self.dead = self.draining = self.aborting = self.was_closed = False

    @property
    def phase(self) -> Phase:
        if self.dead:
            return Phase.DEAD
        return Phase.DRAINING if self.draining else Phase.READY

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> FakeStream:
        if self.dead:
            raise EngineDeadError("the device is gone")
        if self.draining:
            raise OverloadedError("shutting down", draining=True)
        if self.capacity and len(self.live) >= self.capacity:
            raise OverloadedError(f"{self.capacity} requests are running")
        if len(prompt_ids) >= self.max_model_len:
            raise PromptTooLongError(f"the maximum context length is {self.max_model_len} tokens")
        assert request_id is not None and request_id not in self.live
        call = Call(tuple(prompt_ids), params, request_id)
        self.calls.append(call)
        self.live.add(request_id)
        return FakeStream(self, call)

    def server_info(self) -> dict[str, Any]:
        return {"slots": 2}

    async def drain(self, timeout_s: float) -> bool:
        self.draining = True
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.live and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)
        self.aborting = bool(self.live)
        return not self.aborting

    async def close(self) -> None:
        self.was_closed = True


@dataclass
class Served:
    url: str
    handle: EngineHandle
    engine: FakeEngine
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def events(self, path: str, body: Any) -> list[Any]:
        """The decoded frames of a stream; the closing [DONE] is checked and dropped."""
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            frames = (await response.read()).decode().split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        return [orjson.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@asynccontextmanager
async def served(
    engine: FakeEngine | None = None,
    settings: ServiceSettings | None = None,
    prepare: Callable[[EngineHandle], None] = lambda handle: None,
) -> AsyncIterator[Served]:
    """The real server on a loopback port."""
    engine = engine or FakeEngine()
    handle = EngineHandle(engine)
    prepare(handle)
    runner = make_runner(make_app(handle, settings or ServiceSettings()))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as http:
            yield Served(f"http://127.0.0.1:{port}", handle, engine, http)
    finally:
        await runner.cleanup()
