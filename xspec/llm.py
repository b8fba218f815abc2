"""The blocking face for scripts: an asyncio engine on a thread of its own behind plain calls.

Knows nothing of how the engine works; it encodes prompts, submits them all and collects the answers.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import itertools
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar, cast

from xspec.config import Config
from xspec.core.drafts import DraftTally, DraftTotals
from xspec.core.request import FinishReason, SamplingParams, TokenLogprob
from xspec.engine.api import Engine, TextOutput
from xspec.errors import ConfigError, EngineDeadError, EngineError, RequestError
from xspec.progress import Progress, silent
from xspec.threads import settle_threads

T = TypeVar("T")
Prompt = str | Sequence[int]
Message = Mapping[str, Any]
EngineFactory = Callable[[Config, Progress], Awaitable[Engine]]

CLOSE_TIMEOUT_S = 30.0
"""An engine that does not end within this is abandoned with its (daemon) thread."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    prompt_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # on choice 0
    drafts: DraftTotals | None = None  # what became of drafts; None where no drafter is loaded


class LLM:
    """An engine to call from ordinary code. Keywords are flags: `LLM("model.gguf", block_size=16)`.

    Threads may share it. Use it as a context manager or call `close`; a Ctrl-C during a call aborts
    that call's requests and leaves the engine usable.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: Config | None = None,
        progress: Progress = silent,
        engine_factory: EngineFactory | None = None,
        **flags: Any,
    ) -> None:
        self.config = _config_of(model, config, flags)
        settle_threads(self.config.execution.num_compute_threads)
        self._numbers = itertools.count()
        self._thread = _LoopThread()
        factory = _real_engine if engine_factory is None else engine_factory
        try:
            self._engine = self._thread.run(_await(factory(self.config, progress)))
        except BaseException:
            self._thread.stop()
            raise
        # not at exit: by then the interpreter has already ended the engine's own threads
        self._finalizer = weakref.finalize(self, _shut_down, self._thread, self._engine)
        self._finalizer.atexit = False

    @property
    def model_id(self) -> str:
        return self._engine.model_id

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def params(self, **fields: Any) -> SamplingParams:
        """SamplingParams that start from what the checkpoint recommends."""
        known = {item.name for item in dataclasses.fields(SamplingParams)}
        if unknown := sorted(set(fields) - known):
            allowed = ", ".join(sorted(known))
            raise RequestError(f"{unknown[0]} is no sampling parameter; allowed: {allowed}", param=unknown[0])
        return SamplingParams(**{**self._engine.text.generation_defaults, **fields})

    def generate(
        self, prompts: str | Sequence[str] | Sequence[Sequence[int]], params: SamplingParams | None = None
    ) -> list[list[Completion]]:
        """Answer all prompts (text or token ids) together: a list per prompt with its `params.n` choices."""
        several: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        return self._answer([self._encode(prompt) for prompt in several], params)

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: SamplingParams | None = None
    ) -> list[list[Completion]]:
        """Answer one conversation or several; a list per conversation with its `params.n` choices."""
        single = not messages or isinstance(messages[0], Mapping)
        chats = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        return self._answer([self._encode_chat(chat) for chat in chats], params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TextOutput]:
        """Outputs of one prompt as they come. Closing the iterator early aborts the request."""
        return self._stream(self._encode(prompt), self._checked(params))

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Iterator[TextOutput]:
        """`stream` for a conversation."""
        return self._stream(self._encode_chat(messages), self._checked(params))

    def close(self) -> None:
        """End the engine; calls still running elsewhere fail. May be called again."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- prompts -------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._engine.text.tokenizer.encode(prompt))
        ids: tuple[object, ...] = tuple(prompt) if isinstance(prompt, Sequence) else (None,)
        if not all(type(token) is int for token in ids):
            raise RequestError("a prompt is text or a list of token ids", param="prompt")
        return cast("tuple[int, ...]", ids)

    def _encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        template = self._engine.text.chat
        if template is None:
            raise RequestError(
                "this model has no chat template: give it bare text (LLM.generate, xspec generate --raw)",
                param="messages",
            )
        if not messages:
            raise RequestError("a conversation needs at least one message", param="messages")
        # the template writes the special tokens itself
        return tuple(self._engine.text.tokenizer.encode(template.render(messages), add_special_tokens=False))

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        params = self.params() if params is None else params
        params.check()
        return params

    # -- answers -------------------------------------------------------------------------------

    def _answer(
        self, prompts: list[tuple[int, ...]], params: SamplingParams | None
    ) -> list[list[Completion]]:
        return self._run(self._collect_all(prompts, self._checked(params)))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._finalizer.alive:
            work.close()
            raise EngineDeadError("this LLM was closed")
        return self._thread.run(work)

    async def _collect_all(
        self, prompts: list[tuple[int, ...]], params: SamplingParams
    ) -> list[list[Completion]]:
        cap = self.config.service.max_concurrent_requests
        gate = asyncio.Semaphore(cap) if cap else contextlib.nullcontext()

        async def one(prompt: tuple[int, ...]) -> list[Completion]:
            async with gate:
                return await self._collect(prompt, params)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(prompt)) for prompt in prompts]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _collect(self, prompt: tuple[int, ...], params: SamplingParams) -> list[Completion]:
        width = self._engine.draft_width
        choices = [_Gathered(DraftTally(width) if width else None) for _ in range(params.n)]
        async with contextlib.aclosing(self._outputs(prompt, params)) as outputs:
            async for output in outputs:
                choices[output.choice].add(output)
        return [choice.completion() for choice in choices]

    async def _outputs(
        self, prompt: tuple[int, ...], params: SamplingParams
    ) -> AsyncGenerator[TextOutput, None]:
        outputs = self._engine.generate(prompt, params, request_id=f"llm-{next(self._numbers)}")
        async with contextlib.aclosing(cast("AsyncGenerator[TextOutput, None]", outputs)):
            async for output in outputs:
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise EngineError(output.error or "the engine ended the request")
                yield output

    def _stream(self, prompt: tuple[int, ...], params: SamplingParams) -> Iterator[TextOutput]:
        box: queue.SimpleQueue[TextOutput | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async with contextlib.aclosing(self._outputs(prompt, params)) as outputs:
                    async for output in outputs:
                        box.put(output)
            finally:
                box.put(None)

        if not self._finalizer.alive:
            raise EngineDeadError("this LLM was closed")
        future = self._thread.start(pump())
        try:
            while (output := box.get()) is not None:
                yield output
            self._thread.result(future)
        finally:
            future.cancel()


@dataclass(slots=True)
class _Gathered:
    """Outputs of one choice on their way to a Completion."""

    tally: DraftTally | None
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    last: TextOutput | None = None

    def add(self, output: TextOutput) -> None:
        self.texts.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        if self.tally is not None and output.drafts is not None:
            self.tally.add(output.drafts, len(output.token_ids))
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.last = output

    def completion(self) -> Completion:
        if self.last is None or self.last.finish_reason is None:
            raise EngineError("the engine ended a request without finishing it")
        return Completion(
            choice=self.last.choice,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
            prompt_tokens=self.last.prompt_tokens,
            cached_tokens=self.last.cached_tokens,
            logprobs=tuple(self.logprobs),
            prompt_logprobs=self.prompt_logprobs,
            drafts=None if self.tally is None else self.tally.totals(),
        )


class _LoopThread:
    """An event loop running on a daemon thread, and blocking calls into it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="xspec-llm", daemon=True)
        self._thread.start()
        # for scripts that never close: a loop that just vanishes complains about its tasks on stderr
        atexit.register(self.stop)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        future = self.start(work)
        try:
            return cast("T", self.result(future, timeout_s))
        finally:
            future.cancel()  # after a Ctrl-C or a timeout; of no effect once it is done

    @staticmethod
    def result(future: Any, timeout_s: float | None = None) -> Any:
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise EngineDeadError("the engine was closed during the call") from None

    def stop(self) -> None:
        """Cancel what still runs and end the thread."""
        atexit.unregister(self.stop)
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError, EngineDeadError):
            self.run(_cancel_others(), CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _await(work: Awaitable[T]) -> T:
    return await work


async def _real_engine(config: Config, progress: Progress) -> Engine:
    # here and not at the top: importing it loads torch, which has to see the settled threads
    from xspec.engine.build import build_engine

    return await build_engine(config, progress=progress)


def _shut_down(thread: _LoopThread, engine: Engine) -> None:
    if thread.is_current():  # the garbage collector may call from anywhere
        threading.Thread(target=_shut_down, args=(thread, engine), daemon=True).start()
        return
    try:
        thread.run(engine.close(), CLOSE_TIMEOUT_S)
    finally:
        thread.stop()


def _config_of(model: str | None, config: Config | None, flags: dict[str, Any]) -> Config:
    if config is not None:
        if model is not None or flags:
            raise ConfigError("LLM takes a config or flags, not both")
        return config
    if model is not None:
        flags = {"model": model, **flags}
    # a script hands over all its prompts at once; the cap is there to protect servers
    return Config.from_mapping({"max_concurrent_requests": 0, **flags})
