"""Calibrations that were never measured: geometries, and samples that follow a known additive law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from xspec.cost.model import Sample
from xspec.cost.settings import (
    CalibrationSettings,
    ContextInterval,
    Control,
    Effective,
    Geometry,
    Point,
    resolve,
)

Tiers = Callable[[int], Sequence[int]]


def geometry(control: Control, width: int, buckets: Sequence[int], **changes: Any) -> Geometry:
    sizes = {"max_model_len": 2048, "cache_tokens": 65536, "block_size": 128, "slots": 2, **changes}
    if control is Control.SPEC:
        sizes.setdefault("pairs", tuple((steps, None) for steps in range(1, width + 1)))
    return Geometry(control=control, draft_width=width, request_buckets=tuple(buckets), **sizes)


def multiples(width: int) -> Tiers:
    """B, 2B, 4B and the full width, as a graph grid of powers of two has them."""
    return lambda lanes: sorted({lanes * n for n in (1, 2, 4) if n < width + 1} | {lanes * (width + 1)})


def listed(rows: Sequence[int], width: int) -> Tiers:
    """Whatever of `rows` holds the lanes, below the full width, and that."""
    return lambda lanes: [*(r for r in rows if lanes <= r < lanes * (width + 1)), lanes * (width + 1)]


def law_ms(point: Point) -> float:
    """Additive in requests and rows for every context and depth, so both models can be checked."""
    base = 20.0 + 5.0 * point.context + 2.0 * point.draft_steps * (point.depth or 1)
    return base + 0.25 * point.requests + 0.5 * point.target_rows


def measured(effective: Effective, kv_lengths: Sequence[float] = (100.0, 500.0, 900.0)) -> tuple[Sample, ...]:
    """A sample for every point; the median of its windows is the law's, the others are off to both sides."""
    spread = [1.0 + (index - (effective.windows_per_point - 1) / 2) / 10 for index in range(99)]
    return tuple(
        Sample(
            draft_steps=point.draft_steps,
            requests=point.requests,
            target_rows=point.target_rows,
            context=point.context,
            kv_length=kv_lengths[point.context],
            windows_ms=tuple(law_ms(point) * spread[index] for index in range(effective.windows_per_point)),
            depth=point.depth,
        )
        for point in effective.points
    )


def small(control: Control, **changes: Any) -> Effective:
    """Two drafts, three buckets, two contexts."""
    settings = CalibrationSettings(
        contexts=(ContextInterval(32, 1, 127), ContextInterval(160, 128, 4096, (1, 2))),
        window_steps=4,
        warmup_steps=2,
    )
    settings = replace(settings, **changes)
    return resolve(settings, geometry(control, 2, (1, 2, 4)), multiples(2))
