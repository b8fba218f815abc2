"""A saved cost table as JSON: its keys, and the proof that its parts belong together.

The samples must be exactly those of the settings' points on the captured geometry, and the curves must be
what fitting those samples gives: a table edited by hand to be inconsistent is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from xspec.cost.bundle_raw import RawBundle, key_named
from xspec.cost.fit import curves_of, fit_table
from xspec.cost.model import Additive, CostTable, Curve, Sample, Sps
from xspec.cost.schema import MOST_ADDED
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
            {
                "context": context,
                "draft_steps": steps,
                **({"depth": depth} if depth else {}),
                **curve_json(curve),
            }
            for (context, steps, depth), curve in curves_of(bundle.table).items()
        ],
        "samples": [_values(sample) for sample in bundle.samples],
    }


def effective_json(effective: Effective) -> dict[str, Any]:
    """`settings` with no default left out, and the `captured` geometry they were resolved on."""
    geometry = effective.geometry
    captured: dict[str, Any] = {
        "request_buckets": list(geometry.request_buckets),
        "max_model_len": geometry.max_model_len,
        "cache_tokens": geometry.cache_tokens,
        "block_size": geometry.block_size,
        "slots": geometry.slots,
        "target_tiers": {str(bucket): list(rows) for bucket, rows in effective.captured_tiers.items()},
    }
    if geometry.pairs:
        captured["pairs"] = [[steps] if depth is None else [steps, depth] for steps, depth in geometry.pairs]
    return {"settings": to_json(effective.as_settings()), "captured": captured}


def curve_json(curve: Curve) -> dict[str, Any]:
    return {"model": _model(curve), **_values(curve)}


def _model(curve: Curve) -> str:
    return "sps" if isinstance(curve, Sps) else "additive"


def _values(value: Sample | Curve) -> dict[str, Any]:
    held = {item.name: getattr(value, item.name) for item in fields(value) if item.name != "clamped"}
    given = {name: item for name, item in held.items() if item is not None}
    return {name: list(item) if isinstance(item, tuple) else item for name, item in given.items()}


# -- reading --------------------------------------------------------------------------------------


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
        pairs=captured.pairs,
    )
    effective = resolve(settings, geometry, lambda lanes: captured.target_tiers.get(lanes, ()))
    saved, meant = to_json(settings), to_json(effective.as_settings())
    reasons = [
        f"settings: {key} is {saved.get(key, 'left out')}, but what was captured makes it "
        f"{meant.get(key, 'left out')}"
        for key in sorted({*saved, *meant})
        if saved.get(key) != meant.get(key)
    ]
    if captured.pairs and geometry.control is not Control.SPEC:
        reasons.append(f"captured: pairs are only of control {Control.SPEC}, found {raw.control}")
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
        fewest = effective.windows_per_point
        most = fewest if effective.least_point_ms is None else fewest * (1 + MOST_ADDED)
        if not fewest <= len(sample.windows_ms) <= most:
            reasons.append(
                f"samples[{index}]: {len(sample.windows_ms)} windows, but windows_per_point is {fewest}"
            )
        context = effective.contexts[sample.context]
        if not context.prefill_tokens <= sample.kv_length <= context.max_kv_length:
            reasons.append(
                f"samples[{index}]: a mean KV length of {sample.kv_length:g} after {context.prefill_tokens} "
                f"tokens of prefill in {context.kv}"
            )
    refitted = curves_of(refit)
    for key in sorted({*raw.curves, *refitted}):
        named = f"curve of {key_named(key)}"
        saved, fitted = raw.curves.get(key), refitted.get(key)
        if saved is None or fitted is None:
            reasons.append(f"{named}: {'missing' if saved is None else 'no samples of it'}")
        else:
            reasons.extend(f"{named}: {reason}" for reason in _unlike(saved, fitted))
    if reasons:
        raise CalibrationError("the curves are not those of the samples", reasons)
    curves = {key[:2]: curve for key, curve in raw.curves.items() if not key[2]}
    looped = {key: curve for key, curve in raw.curves.items() if key[2]}
    return CostTable(refit.contexts, curves, refit.kv_means, raw.prefill_ms_per_token, looped)


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
