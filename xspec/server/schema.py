"""Bodies of the OpenAI endpoints, parsed and checked: what a handler needs, no JSON left.

Knows nothing about engines or responses. Everything wrong with a body is a RequestError with `param`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xspec.core.request import SamplingParams
from xspec.errors import RequestError
from xspec.server.fields import INT64_MAX, Fields, check_ids, refuse, shown
from xspec.server.messages import read_messages
from xspec.server.sampling import MAX_LOGPROBS, SamplingContext, read_sampling, refuse_unsupported

log = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16

Prompt = str | tuple[int, ...]

RESERVED_TEMPLATE_NAMES = frozenset(
    ("self", "messages", "add_generation_prompt", "tools", "documents", "tokenize", "chat_template")
)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage_stats: bool = False


@dataclass(frozen=True, slots=True)
class Common:
    """What both endpoints have."""

    model: str | None
    request_id: str | None
    stream: bool
    stream_options: StreamOptions
    add_special_tokens: bool
    return_token_ids: bool
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class CompletionBody:
    common: Common
    prompts: tuple[Prompt, ...]
    echo: bool
    scoring: bool  # max_tokens 0: one token is generated, as a request must, and not reported


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a chat template is rendered from."""

    messages: tuple[dict[str, str], ...]
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatBody:
    common: Common
    chat: ChatPrompt


@dataclass(frozen=True, slots=True)
class TokenizeBody:
    model: str | None
    source: str | ChatPrompt
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeBody:
    model: str | None
    tokens: tuple[int, ...]


def parse_completion(body: Mapping[str, Any], context: SamplingContext) -> CompletionBody:
    fields = Fields(body)
    prompts = read_prompts(fields, context.vocab_size)
    echo = fields.boolean("echo", False)
    max_tokens = fields.integer("max_tokens", 0 if echo else 1, INT64_MAX)
    max_tokens = DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    scoring = max_tokens == 0
    if scoring and fields.integer("min_tokens", 0, INT64_MAX):
        raise refuse("min_tokens", fields.raw("min_tokens"), "0 when max_tokens is 0")
    params = read_sampling(
        fields,
        context,
        max_tokens=max(max_tokens, 1),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    common = _common(fields, params, add_special_tokens=True)
    return CompletionBody(common=common, prompts=prompts, echo=echo, scoring=scoring)


def parse_chat(body: Mapping[str, Any], context: SamplingContext) -> ChatBody:
    fields = Fields(body)
    chat = _chat_prompt(fields)
    max_tokens = fields.integer("max_tokens", 1, INT64_MAX)
    newer = fields.integer("max_completion_tokens", 1, INT64_MAX)
    fields.unsupported("echo", lambda value: value is False, "only /v1/completions has it")
    wanted = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    params = read_sampling(
        fields,
        context,
        max_tokens=max_tokens if newer is None else newer,
        logprobs=(top or 0) if wanted else None,
    )
    return ChatBody(common=_common(fields, params, add_special_tokens=False), chat=chat)


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeBody:
    fields = Fields(body)
    prompt = fields.string("prompt")
    messages = fields.raw("messages")
    if (prompt is None) == (messages is None):
        raise RequestError("Exactly one of prompt and messages is needed.", param="prompt")
    return TokenizeBody(
        model=fields.string("model"),
        source=_chat_prompt(fields) if prompt is None else prompt,
        add_special_tokens=fields.boolean("add_special_tokens", prompt is not None),
        return_token_strs=fields.boolean("return_token_strs", False),
    )


def parse_detokenize(body: Mapping[str, Any], vocab_size: int) -> DetokenizeBody:
    fields = Fields(body)
    tokens = fields.token_ids("tokens", vocab_size)
    if tokens is None:
        raise RequestError("tokens is required: a list of token ids.", param="tokens")
    return DetokenizeBody(model=fields.string("model"), tokens=tokens)


def read_prompts(fields: Fields, vocab_size: int) -> tuple[Prompt, ...]:
    """A string, ids, or a list of either (not mixed)."""
    value = fields.raw("prompt")
    if value is None:
        raise RequestError("prompt is required: a string, token ids, or a list of either.", param="prompt")
    if type(value) is str:
        return (value,)
    if type(value) is not list:
        raise refuse("prompt", value, "a string, a list of strings, token ids, or lists of token ids")
    if not value:
        raise RequestError("prompt must not be empty.", param="prompt")
    if all(type(item) is str for item in value):
        return tuple(value)
    if all(type(item) is list for item in value):
        return tuple(_prompt_ids(item, vocab_size) for item in value)
    if any(type(item) in (str, list) for item in value):
        raise RequestError("prompt must not mix strings, token ids and lists.", param="prompt")
    return (_prompt_ids(value, vocab_size),)


def _prompt_ids(ids: list[Any], vocab_size: int) -> tuple[int, ...]:
    if not ids:
        raise RequestError("prompt must not hold an empty list of token ids.", param="prompt")
    return check_ids("prompt", ids, vocab_size)


def _chat_prompt(fields: Fields) -> ChatPrompt:
    messages = read_messages(fields)
    add_generation_prompt = fields.boolean("add_generation_prompt", True)
    continue_final_message = fields.boolean("continue_final_message", False)
    if continue_final_message:
        if fields.raw("add_generation_prompt") is True:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        add_generation_prompt = False
        if messages[-1]["role"] != "assistant" or not messages[-1]["content"].strip():
            raise RequestError(
                "continue_final_message needs a last message of the assistant that is not empty.",
                param="continue_final_message",
            )
    kwargs = fields.object("chat_template_kwargs") or {}
    if reserved := sorted(RESERVED_TEMPLATE_NAMES & kwargs.keys()):
        raise RequestError(
            f"chat_template_kwargs must not set {', '.join(reserved)}.", param="chat_template_kwargs"
        )
    return ChatPrompt(messages, add_generation_prompt, continue_final_message, kwargs)


def _common(fields: Fields, params: SamplingParams, *, add_special_tokens: bool) -> Common:
    stream = fields.boolean("stream", False)
    common = Common(
        model=fields.string("model"),
        request_id=_request_id(fields),
        stream=stream,
        stream_options=_stream_options(fields, stream),
        add_special_tokens=fields.boolean("add_special_tokens", add_special_tokens),
        return_token_ids=fields.boolean("return_token_ids", False),
        params=params,
    )
    refuse_unsupported(fields)
    if strangers := fields.strangers():
        log.debug("unknown fields ignored: %s", shown(strangers))
    return common


def _request_id(fields: Fields) -> str | None:
    value = fields.string("request_id")
    if value is not None and not acceptable_id(value):
        raise refuse("request_id", value, "1 to 128 letters, digits or any of . _ : -")
    return value


def acceptable_id(value: str) -> bool:
    """Whether an id from outside may go into headers, logs and response bodies."""
    return 1 <= len(value) <= 128 and value.isascii() and all(c.isalnum() or c in "._:-" for c in value)


def _stream_options(fields: Fields, stream: bool) -> StreamOptions:
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions()
    if not stream:
        raise RequestError("stream_options needs stream to be true.", param="stream_options")
    inner = Fields(options)
    try:
        return StreamOptions(
            include_usage=inner.boolean("include_usage", False),
            continuous_usage_stats=inner.boolean("continuous_usage_stats", False),
        )
    except RequestError as error:
        raise RequestError(f"stream_options.{error}", param=f"stream_options.{error.param}") from None
