"""Reads a saved cost table: every value of the right kind. Whether they agree is `bundle_json`'s business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xspec.config import MAX_DRAFT_STEPS
from xspec.cost.fit import CurveKey
from xspec.cost.model import Additive, Curve, Sample, Sps
from xspec.cost.read import (
    BadValue,
    Reader,
    choice,
    count,
    counts,
    listing,
    mapping,
    number,
    read_object,
    record,
    refusal,
    text,
)
from xspec.cost.settings import Control, Pair
from xspec.errors import CalibrationError


@dataclass(frozen=True, slots=True)
class RawBundle:
    """A bundle whose values are of the right kinds; whether they agree with each other is not known yet."""

    format: str
    version: int
    created_at: str
    control: str
    algorithm: str
    draft_width: int
    fingerprint: dict[str, Any]
    settings: dict[str, Any]
    captured: RawGeometry
    samples: tuple[Sample, ...]
    curves: dict[CurveKey, Curve]
    prefill_ms_per_token: float


@dataclass(frozen=True, slots=True)
class RawGeometry:
    request_buckets: tuple[int, ...]
    max_model_len: int
    cache_tokens: int
    block_size: int
    slots: int
    target_tiers: dict[int, tuple[int, ...]]
    pairs: tuple[Pair, ...] = ()


def read_raw(content: Mapping[str, Any], where: str) -> RawBundle:
    """The values of a bundle, or a CalibrationError with everything that is missing, unknown or of no use."""
    mistakes: list[str] = []
    values = read_object(content, _READERS, "", mistakes, needed=_READERS)
    if mistakes:
        raise CalibrationError(f"{where} is no valid cost table", mistakes)
    return RawBundle(**values)


def key_named(key: CurveKey) -> str:
    return f"context {key[0]}, {key[1]} drafts" + (f" with {key[2]} loops" if key[2] else "")


def _curves(value: Any, where: str, mistakes: list[str]) -> dict[CurveKey, Curve]:
    """Curves by (context, draft steps, depth)."""
    found: dict[CurveKey, Curve] = {}
    for index, item in enumerate(listing(mapping, "curves")(value, where, mistakes)):
        place = f"{where}[{index}]"
        readers = _CURVES.get(str(item.get("model")))
        if readers is None:
            mistakes.append(refusal(f"{place}.model", item.get("model"), '"sps", "additive"'))
            continue
        before = len(mistakes)
        needed = [name for name in readers if name != "depth"]
        held = read_object(item, readers, place, mistakes, needed)
        if len(mistakes) > before:
            continue
        key = (held.pop("context"), held.pop("draft_steps"), held.pop("depth", 0))
        if key in found:
            mistakes.append(f"{place}: a second curve of {key_named(key)}")
        try:
            found[key] = Sps(**held) if held.pop("model") == "sps" else Additive(**held)
        except CalibrationError as error:
            mistakes.append(f"{place}: {error}")
    return found


def _tiers(value: Any, where: str, mistakes: list[str]) -> dict[int, tuple[int, ...]]:
    """Captured rows by request bucket, whose numbers are the keys."""
    found = {}
    for key, rows in mapping(value, where, mistakes).items():
        if not (key.isascii() and key.isdigit() and 0 < len(key) < 10 and key[0] != "0"):
            raise BadValue(refusal(where, key, "request buckets as keys"))
        found[int(key)] = counts(rows, f"{where}.{key}", mistakes)
    return dict(sorted(found.items()))


def _pairs(value: Any, where: str, mistakes: list[str]) -> tuple[Pair, ...]:
    """(K, d) as [K, d], or [K] where no loops draft; ascending, of one kind."""
    allowed = f"a list of [K] or of [K, d], ascending, with K up to {MAX_DRAFT_STEPS}"
    if not isinstance(value, list) or not value or not all(isinstance(pair, list) for pair in value):
        raise BadValue(refusal(where, value, allowed))
    flat = [number for pair in value for number in pair]
    sizes = {len(pair) for pair in value}
    whole = all(isinstance(number, int) and not isinstance(number, bool) and number > 0 for number in flat)
    if sizes not in ({1}, {2}) or not whole or value != sorted(map(list, {tuple(pair) for pair in value})):
        raise BadValue(refusal(where, value, allowed))
    if max(pair[0] for pair in value) > MAX_DRAFT_STEPS:
        raise BadValue(refusal(where, value, allowed))
    return tuple((pair[0], pair[1] if len(pair) == 2 else None) for pair in value)


_positive = number(0.0, above=True)
_positives = listing(_positive, "positive numbers")
_numbers = listing(number(float("-inf")), "numbers")
_rows = listing(count(1), "row counts")

_SAMPLE: Mapping[str, Reader] = {
    "draft_steps": count(0),
    "requests": count(1),
    "target_rows": count(1),
    "context": count(0),
    "kv_length": _positive,
    "windows_ms": _positives,
    "depth": count(1),
}

_CURVES: Mapping[str, Mapping[str, Reader]] = {
    "sps": {
        "context": count(0),
        "draft_steps": count(0),
        "depth": count(1),
        "model": text,
        "target_rows": _rows,
        "steps_per_second": _positives,
    },
    "additive": {
        "context": count(0),
        "draft_steps": count(0),
        "depth": count(1),
        "model": text,
        "bias_s": number(float("-inf")),
        "requests": _rows,
        "alpha_s": _numbers,
        "target_rows": _rows,
        "theta_s": _numbers,
    },
}

_GEOMETRY: Mapping[str, Reader] = {
    "request_buckets": counts,
    "max_model_len": count(1),
    "cache_tokens": count(1),
    "block_size": count(1),
    "slots": count(1),
    "target_tiers": _tiers,
    "pairs": _pairs,
}

_READERS: Mapping[str, Reader] = {
    "format": text,
    "version": count(1),
    "created_at": text,
    "control": choice(tuple(control.value for control in Control)),
    "algorithm": text,
    "draft_width": count(1, MAX_DRAFT_STEPS),
    "fingerprint": mapping,
    "settings": mapping,
    "captured": record(RawGeometry, _GEOMETRY, needed=[name for name in _GEOMETRY if name != "pairs"]),
    "prefill_ms_per_token": number(0.0),
    "curves": _curves,
    "samples": listing(
        record(Sample, _SAMPLE, needed=[name for name in _SAMPLE if name != "depth"]), "samples"
    ),
}
