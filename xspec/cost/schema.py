"""Calibration settings as a user writes them: the document's JSON plus named extensions.

Owns names, defaults and what each value may be; whether it fits an engine is decided in `settings`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from xspec.config import MAX_DRAFT_STEPS
from xspec.cost.read import Reader, choice, count, counts, listing, read_object, record, truth
from xspec.errors import CalibrationError

MODELS = ("sps", "additive")
UNCOVERED = ("full_width", "plain")


class Control(enum.StrEnum):
    """What adaptation changes: how far is drafted, how much of that is verified, or (K, d)."""

    DRAFT_STEP = "draft_step"
    TARGET_VERIFY = "target_verify"
    SPEC = "spec"


MOST_ADDED = 8
"""Times `windows_per_point`: windows that points may get beside those, where they took too little time."""


@dataclass(frozen=True, slots=True)
class ContextInterval:
    """KV lengths [min, max] whose costs are those measured after a prefill of `prefill_tokens`.

    `request_buckets` (extension): buckets measured in this interval; None: those of the settings.
    """

    prefill_tokens: int
    min_kv_length: int
    max_kv_length: int
    request_buckets: tuple[int, ...] | None = None

    @property
    def kv(self) -> str:
        return f"KV {self.min_kv_length}-{self.max_kv_length}"


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """Settings with nothing resolved: None means "what the engine has captured" or "the built-in default".

    Extensions to the document: `plain_rounds` (measure rounds without drafting, which makes them a choice),
    `max_target_rows` (points with more rows are neither measured nor chosen), `uncovered` (what rounds
    without measured costs run: "full_width" as documented, or "plain"), `kv_growth` (tokens that requests
    may gain after their prefill before new ones take their place: what is measured later in a context has
    no longer KV then; None: as many as the context holds), `least_point_ms` (windows are added to a point
    until they took so long together, so that rounds of a millisecond are not judged by a handful).
    """

    model: str = "additive"
    draft_width: int | None = None
    request_buckets: tuple[int, ...] | None = None
    target_graph_rows: tuple[int, ...] | None = None
    contexts: tuple[ContextInterval, ...] | None = None
    warmup_steps: int = 8
    window_steps: int = 32
    windows_per_point: int = 3
    token_seed: int = 1
    plain_rounds: bool = True
    max_target_rows: int | None = None
    uncovered: str = "full_width"
    kv_growth: int | None = None
    least_point_ms: int | None = None


def parse_calibration(raw: Mapping[str, Any], where: str) -> CalibrationSettings:
    """The settings that a JSON object holds; missing keys keep their defaults.

    `where` says whose object it is (a flag and file) in the CalibrationError, which names every key that is
    unknown or holds a value that is not allowed.
    """
    mistakes: list[str] = []
    read = read_object(raw, _READERS, "", mistakes)
    if mistakes:
        raise CalibrationError(f"{where} is no valid calibration", mistakes)
    return CalibrationSettings(**read)


def to_json(settings: CalibrationSettings) -> dict[str, Any]:
    """The inverse of parse_calibration. Values left to the engine (None) have no key."""
    return {key: _plain(value) for key, value in _given(settings).items()}


def _given(value: CalibrationSettings | ContextInterval) -> dict[str, Any]:
    named = {item.name: getattr(value, item.name) for item in fields(value)}
    return {name: held for name, held in named.items() if held is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, ContextInterval):
        return {key: _plain(held) for key, held in _given(value).items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


# -- reading --------------------------------------------------------------------------------------


def _contexts(value: Any, where: str, mistakes: list[str]) -> tuple[ContextInterval, ...]:
    """Ascending by KV length."""
    read = (context for context in _context_list(value, where, mistakes) if context is not None)
    found = sorted(read, key=lambda context: context.min_kv_length)
    for context in found:
        if context.min_kv_length > context.max_kv_length:
            mistakes.append(f"{where}: found {context.kv}; allowed: min_kv_length up to max_kv_length")
    for one, two in zip(found, found[1:], strict=False):
        if two.min_kv_length <= one.max_kv_length:
            mistakes.append(f"{where}: found {one.kv} and {two.kv}, which overlap; allowed: intervals apart")
    return tuple(found)


_context_list = listing(
    record(
        ContextInterval,
        {
            "prefill_tokens": count(1),
            "min_kv_length": count(1),
            "max_kv_length": count(1),
            "request_buckets": counts,
        },
        needed=("prefill_tokens", "min_kv_length", "max_kv_length"),
    ),
    "context intervals",
)

_READERS: Mapping[str, Reader] = {
    "model": choice(MODELS),
    "draft_width": count(1, MAX_DRAFT_STEPS),
    "request_buckets": counts,
    "target_graph_rows": counts,
    "contexts": _contexts,
    "warmup_steps": count(0),
    "window_steps": count(1),
    "windows_per_point": count(1),
    "token_seed": count(0),
    "plain_rounds": truth,
    "max_target_rows": count(1),
    "uncovered": choice(UNCOVERED),
    "kv_growth": count(1),
    "least_point_ms": count(1),
}
