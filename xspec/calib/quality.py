"""How well fitted curves say what was measured, and where more rows seem to cost less.

Reads bundles; repairs nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from xspec.cost.bundle import Bundle
from xspec.cost.fit import CurveKey, curve_of, curves_of, relative_residuals
from xspec.cost.model import CostTable, Sample, monotone_violations

DISTURBED = 0.2
"""A larger spread of a point's windows says that something else ran on the machine."""

TOLERATED = 0.1
"""Share of points that may be disturbed so in a table that is kept."""

FALL = 0.25
"""A larger fall of costs with more rows is no kernel's doing."""


@dataclass(frozen=True, slots=True)
class Residual:
    """`error`: (fitted - measured) / measured."""

    sample: Sample
    error: float


@dataclass(frozen=True, slots=True)
class Quality:
    """`falls`: in words, where a curve falls with its rows."""

    residuals: tuple[Residual, ...]
    falls: tuple[str, ...]

    @property
    def median(self) -> float:
        return statistics.median(abs(residual.error) for residual in self.residuals)

    @property
    def worst(self) -> Residual:
        return max(self.residuals, key=lambda residual: abs(residual.error))


def quality_of(table: CostTable, samples: Sequence[Sample]) -> Quality:
    residuals = []
    for sample in samples:
        residuals.append(Residual(sample, relative_residuals(curve_of(table, sample), [sample])[0]))
    falls = []
    for key, curve in curves_of(table).items():
        found = monotone_violations(curve)
        for dearest, of_dearest in groupby(found, key=lambda fall: (fall[0], fall[2])):
            cheaper = ", ".join(f"{more} rows {ms:.2f}" for _, more, _, ms in of_dearest)
            where = f"context {key[0]}, {steps_named(key)}"
            falls.append(f"{where}: {dearest[0]} rows cost {dearest[1]:.2f} ms, {cheaper}")
    return Quality(tuple(residuals), tuple(falls))


def disturbances(bundle: Bundle) -> list[str]:
    """What other work on the machine must have done to a measured table, in words; empty where it is sound.

    Costs that fall by more than a quarter with more rows, and points whose median window lies more than a
    fifth above the fastest, if they are more than a tenth of all points.
    """
    found = []
    for key, curve in curves_of(bundle.table).items():
        for few, more, dear, cheap in monotone_violations(curve, tolerance=FALL):
            where = f"{steps_named(key)}, context {key[0]}"
            found.append(f"{where}: {few} rows cost {dear:.1f} ms and {more} rows {cheap:.1f} ms")
    uneven = [sample for sample in bundle.samples if sample.spread > DISTURBED]
    if len(uneven) > TOLERATED * len(bundle.samples):
        found += [
            f"{describe(sample)}: windows of {min(sample.windows_ms):.1f} to {max(sample.windows_ms):.1f} ms"
            for sample in uneven
        ]
    return found


def steps_named(key: CurveKey) -> str:
    """In words, without the context."""
    return f"{key[1]} draft steps" + (f" with {key[2]} loops" if key[2] else "")


def describe(sample: Sample) -> str:
    steps = steps_named((sample.context, sample.draft_steps, sample.depth or 0))
    return f"{steps}, {sample.requests} requests, {sample.target_rows} target rows, context {sample.context}"
