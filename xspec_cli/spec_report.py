"""What offline sampling found, for people: what pays at each batch size, and how far predictions held.

Turns results into Markdown; measures nothing. The figures are in `spec_plots.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from xspec.calib.sampling import Confirmed, Sampled
from xspec.cost.settings import Pair
from xspec.errors import ConfigError
from xspec.policy.spec_config import AdaptiveSpecConfig, spec_config_json

log = logging.getLogger(__name__)


def named(pair: Pair | None) -> str:
    if pair is None:
        return "plain"
    return str(pair[0]) if pair[1] is None else f"{pair[0]}@{pair[1]}"


def summary(sampled: Sampled, config: AdaptiveSpecConfig) -> str:
    """For the terminal: the best pair of each batch size, then the candidates."""
    lines = [*_best_table(sampled), ""]
    lines += _candidate_table(config)
    return "\n".join(lines)


def markdown(sampled: Sampled, config: AdaptiveSpecConfig, pictures: Sequence[str]) -> str:
    """The whole report. `pictures`: lines of Markdown that show the figures or say why there are none."""
    settings = sampled.settings
    parts = [
        f"# Offline sampling: (K, d) of {config.model.name}",
        f"{config.provenance.source}; {config.provenance.created_at}. Screened with answers of "
        f"{settings.screen_tokens} tokens, confirmed with {settings.confirm_tokens}, {settings.repeats} "
        "trials each. Speed-ups are over plain rounds; tokens/s are those of full decode rounds.",
        "\n".join(_best_table(sampled)),
        *pictures,
        "## Acceptance",
        f"Match rates by depth: {_rates(sampled)}. Accepted of the proposed drafts, K down, d across:",
        "\n".join(_acceptance_table(sampled)),
    ]
    for requests in settings.requests:
        parts += [
            f"## {requests} request{'s' if requests > 1 else ''}",
            "Predicted speed-up of every pair, K down, d across:",
            "\n".join(_screen_table(sampled, requests)),
            "Confirmed in the engine:",
            "\n".join(_confirmed_table([c for c in sampled.confirmed if c.requests == requests])),
        ]
    parts += ["## Held-out prompts", "\n".join(_confirmed_table(sampled.evaluated))]
    parts += ["## Candidates", "\n".join(_candidate_table(config))]
    parts += [f"```json\n{json.dumps(spec_config_json(config), indent=1)}\n```"]
    return "\n\n".join(parts) + "\n"


def write_report(sampled: Sampled, config: AdaptiveSpecConfig, path: Path) -> None:
    """The report and, where they can be drawn, its figures beside it."""
    from xspec_cli.spec_plots import MISSING, draw

    try:
        drawn = draw(sampled, config, path)
        shown = [f"![{about}]({picture.name})" for about, picture in drawn] or [MISSING]
        path.write_text(markdown(sampled, config, shown), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report={path}: cannot be written: {error.strerror or error}") from error
    log.info("the report is in %s, with %d figures", path, len(drawn))


def _best_table(sampled: Sampled) -> Iterator[str]:
    yield _row(["requests", "plain tokens/s", "pair", "predicted", "measured", "held-out prompts"])
    yield _row(["---:", "---:", "---", "---:", "---:", "---:"])
    for requests in sampled.settings.requests:
        pair = sampled.best_pair(requests)
        plain, ran = _of(sampled.confirmed, requests, None), _of(sampled.confirmed, requests, pair)
        base, held_out = _of(sampled.evaluated, requests, None), _of(sampled.evaluated, requests, pair)
        yield _row(
            [
                str(requests),
                f"{plain.measured:.1f}",
                named(pair),
                f"{ran.predicted / plain.predicted:.2f} x",
                f"{ran.measured / plain.measured:.2f} x",
                f"{held_out.measured / base.measured:.2f} x",
            ]
        )


def _candidate_table(config: AdaptiveSpecConfig) -> Iterator[str]:
    yield _row(["requests", "candidates (down, up; off)", "begins with", "beta"])
    yield _row(["---", "---", "---", "---:"])
    for index, one in enumerate(config.ranges):
        shown = [f"{c} ({_shown(c.down)}, {_shown(c.up)}; {_shown(c.off)})" for c in one.candidates]
        begins = f"{one.candidates[one.initial]}{' off' if one.initial_off else ''}"
        beta = config.ema_of(index).beta
        yield _row([f"{one.min_requests}-{one.max_requests}", ", ".join(shown), begins, f"{beta:g}"])


def _acceptance_table(sampled: Sampled) -> Iterator[str]:
    cells = {pair: f"{counted.acceptance:.3f}" for pair, counted in sampled.selection.grid.items()}
    yield from _grid(cells, sampled)


def _screen_table(sampled: Sampled, requests: int) -> Iterator[str]:
    cells = {s.pair: f"{s.speedup:.2f}" for s in sampled.screened if s.requests == requests}
    yield from _grid(cells, sampled)


def _grid(cells: dict[Pair, str], sampled: Sampled) -> Iterator[str]:
    yield _row(["K", *(f"d = {depth}" for depth in sampled.depths)])
    yield _row(["---:", *("---:" for _ in sampled.depths)])
    for steps in sorted({pair[0] for pair in sampled.pairs}):
        yield _row([str(steps), *(cells.get((steps, depth), "") for depth in sampled.depths)])


def _confirmed_table(ran: Sequence[Confirmed]) -> Iterator[str]:
    yield _row(["requests", "pair", "acceptance", "predicted/s", "measured/s", "with prompts/s"])
    yield _row(["---:", "---", "---:", "---:", "---:", "---:"])
    for one in ran:
        yield _row(
            [
                str(one.requests),
                named(one.pair),
                "" if one.pair is None else f"{one.acceptance:.3f}",
                f"{one.predicted:.1f}",
                f"{one.measured:.1f}",
                f"{one.end_to_end:.1f}",
            ]
        )


def _rates(sampled: Sampled) -> str:
    pairs = zip(sampled.depths, sampled.selection.rates, sampled.evaluation.rates, strict=True)
    return ", ".join(f"d = {d}: {one:.3f} (held-out prompts {two:.3f})" for d, one, two in pairs)


def _of(ran: Sequence[Confirmed], requests: int, pair: Pair | None) -> Confirmed:
    return next(c for c in ran if (c.requests, c.pair) == (requests, pair))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
