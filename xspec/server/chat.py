"""POST /v1/chat/completions: messages through the model's chat template, chat logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from xspec.core.request import TokenLogprob
from xspec.engine.api import TextOutput
from xspec.server.answers import Answer, stamp
from xspec.server.bodies import read_body
from xspec.server.generation import Usage, generation
from xspec.server.handle import HANDLE, REQUEST_ID
from xspec.server.logprobs import chat_logprobs
from xspec.server.prompts import encode_chat
from xspec.server.sampling import SamplingContext
from xspec.server.schema import ChatBody, parse_chat
from xspec.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Choice:
    """Implements `answers.Choice`."""

    index: int
    prompt_ids: tuple[int, ...]
    body: ChatBody
    tokenizer: Tokenizer
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    opened: bool = False  # its role was announced

    def add(self, output: TextOutput) -> None:
        self.text.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.entries.extend(output.logprobs)
        self.stop_reason = output.stop_reason
        if output.finish_reason is not None:
            self.finish_reason = str(output.finish_reason)

    def take_chunks(self) -> Sequence[Mapping[str, Any]]:
        chunks: list[Mapping[str, Any]] = []
        if not self.opened:
            self.opened = True
            chunks.append(self._opening())
        shows_tokens = self._logprobs_wanted or self.body.common.return_token_ids
        if shows_tokens or self.finish_reason is not None or any(self.text):
            content = "".join(self.text)
            chunks.append(self._entry(delta={"content": content} if content else {}))
            self.text, self.token_ids, self.entries = [], [], []
        return chunks

    def whole(self) -> Mapping[str, Any]:
        message = {"role": "assistant", "content": "".join(self.text), "refusal": None}
        entry = self._entry(message=message)
        if self.body.common.return_token_ids:
            entry["prompt_token_ids"] = list(self.prompt_ids)
        return entry

    @property
    def _logprobs_wanted(self) -> bool:
        return self.body.common.params.logprobs is not None

    def _opening(self) -> Mapping[str, Any]:
        entry: dict[str, Any] = {
            "index": self.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self.body.common.return_token_ids:
            entry["prompt_token_ids"] = list(self.prompt_ids)
        return entry

    def _entry(self, **shown: Mapping[str, Any]) -> dict[str, Any]:
        top = self.body.common.params.logprobs
        entry: dict[str, Any] = {
            "index": self.index,
            **shown,
            "logprobs": None if top is None else chat_logprobs(self.tokenizer, self.entries, top),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if self.body.common.return_token_ids:
            entry["token_ids"] = self.token_ids
        return entry


async def chat_completions(request: web.Request) -> web.StreamResponse:
    with request.app[HANDLE].answering() as engine:
        tokenizer = engine.text.tokenizer
        context = SamplingContext(tokenizer.vocab_size, engine.text.generation_defaults)
        body = await read_body(request, engine, lambda fields: parse_chat(fields, context))
        common = body.common
        ids = await encode_chat(engine, body.chat, common.add_special_tokens)
        kind = "chat.completion.chunk" if common.stream else "chat.completion"
        response_id = f"chatcmpl-{common.request_id or request[REQUEST_ID]}"
        answer = Answer(
            stamp(response_id, kind, engine.model_id),
            [_Choice(index, ids, body, tokenizer) for index in range(common.params.n)],
            common.params.n,
            Usage([len(ids)]),
            engine.draft_width,
        )
        async with generation(engine, [ids], common.params, response_id) as batches:
            if common.stream:
                return await answer.streamed(request, batches, common.stream_options)
            return await answer.whole(batches)
