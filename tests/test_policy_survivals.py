"""What signals say of requests and how far they are believed; numbers done by hand in the comments."""

from __future__ import annotations

import math

import pytest
from policy_world import row

from xspec.core.round import RowFeedback
from xspec.policy.survivals import Correction, RequestSignals, SignalMemory

EASY, HARD = (0.9, 0.8), (0.5, 0.4)  # survivals 0.9, 0.72 and 0.5, 0.2


def said(*signals: float) -> RequestSignals:
    """Signals of a request's first round."""
    one = RequestSignals(len(signals))
    one.observe(signals, batch=1)
    return one


def test_signals_that_are_no_probabilities() -> None:
    raw = [(math.nan, 1.0), (2.0, math.inf), (0.5, -1.0), (1.0, -math.inf)]
    assert [said(*signals).latest for signals in raw] == [[0.0, 0.0], [1.0, 1.0], [0.5, 0.0], [1.0, 0.0]]


def test_expected_tokens_are_corrected_by_what_was_accepted() -> None:
    correction = Correction(2)
    easy, hard = said(*EASY), said(*HARD)
    correction.observe([row(1, 2, 2), row(2, 2, 0)], [easy, hard])
    # Position 1: 1 accepted, 0.9 + 0.5 predicted. Position 2: 1 accepted, 0.72 + 0.2 predicted.
    factors = [17 / 17.4, 17 / 16.92]
    assert correction.factors == pytest.approx(factors)
    assert correction.apply(easy.latest) == pytest.approx([0.9 * factors[0], 0.72 * factors[1]])
    assert correction.apply(hard.latest) == pytest.approx([0.5 * factors[0], 0.2 * factors[1]])


def test_a_record_of_ones_own_is_of_corrected_survivals_of_what_was_asked_for() -> None:
    correction = Correction(2)
    easy, hard = said(*EASY), said(*HARD)
    correction.observe([row(1, 2, 2), row(2, 1, 0)], [easy, hard])
    # (2 + 4) / (0.9 + 0.72 + 4); of the other one draft was asked for.
    assert (easy.own_factor, hard.own_factor) == pytest.approx((6 / 5.62, 4 / 4.5))
    factors = [17 / 17.4, 17 / 16.72]
    assert correction.factors == pytest.approx(factors)
    correction.observe([row(2, 2, 1)], [hard])
    assert hard.own_factor == pytest.approx(5 / (4.5 + 0.5 * factors[0] + 0.2 * factors[1]))


def test_corrected_survivals_stay_probabilities_of_longer_and_longer_runs() -> None:
    correction = Correction(2)
    correction.observe([row(i, 2, 2) for i in range(64)], [said(0.25, 0.2) for _ in range(64)])
    assert correction.factors == pytest.approx([80 / 32, 80 / 19.2])
    assert correction.apply([0.9, 0.8]) == pytest.approx([1.0, 1.0])  # 2.25 and 3.33 are cut to 1
    assert correction.apply([0.2, 0.15]) == pytest.approx([0.5, 0.5])  # 0.625 to the 0.5 before it
    # A request's own factor comes last: 0.5 and 0.25 double to 1 and 0.5, 1 and 0.5 to 1 and 1.
    assert correction.apply([0.2, 0.06], 2.0) == pytest.approx([1.0, 0.5])
    assert correction.apply([0.4, 0.12], 2.0) == pytest.approx([1.0, 1.0])
    assert correction.apply([0.4, 0.12], 0.5) == pytest.approx([0.5, 0.25])


def test_only_what_was_verified_and_decided_corrects() -> None:
    correction = Correction(3)
    rows = [
        row(1, 2, 2, censored=True),  # kept 2, position 3 was not decided
        row(2, 1, 0),  # asked for 1
    ]
    correction.observe(rows, [said(0.5, 1.0, 1.0), said(0.5, 1.0, 1.0)])
    assert correction.factors == pytest.approx([17 / 17, 17 / 16.5, 1.0])


def test_an_answer_that_ended_with_the_targets_token_failed_behind_it() -> None:
    correction = Correction(3)
    # Asked for 3, the first was refused and the token in its place ended the answer: 1 counts as verified.
    ended = RowFeedback(1, proposed=1, admitted=3, verified=1, committed=1)
    correction.observe([ended], [said(0.5, 1.0, 1.0)])
    assert correction.factors == pytest.approx([16 / 16.5] * 3)


def test_the_correction_remembers_400_rows() -> None:
    correction = Correction(1)
    for _ in range(20):
        correction.observe([row(i, 1, 1) for i in range(40)], [said(0.5) for _ in range(40)])
    assert correction.factors == pytest.approx([416 / 216])


def test_a_request_that_does_worse_than_its_signals_gets_a_factor_of_its_own() -> None:
    worse, better = RequestSignals(2), RequestSignals(2)
    assert worse.own_factor == 1.0
    worse.settle(0, 1.0)
    better.settle(2, 1.0)
    # (0 + 4) / (1 + 4) and (2 + 4) / (1 + 4).
    assert (worse.own_factor, better.own_factor) == pytest.approx((0.8, 1.2))
    worse.settle(0, 31.0)
    # 32 promised count as 16: (0 + 4) / (16 + 4).
    assert worse.own_factor == pytest.approx(0.2)


def test_old_signals_give_way_to_what_the_request_showed_on_average() -> None:
    signals = said(0.9)
    # One round of its own against a profile worth 8.
    assert (signals.latest, signals.typical([0.3])) == ([0.9], [pytest.approx(3.3 / 9)])
    signals.observe([0.1], batch=2)  # two rounds, mean 0.5
    assert (signals.latest, signals.typical([0.3])) == ([0.1], [pytest.approx(3.4 / 10)])


def test_a_sequence_without_feedback_for_512_batches_starts_empty() -> None:
    memory = SignalMemory(1)
    memory.begin(1).observe([0.9], batch=1)
    memory.begin(2).observe([0.9], batch=101)
    memory.sweep(batch=511)  # looked at every 512
    assert len(memory) == 2
    memory.sweep(batch=600)
    gone, known = memory.get(1), memory.get(2)
    assert gone is None and known is not None and known.latest == [0.9]
    memory.begin(1).observe([0.1], batch=601)
    again = memory.get(1)
    assert again is not None and again.typical([0.1]) == pytest.approx([0.1])
