"""Tables of targets beside each other: by level, by phase, by class of traffic, and what adaptation is worth.

Every number is the median over rounds; ratios pair the rounds and carry a bootstrap interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xspec_cli.benchlib.hindsight import OTHER_HALF, SAME_ROUNDS, Verdict
from xspec_cli.benchlib.load import Level
from xspec_cli.benchlib.mix import ClassFigures, class_figures
from xspec_cli.benchlib.plan import PlanOptions, Run, runs_of
from xspec_cli.benchlib.stats import Ratio, median, paired_ratio

Cell = Callable[[Run], float | None]

COLUMNS: tuple[tuple[str, str, Cell], ...] = (
    ("tokens/row", ".2f", lambda run: _tokens_a_row(run)),
    ("accepted", ".2f", lambda run: _acceptance(run)),
    ("drafted", ".2f", lambda run: run.rounds.draft_steps if run.rounds else None),
    ("rows", ".1f", lambda run: run.rounds.target_rows if run.rounds else None),
    ("plain", ".0%", lambda run: run.rounds.plain_share if run.rounds else None),
    ("switches/min", ".1f", lambda run: _switches_a_minute(run)),
    ("time/cost", ".3f", lambda run: run.rounds.time_ratio if run.rounds else None),
)
"""Beside the throughput: tokens a request gets in a round, accepted share of the verified drafts, draft steps
and padded target rows of a round, share of plain rounds, changes of depth, measured over predicted time."""

CLASS_COLUMNS: tuple[tuple[str, str, Callable[[ClassFigures], float | None]], ...] = (
    ("requests", ".0f", lambda found: found.completed),
    ("tokens", ".0f", lambda found: found.tokens),
    ("tokens/row", ".2f", lambda found: found.tokens_a_round),
    ("accepted", ".2f", lambda found: found.acceptance),
)


def policy_tables(runs: Sequence[Run], options: PlanOptions, names: Sequence[str]) -> str:
    """One table per level, the first target being the base of all ratios."""
    return "\n\n".join("\n".join(_level_table(runs, level, options, names)) for level in options.levels)


def _level_table(runs: Sequence[Run], level: Level, options: PlanOptions, names: Sequence[str]) -> list[str]:
    taken = {name: runs_of(runs, level, name) for name in names}
    wide = max(len("policy"), *map(len, names))
    head = f"  {'policy':{wide}}{'tokens/s':>10}{'ratio (95 % interval)':>26}"
    head += "".join(f"{title:>{len(title) + 2}}" for title, _, _ in COLUMNS) + "  same text"
    lines = [f"{level}{_rounds(options.rounds)}", head]
    for name, done in taken.items():
        line = f"  {name:{wide}}{_shown(median([run.tokens_per_s for run in done]), '.1f'):>10}"
        line += (
            f"{'' if name == names[0] else _ratio(_rates(done), _rates(taken[names[0]]), options.seed):>26}"
        )
        for title, form, cell in COLUMNS:
            line += f"{_shown(_median(list(map(cell, done))), form):>{len(title) + 2}}"
        lines.append(line + f"{_shown(same_text(done, taken[names[0]]), '.0%'):>11}")
    return lines


def _rounds(count: int) -> str:
    return f", median of {count} rounds" if count > 1 else ""


def _rates(done: Sequence[Run]) -> list[float]:
    return [run.tokens_per_s for run in done]


def _ratio(above: Sequence[float], below: Sequence[float], seed: int) -> str:
    if len(above) != len(below) or not above or min(*above, *below) <= 0.0:
        return "-"
    return interval(paired_ratio(above, below, seed=seed))


def interval(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _tokens_a_row(run: Run) -> float | None:
    if run.rounds is not None:
        return run.rounds.tokens_a_row
    return run.speculation.mean_acceptance_length if run.speculation else None


def _acceptance(run: Run) -> float | None:
    if run.rounds is not None:
        return run.rounds.acceptance
    return run.speculation.acceptance_rate if run.speculation else None


def _switches_a_minute(run: Run) -> float | None:
    return run.rounds.switches / run.seconds * 60.0 if run.rounds and run.seconds > 0.0 else None


def same_text(done: Sequence[Run], base: Sequence[Run]) -> float | None:
    """Share of the requests answered in both with the same text. In bf16 near ties may differ."""
    same = total = 0
    for run, other in zip(done, base, strict=False):
        texts = {sample.prompt_index: sample.digest for sample in other.samples if sample.digest}
        known = [s for s in run.samples if s.digest and s.prompt_index in texts]
        same += sum(sample.digest == texts[sample.prompt_index] for sample in known)
        total += len(known)
    return same / total if total else None


def acceptance_lines(runs: Sequence[Run], options: PlanOptions, names: Sequence[str]) -> str:
    """Per level: acceptance by position given the one before, of all that drafted."""
    lines = []
    wide = max(map(len, names))
    for level in options.levels:
        for name in names:
            found = [
                run.speculation.conditional_rates for run in runs_of(runs, level, name) if run.speculation
            ]
            rates = [_shown(_median(list(at)), ".2f") for at in zip(*found, strict=False)]
            if rates:
                lines.append(f"  {name:{wide}}  {' '.join(rates)}   {level}")
    return "\n".join(["accepted by position, given the one before", *lines]) if lines else ""


def phase_tables(runs: Sequence[Run], options: PlanOptions, names: Sequence[str]) -> str:
    """Per plan of phases: tokens per second over all and in each phase, and how far was drafted in it."""
    blocks = []
    for level in options.levels:
        if level.phases:
            taken = {name: runs_of(runs, level, name) for name in names}
            wide = max(len("tokens/s"), *(len(name) for name in names))
            head = f"  {'tokens/s':{wide}}{'all':>10}" + "".join(f"{phase!s:>10}" for phase in level.phases)
            rates = [_phase_line(name, wide, done) for name, done in taken.items()]
            depths = [_depth_line(name, wide, done) for name, done in taken.items() if _has_rounds(done)]
            if depths:
                depths = [f"  {'drafted':{wide}}", *depths]
            blocks.append("\n".join([f"by phase{_rounds(options.rounds)}", head, *rates, *depths]))
    return "\n\n".join(blocks)


def _has_rounds(done: Sequence[Run]) -> bool:
    return any(phase.rounds is not None for run in done for phase in run.phases)


def _phase_line(name: str, wide: int, done: Sequence[Run]) -> str:
    phases = zip(*(run.phases for run in done), strict=True)
    rates = [median(_rates(done)), *(median([p.tokens_per_s for p in found]) for found in phases)]
    return f"  {name:{wide}}" + "".join(f"{rate:>10.1f}" for rate in rates)


def _depth_line(name: str, wide: int, done: Sequence[Run]) -> str:
    phases = zip(*(run.phases for run in done), strict=True)
    whole = _median([run.rounds.draft_steps if run.rounds else None for run in done])
    steps = [_median([p.rounds.draft_steps if p.rounds else None for p in found]) for found in phases]
    return f"  {name:{wide}}" + "".join(f"{_shown(step, '.2f'):>10}" for step in (whole, *steps))


def class_tables(runs: Sequence[Run], options: PlanOptions, names: Sequence[str]) -> str:
    """Per level and class of traffic; `rows` are target rows that one of its requests takes in a round."""
    blocks = []
    for level in options.levels:
        taken = {name: runs_of(runs, level, name) for name in names}
        classes = [found.traffic for found in class_figures(taken[names[0]])]
        wide = max(len("policy"), *map(len, names))
        deep = max(len("class"), *map(len, classes))
        head = f"  {'class':{deep}}  {'policy':{wide}}"
        head += "".join(f"{title:>{len(title) + 2}}" for title, _, _ in CLASS_COLUMNS)
        head += f"{'tokens/s':>10}{'ratio':>26}{'rows':>8}{'ratio':>26}"
        lines = [f"{level}, by class of traffic{_rounds(options.rounds)}", head]
        for traffic in classes:
            for name in names:
                text = _class_line(traffic, taken[name], taken[names[0]], name != names[0], options.seed)
                lines.append(f"  {traffic:{deep}}  {name:{wide}}{text}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _class_line(traffic: str, done: Sequence[Run], base: Sequence[Run], compared: bool, seed: int) -> str:
    (whole,) = _of_class(traffic, [done])
    line = "".join(f"{_shown(cell(whole), form):>{len(title) + 2}}" for title, form, cell in CLASS_COLUMNS)
    mine, theirs = (_of_class(traffic, [[run] for run in taken]) for taken in (done, base))
    for form, space, read in ((".1f", 10, _class_rate), (".2f", 8, _class_rows)):
        line += f"{_shown(_median([read(found) for found in mine]), form):>{space}}"
        above, below = ([read(found) or 0.0 for found in side] for side in (mine, theirs))
        line += f"{_ratio(above, below, seed) if compared else '':>26}"
    return line


def _of_class(traffic: str, groups: Sequence[Sequence[Run]]) -> list[ClassFigures]:
    """The figures of one class in each group of runs that had any of it."""
    return [found for group in groups for found in class_figures(group) if found.traffic == traffic]


def _class_rate(found: ClassFigures) -> float | None:
    return found.tokens_per_s


def _class_rows(found: ClassFigures) -> float | None:
    return None if found.verified_a_round is None else 1.0 + found.verified_a_round


def verdict_tables(verdicts: Sequence[Verdict]) -> str:
    """What each policy that adapts is worth, per level: compared with what, the ratio, and who that was."""
    groups: dict[tuple[Level, str], list[Verdict]] = {}
    for found in verdicts:
        groups.setdefault((found.level, found.candidate), []).append(found)
    return "\n\n".join(
        "\n".join(_verdict_table(level, candidate, found)) for (level, candidate), found in groups.items()
    )


def _verdict_table(level: Level, candidate: str, found: Sequence[Verdict]) -> list[str]:
    rows: dict[str, dict[str, str]] = {}
    for verdict in found:
        where = (
            "" if verdict.phase is None else f"phase {verdict.phase + 1} ({level.phases[verdict.phase]}), "
        )
        text = f"{interval(verdict.ratio)}  {', '.join(verdict.baseline)}"
        rows.setdefault(where + verdict.claim, {})[verdict.chosen or SAME_ROUNDS] = text
    ways = [way for way in (SAME_ROUNDS, OTHER_HALF) if any(way in row for row in rows.values())]
    wide = max(map(len, (*rows, "over")))
    widths = [max(len(way), *(len(row.get(way, "")) for row in rows.values())) for way in ways]
    pairs = found[0].ratio.pairs
    lines = [f"{level}: {candidate}, {pairs} pair{'s' if pairs > 1 else ''}"]
    for name, row in (("over", dict(zip(ways, ways, strict=True))), *rows.items()):
        cells = (f"{row.get(way, ''):{width}}" for way, width in zip(ways, widths, strict=True))
        lines.append(f"  {name:{wide}}  {'  '.join(cells)}".rstrip())
    return lines
