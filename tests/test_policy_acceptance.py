"""Acceptance rates, with the arithmetic in the comments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_world import row

from xspec.policy.acceptance import PrefixRates


def test_nothing_seen_is_the_prior() -> None:
    rates = PrefixRates(3, window_size=20)
    assert rates.conditional() == pytest.approx([0.6, 0.6, 0.6])
    assert rates.prefix() == pytest.approx([0.6, 0.36, 0.216])


def test_a_position_is_tried_where_all_before_it_were_accepted() -> None:
    rates = PrefixRates(2, window_size=20)
    rates.observe([row(1, 2, 2), row(2, 2, 0), row(3, 2, 1)])
    # Position 1: 3 trials, 2 accepted. Position 2: tried by rows 1 and 3, accepted by row 1.
    # Prior: 0.6 worth 4 trials. q_1 = (2 + 2.4) / (3 + 4), q_2 = (1 + 2.4) / (2 + 4).
    assert rates.conditional() == pytest.approx([4.4 / 7, 3.4 / 6])
    assert rates.prefix() == pytest.approx([4.4 / 7, 4.4 / 7 * 3.4 / 6])


def test_a_row_that_stopped_inside_its_accepted_run_counts_no_failure() -> None:
    rates = PrefixRates(3, window_size=20)
    rates.observe([row(1, 3, 2, censored=True)])  # kept 2 of its run: position 3 was not decided
    assert rates.conditional() == pytest.approx([3.4 / 5, 3.4 / 5, 0.6])


def test_a_row_near_its_limit_tries_only_what_had_room() -> None:
    rates = PrefixRates(3, window_size=20)
    rates.observe([row(1, 1, 1)])  # 3 were drafted, 1 could be admitted: no trial at 2
    assert rates.conditional() == pytest.approx([3.4 / 5, 0.6, 0.6])


def test_rows_that_opted_out_or_plain_batches_teach_nothing() -> None:
    rates = PrefixRates(2, window_size=20)
    rates.observe([row(1, 0, 0), row(2, 0, 0)])
    rates.observe([])
    assert rates.conditional() == pytest.approx([0.6, 0.6])


def test_what_leaves_the_window_anchors_it_with_at_most_32_trials() -> None:
    rates = PrefixRates(1, window_size=1)
    for _ in range(3):
        rates.observe([row(i, 1, 1) for i in range(20)])
    # Window: 20 of 20. Left it: 40 of 40, so long = (40 + 2.4) / 44, weighing min(44, 32).
    assert rates.conditional() == pytest.approx([(20 + 32 * 42.4 / 44) / 52])
    rates.observe([row(1, 1, 0)])
    # Window: 0 of 1. Left it: 60 of 60.
    assert rates.conditional() == pytest.approx([(0 + 32 * 62.4 / 64) / 33])


def test_the_longer_memory_holds_400_trials() -> None:
    rates = PrefixRates(1, window_size=1)
    for _ in range(100):
        rates.observe([row(i, 1, 1) for i in range(32)])
    for _ in range(2):
        rates.observe([row(i, 1, 0) for i in range(32)])
    # 400 of 400, then 32 failures left the window: 400 of 432, decayed to 400 trials. Window: 0 of 32.
    long = (400 * 400 / 432 + 2.4) / 404
    assert rates.conditional() == pytest.approx([32 * long / 64])


def test_a_position_not_observed_halves_its_evidence_every_2000_batches() -> None:
    rates = PrefixRates(2, window_size=20)
    rates.observe([row(i, 2, 2) for i in range(8)])
    assert rates.conditional()[1] == pytest.approx((8 + 2.4) / 12)
    for _ in range(2000):
        rates.observe([row(1, 0, 0)])
    assert rates.conditional() == pytest.approx([(4 + 2.4) / 8] * 2)


def test_the_window_moves_with_speculative_batches_only() -> None:
    rates = PrefixRates(1, window_size=2)
    rates.observe([row(1, 1, 1)])
    before = rates.conditional()[0]
    for _ in range(3):
        rates.observe([row(1, 0, 0)])
    assert rates.conditional()[0] == pytest.approx(before, abs=1e-3)  # aged by three batches, no more


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=5), max_size=30
    )
)
def test_rates_are_probabilities_whatever_happens(batches: list[list[tuple[int, int, bool]]]) -> None:
    rates = PrefixRates(4, window_size=3)
    for batch in batches:
        rates.observe([row(i, v, min(v, a), censored=c) for i, (v, a, c) in enumerate(batch)])
    conditional, prefix = np.array(rates.conditional()), rates.prefix()
    assert ((conditional >= 0.0) & (conditional <= 1.0)).all()
    assert (np.diff(prefix) <= 0.0).all()
