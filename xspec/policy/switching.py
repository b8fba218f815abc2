"""When a held choice may change: minimum gain, dwell, and what counts as a new load.

Held values are frozen and rules are pure functions of them, so a plan that is asked for again starts from the
same state. Choices are indices; what they mean and are worth is the policies' affair. Time is the predicted
time of retired rounds, never a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isnan

FIRST_DWELL_MS = 1_000.0
MAX_DWELL_MS = 16_000.0
EASING_MS = 60_000.0
BUCKET_FACTOR = 1.5
LOAD_FACTOR = 1.5
RETURN_FACTOR = 2.0
FRESH_START_FACTOR = 3.0
LOAD_ROUNDS = 4
"""A load counts once it lasted that many rounds: a gap between two requests is none."""


@dataclass(frozen=True, slots=True)
class Held:
    """The choice rounds run with, and what binds it.

    `rows`: decode rows at the last switch or new load. Rounds planned as `load_id` or later belong to this
    load, those planned as `range_id` or later count as seen before.
    """

    choice: int
    rows: int
    scored_batches: int
    scored_lanes: int
    load_id: int
    range_id: int
    switched_ms: float | None = None  # None: nothing was switched yet
    dwell_ms: float = FIRST_DWELL_MS / 2.0  # the wait after the last switch; the next one is twice that
    lifted: bool = False  # no wait: the load is new
    strange_rounds: int = 0
    probes: int = 0
    probe_id: int = -1  # plan id of the last one
    saving_ms: float = 0.0  # what the next one costs, when it was thought about last


@dataclass(slots=True)
class Moment:
    """The coming round as the rules see it.

    `seen_rows`: least and most rows of late; None: nothing seen, or as many rows as held.
    """

    plan_id: int
    rows: int
    lanes: int
    batches: int  # completed decode batches
    elapsed_ms: float
    seen_rows: tuple[int, int] | None = None


class Turns:
    """The held choice before and after the plan asked for last: asking again for it starts from before."""

    def __init__(self) -> None:
        self.plan_id: int | None = None
        self._before: Held | None = None
        self.held: Held | None = None

    def begin(self, plan_id: int) -> Held | None:
        if plan_id != self.plan_id:
            self.plan_id, self._before = plan_id, self.held
        self.held = self._before
        return self._before


def start(choice: int, now: Moment) -> Held:
    return Held(
        choice=choice,
        rows=now.rows,
        scored_batches=now.batches,
        scored_lanes=now.lanes,
        load_id=now.plan_id,
        range_id=now.plan_id,
    )


def meet_load(held: Held, now: Moment) -> Held:
    """A load that is new, for LOAD_ROUNDS rounds in a row, lifts the dwell and starts the averages anew.

    New is twice as much or half of `held.rows` (what is best there is another matter, seen before or not); or
    1.5 times more or less than that and than all loads seen of late, so that a load which swings between two
    near levels is one load. 3 times more or less starts the dwell anew.
    """
    if now.rows == held.rows and held.strange_rounds == 0:
        return held  # nearly always
    ratio = _ratio(now.rows, held.rows)
    least, most = now.seen_rows or (held.rows, held.rows)
    beyond = now.rows >= LOAD_FACTOR * most or now.rows * LOAD_FACTOR <= least
    far = ratio >= FRESH_START_FACTOR
    if ratio < RETURN_FACTOR and not (ratio >= LOAD_FACTOR and beyond):
        return held if held.strange_rounds == 0 else replace(held, strange_rounds=0)
    if held.strange_rounds + 1 < LOAD_ROUNDS:
        return replace(held, strange_rounds=held.strange_rounds + 1)
    return replace(
        held,
        rows=now.rows,
        load_id=now.plan_id,
        range_id=now.plan_id if far else held.range_id,
        dwell_ms=FIRST_DWELL_MS / 2.0 if far else held.dwell_ms,
        lifted=True,
        strange_rounds=0,
    )


def scoring_due(held: Held, now: Moment, update_interval: int) -> bool:
    """Every `update_interval` decode batches; at once where the request bucket jumped or the load is new."""
    return (
        now.batches - held.scored_batches >= update_interval
        or held.load_id == now.plan_id
        or (now.lanes != held.scored_lanes and _ratio(now.lanes, held.scored_lanes) >= BUCKET_FACTOR)
    )


def best_choice(scores: Sequence[float]) -> int:
    """The first of the best. NaN: no choice; ValueError if there is none at all."""
    return max((i for i, score in enumerate(scores) if not isnan(score)), key=scores.__getitem__)


def choose(
    held: Held, now: Moment, scores: Sequence[float], switch_min_gain: float
) -> tuple[Held, str | None]:
    """What to hold from now on, and why it changed ("gain", "load", "uncovered"; None: it did not).

    `scores`: predicted tokens per ms of each choice, NaN where it is none. A held choice that is none now
    goes at once; else the best must gain strictly more than `switch_min_gain` and the dwell must be over.
    """
    scored = replace(held, scored_batches=now.batches, scored_lanes=now.lanes, saving_ms=0.0)
    best = best_choice(scores)
    covered = not isnan(scores[held.choice])
    # The slack keeps rounding from turning a gain of exactly the minimum into more.
    gains = covered and scores[best] > scores[held.choice] * (1.0 + switch_min_gain) * (1.0 + 1e-9)
    if covered and not (gains and _may_switch(held, now.elapsed_ms)):
        return scored, None
    switched = replace(
        scored,
        choice=best,
        rows=now.rows,
        switched_ms=now.elapsed_ms,
        dwell_ms=max(held.dwell_ms, FIRST_DWELL_MS) if held.lifted else next_dwell_ms(held, now.elapsed_ms),
        lifted=False,
        saving_ms=0.0,
    )
    return switched, "uncovered" if not covered else "load" if held.lifted else "gain"


def _may_switch(held: Held, elapsed_ms: float) -> bool:
    return held.lifted or held.switched_ms is None or elapsed_ms - held.switched_ms >= held.dwell_ms


def next_dwell_ms(held: Held, elapsed_ms: float) -> float:
    """Twice the last wait, which eased by half for every minute without a switch; 16 s at most."""
    eased = held.dwell_ms
    if held.switched_ms is not None and held.dwell_ms > FIRST_DWELL_MS:
        minutes = int((elapsed_ms - held.switched_ms) / EASING_MS)
        eased = max(held.dwell_ms / 2.0**minutes, FIRST_DWELL_MS)
    return min(2.0 * eased, MAX_DWELL_MS)


def _ratio(a: int, b: int) -> float:
    return max(a, b) / min(a, b)
