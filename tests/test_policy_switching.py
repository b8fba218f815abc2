"""Hysteresis, dwell and new loads, as rules without any policy around them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xspec.policy.switching import (
    FIRST_DWELL_MS,
    Held,
    Moment,
    Turns,
    choose,
    meet_load,
    next_dwell_ms,
    scoring_due,
    start,
)


def at(
    elapsed_s: float = 0.0,
    *,
    plan_id: int = 1,
    rows: int = 8,
    lanes: int = 8,
    batches: int = 0,
    seen: tuple[int, int] | None = None,
) -> Moment:
    return Moment(plan_id, rows, lanes, batches, elapsed_s * 1e3, seen)


def held_at(rows: int = 8) -> Held:
    return start(0, at(rows=rows, plan_id=0))


@pytest.mark.parametrize(
    ("best", "switches"), [(1.05, False), (math.nextafter(1.05, 2.0), False), (1.0500001, True)]
)
def test_the_gain_must_be_strictly_more_than_the_minimum(best: float, switches: bool) -> None:
    held, cause = choose(held_at(), at(), [1.0, best], 0.05)
    assert (held.choice, cause) == ((1, "gain") if switches else (0, None))


def test_ties_go_to_the_smaller_choice() -> None:
    held, cause = choose(held_at(), at(), [1.0, 2.0, 2.0], 0.05)
    assert (held.choice, cause) == (1, "gain")


def test_a_choice_without_cost_is_left_at_once_for_the_best_there_is() -> None:
    waiting = replace(held_at(), switched_ms=0.0, dwell_ms=16_000.0)
    held, cause = choose(waiting, at(0.001), [math.nan, 0.5, 0.4], 0.05)
    assert (held.choice, cause) == (1, "uncovered")
    with pytest.raises(ValueError):
        choose(waiting, at(0.001), [math.nan, math.nan], 0.05)


def greedy_switches(held: Held, seconds: float, step_s: float = 0.1) -> list[float]:
    """Times (s) of the switches of somebody who always finds the other choice better."""
    times = []
    for tick in range(int(seconds / step_s) + 1):
        scores = [1.0, 2.0] if held.choice == 0 else [2.0, 1.0]
        held, cause = choose(held, at(tick * step_s), scores, 0.05)
        if cause is not None:
            times.append(round(tick * step_s, 6))
    return times


def test_switches_that_loads_ask_for_leave_the_dwell_as_it_is() -> None:
    """A load that comes and goes ten times, then a steady one: waits are those of two switches for gain."""
    held = held_at()
    for number in range(10):
        held, cause = choose(
            replace(held, lifted=True), at(5.0 * number), [1.0, 2.0] if held.choice == 0 else [2.0, 1.0], 0.05
        )
        assert cause == "load" and held.dwell_ms == FIRST_DWELL_MS
    assert greedy_switches(replace(held, switched_ms=-16_000.0), 8.0) == [0, 2, 6]


def test_dwell_starts_at_a_second_and_doubles_to_sixteen() -> None:
    assert greedy_switches(held_at(), 64.0) == [0, 1, 3, 7, 15, 31, 47, 63]


def test_dwell_eases_by_half_a_minute_but_never_below_the_first() -> None:
    held = replace(held_at(), switched_ms=0.0, dwell_ms=16_000.0)
    assert [next_dwell_ms(held, s * 1e3) for s in (59, 60, 120, 180, 240, 900)] == [
        16_000.0,  # 2 * 16 s, capped
        16_000.0,  # 2 * 8 s
        8_000.0,
        4_000.0,
        2_000.0,
        2_000.0,  # 2 * 1 s
    ]


def test_six_switches_a_minute_at_most_from_the_second_minute_on() -> None:
    eased = replace(held_at(), switched_ms=-3_600_000.0, dwell_ms=16_000.0)
    times = greedy_switches(eased, 120.0)
    assert times[:7] == [0, 2, 6, 14, 30, 46, 62]
    assert max(sum(start <= t < start + 60.0 for t in times) for start in times) == 6


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0.01, 30.0), st.integers(0, 2)), min_size=1, max_size=200))
def test_no_scores_make_more_than_six_switches_a_minute(steps: list[tuple[float, int]]) -> None:
    """Whatever the scores, at one load: in every minute that begins a minute after the first switch."""
    held, now, times = held_at(), 0.0, []
    for wait_s, best in steps:
        now += wait_s
        scores = [1.0] * 3
        scores[best] = 2.0
        held, cause = choose(held, at(now), scores, 0.05)
        if cause is not None:
            times.append(now)
    later = [t for t in times if t >= times[0] + 60.0]
    assert all(sum(first <= t < first + 60.0 for t in later) <= 6 for first in later)


def meet(held: Held, rows: int, rounds: int, seen: tuple[int, int], first_id: int = 100) -> Held:
    for number in range(rounds):
        held = meet_load(held, at(rows=rows, seen=seen, plan_id=first_id + number))
    return held


def test_a_threefold_load_starts_afresh_after_four_rounds() -> None:
    bound = replace(held_at(rows=8), switched_ms=0.0, dwell_ms=16_000.0)
    assert not meet(bound, 24, 3, seen=(8, 24)).lifted
    fresh = meet(bound, 24, 4, seen=(8, 24))
    assert (fresh.lifted, fresh.rows, fresh.load_id, fresh.range_id, fresh.dwell_ms) == (
        True,
        24,
        103,
        103,
        500.0,
    )
    held, cause = choose(fresh, at(0.001, rows=24), [1.0, 2.0], 0.05)
    assert (held.choice, cause, held.lifted) == (1, "load", False)
    assert choose(held, at(0.5, rows=24), [2.0, 1.0], 0.05)[1] is None  # its own wait: 1 s


def test_a_gap_between_requests_is_no_load() -> None:
    held = held_at(rows=8)
    for number in range(50):
        held = meet_load(held, at(rows=2 if number % 4 else 8, seen=(2, 8), plan_id=number))
    assert not held.lifted


def test_half_as_much_again_is_new_unless_it_was_seen_of_late() -> None:
    bound = replace(held_at(rows=8), switched_ms=0.0, dwell_ms=8_000.0)
    fresh = meet(bound, 12, 4, seen=(7, 8))
    assert (fresh.lifted, fresh.load_id, fresh.range_id, fresh.dwell_ms) == (True, 103, 0, 8_000.0)
    assert not meet(bound, 12, 4, seen=(7, 12)).lifted
    assert not meet(bound, 11, 4, seen=(7, 8)).lifted


def test_a_load_of_twice_the_rows_is_new_even_if_it_was_seen_of_late() -> None:
    """Four rows, at the end of a wave, are no reason to keep their choice for eight of the next wave."""
    held = replace(held_at(4), switched_ms=0.0, dwell_ms=8_000.0)
    for plan_id in range(1, 4):
        held = meet_load(held, at(0.1, plan_id=plan_id, rows=8, seen=(1, 8)))
        assert not held.lifted
    held = meet_load(held, at(0.1, plan_id=4, rows=8, seen=(1, 8)))
    assert (held.lifted, held.rows, held.load_id, held.dwell_ms) == (True, 8, 4, 8_000.0)
    held, cause = choose(held, at(0.1, plan_id=4, rows=8), [1.0, 1.01], 0.0)
    assert (held.choice, cause) == (1, "load")
    assert held.dwell_ms == 8_000.0  # the load asked for it: the next wait is no longer for that
    for plan_id in range(5, 12):  # five is not half as many
        held = meet_load(held, at(0.2, plan_id=plan_id, rows=5, seen=(1, 8)))
    assert not held.lifted


def test_scoring_is_due_by_batches_by_a_bucket_jump_and_by_a_new_load() -> None:
    held = held_at()
    assert not scoring_due(held, at(batches=4), 5)
    assert scoring_due(held, at(batches=5), 5)
    assert not scoring_due(held, at(lanes=11), 5)
    assert scoring_due(held, at(lanes=12), 5)
    assert scoring_due(replace(held, load_id=7), at(plan_id=7), 5)


def test_asking_again_starts_from_before() -> None:
    turns = Turns()
    assert turns.begin(0) is None
    turns.held = held_at()
    assert turns.begin(0) is None
    turns.held = first = held_at(rows=3)
    assert turns.begin(1) is first
    turns.held = held_at(rows=5)
    assert turns.begin(1) is first and turns.held is first
