"""What surfaces see of the engine: text outputs, phases and the protocol they program against."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xspec.core.drafts import DraftCounts
from xspec.core.request import FinishReason, SamplingParams, TokenLogprob
from xspec.metrics import Metrics
from xspec.text.tokenizer import TextAssets


class Phase(enum.StrEnum):
    """Life of an engine. /health answers 200 only when READY."""

    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class TextOutput:
    """One step of one choice. `text` never ends inside a UTF-8 character or a possible stop string.

    Token ids arrive with the step that commits them, even while their text is still held back;
    the last output of a choice (finish_reason set) releases all that may be shown.
    """

    request_id: str
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that ended it (None: EOS or length)
    prompt_tokens: int = 0
    completion_tokens: int = 0  # of this choice so far
    cached_tokens: int = 0
    error: str | None = None
    drafts: DraftCounts | None = None  # what was drafted for these tokens; None: nothing


class TextStream(Protocol):
    """Outputs of one request as they come. `aclose` aborts what is unfinished, also before the first
    output was asked for (a bare async generator does not notice that: its body never began)."""

    def __aiter__(self) -> TextStream: ...

    async def __anext__(self) -> TextOutput: ...

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """The asyncio engine. All methods are called on the event loop thread."""

    model_id: str
    max_model_len: int
    text: TextAssets
    metrics: Metrics
    draft_width: int  # most tokens drafted in a round; 0: no drafter is loaded

    @property
    def phase(self) -> Phase: ...

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> TextStream:
        """Admit and stream. RequestError is raised by this call itself, before anything is streamed.

        Outputs of the `params.n` choices interleave. Closing the iterator early aborts the request.
        A failure inside the engine ends every choice with FinishReason.ERROR and `error` set.
        """

    def server_info(self) -> dict[str, Any]:
        """Effective settings and live state, JSON-ready, for /server_info."""

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and let running ones finish; False if the time ran out (they abort)."""

    async def close(self) -> None: ...
