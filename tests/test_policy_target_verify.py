"""Adaptive target verification, decision by decision; numbers done by hand in the comments."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import FakeCosts, feedback, geometry, row, view

from xspec.core.shapes import BucketGrid
from xspec.policy import target_verify
from xspec.policy.budget import Tier, best_tier, expected_tokens
from xspec.policy.target_verify import TargetVerifyPolicy


def by_rows(costs_ms: dict[int, float], plain_ms: float | None = None) -> FakeCosts:
    """Cost of a round with drafts by target rows, and of a plain one."""
    return FakeCosts(lambda steps, requests, rows: costs_ms.get(rows) if steps else plain_ms)


def policy(
    costs: FakeCosts, width: int, lanes: int, tiers: Sequence[int], **settings: object
) -> TargetVerifyPolicy:
    uncovered = str(settings.pop("uncovered", "full_width"))
    geo = geometry(width, BucketGrid([lanes]), tiers={(lanes, width): tuple(tiers)}, uncovered=uncovered)
    return TargetVerifyPolicy(costs, geo, **settings)  # type: ignore[arg-type]


def show(chosen: TargetVerifyPolicy, plan_id: int, signals: dict[int, Sequence[float]]) -> None:
    """A round that verified no draft, so that signals are all it tells."""
    width = len(next(iter(signals.values())))
    plan = chosen.plan(view(plan_id, tuple(signals)))
    rows = [row(sequence_id, 0, 0, proposed=width) for sequence_id in signals]
    chosen.observe(feedback(plan, rows, signals=list(signals.values())))


# -- budget ---------------------------------------------------------------------------------------

EASY, HARD = (0.9, 0.8), (0.5, 0.4)  # survivals 0.9, 0.72 and 0.5, 0.2


def test_the_tier_with_the_most_expected_tokens_per_ms_is_chosen() -> None:
    # G = 2: 2; G = 3: 2.9; G = 4: 3.62; G = 5: 4.12; G = 6: 4.32.
    costs = {2: 10.0, 3: 12.0, 4: 15.5, 5: 17.5, 6: 19.0}
    # Per ms: 0.2, 0.2417, 0.2335, 0.2354, 0.2274.
    chosen = policy(by_rows(costs), 2, 2, [2, 3, 4, 5])
    show(chosen, 0, {1: EASY, 2: HARD})
    plan = chosen.plan(view(1, 2))
    assert (plan.draft_steps, plan.target_rows, plan.predicted_ms, plan.reason) == (2, 3, 12.0, "tier")
    # The best need not be next to the second best: without G = 3 it is G = 5.
    chosen = policy(by_rows(costs | {3: 15.0}), 2, 2, [2, 3, 4, 5])
    show(chosen, 0, {1: EASY, 2: HARD})
    assert chosen.plan(view(1, 2)).target_rows == 5


def test_full_width_is_said_as_none() -> None:
    chosen = policy(by_rows({2: 10.0, 3: 12.0, 6: 12.0}), 2, 2, [2, 3])
    show(chosen, 0, {1: EASY, 2: HARD})
    plan = chosen.plan(view(1, 2))
    assert (plan.draft_steps, plan.target_rows, plan.predicted_ms) == (2, None, 12.0)


def test_ties_go_to_the_smaller_tier_and_tiers_without_cost_are_left_out() -> None:
    ones = [[1.0, 1.0]] * 2  # 2, 3 and 4 tokens
    assert best_tier(ones, [2, 3, 4], [10.0, 15.0, 20.0]).target_rows == 2
    chosen = policy(by_rows({2: 10.0, 6: 90.0}), 2, 2, [2, 3, 4])
    show(chosen, 0, {1: EASY, 2: HARD})
    assert chosen.plan(view(1, 2)).target_rows == 2


def test_padded_rows_are_filled() -> None:
    # 2 requests in 4 lanes: of G = 6 rows 2 hold their last tokens, 4 hold drafts.
    assert expected_tokens([[0.9, 0.72], [0.5, 0.2]], [4, 6, 12]) == pytest.approx([3.62, 4.32, 4.32])


def test_a_request_without_feedback_counts_by_what_others_promise() -> None:
    costs = {2: 10.0, 3: 12.0, 4: 15.3, 6: 19.0}
    chosen = policy(by_rows(costs), 2, 2, [2, 3, 4])
    show(chosen, 0, {1: EASY, 2: HARD})
    # Known: 2, 2.9, 3.62 and 4.32 tokens: 0.2, 0.2417, 0.2366, 0.2274.
    assert chosen.plan(view(1, (1, 2))).target_rows == 3
    # New: 0.63, 0.39 of request 3 beside 0.5, 0.2: 2, 2.63, 3.13 and 3.73 tokens: 0.2, 0.2194, 0.205, 0.196.
    # Were it surely accepted, 1, 1: 2, 3, 4 and 4.7 tokens: G = 4 would be best.
    assert chosen.plan(view(2, (3, 2))).target_rows == 3


def test_positions_without_room_and_opted_out_requests_promise_nothing() -> None:
    costs = {2: 10.0, 3: 12.0, 4: 14.0, 6: 20.0}
    chosen = policy(by_rows(costs), 2, 2, [2, 3, 4])
    show(chosen, 0, {1: EASY, 2: EASY})
    # G = 4: 3.8 / 14 = 0.2714 against 2.9 / 12 = 0.2417; all 5.24 / 20 = 0.262.
    assert chosen.plan(view(1, 2)).target_rows == 4
    # Request 2 has room for 1 draft: 0.9, 0.9, 0.72: the same two are best.
    assert chosen.plan(view(2, 2, rooms=(9, 2))).target_rows == 4
    # Room for none, or opted out: G = 4: 2 + 0.9 + 0.72 = 3.62 / 14 = 0.2586. G = 3: 0.2417.
    assert chosen.plan(view(3, 2, rooms=(9, 1))).target_rows == 4
    # Room for one draft in all: 2.9 / 12.
    assert chosen.plan(view(4, 2, rooms=(2, 1))).target_rows == 3
    assert chosen.plan(view(5, 2, rooms=(2, 9), speculative=(True, False))).target_rows == 3
    plan = chosen.plan(view(6, 2, rooms=(1, 9), speculative=(True, False)))
    assert (plan.draft_steps, plan.target_rows, plan.reason) == (0, None, "nothing_to_draft")


def test_signals_that_are_no_probabilities_promise_nothing() -> None:
    chosen = policy(by_rows({2: 10.0, 3: 10.1, 6: 10.2}), 2, 2, [2, 3])
    show(chosen, 0, {1: (math.nan, math.nan), 2: (math.nan, 1.0)})
    assert chosen.plan(view(1, 2)).target_rows == 2  # nothing is promised
    json.dumps(chosen.status(), allow_nan=False)


def test_the_latest_signals_count() -> None:
    costs = {1: 10.0, 2: 11.0, 3: 20.0}
    chosen = policy(by_rows(costs), 2, 1, [1, 2])
    for plan_id, (first, tier) in enumerate([(0.9, 2), (0.05, 1), (0.5, 2)]):
        show(chosen, 2 * plan_id, {1: (first, 0.1)})
        assert chosen.plan(view(2 * plan_id + 1, 1)).target_rows == tier


@settings(max_examples=60, deadline=None)
@given(
    signals=st.lists(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=4),
    costs=st.lists(st.floats(1.0, 50.0), min_size=16, max_size=16),
    limits=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_the_budget_is_the_best_of_all_tiers_and_allocations(
    signals: list[list[float]], costs: list[float], limits: list[int]
) -> None:
    """Brute force: every number of leading drafts for every request, every tier of 4 padded lanes."""
    count = len(signals)
    limits = limits[:count]
    if not any(limits):
        limits[0] = 1
    tiers = list(range(4, 16))
    chosen = policy(by_rows(dict(zip(range(4, 17), costs, strict=False))), 3, 4, tiers)
    show(chosen, 0, {i + 1: s for i, s in enumerate(signals)})
    plan = chosen.plan(view(1, count, rooms=[limit + 1 for limit in limits]))

    chances = np.cumprod(np.array(signals, dtype=np.float32).astype(np.float64), axis=1)
    best = {
        rows: max(
            count + sum(chances[i, :take].sum() for i, take in enumerate(taken))
            for taken in itertools.product(*(range(limit + 1) for limit in limits))
            if count + sum(taken) <= rows
        )
        for rows in range(4, 17)
    }
    scores = {rows: best[rows] / costs[rows - 4] for rows in range(4, 17)}
    picked = 16 if plan.target_rows is None else plan.target_rows
    assert scores[picked] == pytest.approx(max(scores.values()), rel=1e-9)
    assert plan.predicted_ms == costs[picked - 4]


@dataclass
class ByLength:
    """Costs by the longest KV length of a batch."""

    short: FakeCosts
    long: FakeCosts

    def at(self, kv_lengths: Sequence[int]) -> FakeCosts | None:
        return (self.short if max(kv_lengths) <= 200 else self.long).at(kv_lengths)


def test_costs_are_those_of_the_batch_that_is_planned() -> None:
    """Whatever the round before was planned by: other lengths, other requests, no costs at all."""
    short, long = by_rows({1: 10.0, 2: 11.0, 4: 90.0}), by_rows({1: 10.0, 2: 25.0, 4: 90.0})
    short.covers = lambda kv: kv > 1
    geo = geometry(1, BucketGrid([1, 2]), tiers={(1, 1): (1, 2), (2, 1): (2, 4)})
    chosen = TargetVerifyPolicy(ByLength(short, long), geo)  # type: ignore[arg-type]
    show(chosen, 0, {1: (0.9,), 2: (0.9,)})
    asked = [(1, 100), (1, 201), (1, 100), (2, 100), (1, 100), (1, 1), (1, 100), (2, 201), (1, 201)]
    plans = [chosen.plan(view(1 + i, rows, kv=kv)) for i, (rows, kv) in enumerate(asked)]
    # One request: 1 / 10 against 1.9 / 11 or 1.9 / 25. Two: 2 / 11 or 2 / 25 against 3.8 / 90.
    assert [plan.predicted_ms for plan in plans] == [11.0, 10.0, 11.0, 11.0, 11.0, None, 11.0, 25.0, 10.0]
    assert [plan.target_rows for plan in plans] == [None, 1, None, 2, None, None, None, 2, 1]


# -- how far signals are believed -----------------------------------------------------------------


def test_equal_signals_are_corrected_by_what_each_request_kept() -> None:
    chosen = policy(by_rows({2: 13.5, 3: 14.0, 4: 15.0}, plain_ms=10.0), 1, 2, [2, 3])
    for plan_id in range(60):
        plan = chosen.plan(view(plan_id, (1, 2)))
        drafts = plan.draft_steps
        done = [row(1, drafts, drafts, proposed=drafts), row(2, drafts, 0, proposed=drafts)]
        chosen.observe(feedback(plan, done, signals=[[0.6], [0.6]] if drafts else None))
    easy, hard = chosen._signals.get(1), chosen._signals.get(2)
    assert easy is not None and hard is not None
    assert easy.own_factor > 1.2 and hard.own_factor < 0.5


def test_overconfident_signals_lead_to_smaller_budgets() -> None:
    costs = {1: 10.0, 2: 14.0, 3: 18.0}
    chosen = policy(by_rows(costs), 2, 1, [1, 2])
    tiers = []
    for plan_id in range(80):
        plan = chosen.plan(view(plan_id, 1))
        tiers.append(3 if plan.target_rows is None else plan.target_rows)
        drafts = tiers[-1] - 1
        # 0.9 is promised, one of five is accepted.
        done = [row(1, drafts, min(drafts, int(plan_id % 5 == 0)), proposed=2)]
        chosen.observe(feedback(plan, done, signals=[[0.9, 0.9]]))
    assert tiers[1] == 3 and set(tiers[60:]) == {1}
    assert chosen.status()["signal_correction"][0] < 0.9


# -- plain or not ---------------------------------------------------------------------------------


def test_a_plain_round_is_one_more_candidate() -> None:
    # Prior: 0.6, 0.36. Best with drafts 1.6 / 18 = 0.0889 (G = 2), plain 1 / 10.
    plan = policy(by_rows({1: 17.0, 2: 18.0, 3: 26.0}, 10.0), 2, 1, [1, 2]).plan(view(0, 1))
    assert (plan.draft_steps, plan.target_rows, plan.reason, plan.predicted_ms) == (0, None, "initial", 10.0)
    # At 15 ms 1.6 / 15 = 0.1067; the new request itself counts 1 for the budget: 2 / 15, 3 / 26.
    plan = policy(by_rows({1: 17.0, 2: 15.0, 3: 26.0}, 10.0), 2, 1, [1, 2]).plan(view(0, 1))
    assert (plan.draft_steps, plan.target_rows, plan.reason, plan.predicted_ms) == (2, 2, "initial", 15.0)
    forbidden = policy(by_rows({1: 17.0, 2: 18.0, 3: 26.0}, 10.0), 2, 1, [1, 2], allow_plain_rounds=False)
    assert forbidden.plan(view(0, 1)).draft_steps == 2


@pytest.mark.parametrize(("plain_ms", "switches"), [(11.025, False), (11.025 * 0.9999, True)])
def test_drafts_are_given_up_once_a_whole_window_says_so(plain_ms: float, switches: bool) -> None:
    # Prior: 1.6 tokens in 15 ms begin with drafts. Then signals of 0: 1 token in 11.025 ms, plain as good.
    # The first round leaves the average after 64 rounds.
    chosen = policy(by_rows({1: 11.025, 2: 15.0, 3: 40.0}, plain_ms), 2, 1, [1, 2])
    plans = []
    for plan_id in range(101):
        plans.append(chosen.plan(view(plan_id, 1)))
        assert plan_id or (plans[0].draft_steps, plans[0].reason) == (2, "initial")
        chosen.observe(feedback(plans[-1], [row(1, 0, 0, proposed=2)], signals=[[0.0, 0.0]]))
    switched = [plan.plan_id for plan in plans if plan.reason == "switch"]
    assert switched == ([65] if switches else [])  # looked at every five batches
    assert plans[-1].draft_steps == (0 if switches else 2)


@pytest.mark.parametrize(("plain_ms", "switches"), [(11.025 / 1.02, False), (11.025 / 1.02 * 0.9999, True)])
def test_before_a_window_is_full_drafts_are_given_up_for_the_minimum_gain(
    plain_ms: float, switches: bool
) -> None:
    # As above, in rounds so long that no more than 20 of them make the average of 2 s.
    chosen = policy(by_rows({1: 110.25, 2: 150.0, 3: 400.0}, 10.0 * plain_ms), 2, 1, [1, 2])
    plans = []
    for plan_id in range(101):
        plans.append(chosen.plan(view(plan_id, 1)))
        chosen.observe(feedback(plans[-1], [row(1, 0, 0, proposed=2)], signals=[[0.0, 0.0]]))
    assert plans[-1].draft_steps == (0 if switches else 2)


@pytest.mark.parametrize(("drafts_ms", "switches"), [(16.0 / 1.02, False), (16.0 / 1.02 * 0.9999, True)])
def test_drafts_are_taken_up_for_the_minimum_gain(drafts_ms: float, switches: bool) -> None:
    # Prior: 1.6 tokens. Up to 200 tokens they take 99 ms, then `drafts_ms`; plain 1 in 10.
    short, long = by_rows({1: 99.0, 2: 99.0}, 10.0), by_rows({1: 99.0, 2: drafts_ms}, 10.0)
    geo = geometry(1, BucketGrid([1]), tiers={(1, 1): (1, 2)})
    chosen = TargetVerifyPolicy(ByLength(short, long), geo)  # type: ignore[arg-type]
    plans = []
    for plan_id in range(400):  # so that no look at the short ones is left in the average
        plans.append(chosen.plan(view(plan_id, 1, kv=100 if plan_id < 20 else 300)))
        chosen.observe(feedback(plans[-1], [row(1, 0, 0)]))
    assert plans[0].reason == "initial" and not plans[0].draft_steps
    assert any(plan.reason == "switch" for plan in plans) == switches


def test_a_new_load_is_met_by_the_better_kind_without_a_minimum_gain() -> None:
    # At 3 lanes plain rounds are just not 2 % better than rounds whose drafts all fail.
    ms = {1: (50.0, 10.0), 3: (10.0, 10.2)}
    costs = FakeCosts(lambda steps, requests, rows: ms[requests][1 if steps else 0])
    chosen = TargetVerifyPolicy(costs, geometry(1, BucketGrid([1, 3])))
    plans = []
    for plan_id in range(11):
        rows = (1,) if plan_id < 6 else (1, 2, 3)
        plans.append(chosen.plan(view(plan_id, rows)))
        done = [row(s, 0, 0, proposed=plans[-1].draft_steps) for s in rows]
        signals = [[0.0]] * len(rows) if plans[-1].draft_steps else None
        chosen.observe(feedback(plans[-1], done, signals=signals))
    assert [plan.draft_steps for plan in plans] == [1] * 9 + [0] * 2  # new is what lasts four rounds
    assert chosen.status()["switches"] == {"load": 1}


def test_in_a_plain_spell_one_lucky_probe_does_not_decide() -> None:
    # Rounds so long that four of them make the average: 1, 1 taken at face value is 3 tokens in 750 ms.
    chosen = policy(by_rows({1: 700.0, 2: 725.0, 3: 750.0}, 500.0), 2, 1, [1, 2])
    for plan_id in range(60):
        show(chosen, plan_id, {1: (0.1, 0.1)})
    assert chosen.status()["mode"] == "plain"
    show(chosen, 60, {1: (1.0, 1.0)})
    plans = []
    for plan_id in range(61, 80):
        plans.append(chosen.plan(view(plan_id, 1)))
        chosen.observe(feedback(plans[-1], [row(1, 0, 0)]))
    assert {plan.draft_steps for plan in plans if plan.reason != "probe"} == {0}


def test_promises_are_added_up_where_something_may_come_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a plain spell: at a look in twenty rounds, and where a probe could be paid."""
    looks = []

    def counted(*args: Any) -> Tier:
        looks.append(args)
        return best_tier(*args)

    monkeypatch.setattr(target_verify, "best_tier", counted)
    chosen = policy(by_rows({1: 11.0, 2: 17.95, 3: 25.0}, 10.0), 2, 1, [1, 2])
    plans = []
    for plan_id in range(80):  # a probe costs 7.95 ms, the allowance is 0.1 ms a round
        plans.append(chosen.plan(view(plan_id, 1)))
        chosen.observe(feedback(plans[-1], [row(1, 0, 0)]))
    assert not any(plan.draft_steps for plan in plans)
    assert all(plan.predicted_ms == 10.0 for plan in plans)
    assert len(looks) == 80 // 20
    assert chosen.plan(view(80, 1)).reason == "probe"


def test_one_probe_at_a_time() -> None:
    costs = by_rows({1: 900.0, 2: 900.0, 3: 900.0}, 10.0)
    chosen = policy(costs, 2, 1, [1, 2])
    for plan_id in range(100):  # 0.1 ms a round is saved
        chosen.observe(feedback(chosen.plan(view(plan_id, 1)), [row(1, 0, 0)]))
    costs.formula = by_rows({1: 900.0, 2: 17.0, 3: 900.0}, 10.0).formula
    plans = [chosen.plan(view(plan_id, 1, kv=200)) for plan_id in range(100, 120)]  # none retires
    assert [plan.plan_id for plan in plans if plan.reason == "probe"] == [100]


def test_probes_of_a_plain_spell_use_the_best_budget_that_verifies_a_draft() -> None:
    # Prior 0.6, 0.36: 1.6 / 17.95, 1.96 / 25: the best telling tier is 2, 7.95 ms dearer: after 80 rounds.
    chosen = policy(by_rows({1: 11.0, 2: 17.95, 3: 25.0}, 10.0), 2, 1, [1, 2])
    plans = []
    for plan_id in range(81):
        plans.append(chosen.plan(view(plan_id, 1)))
        chosen.observe(feedback(plans[-1], [row(1, 0, 0)]))
    assert [n for n, plan in enumerate(plans) if plan.draft_steps] == [80]
    assert (plans[80].target_rows, plans[80].reason, plans[80].predicted_ms) == (2, "probe", 17.95)


@pytest.mark.parametrize(("batches", "tier"), [(64, 3), (65, 2)])
def test_signals_count_for_64_batches(batches: int, tier: int) -> None:
    # Request 2 promises nothing. Fresh, request 1 promises 0.9: 2.9 / 13 against 2 / 10. Stale, about 0.1.
    chosen = policy(by_rows({2: 10.0, 3: 13.0, 4: 30.0}), 1, 2, [2, 3])
    show(chosen, 0, {1: (0.9,), 2: (0.0,)})
    for plan_id in range(1, 1 + batches):
        show(chosen, plan_id, {2: (0.0,)})
    assert chosen.plan(view(1 + batches, 2)).target_rows == tier


# -- what is not covered --------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "steps"), [("full_width", 2), ("plain", 0)])
def test_without_measured_costs_the_rule_decides(rule: str, steps: int) -> None:
    short = FakeCosts(by_rows({2: 10.0, 6: 20.0}).formula, lambda kv: kv <= 500)
    plan = policy(short, 2, 2, [2], uncovered=rule).plan(view(0, 2, kv=501))
    assert (plan.draft_steps, plan.target_rows, plan.reason, plan.predicted_ms) == (
        steps,
        None,
        "uncovered_kv",
        None,
    )
    plan = policy(by_rows({}), 2, 2, [2], uncovered=rule).plan(view(0, 2))
    assert (plan.draft_steps, plan.target_rows, plan.reason) == (steps, None, "uncovered_bucket")


def test_with_a_plain_cost_alone_rounds_are_plain() -> None:
    plan = policy(by_rows({}, 10.0), 2, 2, [2]).plan(view(0, 2))
    assert (plan.draft_steps, plan.reason, plan.predicted_ms) == (0, "initial", 10.0)


def test_rounds_without_decode_rows_change_nothing() -> None:
    chosen = policy(by_rows({2: 10.0, 6: 20.0}), 2, 2, [2])
    plan = chosen.plan(view(0, 0, prefill_tokens=64))
    assert (plan.draft_steps, plan.target_rows, plan.reason, plan.predicted_ms) == (
        0,
        None,
        "prefill_only",
        None,
    )
    chosen.observe(feedback(plan, [], prefill_only=True))
    assert chosen.status()["decode_batches"] == 0
    assert chosen.plan(view(1, 2)).reason == "initial"


# -- memory and determinism -----------------------------------------------------------------------


def test_sequences_that_left_are_forgotten() -> None:
    chosen = policy(by_rows({2: 10.0, 3: 11.0, 6: 20.0}), 2, 2, [2, 3])
    for plan_id in range(2500):
        show(chosen, plan_id, {2 * plan_id: EASY, 2 * plan_id + 1: HARD})
    assert chosen.status()["sequences_known"] <= 2 * 2 * 512


def test_sequences_that_run_on_in_plain_rounds_are_remembered() -> None:
    chosen = policy(by_rows({1: 900.0, 2: 900.0, 3: 900.0}, 10.0), 2, 1, [1, 2])
    show(chosen, 0, {1: EASY})
    for plan_id in range(1, 1100):
        chosen.observe(feedback(chosen.plan(view(plan_id, 1)), [row(1, 0, 0)]))
    show(chosen, 1100, {2: EASY})
    assert chosen.status()["sequences_known"] == 2


def test_asked_again_it_says_the_same_and_learns_nothing() -> None:
    costs = FakeCosts(lambda steps, requests, rows: 8.0 + requests + 0.5 * rows + 1.5 * steps)
    lanes = BucketGrid([2, 4, 8])
    geo = geometry(3, lanes, tiers={(b, 3): (b, 2 * b, 3 * b) for b in (2, 4, 8)})
    ask, once = TargetVerifyPolicy(costs, geo), TargetVerifyPolicy(costs, geo)
    rng = np.random.default_rng(1)
    for number in range(300):
        rows = 1 + number // 40
        coming = view(number, rows)
        ask.plan(view(number, 8, speculative=(False,) * 8))
        ask.plan(view(number, 0, prefill_tokens=8))
        ask.plan(view(number, 5))
        plans = [ask.plan(coming), ask.plan(coming), once.plan(coming)]
        assert plans[0] == plans[1] == plans[2]
        drafts = plans[0].draft_steps
        done = feedback(
            plans[0],
            [row(s, 0, 0, proposed=drafts) for s in coming.sequence_ids],
            lanes=lanes.fit(rows).rows,
            signals=rng.random((rows, 3)) * (0.3 if number < 150 else 1.0) if drafts else None,
        )
        ask.observe(done)
        once.observe(done)
    assert ask.status() == once.status()
    assert once.status()["probes"] > 0 and once.status()["switches"]


def test_status_is_json() -> None:
    chosen = policy(by_rows({2: 10.0, 3: 12.0, 6: 19.0}, 30.0), 2, 2, [2, 3])
    json.dumps(chosen.status(), allow_nan=False)
    show(chosen, 0, {1: EASY, 2: HARD})
    chosen.plan(view(1, 2))
    told = json.loads(json.dumps(chosen.status(), allow_nan=False))
    assert (told["control"], told["mode"], told["target_rows"]) == ("target_verify", "speculative", 3)
    # Profile: (4 * 0.6 + 0.9 + 0.5) / 6 and (4 * 0.36 + 0.72 + 0.2) / 6; correction 1.
    assert told["survival"] == pytest.approx([3.8 / 6, 2.36 / 6])
    assert told["conditional_rates"] == pytest.approx([3.8 / 6, 2.36 / 3.8])
