"""Curves and tables, on numbers worked by hand and against a slow reading of the same rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xspec.cost.model import (
    Additive,
    CostTable,
    Sample,
    Sps,
    bucket_groups,
    monotone_violations,
)
from xspec.cost.settings import ContextInterval
from xspec.errors import CalibrationError

SPS = Sps((4, 8, 16), (100.0, 50.0, 20.0))  # 10, 20 and 50 ms
ADDITIVE = Additive(0.010, (1, 4), (0.0, 0.003), (2, 4, 8), (0.0, 0.001, 0.005))


def flat(ms: float, *rows: int) -> Sps:
    return Sps(rows or (1, 64), (1000.0 / ms,) * len(rows or (1, 64)))


def two_contexts(low: Sps, high: Sps, *, gap_from: int = 256) -> CostTable:
    contexts = (ContextInterval(64, 1, 255), ContextInterval(448, gap_from, 1000))
    return CostTable(contexts, {(0, 5): low, (1, 5): high}, (100.0, 500.0), 0.4)


# -- curves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "ms"), [(4, 10.0), (8, 20.0), (16, 50.0), (6, 15.0), (5, 12.5), (12, 35.0), (15, 46.25)]
)
def test_sps_interpolates_milliseconds(rows: int, ms: float) -> None:
    assert SPS.ms(1, rows) == pytest.approx(ms, rel=1e-12)
    assert SPS.ms(1, rows) == SPS.ms(7, rows)


@pytest.mark.parametrize("rows", [1, 3, 17, 1000])
def test_sps_knows_nothing_outside(rows: int) -> None:
    assert SPS.ms(1, rows) is None
    assert Sps((4, 8, 16), (100.0, 50.0, 20.0), clamped=True).ms(1, rows) == (10.0 if rows < 4 else 50.0)


@pytest.mark.parametrize(
    ("requests", "rows", "ms"),
    [(1, 2, 10.0), (4, 8, 18.0), (2, 2, 11.0), (2, 6, 14.0), (3, 3, 12.5), (1, 8, 15.0), (4, 2, 13.0)],
)
def test_additive_interpolates_both_parts(requests: int, rows: int, ms: float) -> None:
    assert ADDITIVE.ms(requests, rows) == pytest.approx(ms, rel=1e-12)


def test_additive_knows_nothing_outside() -> None:
    for requests, rows in ((5, 8), (1, 1), (1, 9), (8, 16)):
        assert ADDITIVE.ms(requests, rows) is None
    clamped = Additive(0.010, (2, 4), (0.0, 0.003), (2, 8), (0.0, 0.005), clamped=True)
    assert clamped.ms(1, 1) == pytest.approx(10.0)
    assert clamped.ms(9, 99) == pytest.approx(18.0)


def test_a_sum_that_is_not_positive_is_no_cost() -> None:
    curve = Additive(0.002, (1, 2), (0.0, -0.003), (2, 4), (0.0, 0.004))
    assert curve.ms(2, 2) is None
    assert curve.ms(2, 4) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Sps((), ()), "equally long"),
        (lambda: Sps((1, 2), (1.0,)), "equally long"),
        (lambda: Sps((2, 2), (1.0, 1.0)), "strictly ascending"),
        (lambda: Sps((4, 2), (1.0, 1.0)), "strictly ascending"),
        (lambda: Sps((0, 2), (1.0, 1.0)), "positive"),
        (lambda: Sps((1, 2), (1.0, 0.0)), "steps_per_second must be at least 1e-06, found 0.0"),
        (lambda: Sps((1, 2), (1.0, -1.0)), "found -1.0"),
        (lambda: Additive(1.0, (1,), (0.0,), (1, 2), (0.0, -2e6)), "within 1e\\+06 seconds"),
        (lambda: Sps((1, 2), (1.0, math.inf)), "finite"),
        (lambda: Additive(math.nan, (1,), (0.0,), (1,), (0.0,)), "within 1e\\+06 seconds"),
        (lambda: Additive(1.0, (1,), (0.1,), (1,), (0.0,)), "must begin with 0"),
        (lambda: Additive(1.0, (1,), (0.0,), (1,), (0.1,)), "must begin with 0"),
        (lambda: Additive(1.0, (2, 1), (0.0, 0.0), (1,), (0.0,)), "strictly ascending"),
        (lambda: Additive(1.0, (1,), (0.0,), (1, 2), (0.0, math.nan)), "theta_s must be finite"),
    ],
)
def test_impossible_curves_are_refused(make: object, reason: str) -> None:
    assert callable(make)
    with pytest.raises(CalibrationError, match=reason):
        make()


def test_median_of_windows() -> None:
    def sample(*windows_ms: float) -> Sample:
        return Sample(1, 1, 2, 0, 10.0, windows_ms)

    assert sample(9.0, 5.0, 7.0).median_ms == 7.0
    assert sample(9.0, 5.0, 7.0, 8.0).median_ms == 7.5
    assert sample(3.0).median_ms == 3.0


# -- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_lengths", "ms"),
    [
        ([100], 10.0),
        ([1], 10.0),  # below the first measured length
        ([500], 20.0),
        ([1000], 20.0),  # beyond the last
        ([300], 15.0),
        ([255], 10.0 + 10.0 * 155 / 400),  # in the first interval, yet on the way to the second's length
        ([100, 500], 15.0),
        ([100, 300, 500, 700], 16.25),
        ([100] * 3 + [500], 12.5),
    ],
)
def test_a_batch_costs_the_mean_over_its_kv_lengths(kv_lengths: list[int], ms: float) -> None:
    costs = two_contexts(flat(10.0), flat(20.0)).at(kv_lengths)
    assert costs is not None
    assert costs.round_ms(5, 4, 24) == pytest.approx(ms, rel=1e-12)
    assert costs.round_ms(4, 4, 24) is None  # a depth without a curve


@pytest.mark.parametrize("kv_lengths", [[], [0], [1001], [100, 1001], [280], [100, 280, 500], [299]])
def test_an_uncovered_length_has_no_costs(kv_lengths: list[int]) -> None:
    assert two_contexts(flat(10.0), flat(20.0), gap_from=300).at(kv_lengths) is None


@pytest.mark.parametrize(("kv_lengths", "covered"), [([], 0), ([9], 0), ([10, 20], 1), ([10, 21], 0)])
def test_one_interval_costs_what_it_costs(kv_lengths: list[int], covered: int) -> None:
    table = CostTable((ContextInterval(12, 10, 20),), {(0, 1): flat(7.0)}, (14.0,), 0.0)
    costs = table.at(kv_lengths)
    assert (costs is not None) == covered
    if costs is not None:
        assert costs.round_ms(1, 2, 4) == pytest.approx(7.0)


def test_a_context_that_lacks_a_value_is_only_missed_by_batches_that_touch_it() -> None:
    table = two_contexts(flat(10.0, 1, 64), flat(20.0, 1, 8))
    short, mixed = table.at([50, 100]), table.at([50, 300])
    assert short is not None and mixed is not None
    assert short.round_ms(5, 4, 24) == pytest.approx(10.0)
    assert mixed.round_ms(5, 4, 24) is None
    assert mixed.round_ms(5, 1, 6) == pytest.approx(12.5)


@pytest.mark.parametrize(
    ("contexts", "means", "curve", "prefill", "reason"),
    [
        ([(1, 9), (9, 20)], (5.0, 15.0), (0, 1), 0.0, "overlap"),
        ([(10, 20), (1, 9)], (5.0, 15.0), (0, 1), 0.0, "out of order"),
        ([(1, 9), (10, 20)], (15.0, 5.0), (0, 1), 0.0, "grow from context to context, found 15, 5"),
        ([(1, 9), (10, 20)], (5.0, 5.0), (0, 1), 0.0, "grow"),
        ([(1, 9)], (math.nan,), (0, 1), 0.0, "must be positive"),
        ([(1, 9)], (5.0, 6.0), (0, 1), 0.0, "1 contexts with 2 mean"),
        ([], (), (0, 1), 0.0, "0 contexts"),
        ([(1, 9)], (5.0,), (1, 1), 0.0, "a curve for a context"),
        ([(1, 9)], (5.0,), (0, 1), -1.0, "prefill_ms_per_token"),
        ([(1, 9)], (5.0,), (0, 1), math.inf, "prefill_ms_per_token"),
    ],
)
def test_impossible_tables_are_refused(
    contexts: list[tuple[int, int]],
    means: tuple[float, ...],
    curve: tuple[int, int],
    prefill: float,
    reason: str,
) -> None:
    intervals = tuple(ContextInterval(1, low, high) for low, high in contexts)
    with pytest.raises(CalibrationError, match=reason):
        CostTable(intervals, {curve: flat(1.0)}, means, prefill)


def slow_round_ms(table: CostTable, kv_lengths: Sequence[int], rows: int) -> float | None:
    """The rules, request by request."""
    total = 0.0
    for kv in kv_lengths:
        if not any(c.min_kv_length <= kv <= c.max_kv_length for c in table.contexts):
            return None
        means = table.kv_means
        right = next((i for i, mean in enumerate(means) if mean >= kv), len(means) - 1)
        left = max(0, right - 1) if means[right] > kv else right
        share = (kv - means[left]) / (means[right] - means[left]) if left != right else 0.0
        low, high = table.curves[left, 1].ms(1, rows), table.curves[right, 1].ms(1, rows)
        assert low is not None and high is not None
        total += low + share * (high - low)
    return total / len(kv_lengths)


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    count = draw(st.integers(1, 4))
    edges = sorted(draw(st.sets(st.integers(1, 400), min_size=2 * count, max_size=2 * count)))
    contexts = tuple(ContextInterval(1, edges[2 * i], edges[2 * i + 1]) for i in range(count))
    means = sorted(draw(st.sets(st.integers(1, 400), min_size=count, max_size=count)))
    ms = draw(st.lists(st.floats(1.0, 50.0), min_size=count, max_size=count))
    curves = {(i, 1): flat(ms[i]) for i in range(count)}
    return CostTable(contexts, curves, tuple(map(float, means)), 0.0)


@given(tables(), st.lists(st.integers(0, 420), min_size=1, max_size=8), st.integers(1, 64))
def test_table_equals_the_slow_reading(table: CostTable, kv_lengths: list[int], rows: int) -> None:
    costs, expected = table.at(kv_lengths), slow_round_ms(table, kv_lengths, rows)
    if expected is None:
        assert costs is None
    else:
        assert costs is not None
        assert costs.round_ms(1, 1, rows) == pytest.approx(expected, rel=1e-9)


# -- checks ---------------------------------------------------------------------------------------


def test_falls_in_cost_are_reported_with_both_sides() -> None:
    curve = Sps((4, 8, 12, 16, 24), tuple(1000.0 / ms for ms in (10.0, 20.0, 19.9, 15.0, 21.0)))
    assert monotone_violations(curve) == [(8, 16, pytest.approx(20.0), pytest.approx(15.0))]
    assert [found[:2] for found in monotone_violations(curve, tolerance=0.0)] == [(8, 12), (8, 16)]
    assert monotone_violations(SPS) == []


def test_falls_of_an_additive_curve_are_those_of_theta() -> None:
    curve = Additive(0.010, (1, 4), (0.0, 0.090), (2, 4, 8), (0.0, 0.002, 0.001))
    assert monotone_violations(curve) == [(4, 8, pytest.approx(12.0), pytest.approx(11.0))]
    assert monotone_violations(ADDITIVE) == []


@pytest.mark.parametrize(
    ("cells", "groups"),
    [
        ([], ()),
        ([(1, 2), (1, 4), (2, 4), (8, 8)], ((1, 2), (8,))),
        ([(1, 6), (2, 12), (4, 24)], ((1,), (2,), (4,))),
        ([(1, 2), (2, 3), (4, 4), (1, 3), (2, 4)], ((1, 2, 4),)),
        ([(1, 1), (2, 2), (3, 1), (3, 2)], ((1, 2, 3),)),
    ],
)
def test_buckets_are_grouped_by_shared_rows(
    cells: list[tuple[int, int]], groups: tuple[tuple[int, ...], ...]
) -> None:
    assert bucket_groups(cells) == groups
    assert bucket_groups(reversed(cells)) == groups
