"""Candidates in order with thresholds, derived from costs and offline acceptance."""

from __future__ import annotations

import pytest
from looped_world import CODE, LAST_LOOP_ONLY, costs, offline

from xspec.cost.looped import IdealCosts, acceptance_of, gain, ideal_speedup, rate_of
from xspec.policy.derive import Pair, derive_candidates

IDEAL = IdealCosts(4)


def ideal_ms(pair: Pair) -> float | None:
    return IDEAL.round_ms(pair[0], 1, pair[0] + 1, pair[1])


def at_rate(rate: float, *pairs: Pair) -> dict[Pair, float]:
    return {pair: acceptance_of(rate, pair[0]) for pair in pairs}


def test_thresholds_lie_where_the_model_has_the_neighbours_equal() -> None:
    """1@1 against 4@1 in the idealized model at one match rate p: 4 (1 + p) / 5 = 4 (1 + 4 a(p)) / 8."""
    chosen, best, off = derive_candidates(at_rate(0.8, (1, 1), (4, 1)), ideal_ms, 4.0, dead_band=0.0)
    one, four = chosen
    assert [(str(c), c.off) for c in chosen] == [("1@1", 0.25), ("4@1", 0.25)]
    assert one.up is not None and four.down is not None
    p = one.up  # of one draft the acceptance is the rate
    assert ideal_speedup(4, 1, 1, p) == pytest.approx(ideal_speedup(4, 4, 1, acceptance_of(p, 4)), rel=1e-3)
    assert rate_of(four.down, 4) == pytest.approx(p, abs=1e-3)
    assert (best, off) == (1, False)
    assert derive_candidates(at_rate(0.4, (1, 1), (4, 1)), ideal_ms, 4.0, dead_band=0.0)[1] == 0


def test_the_dead_band_is_what_the_neighbour_must_gain() -> None:
    (one, four), _, _ = derive_candidates(at_rate(0.8, (1, 1), (4, 1)), ideal_ms, 4.0, dead_band=0.05)
    assert one.up is not None and four.down is not None
    up, down = one.up, rate_of(four.down, 4)
    assert down < up
    lead = ideal_speedup(4, 4, 1, acceptance_of(up, 4)) / ideal_speedup(4, 1, 1, up)
    assert lead == pytest.approx(1.05, rel=1e-3)
    behind = ideal_speedup(4, 4, 1, acceptance_of(down, 4)) / ideal_speedup(4, 1, 1, down)
    assert behind == pytest.approx(1 / 1.05, rel=1e-3)


def test_plain_rounds_that_beat_everything_are_told() -> None:
    chosen, best, off = derive_candidates(at_rate(0.1, (1, 1), (4, 1)), ideal_ms, 4.0)
    assert off and chosen[best].draft_steps == 1
    # where nothing ever pays one pair is kept, to be probed
    chosen, _, off = derive_candidates({(1, 1): 0.9, (2, 1): 0.8}, lambda pair: 100.0 * pair[0], 4.0)
    assert off and [str(c) for c in chosen] == ["1@1"]
    assert chosen[0].up is None and chosen[0].down is None


def test_pairs_without_a_cost_are_left_out() -> None:
    chosen, _, _ = derive_candidates(
        at_rate(0.9, (1, 1), (4, 1)), lambda pair: None if pair[0] == 4 else 5.0, 4.0
    )
    assert [str(c) for c in chosen] == ["1@1"]
    with pytest.raises(ValueError, match="at least one pair"):
        derive_candidates({(1, 1): 0.5}, lambda pair: None, 4.0)


@pytest.mark.parametrize("text", [CODE, LAST_LOOP_ONLY], ids=lambda text: text.name)
@pytest.mark.parametrize("requests", [1, 8, 32])
def test_measured_costs_give_an_ordered_chain_with_the_best_pair(text: object, requests: int) -> None:
    table, acceptance = costs(), offline(text)  # type: ignore[arg-type]
    plain = table.round_ms(0, requests, requests)
    assert plain is not None

    def ms(pair: Pair) -> float:
        found = table.round_ms(pair[0], requests, requests * (pair[0] + 1), pair[1])
        assert found is not None
        return found

    chosen, best, off = derive_candidates(acceptance, ms, plain)
    pairs = [(one.draft_steps, one.draft_loops) for one in chosen]
    assert 1 <= len(chosen) <= 4
    assert [ms(pair) for pair in pairs] == sorted(ms(pair) for pair in pairs)
    gains = {pair: gain(pair[0], rate, ms(pair), plain) for pair, rate in acceptance.items()}
    assert off == (max(gains.values()) <= 1.0)
    if not off:
        assert gains[pairs[best]] == pytest.approx(max(gains.values()), rel=0.02)
    for one in chosen:
        if one.up is not None and one.down is not None:
            assert one.up - one.down >= 0.01
        assert one.off == pytest.approx(
            (ms((one.draft_steps, one.draft_loops)) / plain - 1) / one.draft_steps, abs=1e-4
        )


def test_other_drafters_have_pairs_without_loops() -> None:
    pairs = {(1, None): 0.8, (3, None): 0.6}
    chosen, _, _ = derive_candidates(pairs, lambda pair: 4.0 + 0.5 * pair[0], 4.0)
    assert {one.draft_loops for one in chosen} == {None}
    assert [one.draft_steps for one in chosen] == sorted(one.draft_steps for one in chosen)
