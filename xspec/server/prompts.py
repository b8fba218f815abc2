"""Text into token ids for the handlers, off the event loop when it may take longer than a blink.

The tokenizer and templates are pure; only where they run is decided here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from xspec.engine.api import Engine
from xspec.errors import PromptTooLongError, RequestError
from xspec.server.schema import ChatPrompt, Prompt

INLINE_CHARS = 2048
"""Text up to this length is rendered and tokenised on the loop: about a millisecond."""

MAX_CHARS_PER_TOKEN = 64
"""No useful text has longer tokens on average: beyond this times the context it is not even tokenised."""

T = TypeVar("T")


async def run_sized(work: Callable[[], T], size: int, inline: int) -> T:
    """`work()` here when it is small, in a worker thread otherwise."""
    return work() if size <= inline else await asyncio.to_thread(work)


async def encode_all(
    engine: Engine, prompts: tuple[Prompt, ...], add_special_tokens: bool
) -> list[tuple[int, ...]]:
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))

    def work() -> list[tuple[int, ...]]:
        return [_encode(engine, prompt, add_special_tokens) for prompt in prompts]

    return await run_sized(work, size, INLINE_CHARS)


async def encode_chat(engine: Engine, chat: ChatPrompt, add_special_tokens: bool) -> tuple[int, ...]:
    size = sum(len(message["content"]) for message in chat.messages) + 64 * len(chat.messages)

    def work() -> tuple[int, ...]:
        return _encode(engine, _render(engine, chat), add_special_tokens, "messages")

    return await run_sized(work, size, INLINE_CHARS)


def _encode(
    engine: Engine, prompt: Prompt, add_special_tokens: bool, param: str = "prompt"
) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return prompt
    if len(prompt) > MAX_CHARS_PER_TOKEN * engine.max_model_len:
        raise PromptTooLongError(
            f"{param} has {len(prompt)} characters, far more than a context of "
            f"{engine.max_model_len} tokens holds.",
            param=param,
        )
    try:
        ids = engine.text.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    except RequestError as error:
        raise RequestError(str(error), param=error.param or param) from None
    if not ids:
        raise RequestError(f"{param} is empty: there is nothing to continue.", param=param)
    return tuple(ids)


def _render(engine: Engine, chat: ChatPrompt) -> str:
    template = engine.text.chat
    if template is None:
        raise RequestError("This model has no chat template; use /v1/completions.", param="messages")
    try:
        text = template.render(
            list(chat.messages), add_generation_prompt=chat.add_generation_prompt, **chat.template_kwargs
        )
    except RequestError as error:
        raise RequestError(str(error), param=error.param or "messages") from None
    return _cut_after_final(text, chat.messages[-1]["content"]) if chat.continue_final_message else text


def _cut_after_final(text: str, content: str) -> str:
    """Drop what the template puts after the last message, so that the model goes on with it."""
    for tail in (content, content.strip()):
        start = text.rfind(tail)
        if start >= 0:
            return text[: start + len(tail)]
    raise RequestError(
        "The chat template changes the last message, so it cannot be continued.",
        param="continue_final_message",
    )
