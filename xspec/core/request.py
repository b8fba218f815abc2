"""What a client asks for and what it gets back, in token ids.

Knows nothing about text, pages, devices or HTTP: `engine/text.py` turns ids into strings.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from xspec.core.drafts import DraftCounts
from xspec.errors import RequestError

NO_NOISE_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would only overflow."""

MAX_TEMPERATURE = 100.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
"""Beyond these, logits divided by a temperature or penalty overflow to inf or nan in float32."""

MAX_INT64 = 2**63 - 1
"""What a device row can hold of a count."""

MAX_CHOICES = 1024
"""Each choice is a sequence of its own from the moment of admission."""


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
    speculative: bool = True  # False: no token is drafted for it; the text is the same either way

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

    def check(self) -> None:
        """RequestError with the first field that is out of range: one such row would fail a whole round."""
        for name, good, allowed in self._rules():
            if not good:
                raise RequestError(f"{name} is {getattr(self, name)!r}; allowed: {allowed}", param=name)

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """(field, whether it holds, what is allowed), lazily: later rules rely on earlier ones."""
        yield "n", _whole(self.n, 1, MAX_CHOICES), f"integers from 1 to {MAX_CHOICES}"
        yield "max_tokens", self.max_tokens is None or _whole(self.max_tokens, 1), "None or integers from 1"
        most = MAX_INT64 if self.max_tokens is None else min(self.max_tokens, MAX_INT64)
        yield "min_tokens", _whole(self.min_tokens, 0, most), "0 to max_tokens"
        hot = _real(self.temperature, 0.0, MAX_TEMPERATURE)
        yield "temperature", hot, f"numbers from 0 to {MAX_TEMPERATURE:g}"
        yield "top_k", _whole(self.top_k, 0, MAX_INT64), "integers from 0 to 2**63 - 1"
        yield "top_p", _real(self.top_p, 0.0, 1.0) and self.top_p > 0, "numbers above 0 to 1"
        yield "min_p", _real(self.min_p, 0.0, 1.0), "numbers from 0 to 1"
        yield "presence_penalty", _real(self.presence_penalty, -2.0, 2.0), "numbers from -2 to 2"
        yield "frequency_penalty", _real(self.frequency_penalty, -2.0, 2.0), "numbers from -2 to 2"
        repeats = _real(self.repetition_penalty, MIN_REPETITION, MAX_REPETITION)
        yield "repetition_penalty", repeats, f"numbers from {MIN_REPETITION:g} to {MAX_REPETITION:g}"
        yield "logit_bias", _biases(self.logit_bias), "a mapping of token ids to finite numbers"
        stops = isinstance(self.stop, tuple) and all(isinstance(stop, str) and stop for stop in self.stop)
        yield "stop", stops, "a tuple of non-empty strings"
        ids = isinstance(self.stop_token_ids, tuple) and all(_whole(i, 0) for i in self.stop_token_ids)
        yield "stop_token_ids", ids, "a tuple of token ids"
        yield "seed", self.seed is None or _whole(self.seed, -math.inf), "None or integers"
        yield "logprobs", self.logprobs is None or _whole(self.logprobs, 0), "None or integers from 0"
        scored = self.prompt_logprobs is None or _whole(self.prompt_logprobs, 0)
        yield "prompt_logprobs", scored, "None or integers from 0"
        yield "speculative", isinstance(self.speculative, bool), "True or False"


def _whole(value: object, low: float, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _real(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _biases(biases: object) -> bool:
    return isinstance(biases, Mapping) and all(
        _whole(token, 0) and _real(bias, -math.inf, math.inf) and math.isfinite(bias)
        for token, bias in biases.items()
    )


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
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = (
        None  # with choice 0's first output; [0] is None
    )
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the stop id that ended it, if one did (it is in token_ids)
    cached_tokens: int = 0  # prompt tokens served by the prefix cache
    error: str | None = None  # why, when finish_reason is ERROR
    drafts: DraftCounts | None = None  # of the round, as far as token_ids go; None: nothing was drafted
