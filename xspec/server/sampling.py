"""Sampling fields of a request body, with the model's own defaults, as SamplingParams.

Fields that OpenAI, vLLM or xLLM know and this server does not implement are refused here by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xspec.core.request import SamplingParams
from xspec.errors import RequestError
from xspec.server.fields import INT64_MAX, Fields, refuse, shown

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 256
MAX_BIASES = 4096
# Beyond these, logits divided by a temperature or penalty overflow to inf or nan in float32.
MAX_TEMPERATURE = 100.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0

IGNORED = frozenset(
    (
        "metadata", "store", "user", "service_tier", "parallel_tool_calls", "safety_identifier",
        "prompt_cache_key", "prompt_cache_retention",
    )
)  # fmt: skip
"""Sent by ordinary clients, without any bearing on the text."""


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What checking a body needs to know of the model."""

    vocab_size: int
    defaults: Mapping[str, Any]


def _empty(value: object) -> bool:
    return value is False or (isinstance(value, (str, list, dict)) and not value)


def _is(*neutral: object) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(item) and value == item for item in neutral)


_NO_GRAMMAR = "structured output is not available"
_NO_TOOLS = "tool calling is not available"
_NO_BEAM = "beam search is not available"
_NO_PRIORITY = "requests are served in order of arrival"

UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("response_format", _is({"type": "text"}), "only {'type': 'text'} is"),
    ("guided_json", _empty, _NO_GRAMMAR),
    ("guided_regex", _empty, _NO_GRAMMAR),
    ("guided_choice", _empty, _NO_GRAMMAR),
    ("guided_grammar", _empty, _NO_GRAMMAR),
    ("guided_json_object", _empty, _NO_GRAMMAR),
    ("guided_decoding_backend", _empty, _NO_GRAMMAR),
    ("guided_whitespace_pattern", _empty, _NO_GRAMMAR),
    ("structured_outputs", _empty, _NO_GRAMMAR),
    ("use_beam_search", _is(False), _NO_BEAM),
    ("beam_width", _is(0, 1), _NO_BEAM),
    ("length_penalty", _is(1, 1.0), _NO_BEAM),
    ("early_stopping", _is(False), _NO_BEAM),
    ("num_return_sequences", _is(1), "use n"),
    ("allowed_token_ids", _empty, "use logit_bias"),
    ("bad_words", _empty, "use logit_bias"),
    ("logits_processors", _empty, "no code runs on behalf of a request"),
    ("truncate_prompt_tokens", lambda value: False, "a prompt is never cut; shorten it before sending"),
    ("prompt_logprobs", lambda value: False, "use echo with logprobs on /v1/completions"),
    ("priority", _is(0), _NO_PRIORITY),
    ("offline", _is(False), _NO_PRIORITY),
    ("ttft_slo_ms", _is(0), _NO_PRIORITY),
    ("tpot_slo_ms", _is(0), _NO_PRIORITY),
    ("ttlt_slo_ms", _is(0), _NO_PRIORITY),
    ("prompt_embeds", _empty, "prompts are text or token ids"),
    ("kv_transfer_params", _empty, "prefill and decode are not split"),
    ("suffix", _empty, "text can only be continued, not filled in"),
    ("tools", _empty, _NO_TOOLS),
    ("tool_choice", _is("none", "auto"), _NO_TOOLS),
    ("functions", _empty, _NO_TOOLS),
    ("function_call", _is("none", "auto"), _NO_TOOLS),
    ("audio", _empty, "only text is generated"),
    ("modalities", _is(["text"]), "only text is generated"),
    ("prediction", _empty, "predicted outputs are not available"),
    ("web_search_options", lambda value: False, "there is no search"),
    ("reasoning_effort", _is("none"), "use chat_template_kwargs for what the model's template offers"),
    ("verbosity", _is("medium"), "there is no such control"),
    ("chat_template", _empty, "the model's own template is used"),
    ("documents", _empty, "put them into the messages"),
    ("mm_processor_kwargs", _empty, "only text is accepted"),
    ("lora_request", _empty, "adapters are not available"),
)


def refuse_unsupported(fields: Fields) -> None:
    for name, neutral, why in UNSUPPORTED:
        fields.unsupported(name, neutral, why)
    fields.seen |= IGNORED


def read_sampling(
    fields: Fields,
    context: SamplingContext,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """All sampling fields but max_tokens and logprobs, which the two endpoints spell differently."""
    defaults = context.defaults
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    if best_of not in (None, n):
        raise RequestError(f"best_of is only supported equal to n ({n}), found {best_of}.", param="best_of")
    min_tokens = fields.integer("min_tokens", 0, INT64_MAX) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise refuse("min_tokens", min_tokens, f"at most max_tokens ({max_tokens})")
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    top_k = int(defaults.get("top_k", 0)) if top_k is None else top_k

    def number(name: str, neutral: float, low: float, high: float, above_low: bool = False) -> float:
        value = fields.number(name, low, high, above_low=above_low)
        return float(defaults.get(name, neutral)) if value is None else value

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=number("temperature", 1.0, 0.0, MAX_TEMPERATURE),
        top_k=max(top_k, 0),
        top_p=number("top_p", 1.0, 0.0, 1.0, above_low=True),
        min_p=number("min_p", 0.0, 0.0, 1.0),
        presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=number("repetition_penalty", 1.0, MIN_REPETITION, MAX_REPETITION),
        logit_bias=_logit_bias(fields, context.vocab_size),
        stop=_stop(fields),
        stop_token_ids=fields.token_ids("stop_token_ids", context.vocab_size, limit=MAX_STOP_IDS) or (),
        ignore_eos=fields.boolean("ignore_eos", False),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        seed=fields.integer("seed", -(2**63), INT64_MAX),
        n=n,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        speculative=fields.boolean("speculative", True),
    )


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if type(value) is str else value
    if type(stops) is not list or not all(type(stop) is str for stop in stops):
        raise refuse("stop", value, "a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop may hold at most {MAX_STOPS} strings, found {len(stops)}.", param="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise refuse("stop", stop, f"made of strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    value = fields.object("logit_bias")
    if value is None:
        return {}
    if len(value) > MAX_BIASES:
        raise RequestError(
            f"logit_bias may hold at most {MAX_BIASES} tokens, found {len(value)}.", param="logit_bias"
        )
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # isdecimal alone admits other scripts' digits, and int() a sign or underscores.
        token = int(key) if key.isascii() and key.isdecimal() and len(key) < 12 else -1
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias names token {shown(key)}; token ids go from 0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise refuse("logit_bias", bias, "made of numbers from -100 to 100")
        biases[token] = float(bias)
    return biases
