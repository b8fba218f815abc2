"""The device's allocation of a row budget: worked examples, brute force, and what may not depend on what."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xspec.verify.admit import admit

NAN = float("nan")


def counts(signals: list[list[float]], budget: int, caps: list[int] | None = None) -> list[int]:
    lanes, width = len(signals), len(signals[0])
    limit = torch.tensor(caps or [width] * lanes)
    return admit(torch.tensor(signals), limit, lanes, lanes + budget).tolist()


def test_worked_example() -> None:
    # survivals: lane 0 .9 .72 .36, lane 1 .5 .45 .405, lane 2 .8 .08 .008
    signals = [[0.9, 0.8, 0.5], [0.5, 0.9, 0.9], [0.8, 0.1, 0.1]]
    assert counts(signals, 0) == [0, 0, 0]
    assert counts(signals, 1) == [1, 0, 0]  # .9
    assert counts(signals, 3) == [2, 0, 1]  # .9 .8 .72
    assert counts(signals, 6) == [2, 3, 1]  # then .5 .45 .405, all above lane 0's .36
    assert counts(signals, 9) == [3, 3, 3]  # rows are used as long as there are drafts
    assert counts(signals, 20) == [3, 3, 3]


def test_ties_go_by_position_then_lane() -> None:
    assert counts([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], 2) == [1, 1, 0]
    assert counts([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], 4) == [2, 1, 1]
    assert counts([[0.0, 0.0], [0.0, 0.0]], 1) == [1, 0]


def test_caps_and_padding_lanes() -> None:
    assert counts([[0.9, 0.9], [0.1, 0.1]], 3, [0, 2]) == [0, 2]
    assert counts([[0.9, 0.9], [0.1, 0.1]], 3, [1, 2]) == [1, 2]
    padded = admit(torch.tensor([[0.1], [0.2], [0.9]]), torch.tensor([1, 1, 0]), 2, 3)
    assert padded.tolist() == [0, 1, 0]  # the third lane is padding: the budget is for two anchors


def test_signals_that_are_no_probabilities() -> None:
    assert counts([[NAN, 1.0], [0.3, 0.3]], 1) == [0, 1]
    assert counts([[math.inf, 0.5], [-3.0, 1.0]], 2) == [2, 0]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_allocation_has_a_larger_sum(data: st.DataObject) -> None:
    lanes, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    chance = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0])
    signals = data.draw(
        st.lists(st.lists(chance, min_size=width, max_size=width), min_size=lanes, max_size=lanes)
    )
    caps = data.draw(st.lists(st.integers(0, width), min_size=lanes, max_size=lanes))
    budget = data.draw(st.integers(0, lanes * width))
    found = counts(signals, budget, caps)
    survival = [list(itertools.accumulate(row, lambda a, b: a * b)) for row in signals]

    def worth(allocation: tuple[int, ...] | list[int]) -> float:
        return sum(sum(row[:n]) for row, n in zip(survival, allocation, strict=True))

    legal = [
        option
        for option in itertools.product(*(range(cap + 1) for cap in caps))
        if sum(option) == min(budget, sum(caps))
    ]
    assert tuple(found) in legal
    assert worth(found) == pytest.approx(max(map(worth, legal)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_later_positions_never_change_an_earlier_admission(data: st.DataObject) -> None:
    """Whether draft k is verified may depend on its request's signals up to k only (proof of decision 7)."""
    lanes, width = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 5))
    chance = st.floats(0.0, 1.0, width=32)
    row = st.lists(chance, min_size=width, max_size=width)
    signals = data.draw(st.lists(row, min_size=lanes, max_size=lanes))
    budget = data.draw(st.integers(0, lanes * width))
    lane, position = data.draw(st.integers(0, lanes - 1)), data.draw(st.integers(1, width - 1))
    changed = [list(values) for values in signals]
    changed[lane][position:] = data.draw(row)[position:]
    before, after = counts(signals, budget)[lane], counts(changed, budget)[lane]
    assert min(before, position) == min(after, position)
