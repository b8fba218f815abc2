"""The RFC's figures of offline sampling as PNG. Matplotlib is an extra and loaded here only."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xspec.calib.sampling import Sampled
from xspec.cost.looped import ideal_speedup
from xspec.cost.settings import Pair
from xspec.policy.spec_config import AdaptiveSpecConfig

MISSING = "No figures: matplotlib is not installed (pip install 'xspec[plots]')."

PANEL_INCHES, HEIGHT_INCHES = 4.0, 3.6
CURVE_POINTS = 41

Draw = Callable[[Any, Sampled, AdaptiveSpecConfig], None]


def draw(sampled: Sampled, config: AdaptiveSpecConfig, report: Path) -> list[tuple[str, Path]]:
    """PNG files beside `report`, with what they show; none where matplotlib is missing."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return []
    drawn = []
    for (_, about, panels, paint), path in zip(_FIGURES, pictures_of(report), strict=True):
        width = PANEL_INCHES * (len(sampled.settings.requests) if panels else 1.4)
        figure = figures.Figure(figsize=(width, HEIGHT_INCHES), layout="constrained")
        paint(figure, sampled, config)
        figure.savefig(path, format="png", dpi=120)
        drawn.append((about, path))
    return drawn


def pictures_of(report: Path) -> list[Path]:
    """Every file that `draw` writes."""
    return [report.with_name(f"{report.stem}_{name}.png") for name, *_ in _FIGURES]


def _speedups(figure: Any, sampled: Sampled, config: AdaptiveSpecConfig) -> None:
    """A panel a batch size; blue loses, red wins."""
    sizes = sampled.settings.requests
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    largest = max(max(s.speedup, 1.0 / s.speedup) for s in sampled.screened)
    for requests, axes in zip(sizes, panels, strict=True):
        cells = {s.pair: s.speedup for s in sampled.screened if s.requests == requests}
        _heat(axes, cells, sampled, "RdBu_r", 2.0 - largest, largest)
        axes.set_title(f"speed-up, {requests} request{'s' if requests > 1 else ''}", fontsize=10)


def _acceptances(figure: Any, sampled: Sampled, config: AdaptiveSpecConfig) -> None:
    cells = {pair: counted.acceptance for pair, counted in sampled.selection.grid.items()}
    axes = figure.subplots()
    _heat(axes, cells, sampled, "viridis", 0.0, 1.0, dark=0.5)
    axes.set_title("accepted of the proposed drafts", fontsize=10)


def _against_acceptance(figure: Any, sampled: Sampled, config: AdaptiveSpecConfig) -> None:
    """Marks: predicted by measured costs. Lines: S = D (1 + K a) / (D + d K), thicker with K."""
    axes = figure.subplots()
    loops = config.model.loops or 1 + max(sampled.depths)
    xs = [index / (CURVE_POINTS - 1) for index in range(CURVE_POINTS)]
    steps_all = sorted({pair[0] for pair in sampled.pairs})
    for depth in sampled.depths:
        for rank, steps in enumerate(steps_all):
            ys = [ideal_speedup(loops, steps, depth, x) for x in xs]
            label = f"ideal, d = {depth}" if steps == steps_all[-1] else None
            axes.plot(xs, ys, color=f"C{depth + 3}", linewidth=0.4 + 0.4 * rank, alpha=0.6, label=label)
    for index, requests in enumerate(sampled.settings.requests):
        mine = [s for s in sampled.screened if s.requests == requests]
        axes.plot(
            [s.acceptance for s in mine],
            [s.speedup for s in mine],
            "os^Dv"[index % 5],
            color=f"C{index}",
            markersize=5,
            label=f"{requests} request{'s' if requests > 1 else ''}",
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("acceptance")
    axes.set_ylabel("speed-up")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _predictions(figure: Any, sampled: Sampled, config: AdaptiveSpecConfig) -> None:
    axes = figure.subplots()
    for mark, name, ran in (("o", "selection", sampled.confirmed), ("x", "held out", sampled.evaluated)):
        for index, requests in enumerate(sampled.settings.requests):
            mine = [c for c in ran if c.requests == requests]
            axes.plot(
                [c.predicted for c in mine],
                [c.measured for c in mine],
                mark,
                color=f"C{index}",
                label=f"{requests} at once, {name}",
            )
    every = [*sampled.confirmed, *sampled.evaluated]
    ends = [
        f(min(c.predicted, c.measured) if f is min else max(c.predicted, c.measured) for c in every)
        for f in (min, max)
    ]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted tokens/s")
    axes.set_ylabel("measured tokens/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)


def _heat(
    axes: Any,
    cells: Mapping[Pair, float],
    sampled: Sampled,
    colours: str,
    low: float,
    high: float,
    dark: float = -1.0,
) -> None:
    """K up, d across, the value in each cell, white below `dark`; an empty one was not measured."""
    steps = sorted({pair[0] for pair in sampled.pairs})
    nan = float("nan")
    rows = [[cells.get((k, depth), nan) for depth in sampled.depths] for k in steps]
    axes.imshow(rows, cmap=colours, vmin=low, vmax=high, aspect="auto", origin="lower")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if value == value:
                ink = "white" if value < dark else "black"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=9, color=ink)
    axes.set_xticks(range(len(sampled.depths)), [f"{depth}" for depth in sampled.depths])
    axes.set_yticks(range(len(steps)), [f"{k}" for k in steps])
    axes.set_xlabel("d (draft loops)")
    axes.set_ylabel("K (draft tokens)")


_FIGURES: tuple[tuple[str, str, bool, Draw], ...] = (
    ("speedup", "Predicted speed-up by K and d", True, _speedups),
    ("acceptance", "Draft acceptance by K and d", False, _acceptances),
    ("speedup_acceptance", "Speed-up against acceptance", False, _against_acceptance),
    ("predicted", "Predicted against measured tokens/s", False, _predictions),
)
