"""What a benchmark shows and keeps: the table for people, the JSON document with every raw sample."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from xspec.errors import ConfigError
from xspec_cli.benchlib.hindsight import Verdict
from xspec_cli.benchlib.plan import Comparison, PlanOptions, Run, runs_of
from xspec_cli.benchlib.samples import RunFigures
from xspec_cli.benchlib.stats import Summary, median

FORMAT_VERSION = 1
LATENCIES: tuple[tuple[str, Callable[[RunFigures], Summary | None]], ...] = (
    ("TTFT", lambda figures: figures.ttft_ms),
    ("TPOT", lambda figures: figures.tpot_ms),
    ("ITL", lambda figures: figures.itl_ms),
    ("e2e", lambda figures: figures.e2e_ms),
)
COLUMNS: tuple[tuple[str, Callable[[Summary], float]], ...] = (
    ("mean", lambda summary: summary.mean),
    ("p50", lambda summary: summary.p50),
    ("p95", lambda summary: summary.p95),
    ("p99", lambda summary: summary.p99),
)


def table(runs: Sequence[Run], options: PlanOptions, targets: Sequence[str]) -> str:
    """One block per level and target. With several rounds every number is the median over them."""
    blocks = [
        "\n".join(_block(level_runs, str(level), target))
        for level in options.levels
        for target in targets
        if (level_runs := runs_of(runs, level, target))
    ]
    return "\n\n".join(blocks)


def _block(runs: Sequence[Run], level: str, target: str) -> list[str]:
    rounds = f", median of {len(runs)} rounds" if len(runs) > 1 else ""
    completed = sum(run.figures.completed for run in runs)
    failed = sum(run.figures.failed for run in runs)
    lines = [
        f"{target}, {level}{rounds}",
        f"  output tokens/s {_number(median([run.tokens_per_s for run in runs]))}"
        f"   requests/s {_number(median([run.figures.requests_per_s for run in runs]))}"
        f"   completed {completed}   failed {failed}",
        *_speculation(runs),
        "  " + " " * 8 + "".join(f"{name:>10}" for name, _ in COLUMNS),
    ]
    for name, latency in LATENCIES:
        summaries = [summary for run in runs if (summary := latency(run.figures)) is not None]
        cells = [_number(median(list(map(part, summaries))) if summaries else None) for _, part in COLUMNS]
        lines.append(f"  {name + ' ms':<8}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def _speculation(runs: Sequence[Run]) -> list[str]:
    found = [run.speculation for run in runs if run.speculation is not None]
    if not found:
        return []
    length = median([drafted.mean_acceptance_length for drafted in found])
    places = zip(*(drafted.position_rates for drafted in found), strict=False)
    rates = " ".join(f"{median(list(rates)):.2f}" for rates in places)
    return [f"  acceptance length {length:.2f}   drafts accepted up to each place {rates}"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def comparison_lines(comparisons: Sequence[Comparison]) -> str:
    """How the other targets compare with the first, level by level."""
    return "\n".join(
        f"{found.level}: {found.target} / {found.baseline} = {found.ratio.median:.3f} "
        f"(95 % interval {found.ratio.low:.3f} to {found.ratio.high:.3f}, {found.ratio.pairs} pairs, "
        "output tokens/s)"
        for found in comparisons
    )


def failures(runs: Sequence[Run], limit: int = 5) -> list[str]:
    """The distinct errors of all runs with their counts, most frequent first."""
    counts: dict[str, int] = {}
    for run in runs:
        for sample in run.samples:
            if sample.error is not None:
                counts[sample.error] = counts.get(sample.error, 0) + 1
    ordered = sorted(counts.items(), key=lambda entry: -entry[1])
    return [f"{count} x {error}" for error, count in ordered[:limit]]


def document(
    runs: Sequence[Run],
    comparisons: Sequence[Comparison],
    *,
    verdicts: Sequence[Verdict] = (),
    settings: Mapping[str, Any],
    targets: Sequence[Mapping[str, Any]],
    machine: Mapping[str, Any],
    started_at: str,
) -> dict[str, Any]:
    return {
        "format": "xspec bench",
        "version": FORMAT_VERSION,
        "started_at": started_at,
        "settings": dict(settings),
        "targets": [dict(target) for target in targets],
        "machine": dict(machine),
        "comparisons": [dataclasses.asdict(found) for found in comparisons],
        "verdicts": [dataclasses.asdict(found) for found in verdicts],
        "runs": [dataclasses.asdict(run) for run in runs],
    }


def check_output(path: str) -> None:
    """Refuse before any work what could not be written after it."""
    if not path:
        return
    if os.path.lexists(path):
        raise ConfigError(f"--output={path} exists already; a result is never overwritten")
    if not os.access(Path(path).absolute().parent, os.W_OK):
        raise ConfigError(f"--output={path}: its folder does not exist or cannot be written")


def write_document(path: str, body: Mapping[str, Any]) -> None:
    try:
        with open(path, "xb") as file:  # exclusive: another run may have taken the name meanwhile
            file.write(orjson.dumps(body, option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise ConfigError(f"--output={path} cannot be written: {error}") from error
