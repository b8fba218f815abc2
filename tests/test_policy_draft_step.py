"""Adaptive draft steps, decision by decision; numbers done by hand in the comments.

Prior rates are 0.6 at every position, so P = 0.6, 0.36, 0.216, ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from policy_world import FakeCosts, feedback, geometry, row, view

from xspec.core.round import SpeculationPlan
from xspec.core.shapes import BucketGrid
from xspec.errors import ConfigError
from xspec.policy.base import PolicyView
from xspec.policy.draft_step import DraftStepPolicy
from xspec.policy.settings import DraftStepSettings


def by_depth(*costs_ms: float | None) -> FakeCosts:
    return FakeCosts(lambda steps, requests, target_rows: costs_ms[steps])


def policy(
    costs: FakeCosts, width: int, *, uncovered: str = "full_width", **settings: object
) -> DraftStepPolicy:
    geo = geometry(width, BucketGrid.exact(32), uncovered=uncovered)
    return DraftStepPolicy(costs, geo, DraftStepSettings(**settings))  # type: ignore[arg-type]


def run(
    chosen: DraftStepPolicy,
    views: Sequence[PolicyView],
    accepted: Callable[[int, int], int] = lambda sequence_id, steps: 0,
) -> list[SpeculationPlan]:
    """Plans of rounds that each retire before the next is planned."""
    plans = []
    for one in views:
        plan = chosen.plan(one)
        rows = [row(s, plan.draft_steps, accepted(s, plan.draft_steps)) for s in one.sequence_ids]
        chosen.observe(feedback(plan, rows))
        plans.append(plan)
    return plans


LATER = 200
"""A KV length at which costs are asked anew: until then those of the round before are kept."""


def views(first: int, count: int, rows: int | Sequence[int], kv: int = 100) -> list[PolicyView]:
    return [view(first + number, rows, kv=kv) for number in range(count)]


def choice(plan: SpeculationPlan) -> tuple[int, str]:
    return plan.draft_steps, plan.reason


# -- objective ------------------------------------------------------------------------------------


def test_the_first_depth_is_the_best_under_the_prior() -> None:
    # 2 requests: 2 / 10 = 0.200, (2 + 1.2) / 12 = 0.2667, (2 + 1.2 + 0.72) / 15 = 0.2613.
    plan = policy(by_depth(10, 12, 15), 2).plan(view(0, 2))
    assert (plan.draft_steps, plan.target_rows, plan.predicted_ms, plan.reason) == (1, None, 12, "initial")
    assert plan.policy == "draft_step"


def test_costs_are_asked_at_the_padded_size() -> None:
    asked = []

    def cost(steps: int, requests: int, target_rows: int) -> float:
        asked.append((steps, requests, target_rows))
        return 1.0 + steps

    DraftStepPolicy(FakeCosts(cost), geometry(2, BucketGrid([4, 8]))).plan(view(0, 5))
    assert set(asked) == {(0, 8, 8), (1, 8, 16), (2, 8, 24)}


def test_a_request_near_its_limit_counts_only_drafts_it_has_room_for() -> None:
    # 15 -> 14.5: (2 + 1.2 + 0.72) / 14.5 = 0.2703 beats 0.2667 of depth 1.
    costs = by_depth(10, 12, 14.5)
    assert policy(costs, 2).plan(view(0, 2, rooms=(3, 9))).draft_steps == 2
    # Room 2 for one: (2 + 1.2 + 0.36) / 14.5 = 0.2455.
    assert policy(costs, 2).plan(view(0, 2, rooms=(2, 9))).draft_steps == 1
    # Room 1 for one: (2 + 0.6) / 12 = 0.2167, (2 + 0.6 + 0.36) / 14.5 = 0.2041, plain 0.2.
    assert policy(costs, 2).plan(view(0, 2, rooms=(1, 9))).draft_steps == 1


def test_requests_that_opted_out_count_one_token() -> None:
    # Of 2 requests one speculates: plain 0.2, (2 + 0.6) / 12 = 0.2167, and at 14 ms 0.1857.
    assert policy(by_depth(10, 12, 99), 2).plan(view(0, 2, speculative=(True, False))).draft_steps == 1
    assert policy(by_depth(10, 14, 99), 2).plan(view(0, 2, speculative=(True, False))).draft_steps == 0
    assert policy(by_depth(10, 14, 99), 2).plan(view(0, 2)).draft_steps == 1  # 3.2 / 14 = 0.2286


@pytest.mark.parametrize("hopeless", [{"speculative": (False, False)}, {"rooms": (1, 1)}])
def test_a_batch_no_draft_can_help_is_plain_and_leaves_the_depth_held(
    hopeless: dict[str, tuple[int, ...]],
) -> None:
    chosen = policy(by_depth(10, 11, 12), 2)
    assert chosen.plan(view(0, 2)).draft_steps == 2
    plan = chosen.plan(view(1, 2, **hopeless))  # type: ignore[arg-type]
    assert (plan.draft_steps, plan.reason, plan.predicted_ms) == (0, "nothing_to_draft", 10)
    assert choice(chosen.plan(view(2, 2))) == (2, "hold")


def test_plain_rounds_can_be_forbidden() -> None:
    costs = by_depth(10, 30, 40)
    assert policy(costs, 2).plan(view(0, 1)).draft_steps == 0
    assert policy(costs, 2, allow_plain_rounds=False).plan(view(0, 1)).draft_steps == 1


def test_a_depth_without_cost_is_no_candidate() -> None:
    assert policy(by_depth(None, 20, None, 21), 3).plan(view(0, 1)).draft_steps == 3


# -- what is not covered --------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "steps"), [("full_width", 2), ("plain", 0)])
def test_without_measured_costs_the_rule_decides(rule: str, steps: int) -> None:
    beyond = FakeCosts(
        lambda steps, requests, target_rows: 10.0 if requests <= 4 else None, lambda kv: kv <= 500
    )
    chosen = policy(beyond, 2, uncovered=rule)
    plans = [chosen.plan(view(0, 2, kv=501)), chosen.plan(view(1, 5)), chosen.plan(view(2, 2))]
    assert [choice(plan) for plan in plans[:2]] == [(steps, "uncovered_kv"), (steps, "uncovered_bucket")]
    assert [plan.predicted_ms for plan in plans] == [None, None, 10.0]
    assert plans[2].reason == "initial"
    for plan in plans:
        chosen.observe(feedback(plan, [row(1, 0, 0)]))
    assert chosen.status()["uncovered"] == {"kv": 1, "bucket": 1}


def test_a_held_depth_that_lost_its_cost_goes_at_once() -> None:
    narrow = FakeCosts(lambda steps, requests, target_rows: None if steps == 2 and requests > 3 else 10.0)
    chosen = policy(narrow, 2)
    assert chosen.plan(view(0, 3)).draft_steps == 2
    assert choice(chosen.plan(view(1, 4))) == (1, "switch")


def test_geometry_refuses_what_it_cannot_mean() -> None:
    with pytest.raises(ConfigError, match="uncovered is 'wide'; allowed: full_width, plain"):
        geometry(2, uncovered="wide")
    with pytest.raises(ConfigError, match="draft_width is 0"):
        geometry(0)


# -- when -----------------------------------------------------------------------------------------


def change_costs(costs: FakeCosts, *costs_ms: float) -> None:
    costs.formula = by_depth(*costs_ms).formula


@pytest.mark.parametrize(("cost_ms", "switches"), [(16.0 / 10.5, False), (16.0 / 10.5 * 0.9999, True)])
def test_a_gain_of_exactly_the_minimum_is_not_enough(cost_ms: float, switches: bool) -> None:
    # Plain: 1 / 1 ms. Depth 1: 1.6 / cost = 1.05 exactly at 1.6 / 1.05 ms.
    costs = by_depth(1.0, 99.0)
    chosen = policy(costs, 1)
    run(chosen, views(0, 20, 1))  # the first window goes by the best
    change_costs(costs, 1.0, cost_ms)
    assert choice(chosen.plan(view(20, 1, kv=LATER))) == ((1, "switch") if switches else (0, "hold"))


def test_depths_are_scored_again_every_five_decode_batches() -> None:
    costs = by_depth(10.0, 99.0)
    chosen = policy(costs, 1)
    run(chosen, views(0, 4, 1))
    change_costs(costs, 10.0, 10.9)
    prompts = [view(4 + number, 0, prefill_tokens=64) for number in range(3)]
    for one in prompts:  # they count for nothing
        plan = chosen.plan(one)
        assert (plan.draft_steps, plan.reason, plan.predicted_ms) == (0, "prefill_only", None)
        chosen.observe(feedback(plan, [], prefill_only=True))
    assert [choice(plan) for plan in run(chosen, views(7, 2, 1, LATER))] == [(0, "hold"), (1, "switch")]


def test_a_decode_plan_that_ran_prompts_alone_counts_for_nothing() -> None:
    costs = by_depth(10.0, 99.0)
    chosen = policy(costs, 1)
    run(chosen, views(0, 4, 1))
    change_costs(costs, 10.0, 10.9)
    chosen.observe(feedback(chosen.plan(view(4, 1, kv=LATER)), [], prefill_only=True))
    assert choice(chosen.plan(view(5, 1, kv=LATER))) == (0, "hold")


def test_a_bucket_half_as_large_again_is_scored_at_once() -> None:
    wide = FakeCosts(lambda steps, requests, target_rows: (10.0, 99.0 if requests < 3 else 10.0)[steps])
    chosen = policy(wide, 1)
    assert choice(chosen.plan(view(0, 2))) == (0, "initial")
    # Only this batch counts so far: (3 + 3 * 0.6) / 10 against 3 / 10.
    assert choice(chosen.plan(view(1, 3))) == (1, "switch")


def test_chunks_of_prompts_beside_decode_rows_change_no_decision() -> None:
    plans = [policy(by_depth(10, 12, 15), 2).plan(view(0, 2, prefill_tokens=n)) for n in (0, 512)]
    assert plans[0] == plans[1]


def test_recent_batches_of_the_load_share_the_score() -> None:
    # Rows swing between 2 and 3. At 2 rows depth 1 costs 10 and plain 10; at 3 rows 50 and 10.
    # Alone: 2 rows 3.2 / 10 > 2 / 10. Together: (3.2 + 4.8) / 60 = 0.133 < 5 / 20 = 0.25: plain.
    swing = FakeCosts(lambda steps, requests, target_rows: (10.0, 10.0 if requests == 2 else 50.0)[steps])
    chosen = policy(swing, 1, update_interval=6)
    plans = run(chosen, [view(number, 2 + number % 2) for number in range(13)])
    assert plans[0].draft_steps == 1 and plans[0].reason == "initial"
    assert {plan.draft_steps for plan in plans[6:] if plan.reason != "probe"} == {0}


# -- learning -------------------------------------------------------------------------------------


def test_rates_learnt_change_the_depth() -> None:
    # All accepted: after 5 batches of depth 1, q_1 = (5 + 2.4) / 9 = 0.822, q_2 still 0.6.
    # Depth 1: 1.822 / 12 = 0.1519; depth 2: (1.822 + 0.4933) / 14.6 = 0.1586, 4.4 % more: enough in the
    # first window, which goes by the best.
    # (Rates before: 1.6 / 12 = 0.1333; 1.96 / 14.6 = 0.1342; 1 / 20: depth 2 first, so begin dearer.)
    costs = by_depth(20.0, 12.0, 15.0)
    chosen = policy(costs, 2)
    first = run(chosen, views(0, 1, 1), lambda s, k: k)
    change_costs(costs, 20.0, 12.0, 14.6)
    plans = first + run(chosen, views(1, 10, 1), lambda s, k: k)
    held = [(1, "initial")] + [(1, "hold")] * 4
    assert [choice(plan) for plan in plans] == [*held, (2, "switch")] + [(2, "hold")] * 5
    assert chosen.status()["survival"][0] > 0.88


def test_feedback_is_credited_to_the_plan_that_ran() -> None:
    chosen = policy(by_depth(10, 99, 11), 2)
    plan = chosen.plan(view(0, 1))
    assert plan.draft_steps == 2
    chosen.observe(feedback(plan, [row(1, 2, 2)]))
    assert chosen.status()["conditional_rates"] == pytest.approx([3.4 / 5, 3.4 / 5])


def test_rounds_that_failed_leave_nothing_behind() -> None:
    chosen = policy(by_depth(10, 11), 1)
    for number in range(50):
        plan = chosen.plan(view(number, 1))
        if number % 10 == 9:
            chosen.observe(feedback(plan, [row(1, 1, 1)]))
    assert chosen.status()["decode_batches"] == 5
    assert not chosen._ledger._planned


# -- probes ---------------------------------------------------------------------------------------


def test_a_probe_waits_until_one_per_cent_of_the_time_pays_it() -> None:
    # Plain rounds of 10 ms, depth 1 costs 7.95 more (1.6 / 17.95 loses): 0.1 ms a round, so after 80
    # rounds. What is saved up pays one probe, which takes it all: 80 rounds of 0.1 ms again, after its own.
    chosen = policy(by_depth(10.0, 17.95), 1)
    plans = run(chosen, views(0, 162, 1))
    assert [n for n, plan in enumerate(plans) if plan.draft_steps] == [80, 161]
    assert choice(plans[80]) == (1, "probe") and plans[80].predicted_ms == 17.95
    assert choice(plans[81]) == (0, "hold")


def test_every_fourth_probe_goes_to_the_deepest_depth_the_others_to_the_best() -> None:
    # Under the prior 1.6 / 17 = 0.094, 1.96 / 20 = 0.098, 2.176 / 30 = 0.0725 against 0.1: best is depth 2.
    chosen = policy(by_depth(10.0, 17.0, 20.0, 30.0), 3)
    plans = run(chosen, views(0, 1200, 1), lambda s, k: 1 if k else 0)
    probes = [plan.draft_steps for plan in plans if plan.reason == "probe"]
    assert len(probes) >= 8 and probes[0] == 2
    assert [depth for n, depth in enumerate(probes) if n % 4 == 3] == [3] * (len(probes) // 4)


def test_one_probe_at_a_time() -> None:
    costs = by_depth(10.0, 99.0)
    chosen = policy(costs, 1, switch_min_gain=9.0)
    run(chosen, views(0, 50, 1))
    change_costs(costs, 10.0, 10.35)
    plans = [chosen.plan(view(50 + n, 1, kv=LATER)) for n in range(4)]  # none retires
    assert [plan.reason for plan in plans] == ["probe", "hold", "hold", "hold"]
    for plan in plans:  # the probe takes what was saved; three plain rounds bring 0.3 ms
        chosen.observe(feedback(plan, [row(1, plan.draft_steps, 0)]))
    assert [plan.reason for plan in run(chosen, views(54, 2, 1, LATER))] == ["hold", "probe"]


def test_no_probe_where_no_request_has_room_for_it() -> None:
    chosen = policy(by_depth(10.0, 17.0, 17.5), 2)
    short = [view(number, 1, rooms=(2,)) for number in range(400)]
    assert {plan.draft_steps for plan in run(chosen, short)} == {0, 1}


def test_probes_cost_one_per_cent_at_most() -> None:
    chosen = policy(by_depth(10.0, 17.0, 20.0, 31.0), 3)
    plans = run(chosen, views(0, 2000, 1), lambda s, k: 0)
    assert {plan.draft_steps for plan in plans if plan.reason == "hold"} == {0}
    spent = sum((plan.predicted_ms or 0.0) - 10.0 for plan in plans if plan.reason == "probe")
    total = sum(plan.predicted_ms or 0.0 for plan in plans)
    assert 0.009 * total < spent <= 0.01 * total


# -- determinism ----------------------------------------------------------------------------------


def test_asked_again_it_says_the_same_and_learns_nothing() -> None:
    ask, once = (policy(by_depth(10.0, 17.0, 20.0), 2) for _ in range(2))
    for number in range(300):
        coming = view(number, 1 + number // 100)
        ask.plan(view(number, 32, speculative=(False,) * 32))  # plans that became no round
        ask.plan(view(number, 0, prefill_tokens=8))
        ask.plan(view(number, 7))
        plans = [ask.plan(coming), ask.plan(coming), once.plan(coming)]
        assert plans[0] == plans[1] == plans[2]
        done = feedback(plans[0], [row(s, plans[0].draft_steps, 0) for s in coming.sequence_ids])
        ask.observe(done)
        once.observe(done)
    assert ask.status() == once.status()
    assert once.status()["probes"] > 0


def test_status_is_json() -> None:
    chosen = policy(by_depth(10, 12), 1)
    json.dumps(chosen.status(), allow_nan=False)
    run(chosen, views(0, 3, 2), lambda s, k: k)
    told = json.loads(json.dumps(chosen.status(), allow_nan=False))
    assert (told["control"], told["draft_steps"], told["predicted_ms"], told["reason"]) == (
        "draft_step",
        1,
        12,
        "hold",
    )
    assert (told["decode_batches"], told["predicted_total_ms"]) == (3, 36)
