"""How well fitted curves say what was measured, and where more rows seem to cost less.

Reads bundles; repairs nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from xspec.cost.fit import relative_residuals
from xspec.cost.model import CostTable, Sample, monotone_violations


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
        curve = table.curves[sample.context, sample.draft_steps]
        residuals.append(Residual(sample, relative_residuals(curve, [sample])[0]))
    falls = []
    for (context, steps), curve in sorted(table.curves.items()):
        found = monotone_violations(curve)
        for dearest, of_dearest in groupby(found, key=lambda fall: (fall[0], fall[2])):
            cheaper = ", ".join(f"{more} rows {ms:.2f}" for _, more, _, ms in of_dearest)
            where = f"context {context}, {steps} draft steps"
            falls.append(f"{where}: {dearest[0]} rows cost {dearest[1]:.2f} ms, {cheaper}")
    return Quality(tuple(residuals), tuple(falls))


def describe(sample: Sample) -> str:
    return (
        f"{sample.draft_steps} draft steps, {sample.requests} requests, {sample.target_rows} target rows, "
        f"context {sample.context}"
    )
