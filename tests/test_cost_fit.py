"""Fits of samples whose law is known, and refusals of samples that determine none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from cost_measured import law_ms, measured, small
from hypothesis import given
from hypothesis import strategies as st

from xspec.cost.fit import fit_additive, fit_sps, fit_table, relative_residuals
from xspec.cost.model import Additive, Sample, Sps
from xspec.cost.settings import Control
from xspec.errors import CalibrationError


def sample(requests: int, rows: int, *windows_ms: float, kv_length: float = 50.0) -> Sample:
    return Sample(2, requests, rows, 0, kv_length, windows_ms)


# -- worked by hand -------------------------------------------------------------------------------


def test_sps_is_steps_per_second_of_the_median() -> None:
    curve = fit_sps([sample(2, 8, 20.0, 21.0, 90.0), sample(1, 4, 10.0, 8.0, 9.0)])
    assert curve == Sps((4, 8), (1000.0 / 9.0, 1000.0 / 21.0))


def test_sps_takes_the_mean_where_buckets_share_rows() -> None:
    curve = fit_sps([sample(4, 8, 20.0), sample(2, 8, 30.0), sample(2, 4, 10.0)])
    assert curve.ms(1, 8) == pytest.approx(25.0, rel=1e-12)
    assert curve.ms(1, 4) == pytest.approx(10.0, rel=1e-12)


def test_additive_is_least_squares() -> None:
    """alpha = mean of (1, 2), theta = mean of (2, 3), and the mean of all, 11.75, is met."""
    cells = [sample(1, 2, 10.0), sample(1, 4, 12.0), sample(2, 2, 11.0), sample(2, 4, 14.0)]
    curve = fit_additive(cells)
    assert curve.requests == (1, 2) and curve.target_rows == (2, 4)
    assert curve.bias_s == pytest.approx(0.00975)
    assert curve.alpha_s == (0.0, pytest.approx(0.0015))
    assert curve.theta_s == (0.0, pytest.approx(0.0025))
    assert relative_residuals(curve, cells) == pytest.approx((-0.025, 0.25 / 12, 0.25 / 11, -0.25 / 14))


def test_additive_takes_medians() -> None:
    curve = fit_additive([sample(1, 2, 10.0, 500.0, 9.0), sample(1, 4, 12.0, 12.0, 1.0)])
    assert curve.bias_s == pytest.approx(0.010)
    assert curve.theta_s == (0.0, pytest.approx(0.002))


def test_a_single_point_is_all_bias() -> None:
    assert fit_additive([sample(3, 6, 12.0)]).ms(3, 6) == pytest.approx(12.0)


# -- properties -----------------------------------------------------------------------------------


@st.composite
def additive_laws(draw: st.DrawFn) -> tuple[Additive, list[tuple[int, int]]]:
    """A law, and cells that determine it: a walk that changes one side at a time, and whatever else."""
    requests = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=5)))
    rows = sorted(draw(st.sets(st.integers(1, 256), min_size=1, max_size=6)))
    part = st.floats(-0.002, 0.05)
    alpha = (0.0, *(draw(part) for _ in requests[1:]))
    theta = (0.0, *(draw(part) for _ in rows[1:]))
    law = Additive(draw(st.floats(0.005, 0.1)), tuple(requests), alpha, tuple(rows), theta)
    i = j = 0
    cells = [(requests[0], rows[0])]
    while i < len(requests) - 1 or j < len(rows) - 1:
        along = i < len(requests) - 1 and (j == len(rows) - 1 or draw(st.booleans()))
        i, j = (i + 1, j) if along else (i, j + 1)
        cells.append((requests[i], rows[j]))
    more = st.tuples(st.sampled_from(requests), st.sampled_from(rows))
    return law, draw(st.permutations([*cells, *draw(st.lists(more, max_size=8))]))


def samples_of(law: Additive, cells: list[tuple[int, int]]) -> list[Sample]:
    found = [(requests, rows, law.ms(requests, rows)) for requests, rows in cells]
    return [sample(requests, rows, ms) for requests, rows, ms in found if ms is not None]


@given(additive_laws())
def test_additive_recovers_its_law(drawn: tuple[Additive, list[tuple[int, int]]]) -> None:
    law, cells = drawn
    curve = fit_additive(samples_of(law, cells))
    assert (curve.requests, curve.target_rows) == (law.requests, law.target_rows)
    assert curve.bias_s == pytest.approx(law.bias_s, abs=1e-9)
    assert curve.alpha_s == pytest.approx(law.alpha_s, abs=1e-9)
    assert curve.theta_s == pytest.approx(law.theta_s, abs=1e-9)


@given(additive_laws(), st.data())
def test_order_never_matters(drawn: tuple[Additive, list[tuple[int, int]]], data: st.DataObject) -> None:
    noisy = [
        replace(found, windows_ms=(found.median_ms * data.draw(st.floats(0.9, 1.1)),))
        for found in samples_of(*drawn)
    ]
    shuffled = data.draw(st.permutations(noisy))
    assert fit_sps(shuffled) == fit_sps(noisy)
    try:
        curve = fit_additive(noisy)
    except CalibrationError as error:
        assert "no positive cost" in str(error)
    else:
        assert fit_additive(shuffled) == curve


@given(st.dictionaries(st.integers(1, 300), st.floats(0.1, 1e4), min_size=1, max_size=12))
def test_sps_recovers_every_probe(ms_of: dict[int, float]) -> None:
    curve = fit_sps([sample(1, rows, ms) for rows, ms in ms_of.items()])
    for rows, ms in ms_of.items():
        assert curve.ms(1, rows) == pytest.approx(ms, rel=1e-12)


# -- refusals -------------------------------------------------------------------------------------


def test_an_unconnected_grid_names_its_parts() -> None:
    cells = [sample(1, 6, 10.0), sample(2, 6, 11.0), sample(4, 24, 14.0), sample(8, 48, 20.0)]
    with pytest.raises(CalibrationError) as error:
        fit_additive(cells)
    assert "4 points cannot determine 6 additive costs" in str(error.value)
    assert str(error.value).endswith("share no target rows: 1, 2 | 4 | 8")


@pytest.mark.parametrize("fit", [fit_sps, fit_additive])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e308])
def test_bad_windows_are_named(fit: object, bad: float) -> None:
    assert callable(fit)
    with pytest.raises(CalibrationError) as error:
        fit([sample(1, 6, 10.0, 11.0), sample(2, 6, 10.0, bad)])
    (reason,) = error.value.reasons
    assert reason.startswith("context 0, 2 drafts, 2 requests, 6 target rows: 10, ")


@pytest.mark.parametrize("fit", [fit_sps, fit_additive])
def test_nothing_to_fit(fit: object) -> None:
    assert callable(fit)
    with pytest.raises(CalibrationError, match="no samples"):
        fit([])
    with pytest.raises(CalibrationError, match="no windows"):
        fit([sample(1, 6)])
    with pytest.raises(CalibrationError, match="mean KV length nan"):
        fit([sample(1, 6, 1.0, kv_length=math.nan)])


def test_samples_no_sum_explains_are_refused() -> None:
    """Row mean + column mean - mean of all at (1, 2) is 1 + 1 - 25.75."""
    cells = [sample(1, 2, 1.0), sample(1, 4, 1.0), sample(2, 2, 1.0), sample(2, 4, 100.0)]
    with pytest.raises(CalibrationError, match="no positive cost for .* 1 requests, 2 target rows, measured"):
        fit_additive(cells)


def test_a_residual_outside_the_curve_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 requests, 9 target rows"):
        relative_residuals(Sps((4, 8), (1.0, 1.0)), [sample(2, 9, 1.0)])


# -- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("control", Control)
@pytest.mark.parametrize("model", ["sps", "additive"])
def test_table_costs_what_was_measured(control: Control, model: str) -> None:
    effective = small(control, model=model)
    table = fit_table(effective, measured(effective), 0.25)
    assert table.prefill_ms_per_token == 0.25
    assert table.kv_means == (100.0, 500.0)
    assert set(table.curves) == {(p.context, p.draft_steps) for p in effective.points}
    for point in effective.points:
        costs = table.at([100, 100] if point.context == 0 else [500])
        assert costs is not None
        ms = costs.round_ms(point.draft_steps, point.requests, point.target_rows)
        sharing = [p for p in effective.points if replace(p, requests=point.requests) == point]
        expected = [law_ms(p) for p in sharing] if model == "sps" else [law_ms(point)]
        assert ms == pytest.approx(sum(expected) / len(expected), rel=1e-9)


def test_plain_rounds_are_a_curve_over_rows_in_either_model() -> None:
    effective = small(Control.TARGET_VERIFY, model="additive")
    table = fit_table(effective, measured(effective), 0.0)
    assert {key for key, curve in table.curves.items() if isinstance(curve, Sps)} == {(0, 0), (1, 0)}


def test_samples_must_be_those_of_the_points() -> None:
    effective = small(Control.TARGET_VERIFY)
    samples = measured(effective)
    strange = replace(samples[0], target_rows=99)
    with pytest.raises(CalibrationError) as error:
        fit_table(effective, (strange, *samples[2:], samples[2]), 0.0)
    gone, first = effective.points[1], effective.points[0]
    assert [reason.split(":")[0] for reason in error.value.reasons] == [
        "not measured",
        "not measured",
        "not asked for",
        "measured 2 times",
    ]
    assert f"{first.requests} requests, {first.target_rows} target rows" in error.value.reasons[0]
    assert f"{gone.requests} requests, {gone.target_rows} target rows" in error.value.reasons[1]


def test_many_missing_samples_are_counted() -> None:
    effective = small(Control.TARGET_VERIFY)
    with pytest.raises(CalibrationError) as error:
        fit_table(effective, measured(effective)[:1], 0.0)
    assert error.value.reasons[-1] == f"and {len(effective.points) - 13} more"
