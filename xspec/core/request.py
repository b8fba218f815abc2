"""What a client asks for and what it gets back, in token ids.

Knows nothing about text, pages, devices or HTTP: `engine/text.py` turns ids into strings.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

NO_NOISE_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would only overflow."""


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop id or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the engine failed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Neutral values switch a rule off; all rules follow vLLM's definitions.

    `seed` is resolved at admission (never None on a Sequence): the text of a request is a function
    of prompt, parameters, seed and choice index alone (architecture decision 7).
    """

    max_tokens: int | None = None  # None: up to max_model_len
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None  # None: off, 0: the chosen token's only, k: and the k likeliest
    prompt_logprobs: int | None = None  # the same for prompt tokens (completions with echo)

    @property
    def greedy(self) -> bool:
        return self.temperature < NO_NOISE_BELOW

    @property
    def penalised(self) -> bool:
        """Whether token counts enter the choice."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def filtered(self) -> bool:
        """Whether the candidate set is cut by top-k, top-p or min-p (never for greedy rows)."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One admitted prompt. It becomes `params.n` Sequences, one per choice."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float = 0.0  # time.monotonic() at admission; for metrics and fairness only


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the model's raw distribution (before penalties and temperature)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the k likeliest (id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens that one choice gained in one round, in order; the last one carries `finish_reason`."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token when asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # with the first output; [0] is None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop id that ended it, if one did (it is in token_ids)
    cached_tokens: int = 0  # prompt tokens served by the prefix cache
    error: str | None = None  # why, when finish_reason is ERROR
