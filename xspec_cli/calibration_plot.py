"""A picture of fitted cost curves against what was measured. Matplotlib is an extra and loaded here only."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from xspec.cost.bundle import Bundle
from xspec.cost.fit import curves_of

MISSING = "No picture of the curves: matplotlib is not installed (pip install 'xspec[plots]')."

WIDTH_INCHES, HEIGHT_INCHES = 6.0, 4.5

MARKERS = "os^Dv"
"""By loops that draft."""


def draw(bundle: Bundle, path: Path) -> bool:
    """Write a PNG: a panel a context, milliseconds over target rows. False where matplotlib is missing."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    contexts = range(len(bundle.effective.contexts))
    figure = figures.Figure(figsize=(WIDTH_INCHES * len(contexts), HEIGHT_INCHES), layout="constrained")
    for context, axes in zip(contexts, figure.subplots(1, len(contexts), squeeze=False)[0], strict=True):
        _panel(bundle, context, axes)
    figure.savefig(path, format="png", dpi=120)
    return True


def _panel(bundle: Bundle, context: int, axes: Any) -> None:
    """Dots: measured. Lines: fitted, one for each request bucket where the curve tells them apart."""
    interval = bundle.effective.contexts[context]
    for (at, steps, depth), curve in curves_of(bundle.table).items():
        if at != context:
            continue
        samples = [
            s for s in bundle.samples if (s.context, s.draft_steps, s.depth or 0) == (context, steps, depth)
        ]
        colour, marker = f"C{steps % 10}", MARKERS[max(depth - 1, 0) % len(MARKERS)]
        drafts = f"K {steps}, d {depth}" if depth else f"{steps} draft steps"
        name = drafts if steps else "plain"
        rows = [s.target_rows for s in samples]
        axes.plot(rows, [s.median_ms for s in samples], marker, color=colour, markersize=4, label=name)
        for requests in sorted({s.requests for s in samples}):
            mine = sorted(s.target_rows for s in samples if s.requests == requests)
            axes.plot(mine, [curve.ms(requests, size) for size in mine], "-", color=colour, linewidth=1)
    axes.set_title(f"{interval.kv} (dots: measured, lines: fitted)", fontsize=10)
    axes.set_xlabel("padded target rows")
    axes.set_ylabel("ms a round")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
