"""A saved cost table as JSON: its keys, and the proof that its parts belong together.

The samples must be exactly those of the settings' points on the captured geometry, and the curves must be
what fitting those samples gives: a table edited by hand to be inconsistent is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from xspec.config import MAX_DRAFT_STEPS
from xspec.cost.fit import fit_table
from xspec.cost.model import Additive, CostTable, Curve, Sample, Sps
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
from xspec.cost.settings import Control, Effective, Geometry, parse_calibration, resolve, to_json
from xspec.errors import CalibrationError

FORMAT = "xspec-cost-table"
VERSION = 1

FIT_TOLERANCE, COST_TOLERANCE = 1e-6, 1e-9
"""How far a saved number may be from a refit, relative to itself and to the cost it is part of: the rounding
of another machine's algebra."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Costs measured on one engine, with everything that says which and how.

    `fingerprint`: plain JSON facts that the costs hold for. `effective`: the settings they were measured by,
    with the captured geometry. `created_at`: when, in the caller's words.
    """

    control: Control
    algorithm: str
    draft_width: int
    fingerprint: Mapping[str, Any]
    effective: Effective
    samples: tuple[Sample, ...]
    table: CostTable
    created_at: str


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
    curves: dict[tuple[int, int], Curve]
    prefill_ms_per_token: float


@dataclass(frozen=True, slots=True)
class RawGeometry:
    request_buckets: tuple[int, ...]
    max_model_len: int
    cache_tokens: int
    block_size: int
    slots: int
    target_tiers: dict[int, tuple[int, ...]]


# -- writing --------------------------------------------------------------------------------------


def encode(bundle: Bundle) -> dict[str, Any]:
    """JSON-ready; `decode(read_raw(...))` gives an equal bundle."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "created_at": bundle.created_at,
        "control": bundle.control.value,
        "algorithm": bundle.algorithm,
        "draft_width": bundle.draft_width,
        "fingerprint": dict(bundle.fingerprint),
        **effective_json(bundle.effective),
        "prefill_ms_per_token": bundle.table.prefill_ms_per_token,
        "curves": [
            {"context": context, "draft_steps": steps, **curve_json(curve)}
            for (context, steps), curve in sorted(bundle.table.curves.items())
        ],
        "samples": [_values(sample) for sample in bundle.samples],
    }


def effective_json(effective: Effective) -> dict[str, Any]:
    """`settings` with no default left out, and the `captured` geometry they were resolved on."""
    geometry = effective.geometry
    captured = {
        "request_buckets": list(geometry.request_buckets),
        "max_model_len": geometry.max_model_len,
        "cache_tokens": geometry.cache_tokens,
        "block_size": geometry.block_size,
        "slots": geometry.slots,
        "target_tiers": {str(bucket): list(rows) for bucket, rows in effective.captured_tiers.items()},
    }
    return {"settings": to_json(effective.as_settings()), "captured": captured}


def curve_json(curve: Curve) -> dict[str, Any]:
    return {"model": _model(curve), **_values(curve)}


def _model(curve: Curve) -> str:
    return "sps" if isinstance(curve, Sps) else "additive"


def _values(value: Sample | Curve) -> dict[str, Any]:
    held = {item.name: getattr(value, item.name) for item in fields(value) if item.name != "clamped"}
    return {name: list(item) if isinstance(item, tuple) else item for name, item in held.items()}


# -- reading --------------------------------------------------------------------------------------


def read_raw(content: Mapping[str, Any], where: str) -> RawBundle:
    """The values of a bundle, or a CalibrationError with everything that is missing, unknown or of no use."""
    mistakes: list[str] = []
    values = read_object(content, _READERS, "", mistakes, needed=_READERS)
    if mistakes:
        raise CalibrationError(f"{where} is no valid cost table", mistakes)
    return RawBundle(**values)


def decode(raw: RawBundle, where: str) -> Bundle:
    """The bundle, or a CalibrationError with why its parts do not belong together."""
    try:
        effective = _effective(raw, where)
        table = _table(raw, effective)
    except CalibrationError as error:
        raise CalibrationError(f"{where} contradicts itself", [*(error.reasons or [str(error)])]) from error
    return Bundle(
        control=Control(raw.control),
        algorithm=raw.algorithm,
        draft_width=raw.draft_width,
        fingerprint=raw.fingerprint,
        effective=effective,
        samples=raw.samples,
        table=table,
        created_at=raw.created_at,
    )


def _effective(raw: RawBundle, where: str) -> Effective:
    """Settings resolved anew on the geometry that was captured; they must be effective ones already."""
    settings = parse_calibration(raw.settings, f"{where}: settings")
    captured = raw.captured
    geometry = Geometry(
        control=Control(raw.control),
        draft_width=raw.draft_width,
        request_buckets=captured.request_buckets,
        max_model_len=captured.max_model_len,
        cache_tokens=captured.cache_tokens,
        block_size=captured.block_size,
        slots=captured.slots,
    )
    effective = resolve(settings, geometry, lambda lanes: captured.target_tiers.get(lanes, ()))
    saved, meant = to_json(settings), to_json(effective.as_settings())
    reasons = [
        f"settings: {key} is {saved.get(key, 'left out')}, but what was captured makes it "
        f"{meant.get(key, 'left out')}"
        for key in sorted({*saved, *meant})
        if saved.get(key) != meant.get(key)
    ]
    if captured.target_tiers != dict(effective.captured_tiers):
        buckets = ", ".join(map(str, effective.captured_tiers)) or "none"
        reasons.append(f"captured: target_tiers must be given for request buckets {buckets}, and no others")
    if reasons:
        raise CalibrationError("settings and captured geometry differ", reasons)
    return effective


def _table(raw: RawBundle, effective: Effective) -> CostTable:
    """The saved curves, once they are shown to be a fit of the saved samples."""
    refit = fit_table(effective, raw.samples, raw.prefill_ms_per_token)
    reasons = []
    for index, sample in enumerate(raw.samples):
        if len(sample.windows_ms) != effective.windows_per_point:
            reasons.append(
                f"samples[{index}]: {len(sample.windows_ms)} windows, "
                f"but windows_per_point is {effective.windows_per_point}"
            )
        context = effective.contexts[sample.context]
        if not context.prefill_tokens <= sample.kv_length <= context.max_kv_length:
            reasons.append(
                f"samples[{index}]: a mean KV length of {sample.kv_length:g} after {context.prefill_tokens} "
                f"tokens of prefill in {context.kv}"
            )
    for key in sorted({*raw.curves, *refit.curves}):
        named = f"curve of context {key[0]}, {key[1]} drafts"
        saved, fitted = raw.curves.get(key), refit.curves.get(key)
        if saved is None or fitted is None:
            reasons.append(f"{named}: {'missing' if saved is None else 'no samples of it'}")
        else:
            reasons.extend(f"{named}: {reason}" for reason in _unlike(saved, fitted))
    if reasons:
        raise CalibrationError("the curves are not those of the samples", reasons)
    return CostTable(refit.contexts, raw.curves, refit.kv_means, raw.prefill_ms_per_token)


def _unlike(saved: Curve, fitted: Curve) -> Iterator[str]:
    """How a saved curve is not the fitted one."""
    if type(saved) is not type(fitted):
        yield f"its model is {_model(saved)}, but the settings make it {_model(fitted)}"
        return
    scale = 0.0  # parts of an additive curve may be next to nothing beside the cost as a whole
    if isinstance(fitted, Additive):
        scale = abs(fitted.bias_s) + max(map(abs, fitted.alpha_s)) + max(map(abs, fitted.theta_s))
    left, right = _values(saved), _values(fitted)
    for name in right:
        ours, theirs = _as_list(left[name]), _as_list(right[name])
        close = len(ours) == len(theirs) and all(
            abs(a - b) <= FIT_TOLERANCE * abs(b) + COST_TOLERANCE * scale
            for a, b in zip(ours, theirs, strict=True)
        )
        if ours != theirs and (name in ("requests", "target_rows") or not close):
            yield f"{name} is {_shown(ours)}, but its samples give {_shown(theirs)}"


def _as_list(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def _shown(values: list[float]) -> str:
    return ", ".join(f"{value:.9g}" for value in values)


# -- readers --------------------------------------------------------------------------------------


def _curves(value: Any, where: str, mistakes: list[str]) -> dict[tuple[int, int], Curve]:
    """Curves by (context, draft steps)."""
    found: dict[tuple[int, int], Curve] = {}
    for index, item in enumerate(listing(mapping, "curves")(value, where, mistakes)):
        place = f"{where}[{index}]"
        readers = _CURVES.get(str(item.get("model")))
        if readers is None:
            mistakes.append(refusal(f"{place}.model", item.get("model"), '"sps", "additive"'))
            continue
        before = len(mistakes)
        held = read_object(item, readers, place, mistakes, needed=readers)
        if len(mistakes) > before:
            continue
        key = (held.pop("context"), held.pop("draft_steps"))
        if key in found:
            mistakes.append(f"{place}: a second curve of context {key[0]}, {key[1]} drafts")
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
}

_CURVES: Mapping[str, Mapping[str, Reader]] = {
    "sps": {
        "context": count(0),
        "draft_steps": count(0),
        "model": text,
        "target_rows": _rows,
        "steps_per_second": _positives,
    },
    "additive": {
        "context": count(0),
        "draft_steps": count(0),
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
    "captured": record(RawGeometry, _GEOMETRY, needed=_GEOMETRY),
    "prefill_ms_per_token": number(0.0),
    "curves": _curves,
    "samples": listing(record(Sample, _SAMPLE, needed=_SAMPLE), "samples"),
}
