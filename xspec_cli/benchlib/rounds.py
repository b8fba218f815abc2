"""What an engine in this process did round by round, and the means of a stretch of time.

Fed with the feedback of retired rounds; knows nothing about requests or policies.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from xspec.core.round import RoundFeedback
from xspec.metrics_speculation import pair_of
from xspec_cli.benchlib.stats import mean, median

PROBE = "probe"
"""How the reason begins of a round that only learns about a depth not in use."""


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """Rounds that decoded. `rows` counts requests over them: a round of eight requests adds eight.

    `time_ratio` is measured over predicted round time, the median over rounds in a row that had no prompt to
    compute; `switches` are changes of what is drafted from one round to the next, probes left out.
    `choices`: rounds by what they ran, "plain", "K" or (looped) "K@d", most frequent first.
    """

    rounds: int
    rows: int
    tokens_a_row: float
    acceptance: float | None  # accepted of the verified drafts; None: none was verified
    draft_steps: float  # mean
    target_rows: float  # mean, padding included
    plain_share: float  # of the rounds, those that drafted nothing
    switches: int
    time_ratio: float | None = None
    choices: tuple[tuple[str, int], ...] = ()


def round_figures(feedbacks: Sequence[RoundFeedback]) -> RoundFigures | None:
    """None where no round decoded."""
    decoded = [feedback for feedback in feedbacks if feedback.rows]
    if not decoded:
        return None
    rows = [row for feedback in decoded for row in feedback.rows]
    verified = sum(row.verified for row in rows)
    steps = [feedback.plan.draft_steps for feedback in decoded]
    settled = [pair_of(f.plan) for f in decoded if f.plan.reason.partition(":")[0] != PROBE]
    ratios = [ratio for feedback in decoded if (ratio := _time_ratio(feedback)) is not None]
    return RoundFigures(
        rounds=len(decoded),
        rows=len(rows),
        tokens_a_row=sum(row.committed for row in rows) / len(rows),
        acceptance=sum(row.accepted for row in rows) / verified if verified else None,
        draft_steps=mean(steps),
        target_rows=mean([feedback.shape.target_rows for feedback in decoded]),
        plain_share=steps.count(0) / len(steps),
        switches=sum(now != then for then, now in zip(settled, settled[1:], strict=False)),
        time_ratio=median(ratios) if ratios else None,
        choices=tuple(Counter(pair_of(f.plan) for f in decoded).most_common()),
    )


def _time_ratio(feedback: RoundFeedback) -> float | None:
    predicted, measured = feedback.plan.predicted_ms, feedback.round_ms
    if not predicted or measured is None or feedback.prefill_tokens:
        return None
    return measured / predicted


class RoundLog:
    """Rounds as they retire, stamped by the running event loop's clock."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._feedbacks: list[RoundFeedback] = []

    def observe(self, feedback: RoundFeedback) -> None:
        self._times_s.append(asyncio.get_running_loop().time())
        self._feedbacks.append(feedback)

    def clear(self) -> None:
        self._times_s.clear()
        self._feedbacks.clear()

    def figures(self, begin_s: float, end_s: float) -> RoundFigures | None:
        """Of the rounds that retired in [begin_s, end_s)."""
        first, last = bisect_left(self._times_s, begin_s), bisect_left(self._times_s, end_s)
        return round_figures(self._feedbacks[first:last])
