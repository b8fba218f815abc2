"""From raw samples to curves: medians, least squares, and a table of exactly what was to be measured.

Pure arithmetic on samples; sorted first, so their order never matters. Refuses rather than repairs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from xspec.cost.model import LONGEST_ROUND_S, Additive, CostTable, Curve, Sample, Sps, bucket_groups
from xspec.cost.settings import Effective, Point
from xspec.errors import CalibrationError

CurveKey = tuple[int, int, int]
"""(context, draft steps, depth), the last 0 where no loops draft."""


def fit_sps(samples: Sequence[Sample]) -> Sps:
    """Steps per second by target rows. Buckets that share rows: their mean cost, as least squares has it."""
    _check(samples)
    by_rows: dict[int, list[float]] = {}
    for sample in _sorted(samples):
        by_rows.setdefault(sample.target_rows, []).append(sample.median_ms)
    rows = sorted(by_rows)
    return Sps(tuple(rows), tuple(1000.0 * len(by_rows[size]) / math.fsum(by_rows[size]) for size in rows))


def fit_additive(samples: Sequence[Sample]) -> Additive:
    """seconds = bias + alpha(requests) + theta(target rows) by ordinary least squares on the medians.

    The gauge is alpha(first) = theta(first) = 0. CalibrationError if groups of request buckets share no
    target rows: then what is alpha and what is theta cannot be told.
    """
    _check(samples)
    cells = [(sample.requests, sample.target_rows) for sample in samples]
    requests, rows = sorted({cell[0] for cell in cells}), sorted({cell[1] for cell in cells})
    if len(groups := bucket_groups(cells)) > 1:
        apart = " | ".join(", ".join(map(str, group)) for group in groups)
        raise CalibrationError(
            f"{len(set(cells))} points cannot determine {len(requests) + len(rows) - 1} additive costs: "
            f"these groups of request buckets share no target rows: {apart}"
        )
    ordered = _sorted(samples)
    design = np.zeros((len(ordered), len(requests) + len(rows) - 1))
    design[:, 0] = 1.0
    for line, sample in zip(design, ordered, strict=True):
        if place := requests.index(sample.requests):
            line[place] = 1.0
        if place := rows.index(sample.target_rows):
            line[len(requests) - 1 + place] = 1.0
    seconds = np.array([sample.median_ms / 1000.0 for sample in ordered])
    solution, *_ = np.linalg.lstsq(design, seconds, rcond=None)
    bias, *parts = solution.tolist()
    alpha, theta = parts[: len(requests) - 1], parts[len(requests) - 1 :]
    curve = Additive(bias, tuple(requests), (0.0, *alpha), tuple(rows), (0.0, *theta))
    for sample in ordered:
        if curve.ms(sample.requests, sample.target_rows) is None:
            raise CalibrationError(
                f"the additive fit gives no positive cost for {_named(sample)}, measured at "
                f'{sample.median_ms:g} ms: the samples do not add up; model "sps" needs no such form'
            )
    return curve


def fit_table(effective: Effective, samples: Sequence[Sample], prefill_ms_per_token: float) -> CostTable:
    """One curve for every (context, draft steps, depth) of the settings, from samples of exactly their
    points.

    Plain rounds have one target row a lane, so their cost is one over target rows under either model.
    """
    check_coverage(effective.points, samples)
    curves: dict[tuple[int, int], Curve] = {}
    looped: dict[tuple[int, int, int], Curve] = {}
    for context, steps, depth in sorted({_key(sample) for sample in samples}):
        mine = [sample for sample in samples if _key(sample) == (context, steps, depth)]
        curve = fit_additive(mine) if effective.model == "additive" and steps else fit_sps(mine)
        if depth:
            looped[context, steps, depth] = curve
        else:
            curves[context, steps] = curve
    means = []
    for index in range(len(effective.contexts)):
        lengths = [sample.kv_length for sample in _sorted(samples) if sample.context == index]
        means.append(math.fsum(lengths) / len(lengths))
    return CostTable(effective.contexts, curves, tuple(means), prefill_ms_per_token, looped)


def curves_of(table: CostTable) -> dict[CurveKey, Curve]:
    """Every curve of a table, ascending."""
    plain: dict[CurveKey, Curve] = {(*key, 0): curve for key, curve in table.curves.items()}
    return dict(sorted({**plain, **table.looped}.items()))


def curve_of(table: CostTable, place: Sample | Point) -> Curve:
    """The curve that a measured point belongs to; KeyError if there is none."""
    context, steps, depth = _key(place)
    return table.looped[context, steps, depth] if depth else table.curves[context, steps]


def _key(place: Sample | Point) -> CurveKey:
    return place.context, place.draft_steps, (place.depth or 0) if place.draft_steps else 0


def check_coverage(points: Sequence[Point], samples: Sequence[Sample]) -> None:
    """CalibrationError unless every point was measured once and nothing else was; it says what differs."""
    found = Counter(Point(s.context, s.draft_steps, s.requests, s.target_rows, s.depth) for s in samples)
    wanted = set(points)
    reasons = [f"not measured: {_named(point)}" for point in points if point not in found]
    reasons += [f"not asked for: {_named(point)}" for point in found if point not in wanted]
    reasons += [f"measured {count} times: {_named(point)}" for point, count in found.items() if count > 1]
    if reasons:
        shown = [*reasons[:12], f"and {len(reasons) - 12} more"] if len(reasons) > 12 else reasons
        raise CalibrationError("the samples are not those of the calibration's points", shown)


def relative_residuals(curve: Curve, samples: Sequence[Sample]) -> tuple[float, ...]:
    """(fitted - measured) / measured of each sample, aligned; ValueError for one outside the curve."""
    residuals = []
    for sample in samples:
        fitted = curve.ms(sample.requests, sample.target_rows)
        if fitted is None:
            raise ValueError(f"the curve says nothing of {_named(sample)}")
        residuals.append(fitted / sample.median_ms - 1.0)
    return tuple(residuals)


def _check(samples: Sequence[Sample]) -> None:
    if not samples:
        raise CalibrationError("no samples to fit")
    bad = [
        f"{_named(sample)}: {', '.join(f'{ms:g}' for ms in sample.windows_ms) or 'no windows'}"
        for sample in _sorted(samples)
        if not sample.windows_ms or not all(0 < ms <= 1000 * LONGEST_ROUND_S for ms in sample.windows_ms)
    ]
    bad += [
        f"{_named(sample)}: mean KV length {sample.kv_length:g}"
        for sample in _sorted(samples)
        if not (math.isfinite(sample.kv_length) and sample.kv_length > 0)
    ]
    if bad:
        raise CalibrationError(
            f"samples must be above 0 ms and at most {LONGEST_ROUND_S:g} s, at a positive KV length", bad
        )


def _sorted(samples: Sequence[Sample]) -> list[Sample]:
    return sorted(
        samples,
        key=lambda s: (
            s.context,
            s.draft_steps,
            s.depth or 0,
            s.requests,
            s.target_rows,
            s.kv_length,
            s.windows_ms,
        ),
    )


def _named(place: Sample | Point) -> str:
    loops = f" with {place.depth} loops" if place.depth else ""
    return (
        f"context {place.context}, {place.draft_steps} drafts{loops}, {place.requests} requests, "
        f"{place.target_rows} target rows"
    )
