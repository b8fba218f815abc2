"""Costs of looped targets: the RFC's worked numbers, its formula on measured loops, and tables by depth."""

from __future__ import annotations

import pytest
from looped_world import DEPTHS, LOOPS, STEPS, costs, loop_ms, replay

from xspec.cost.fit import curve_of
from xspec.cost.looped import (
    IdealCosts,
    LoopedCosts,
    acceptance_of,
    gain,
    ideal_break_even,
    ideal_speedup,
    off_acceptance,
    rate_of,
    tokens_per_s,
)
from xspec.cost.model import CostTable, Sample, Sps
from xspec.cost.schema import ContextInterval
from xspec.errors import CalibrationError, ConfigError

# -- the idealized model --------------------------------------------------------------------------


def test_the_worked_numbers_of_the_rfc() -> None:
    """L512, B8, K1: d = 2 at 90.8 %, d = 3 at 94.9 %; the deeper one is worth 0.88 times as much."""
    two, three = ideal_speedup(4, 1, 2, 0.908), ideal_speedup(4, 1, 3, 0.949)
    assert (round(two, 2), round(three, 2)) == (1.27, 1.11)
    assert round(three / two, 2) == 0.88
    assert three / two == pytest.approx((1 + 0.949) / (1 + 0.908) * (4 + 2) / (4 + 3))
    # 2.1 % more output, 16.7 % more time
    assert pytest.approx(1.021, abs=5e-4) == (1 + 0.949) / (1 + 0.908)
    assert pytest.approx(1.167, abs=5e-4) == (4 + 3) / (4 + 2)


@pytest.mark.parametrize("depth", DEPTHS)
def test_break_even_does_not_depend_on_the_number_of_drafts(depth: int) -> None:
    for steps in (1, 2, 4, 8, 16):
        assert ideal_speedup(LOOPS, steps, depth, ideal_break_even(LOOPS, depth)) == pytest.approx(1.0)
        assert ideal_speedup(LOOPS, steps, depth, depth / LOOPS + 0.01) > 1.0
        assert ideal_speedup(LOOPS, steps, depth, depth / LOOPS - 0.01) < 1.0


@pytest.mark.parametrize(("depth", "ceiling"), [(1, 3.0), (2, 1.8), (3, 9 / 7)])
def test_with_certain_drafts_the_ceiling_is_d_times_k_plus_one(depth: int, ceiling: float) -> None:
    assert ideal_speedup(LOOPS, 8, depth, 1.0) == pytest.approx(ceiling)


def test_ideal_costs_are_the_denominator() -> None:
    ideal = IdealCosts(4)
    for steps in STEPS:
        for depth in DEPTHS:
            ms = ideal.at([1]).round_ms(steps, 8, 8 * (steps + 1), depth)
            assert ms == 4 + depth * steps
            assert gain(steps, 0.7, ms, 4.0) == pytest.approx(ideal_speedup(4, steps, depth, 0.7))
    assert ideal.round_ms(0, 8, 8) == ideal.round_ms(0, 8, 8, 2) == 4.0
    assert ideal.round_ms(1, 8, 16) is None


# -- measured loops -------------------------------------------------------------------------------


def test_the_formula_with_measured_loops() -> None:
    """T = d (K + 1) c(B) + K head + (D - d) c(B (K + 1)) + other; 8 requests, K 4, d 1, hidden 128 x 2."""
    table = LoopedCosts(4, loop_ms((8, 40), (0.47, 0.93)), loop_ms((8, 40), (0.47, 0.93)), 0.3, 0.05)
    assert table.round_ms(4, 8, 40, 1) == pytest.approx(5 * 0.47 + 4 * 0.05 + 3 * 0.93 + 0.3)
    assert table.round_ms(0, 8, 8) == pytest.approx(4 * 0.47 + 0.3)
    # no rows beyond what was measured, and no depth that leaves nothing to draft with or to verify
    assert table.round_ms(8, 8, 72, 1) is None
    assert [table.round_ms(4, 8, 40, depth) for depth in (None, 0, 4)] == [None, None, None]
    with pytest.raises(ConfigError, match="loops is 1"):
        LoopedCosts(1, table.shallow, table.verify)


def test_break_even_of_measured_loops_lies_where_the_research_has_it() -> None:
    """H128 without other costs: d = 1 at one request .30 to .37, d = 2 .54 to .58."""
    curve = loop_ms((1, 2, 3, 5, 9), (0.25, 0.29, 0.33, 0.34, 0.39))
    table = LoopedCosts(4, curve, curve)
    plain = table.round_ms(0, 1, 1)
    assert plain is not None
    found = {
        depth: [off_acceptance(k, table.round_ms(k, 1, k + 1, depth) or 0.0, plain) for k in STEPS]
        for depth in (1, 2)
    }
    assert (round(min(found[1]), 2), round(max(found[1]), 2)) == (0.30, 0.37)
    assert (round(min(found[2]), 2), round(max(found[2]), 2)) == (0.54, 0.58)
    for depth, thetas in found.items():
        for steps, theta in zip(STEPS, thetas, strict=True):
            ms = table.round_ms(steps, 1, steps + 1, depth) or 0.0
            assert gain(steps, theta, ms, plain) == pytest.approx(1.0)


def test_tokens_per_second() -> None:
    assert tokens_per_s(8, 4, 0.5, 12.0) == pytest.approx(8 * 3 / 0.012)


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_rates_and_acceptance_are_inverse(steps: int) -> None:
    for rate in (0.0, 0.05, 0.5, 0.83, 0.99, 1.0):
        assert rate_of(acceptance_of(rate, steps), steps) == pytest.approx(rate, abs=1e-9)
    assert acceptance_of(0.5, 2) == pytest.approx((0.5 + 0.25) / 2)


def test_replay_by_hand() -> None:
    # 1 1 | 0 -> 2 of 3 drafts, 3 tokens; 1 0 -> 1 of 3, 2 tokens; 1 1 1 and a bonus -> 3 of 3, 4 tokens
    assert replay([1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1], 3) == (9, 6, 9)


# -- tables by depth ------------------------------------------------------------------------------


def table(looped: dict[tuple[int, int, int], Sps]) -> CostTable:
    plain = {(0, 0): loop_ms((1, 8), (4.0, 8.0))}
    return CostTable((ContextInterval(1, 1, 4096),), plain, (64.0,), 0.1, looped)


def test_a_table_answers_by_depth_and_plain_rounds_have_none() -> None:
    at = table({(0, 1, d): loop_ms((2, 16), (5.0 + d, 10.0 + d)) for d in (1, 2)}).at([10])
    assert at is not None
    assert [at.round_ms(1, 8, 16, d) for d in (1, 2, 3)] == [pytest.approx(11.0), pytest.approx(12.0), None]
    assert at.round_ms(1, 8, 16) is None
    assert at.round_ms(0, 8, 8) == at.round_ms(0, 8, 8, 2) == pytest.approx(8.0)


def test_curves_by_depth_need_a_context_drafts_and_a_depth() -> None:
    curve = loop_ms((2,), (5.0,))
    for key in ((0, 0, 1), (0, 1, 0), (1, 1, 1)):
        with pytest.raises(CalibrationError):
            table({key: curve})


def test_samples_belong_to_curves_by_depth_and_older_ones_have_none() -> None:
    curve = loop_ms((16,), (6.0,))
    one = table({(0, 1, 2): curve})
    assert curve_of(one, Sample(1, 8, 16, 0, 64.0, (1.0,), depth=2)) is curve
    assert curve_of(one, Sample(0, 8, 8, 0, 64.0, (1.0,), depth=2)) is one.curves[0, 0]
    assert Sample(1, 8, 16, 0, 64.0, (1.0,)).depth is None


def test_the_small_models_costs_are_monotone() -> None:
    """What the other tests stand on: more rows, drafts or loops never cost less."""
    one = costs()
    for requests in (1, 8, 32):
        for depth in DEPTHS:
            ms = [one.round_ms(k, requests, requests * (k + 1), depth) or 0.0 for k in STEPS]
            assert ms == sorted(ms) and ms[0] > (one.round_ms(0, requests, requests) or 0.0)
