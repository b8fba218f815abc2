"""What a simulation shows and keeps: a table for people, a JSON document with every figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xspec.sim.compare import Comparison, Figures, Outcome

FORMAT = "xspec simulate"
FORMAT_VERSION = 1
COLUMNS = ("tokens/s", "tokens/round", "vs best fixed", "vs oracle", "switches/min", "probes", "plain")
WIDTHS = (10, 14, 15, 11, 14, 8, 8)
CHOICES_SHOWN = 4


def table(found: Comparison) -> str:
    """One block per phase and one over all; regrets as the share of tokens/s lost (negative: gained)."""
    blocks = [_block(found, index) for index in range(len(found.labels))]
    if len(blocks) > 1:
        blocks.append(_block(found, None))
    return "\n\n".join("\n".join(lines) for lines in blocks)


def _block(found: Comparison, phase: int | None) -> Iterator[str]:
    best, names = found.best_fixed(phase), [outcome.contender.name for outcome in found.outcomes]
    margin = max(map(len, names)) + 2
    figures = best.total if phase is None else best.phases[phase]
    assert figures is not None
    label = f"phase {phase + 1}: {found.labels[phase]}" if phase is not None else "all phases"
    yield f"{label}, best fixed width in hindsight: {best.contender.name}"
    if phase is None:
        yield f"  each phase at its own best fixed width: {found.per_phase_best():.1f} tokens/s"
    cells = zip(COLUMNS, WIDTHS, strict=True)
    yield "  " + " " * margin + "".join(f"{name:>{width}}" for name, width in cells)
    for outcome in found.outcomes:
        if outcome.total is None:
            yield f"  {outcome.contender.name:<{margin}}not measured: {outcome.refused}"
        else:
            yield f"  {outcome.contender.name:<{margin}}" + _row(found, outcome, phase)
    for outcome in found.outcomes:
        if not outcome.contender.fixed and outcome.total is not None:
            yield from _choices(outcome, phase)
    yield from _difficulties(found, phase)


def _row(found: Comparison, outcome: Outcome, phase: int | None) -> str:
    figures = figures_in(outcome, phase)
    shown = (
        f"{figures.tokens_per_s:.1f}",
        f"{figures.tokens_per_round:.2f}",
        _share(found.regret(outcome, found.best_fixed(phase), phase)),
        _share(found.regret_oracle(outcome, phase)),
        f"{figures.switches_per_minute:.1f}",
        _share(figures.probe_share),
        _share(figures.plain_share),
    )
    return "".join(f"{text:>{width}}" for text, width in zip(shown, WIDTHS, strict=True))


def figures_in(outcome: Outcome, phase: int | None) -> Figures:
    """Figures of an outcome that ran."""
    figures = outcome.total if phase is None else outcome.phases[phase]
    assert figures is not None
    return figures


def _choices(outcome: Outcome, phase: int | None) -> Iterator[str]:
    figures = figures_in(outcome, phase)
    shares = [
        f"{name} {_share(count / figures.decode_rounds)}" for name, count in figures.choices[:CHOICES_SHOWN]
    ]
    more = len(figures.choices) - len(shares)
    rest = f" and {more} more" if more > 0 else ""
    yield f"  {outcome.contender.name} ran {'; '.join(shares)}{rest}"


def _difficulties(found: Comparison, phase: int | None) -> Iterator[str]:
    """Rows and tokens by class, where there are several."""
    for outcome in found.outcomes:
        if outcome.total is None:
            continue
        classes = figures_in(outcome, phase).difficulties
        if len(classes) > 1:
            shown = ", ".join(f"{c.name} {c.verify_rows:.2f} rows {c.tokens:.2f} tokens" for c in classes)
            yield f"  {outcome.contender.name}, per request and round: {shown}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value + 0.0:.1f} %"


def document(
    found: Comparison, *, settings: Mapping[str, Any], source: Mapping[str, Any], notes: Sequence[str]
) -> dict[str, Any]:
    """Everything shown, and the figures of all phases, for machines."""
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "settings": dict(settings),
        "costs": dict(source),
        "notes": list(notes),
        "phases": list(found.labels),
        "best_fixed": found.best_fixed().contender.name,
        "best_fixed_by_phase": [found.best_fixed(index).contender.name for index in range(len(found.labels))],
        "per_phase_best_tokens_per_s": found.per_phase_best(),
        "contenders": [_contender(found, outcome) for outcome in found.outcomes],
    }


def _contender(found: Comparison, outcome: Outcome) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": outcome.contender.name, "fixed": outcome.contender.fixed}
    if outcome.total is None or outcome.run is None:
        return {**entry, "refused": outcome.refused}
    latencies = outcome.run.latencies_s
    return {
        **entry,
        "mean_latency_s": sum(latencies) / len(latencies) if latencies else None,
        "requests": len(latencies),
        "total": _figures(found, outcome, None),
        "phases": [_figures(found, outcome, index) for index in range(len(found.labels))],
    }


def _figures(found: Comparison, outcome: Outcome, phase: int | None) -> dict[str, Any]:
    figures = figures_in(outcome, phase)
    return {
        **dataclasses.asdict(figures),
        "choices": dict(figures.choices),
        "tokens_per_s": figures.tokens_per_s,
        "switches_per_minute": figures.switches_per_minute,
        "regret_best_fixed": found.regret(outcome, found.best_fixed(phase), phase),
        "regret_oracle": found.regret_oracle(outcome, phase),
    }
