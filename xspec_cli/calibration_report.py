"""What a calibration found, for people: settings, fit, and the width that its costs favour at each load. For
(K, d) it is the acceptance from which on each of them gains.

Turns a bundle into Markdown; measures nothing and draws nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xspec.calib.quality import Quality, Residual, describe, quality_of, steps_named
from xspec.cost.bundle import Bundle, effective_json
from xspec.cost.fit import curve_of, curves_of
from xspec.cost.looped import off_acceptance
from xspec.cost.model import Additive, Curve
from xspec.cost.settings import Control, Point

RATES = (0.4, 0.6, 0.8)
"""Conditional acceptance rates that widths are compared at: that a draft is accepted if all before it were.
"""

FACTS = ("device", "compute_threads", "dtype", "xspec", "torch_patch", "algorithm", "draft_width", "slots")


@dataclass(frozen=True, slots=True)
class Width:
    """A way to run a round of `requests` requests, all of which a full bucket has."""

    draft_steps: int
    requests: int
    target_rows: int
    tokens_per_s: float

    def named(self, control: Control) -> str:
        if self.draft_steps == 0:
            return "plain"
        if control is Control.DRAFT_STEP:
            return f"{self.draft_steps} steps"
        return f"{self.target_rows} rows"


def expected_tokens(requests: int, target_rows: int, draft_steps: int, rate: float) -> float:
    """Tokens of a round whose drafts are each accepted with probability `rate` if all before them were.

    Rows beyond one a request verify the drafts likeliest to be accepted: all first ones, then all second
    ones. What is left when a position cannot be verified for all requests goes to some of them.
    """
    drafts = min(target_rows - requests, requests * draft_steps)
    whole, rest = divmod(drafts, requests)
    survival = [rate**position for position in range(1, whole + 2)]
    return requests * (1.0 + sum(survival[:whole])) + rest * survival[whole]


def best_width(bundle: Bundle, context: int, requests: int, rate: float) -> Width:
    """Of the measured widths of a full bucket that which yields most tokens a second; the narrower of equal
    ones."""
    widths = []
    for point in bundle.effective.points:
        padded = point.target_rows > point.requests * (point.draft_steps + 1)  # only there to connect the fit
        if (point.context, point.requests) != (context, requests) or padded:
            continue
        ms = curve_of(bundle.table, point).ms(requests, point.target_rows)
        if ms is not None:
            tokens = expected_tokens(requests, point.target_rows, point.draft_steps, rate)
            widths.append(Width(point.draft_steps, requests, point.target_rows, 1e3 * tokens / ms))
    return max(widths, key=lambda w: (w.tokens_per_s, -w.target_rows))


def summary(bundle: Bundle) -> str:
    """The best widths, or where (K, d) begin to gain, in a few lines for the terminal."""
    lines = [_fit_line(quality_of(bundle.table, bundle.samples))]
    for context in range(len(bundle.effective.contexts)):
        lines += ["", _context_title(bundle, context), *_load_table(bundle, context)]
    return "\n".join(lines)


def markdown(bundle: Bundle, picture: str) -> str:
    """The whole report. `picture`: a line of Markdown that shows the curves or says why it does not."""
    quality = quality_of(bundle.table, bundle.samples)
    described = effective_json(bundle.effective)
    facts = [f"| {key} | {bundle.fingerprint.get(key, '')} |" for key in FACTS]
    parts = [
        f"# Costs of rounds: {bundle.control} with {bundle.algorithm}",
        f"Measured {bundle.created_at}.",
        "\n".join(["| engine | |", "| --- | --- |", *facts]),
        *_load_title(bundle.control),
    ]
    for context in range(len(bundle.effective.contexts)):
        parts += [f"### {_context_title(bundle, context)}", "\n".join(_load_table(bundle, context))]
    parts += ["## Fit", _fit_line(quality)]
    parts += [f"Costs fall with more rows: {fall}." for fall in quality.falls]
    parts += [picture]
    for context in range(len(bundle.effective.contexts)):
        of_context = [r for r in quality.residuals if r.sample.context == context]
        parts += [f"### {_context_title(bundle, context)}", "\n".join(_samples_table(of_context))]
    parts += ["## Curves", "\n".join(_curves(bundle)), "## Settings", _block(described["settings"])]
    parts += ["## Captured geometry", _block(described["captured"])]
    return "\n\n".join(parts) + "\n"


def _context_title(bundle: Bundle, context: int) -> str:
    interval = bundle.effective.contexts[context]
    return f"{interval.kv}, measured at a mean of {bundle.table.kv_means[context]:.0f} tokens"


def _load_title(control: Control) -> tuple[str, str]:
    if control is Control.SPEC:
        return (
            "## Where speculation begins to gain",
            "K drafts with d loops as K@d. In each cell: ms of the round, and the draft acceptance from "
            "which on it yields more tokens a second than plain rounds, (T / T_plain - 1) / K; above 1 "
            "it never does.",
        )
    return (
        "## Predicted best width by load",
        "Requests fill their bucket; drafts are accepted with the rate at the top if all before them were. "
        "In each cell: the width whose predicted tokens a second are highest, and those.",
    )


def _load_table(bundle: Bundle, context: int) -> Iterator[str]:
    return (_gain_table if bundle.control is Control.SPEC else _best_table)(bundle, context)


def _gain_table(bundle: Bundle, context: int) -> Iterator[str]:
    """A row for each (K, d), a column for each bucket."""
    points = [p for p in bundle.effective.points if p.context == context]
    requests = sorted({p.requests for p in points})
    by_pair: dict[tuple[int, int], dict[int, Point]] = {}
    for point in points:
        by_pair.setdefault((point.draft_steps, point.depth or 0), {})[point.requests] = point
    plain = by_pair.get((0, 0), {})
    yield _row(["K@d", *(f"{bucket} requests" for bucket in requests)])
    yield _row(["---", *("---:" for _ in requests)])
    for (steps, depth), measured in sorted(by_pair.items()):
        name = f"{steps}@{depth}" if depth else str(steps)
        cells = [_gain_cell(bundle, measured.get(bucket), plain.get(bucket)) for bucket in requests]
        yield _row([name if steps else "plain", *cells])


def _gain_cell(bundle: Bundle, point: Point | None, plain: Point | None) -> str:
    ms, plain_ms = (
        None if one is None else curve_of(bundle.table, one).ms(one.requests, one.target_rows)
        for one in (point, plain)
    )
    if point is None or ms is None:
        return ""
    if not point.draft_steps or plain_ms is None:
        return f"{ms:.2f}"
    return f"{ms:.2f}, {max(off_acceptance(point.draft_steps, ms, plain_ms), 0.0):.2f}"


def _best_table(bundle: Bundle, context: int) -> Iterator[str]:
    requests = sorted({p.requests for p in bundle.effective.points if p.context == context})
    yield _row(["requests", *(f"rate {rate:g}" for rate in RATES)])
    yield _row(["---:", *("---" for _ in RATES)])
    for bucket in requests:
        best = [best_width(bundle, context, bucket, rate) for rate in RATES]
        yield _row([str(bucket), *(f"{w.named(bundle.control)}, {w.tokens_per_s:.1f}/s" for w in best)])


def _samples_table(residuals: Sequence[Residual]) -> Iterator[str]:
    yield _row(["drafts", "requests", "target rows", "KV", "windows ms", "median ms", "fit"])
    yield _row(["---:", "---:", "---:", "---:", "---", "---:", "---:"])
    for residual in residuals:
        sample = residual.sample
        yield _row(
            [
                f"{sample.draft_steps}@{sample.depth}" if sample.depth else str(sample.draft_steps),
                str(sample.requests),
                str(sample.target_rows),
                f"{sample.kv_length:.0f}",
                " ".join(f"{ms:.2f}" for ms in sample.windows_ms),
                f"{sample.median_ms:.2f}",
                f"{100 * residual.error:+z.1f} %",
            ]
        )


def _fit_line(quality: Quality) -> str:
    worst = quality.worst
    return (
        f"{len(quality.residuals)} points; fitted against measured: median {100 * quality.median:.1f} %, "
        f"worst {100 * worst.error:+z.1f} % ({describe(worst.sample)})."
    )


def _curves(bundle: Bundle) -> Iterator[str]:
    for key, curve in curves_of(bundle.table).items():
        yield f"- context {key[0]}, {steps_named(key)}: {_curve(curve)}"
    yield f"- a prompt token: {bundle.table.prefill_ms_per_token:.3f} ms"


def _curve(curve: Curve) -> str:
    if isinstance(curve, Additive):
        alpha = _pairs(curve.requests, [1e3 * s for s in curve.alpha_s])
        theta = _pairs(curve.target_rows, [1e3 * s for s in curve.theta_s])
        return f"{1e3 * curve.bias_s:.2f} ms, by requests {alpha}, by target rows {theta}"
    return f"ms by target rows {_pairs(curve.target_rows, [1e3 / sps for sps in curve.steps_per_second])}"


def _pairs(sizes: Sequence[int], values: Sequence[float]) -> str:
    return ", ".join(f"{size}: {value:.2f}" for size, value in zip(sizes, values, strict=True))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _block(value: object) -> str:
    return f"```json\n{json.dumps(value, indent=1)}\n```"
