"""POST /v1/completions: prompts as text or ids, echo, completion logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from xspec.core.request import TokenLogprob
from xspec.engine.api import Engine, TextOutput
from xspec.errors import EngineError, RequestError
from xspec.server.answers import Answer, stamp
from xspec.server.bodies import read_body
from xspec.server.generation import Usage, generation
from xspec.server.handle import HANDLE, REQUEST_ID, SETTINGS
from xspec.server.logprobs import CompletionLogprobs
from xspec.server.prompts import INLINE_CHARS, encode_all, run_sized
from xspec.server.sampling import SamplingContext
from xspec.server.schema import CompletionBody, parse_completion


@dataclass(slots=True)
class _Prompt:
    """What the choices of one prompt share."""

    ids: tuple[int, ...]
    echo: str | None = None  # its text, when it is to be part of the answer
    logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(slots=True)
class _Choice:
    """Implements `answers.Choice`."""

    index: int
    prompt: _Prompt
    body: CompletionBody
    logprobs: CompletionLogprobs | None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    begun: bool = False
    opened: bool = False  # its first chunk was taken

    def add(self, output: TextOutput) -> None:
        if not self.begun:
            self.begun = True
            self._begin(output)
        if not self.body.scoring:
            self.text.append(output.text)
            self.token_ids.extend(output.token_ids)
            self.stop_reason = output.stop_reason
            if self.logprobs is not None:
                self.logprobs.add(output.logprobs)
        if output.finish_reason is not None:
            self.finish_reason = "length" if self.body.scoring else str(output.finish_reason)

    def _begin(self, output: TextOutput) -> None:
        if self.prompt.echo is None:
            return
        self.text.append(self.prompt.echo)
        if self.logprobs is None:
            return
        if output.prompt_logprobs is not None:
            self.prompt.logprobs = output.prompt_logprobs
        if self.prompt.logprobs is None:
            raise EngineError("the engine returned no log-probabilities of the prompt")
        self.logprobs.add_prompt(self.prompt.ids, self.prompt.logprobs)

    def take_chunks(self) -> Sequence[Mapping[str, Any]]:
        shows_tokens = self.logprobs is not None or self.body.common.return_token_ids
        if not shows_tokens and self.finish_reason is None and not any(self.text):
            return ()
        entry = self.whole()
        self.opened = True
        self.text, self.token_ids = [], []
        return (entry,)

    def whole(self) -> Mapping[str, Any]:
        entry: dict[str, Any] = {
            "index": self.index,
            "text": "".join(self.text),
            "logprobs": None if self.logprobs is None else self.logprobs.take(),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if self.body.common.return_token_ids:
            entry["token_ids"] = self.token_ids
            entry["prompt_token_ids"] = None if self.opened else list(self.prompt.ids)
        return entry


async def completions(request: web.Request) -> web.StreamResponse:
    with request.app[HANDLE].answering() as engine:
        tokenizer = engine.text.tokenizer
        context = SamplingContext(tokenizer.vocab_size, engine.text.generation_defaults)
        body = await read_body(request, engine, lambda fields: parse_completion(fields, context))
        _check_count(len(body.prompts), request.app[SETTINGS].max_concurrent_requests)
        ids = await encode_all(engine, body.prompts, body.common.add_special_tokens)
        prompts = [_Prompt(each) for each in ids]
        if body.echo:
            await _fill_echo(engine, body, prompts)
        common = body.common
        response_id = f"cmpl-{common.request_id or request[REQUEST_ID]}"
        answer = Answer(
            stamp(response_id, "text_completion", engine.model_id),
            _choices(engine, body, prompts),
            common.params.n,
            Usage([len(each) for each in ids], count_answers=not body.scoring),
            engine.draft_width,
        )
        async with generation(engine, ids, common.params, response_id) as batches:
            if common.stream:
                return await answer.streamed(request, batches, common.stream_options)
            return await answer.whole(batches)


def _choices(engine: Engine, body: CompletionBody, prompts: list[_Prompt]) -> list[_Choice]:
    params = body.common.params

    def logprobs() -> CompletionLogprobs | None:
        top = params.logprobs
        return None if top is None else CompletionLogprobs(engine.text.tokenizer, top)

    return [
        _Choice(p * params.n + c, prompt, body, logprobs())
        for p, prompt in enumerate(prompts)
        for c in range(params.n)
    ]


async def _fill_echo(engine: Engine, body: CompletionBody, prompts: list[_Prompt]) -> None:
    """Text prompts come back as sent; ids as the text they stand for, special tokens included."""

    def work() -> None:
        for sent, prompt in zip(body.prompts, prompts, strict=True):
            decode = engine.text.tokenizer.decode
            prompt.echo = sent if isinstance(sent, str) else decode(sent, skip_special_tokens=False)

    await run_sized(work, sum(len(prompt.ids) for prompt in prompts), INLINE_CHARS)


def _check_count(prompts: int, max_concurrent: int) -> None:
    """More prompts than the engine ever holds at once would be told to try again forever."""
    if max_concurrent and prompts > max_concurrent:
        raise RequestError(
            f"prompt holds {prompts} prompts; one request may hold at most {max_concurrent} "
            "(max_concurrent_requests).",
            param="prompt",
        )
