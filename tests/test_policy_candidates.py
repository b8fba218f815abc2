"""Moves by the average of acceptance: the RFC's recursion and every corner case decided in docs/looped.md."""

from __future__ import annotations

import pytest
from policy_world import row

from xspec.policy.candidates import (
    FRESH_ROUNDS,
    STALE_HALF_LIFE_ROUNDS,
    AcceptanceEma,
    Average,
    BucketState,
    acceptance_counts,
)
from xspec.policy.spec_config import BatchRange, Candidate, EmaSettings

THREE = (
    Candidate(1, 2, up=0.9, acceptance=0.8),
    Candidate(2, 2, up=0.8, down=0.5, acceptance=0.7),
    Candidate(4, 1, down=0.4, acceptance=0.6),
)


def unknown(candidate: int, acceptance: float) -> float | None:
    return None


def made(initial: int = 1, **settings: object) -> tuple[AcceptanceEma, BucketState]:
    bucket = BucketState.of(BatchRange(1, 8, THREE, initial))
    return AcceptanceEma(THREE, EmaSettings(**settings)), bucket  # type: ignore[arg-type]


# -- r of a round ---------------------------------------------------------------------------------


def test_r_is_the_ratio_of_sums_over_requests() -> None:
    """Not the mean of ratios: 4 of 4, 0 of 4 and 1 of 2 would be .5 then."""
    rows = [row(1, 4, 4), row(2, 4, 0), row(3, 4, 1)]
    assert acceptance_counts(rows, 4) == (5, 12)


def test_rounds_without_any_acceptance_count() -> None:
    assert acceptance_counts([row(1, 4, 0), row(2, 4, 0)], 4) == (0, 8)


def test_rows_cut_short_by_room_do_not_count_beside_whole_ones() -> None:
    assert acceptance_counts([row(1, 4, 1), row(2, 2, 2)], 4) == (1, 4)


def test_they_count_by_what_they_verified_where_there_are_no_others() -> None:
    assert acceptance_counts([row(1, 2, 2), row(2, 1, 0)], 4) == (2, 3)


def test_a_row_that_ended_inside_its_run_never_counts() -> None:
    ended = row(1, 2, 2, censored=True)
    assert acceptance_counts([ended], 4) == (0, 0)
    assert acceptance_counts([ended, row(2, 4, 3)], 4) == (3, 4)
    assert acceptance_counts([row(1, 4, 4, censored=True), row(2, 4, 3)], 4) == (3, 4)


def test_a_round_in_which_nothing_was_verified_has_no_r() -> None:
    assert acceptance_counts([row(1, 0, 0), row(2, 0, 0)], 4) == (0, 0)


# -- E --------------------------------------------------------------------------------------------


def test_with_a_seed_the_recursion_is_the_rfcs() -> None:
    average, expected = Average(0.8), 0.8
    for clock, rate in enumerate([1.0, 0.0, 0.5, 0.25], start=1):
        average.update(rate, 0.2, clock)
        expected = 0.8 * expected + 0.2 * rate
        assert average.value(clock) == pytest.approx(expected)


def test_without_a_seed_the_first_sample_is_the_average_and_no_zero_weighs() -> None:
    average = Average(None)
    assert average.value(0) is None
    average.update(0.6, 0.1, 1)
    assert average.value(1) == pytest.approx(0.6)
    average.update(0.9, 0.1, 2)
    # weights beta (1 - beta) and beta, made to add up to 1
    assert average.value(2) == pytest.approx((0.09 * 0.6 + 0.1 * 0.9) / 0.19)


def test_what_is_not_renewed_goes_half_way_back_to_its_seed() -> None:
    average = Average(0.8)
    average.update(0.2, 0.5, 10)
    assert average.value(10) == average.value(11) == pytest.approx(0.5)
    assert average.value(11 + STALE_HALF_LIFE_ROUNDS) == pytest.approx(0.65)
    average.update(0.65, 0.5, 11 + STALE_HALF_LIFE_ROUNDS)
    assert average.value(11 + STALE_HALF_LIFE_ROUNDS) == pytest.approx(0.65)


def test_without_a_seed_there_is_nothing_to_go_back_to() -> None:
    average = Average(None)
    average.update(0.2, 0.5, 10)
    assert average.value(5000) == pytest.approx(0.2)


# -- moves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accepted", "index"), [(9, 2), (4, 0), (7, 1), (5, 1), (8, 1)])
def test_above_up_one_on_below_down_one_back_else_stay(accepted: int, index: int) -> None:
    """beta 1: E is the last r. On a threshold, .5 and .8, nothing moves."""
    policy, bucket = made(beta=1.0, interval=1, min_feedback=1)
    assert policy.learn(bucket, 1, accepted, 10)
    assert policy.next_index(bucket, unknown) == index


def test_moves_stay_in_the_list() -> None:
    policy, bucket = made(initial=2, beta=1.0, interval=1, min_feedback=1)
    policy.learn(bucket, 2, 10, 10)
    assert policy.next_index(bucket, unknown) == 2
    policy, bucket = made(initial=0, beta=1.0, interval=1, min_feedback=1)
    policy.learn(bucket, 0, 0, 10)
    assert policy.next_index(bucket, unknown) == 0


def test_a_list_of_one_never_moves() -> None:
    one = (Candidate(2, 1),)
    policy, bucket = AcceptanceEma(one, EmaSettings(1.0, 1, 1)), BucketState.of(BatchRange(1, 1, one))
    for accepted in (0, 2):
        assert policy.learn(bucket, 0, accepted, 2)
        assert policy.next_index(bucket, unknown) == 0


def test_looks_come_every_interval_of_feedback_rounds_with_enough_drafts() -> None:
    policy, bucket = made(beta=0.1, interval=3, min_feedback=10)
    looks = [policy.learn(bucket, 1, 1, 2) for _ in range(12)]
    # 10 drafts after 5 rounds, then every third
    assert [n for n, look in enumerate(looks, start=1) if look] == [5, 8, 11]


def test_one_request_needs_more_rounds_than_many() -> None:
    few, bucket_few = made(interval=1, min_feedback=16)
    many, bucket_many = made(interval=1, min_feedback=16)
    assert [few.learn(bucket_few, 1, 1, 2) for _ in range(8)] == [False] * 7 + [True]
    assert many.learn(bucket_many, 1, 8, 16)


def test_after_a_move_the_new_candidate_must_show_enough_itself() -> None:
    policy, bucket = made(beta=1.0, interval=2, min_feedback=4)
    policy.learn(bucket, 1, 2, 2)
    assert policy.learn(bucket, 1, 2, 2)
    bucket.enter(2)
    assert not policy.learn(bucket, 2, 4, 4)
    assert policy.learn(bucket, 2, 4, 4)


def test_late_feedback_is_credited_to_its_own_candidate_and_to_no_look() -> None:
    policy, bucket = made(beta=0.5, interval=1, min_feedback=1)
    bucket.enter(2)
    assert not policy.learn(bucket, 1, 0, 2)
    assert bucket.averages[1].value(bucket.clock) == pytest.approx(0.35)
    assert bucket.averages[2].value(bucket.clock) == pytest.approx(0.6)
    assert (bucket.drafts, bucket.rounds) == (0, 0)


# -- neighbours that have shown themselves ---------------------------------------------------------


def gain(candidate: int, acceptance: float) -> float:
    """K and d of THREE in the idealized model of 4 loops."""
    steps, depth = ((1, 2), (2, 2), (4, 1))[candidate]
    return 4 * (1 + steps * acceptance) / (4 + depth * steps)


def test_no_move_to_a_neighbour_that_was_lately_worse() -> None:
    policy, bucket = made(beta=1.0, interval=1, min_feedback=1)
    bucket.averages[2].settle(0.1, 0)
    policy.learn(bucket, 1, 9, 10)  # gain 4 * 2.8 / 8 = 1.4 against 4 * 1.4 / 8 = .7
    assert policy.next_index(bucket, gain) == 1
    bucket.averages[2].settle(0.9, bucket.clock)  # 4 * 4.6 / 8 = 2.3
    assert policy.next_index(bucket, gain) == 2
    # without costs nothing can be compared
    bucket.averages[2].settle(0.1, bucket.clock)
    assert policy.next_index(bucket, unknown) == 2


def test_what_a_neighbour_showed_long_ago_keeps_nobody_away() -> None:
    policy, bucket = made(beta=1.0, interval=1, min_feedback=1)
    bucket.averages[2].settle(0.1, 0)
    bucket.clock = FRESH_ROUNDS
    policy.learn(bucket, 1, 9, 10)
    assert policy.next_index(bucket, gain) == 2
