"""The acceptance_ema policy as an engine uses it: ranges, plans, feedback, switching off and on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from looped_world import CODE, LANES, PROSE, Streams, config, costs, geometry, tokens_per_ms
from policy_world import feedback, row, view

from xspec.core.round import SpeculationPlan
from xspec.cost.looped import IdealCosts
from xspec.cost.model import Costs
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.loop_candidates import RANGE_ROUNDS, AdaptiveController, range_of
from xspec.policy.spec_config import (
    AdaptiveSpecConfig,
    BatchRange,
    Candidate,
    DisableSettings,
    EmaSettings,
    ModelFacts,
    Provenance,
)

PAIRS = (
    Candidate(1, 2, up=0.9, acceptance=0.8),
    Candidate(4, 1, down=0.4, acceptance=0.6),
)
USUAL = DisableSettings()
QUICK = EmaSettings(beta=1.0, interval=1, min_feedback=1)
NOTHING = (0.0, 0.0, 0.0)


def spec(ranges: Sequence[BatchRange] | None = None, disable: DisableSettings = USUAL) -> AdaptiveSpecConfig:
    return AdaptiveSpecConfig(
        ModelFacts("small", 4),
        Provenance("prior", "a test"),
        tuple(ranges or (BatchRange(1, 3, PAIRS, 1), BatchRange(4, 15, PAIRS, 0))),
        ema=QUICK,
        disable=disable,
    )


def controller(given: AdaptiveSpecConfig | None = None, table: Costs | None = None) -> AdaptiveController:
    return AdaptiveController(given or spec(), IdealCosts(4) if table is None else table, geometry())


def chosen(plan: SpeculationPlan) -> tuple[int, int | None, int | None, int | None, str]:
    return plan.draft_steps, plan.depth, plan.range_index, plan.candidate_index, plan.reason


def tell(policy: AdaptiveController, plan: SpeculationPlan, accepted: int, rows: int = 1) -> None:
    policy.observe(feedback(plan, [row(i + 1, plan.draft_steps, accepted) for i in range(rows)]))


# -- ranges ---------------------------------------------------------------------------------------


def test_the_range_of_a_batch() -> None:
    ranges = (BatchRange(2, 3, PAIRS), BatchRange(8, 15, PAIRS))
    # below the first: the first; in the gap: the one below; above the last: the last
    assert [range_of(ranges, b) for b in (1, 2, 3, 4, 7, 8, 15, 16, 500)] == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_the_first_plan_is_the_initial_candidate_of_its_range() -> None:
    assert chosen(controller().plan(view(0, 1))) == (4, 1, 0, 1, "candidate")
    assert chosen(controller().plan(view(0, 8))) == (1, 2, 1, 0, "candidate")
    assert controller().plan(view(0, 1)).predicted_ms == pytest.approx(8.0)


def test_a_batch_just_over_a_border_must_stay_there_one_far_over_need_not() -> None:
    policy = controller()
    assert policy.plan(view(0, 3)).range_index == 0
    near = [policy.plan(view(1 + n, 4)).range_index for n in range(RANGE_ROUNDS)]
    assert near == [0] * (RANGE_ROUNDS - 1) + [1]
    assert policy.plan(view(9, 2)).range_index == 0  # 4 / 2 is 1.5 or more
    assert policy.plan(view(10, 5)).range_index == 1


def test_a_load_that_flaps_at_a_border_stays_in_its_range() -> None:
    policy = controller()
    seen = {policy.plan(view(n, (3, 3, 4, 4)[n % 4])).range_index for n in range(40)}
    assert seen == {0}


def test_a_range_keeps_its_state_while_another_holds() -> None:
    policy = controller()
    tell(policy, policy.plan(view(0, 1)), accepted=0)  # .0 < .4: one back
    assert chosen(policy.plan(view(1, 1)))[:2] == (1, 2)
    assert chosen(policy.plan(view(2, 8)))[:2] == (1, 2)
    tell(policy, policy.plan(view(3, 8)), accepted=1, rows=8)
    assert chosen(policy.plan(view(4, 8)))[:2] == (4, 1)
    assert chosen(policy.plan(view(5, 1)))[:2] == (1, 2)
    status = policy.status()["ranges"]
    assert [one["acceptance"] for one in status] == [[0.8, 0.0], [1.0, 0.6]]
    assert [one["moves"] for one in status] == [{"up": 0, "down": 1}, {"up": 1, "down": 0}]


# -- plans ----------------------------------------------------------------------------------------


def test_rounds_without_decode_rows_or_room_are_plain_and_teach_nothing() -> None:
    policy = controller()
    only = policy.plan(view(0, ()))
    assert chosen(only) == (0, None, None, None, "prefill_only")
    policy.observe(feedback(only, [], lanes=1, prefill_only=True))
    full = policy.plan(view(1, 2, rooms=(1, 1)))
    assert chosen(full) == (0, None, None, None, "nothing_to_draft")
    policy.observe(feedback(full, [row(1, 0, 0), row(2, 0, 0)]))
    assert chosen(policy.plan(view(2, 2, speculative=(False, False))))[4] == "nothing_to_draft"
    assert policy.status()["feedback_ignored"] == 0
    assert all(one["feedback_rounds"] == 0 for one in policy.status()["ranges"])


def test_asking_again_changes_nothing() -> None:
    once, often = controller(), controller()
    for number in range(60):
        rows = (3, 4, 8, 1)[number // 3 % 4]
        for _ in range(3):
            often.plan(view(number, 12))
        one, two = once.plan(view(number, rows)), often.plan(view(number, rows))
        assert one == two
        for policy, plan in ((once, one), (often, two)):
            tell(policy, plan, accepted=number % 2 if plan.draft_steps else 0, rows=rows)
    assert once.status() == often.status()


# -- feedback -------------------------------------------------------------------------------------


def test_late_feedback_goes_to_the_candidate_that_ran() -> None:
    policy = controller()
    first, second = policy.plan(view(0, 1)), policy.plan(view(1, 1))
    tell(policy, first, accepted=0)
    third = policy.plan(view(2, 1))
    assert (second.candidate_index, third.candidate_index) == (1, 0)
    tell(policy, second, accepted=4)  # of candidate 1, planned before the move
    (one, _) = policy.status()["ranges"]
    assert one["acceptance"] == [0.8, 1.0] and one["candidate_index"] == 0


def test_duplicate_and_unknown_feedback_is_ignored() -> None:
    policy = controller()
    plan = policy.plan(view(0, 1))
    tell(policy, plan, accepted=3)
    before = json.dumps({**policy.status(), "feedback_ignored": 0, "rounds": 0})
    tell(policy, plan, accepted=0)
    tell(policy, replace(plan, plan_id=77), accepted=0)
    after = policy.status()
    assert after["feedback_ignored"] == 2
    assert json.dumps({**after, "feedback_ignored": 0, "rounds": 0}) == before


def test_feedback_may_come_out_of_order_and_failed_rounds_never_come() -> None:
    policy = controller()
    plans = [policy.plan(view(n, 1)) for n in range(3)]
    tell(policy, plans[1], accepted=2)
    tell(policy, plans[0], accepted=2)
    assert policy.status()["ranges"][0]["feedback_rounds"] == 2
    # plan 2 failed: nothing waits for it
    for number in range(3, 20):
        tell(policy, policy.plan(view(number, 1)), accepted=2)
    tell(policy, plans[2], accepted=0)
    assert policy.status()["ranges"][0]["feedback_rounds"] == 19
    assert policy.status()["feedback_ignored"] == 1


def test_a_round_whose_drafts_were_all_clipped_changes_no_average() -> None:
    policy = controller()
    plan = policy.plan(view(0, 2))
    policy.observe(feedback(plan, [row(1, 0, 0), row(2, 0, 0)]))
    (one, _) = policy.status()["ranges"]
    assert one["acceptance"] == [0.8, 0.6] and one["feedback_rounds"] == 0


# -- off ------------------------------------------------------------------------------------------


def zero(policy: AdaptiveController, first: int, count: int, rows: int = 8) -> list[SpeculationPlan]:
    """Rounds that each retire before the next, with nothing accepted."""
    plans = []
    for number in range(first, first + count):
        plans.append(policy.plan(view(number, rows)))
        tell(policy, plans[-1], accepted=0, rows=rows)
    return plans


def test_off_at_the_cheapest_candidate_after_so_many_looks() -> None:
    """1 + 0 against T ratio (4 + 2) / 4: a gain of 2/3 at each look; 2 looks."""
    plans = zero(controller(), 0, 5)
    assert [chosen(plan) for plan in plans[:2]] == [(1, 2, 1, 0, "candidate")] * 2
    assert [chosen(plan) for plan in plans[2:]] == [(0, None, 1, None, "off")] * 3
    assert plans[2].predicted_ms == pytest.approx(4.0)


def test_a_dearer_candidate_is_left_for_the_cheapest_first() -> None:
    plans = zero(controller(), 0, 5, rows=1)
    assert [chosen(plan)[:2] for plan in plans] == [(4, 1), (1, 2), (1, 2), (0, None), (0, None)]


def test_a_candidate_that_loses_least_is_switched_off_too() -> None:
    """4@1 between its thresholds at a gain of (1 + 3/4) / (8/4): no move is due, and it loses."""
    lone = BatchRange(
        1, 8, (Candidate(1, 1, up=0.6, off=0.9), Candidate(4, 1, down=0.1, off=0.325)), initial=1
    )
    policy = controller(replace(spec(), ranges=(lone,)))
    for number in range(40):
        plan = policy.plan(view(number, 4))
        if not plan.draft_steps:
            break
        assert plan.candidate_index == 1
        policy.observe(feedback(plan, [row(i, 4, int(i < 3)) for i in range(4)]))
    assert policy.status()["ranges"][0]["events"]["off"] == 1


def test_a_gain_inside_the_margin_does_not_switch_off() -> None:
    """1@2 gains exactly 1 at .5 in the idealized model."""
    policy = controller()
    for number in range(40):
        plan = policy.plan(view(number, 8))
        assert plan.draft_steps
        policy.observe(feedback(plan, [row(i, 1, i % 2) for i in range(8)]))


def test_it_can_be_kept_from_switching_off() -> None:
    policy = controller(spec(disable=DisableSettings(enabled=False)))
    assert all(plan.draft_steps for plan in zero(policy, 0, 40))


def test_averages_stand_still_while_off_but_for_failed_probes() -> None:
    policy = controller()
    zero(policy, 0, 3)
    before = policy.status()["ranges"][1]
    zero(policy, 3, 8)
    after = policy.status()["ranges"][1]
    assert (
        after["acceptance"] == before["acceptance"] and after["feedback_rounds"] == before["feedback_rounds"]
    )
    assert after["off"] and after["probes"] == 0


def probe_starts(plans: Sequence[SpeculationPlan]) -> list[int]:
    return [
        n
        for n, (before, plan) in enumerate(zip(plans, plans[1:], strict=False), start=1)
        if plan.reason == "probe" and before.reason != "probe"
    ]


def test_probes_come_with_exponential_backoff_up_to_a_cap() -> None:
    generous = DisableSettings(probe_share=0.5, backoff_first=4, backoff_cap=16, probe_rounds=1)
    starts = probe_starts(zero(controller(spec(disable=generous)), 0, 100))
    gaps = [b - a for a, b in zip(starts, starts[1:], strict=False)]
    assert gaps[:4] == [8 + 1, 16 + 1, 16 + 1, 16 + 1]


@pytest.mark.parametrize("share", [0.01, 0.02])
def test_probes_cost_no_more_than_their_share(share: float) -> None:
    policy = controller(spec(disable=DisableSettings(probe_share=share)))
    plans = zero(policy, 0, 2000)[10:]
    extra = sum((plan.predicted_ms or 0.0) / 4.0 - 1.0 for plan in plans if plan.reason == "probe")
    assert 0.0 < extra <= share * len(plans) + 1.0


def test_a_probe_that_finds_acceptance_switches_on_again() -> None:
    policy = controller()
    zero(policy, 0, 30)
    assert policy.status()["ranges"][1]["off"]
    for number in range(30, 30 + 64):
        plan = policy.plan(view(number, 8))
        tell(policy, plan, accepted=plan.draft_steps, rows=8)
        if not policy.status()["ranges"][1]["off"]:
            break
    state = policy.status()["ranges"][1]
    assert not state["off"] and state["events"]["on"] == 1
    assert policy.plan(view(200, 8)).draft_steps


def test_one_lucky_draft_does_not_switch_on_one_request() -> None:
    """One request, K 1: a probe round has one draft, 8 must have been seen. 1 of 1 and 1 of 2 are above
    break-even (d / D = .25), so it goes on looking, twice as long each time; 1 of 4 is not."""
    one = BatchRange(1, 15, (Candidate(1, 1, acceptance=0.8),))
    policy = controller(spec([one], DisableSettings(probe_rounds=1, probe_share=0.5, backoff_first=2)))
    luck = iter([1, 0, 0, 0, 0])
    probes = []
    for number in range(40):
        plan = policy.plan(view(number, 1))
        tell(policy, plan, accepted=next(luck, 0) if plan.reason == "probe" else 0)
        if plan.reason == "probe":
            probes.append(number)
        if policy.status()["ranges"][0]["events"]["probe_failed"]:
            break
    assert probes == list(range(probes[0], probes[0] + 4))
    state = policy.status()["ranges"][0]
    assert state["off"] and state["events"]["on"] == 0
    assert state["acceptance"] == [pytest.approx(0.25 / 2)]  # frozen at 0, moved half way by the probe


def test_switched_on_by_chance_it_is_off_again_at_the_first_look() -> None:
    policy = controller()
    zero(policy, 0, 3)
    number = 3
    while policy.status()["ranges"][1]["off"]:
        plan = policy.plan(view(number, 8))
        tell(policy, plan, accepted=plan.draft_steps, rows=8)
        number += 1
    wait = policy.status()["ranges"][1]
    assert wait["events"] == {"off": 1, "on": 1, "probe_failed": 0, "entered": 0, "new_requests": 0}
    zero(policy, number, 1)
    state = policy.status()["ranges"][1]
    assert state["off"] and state["probe_after_rounds"] == 24  # twice the first wait: it was no recovery


def test_coming_to_a_range_that_is_off_makes_a_probe_due() -> None:
    policy = controller()
    zero(policy, 0, 3)
    for number in range(3, 40):  # elsewhere; its probes' allowance grows
        tell(policy, policy.plan(view(number, 1)), accepted=3)
    soon = zero(policy, 40, 4)
    assert any(plan.reason == "probe" for plan in soon)
    assert policy.status()["ranges"][1]["events"]["entered"] >= 1


def test_new_requests_bring_the_backoff_back_to_its_first_value() -> None:
    policy = controller()
    zero(policy, 0, 300)
    assert policy.status()["ranges"][1]["probe_after_rounds"] == 48
    for number in range(300, 310):
        plan = policy.plan(view(number, range(100, 108)))
        policy.observe(feedback(plan, [row(i, plan.draft_steps, 0) for i in range(100, 108)]))
        if plan.reason == "off":
            break
    assert policy.status()["ranges"][1]["events"]["new_requests"] == 1
    assert policy.status()["ranges"][1]["probe_after_rounds"] == 12


def test_a_range_may_begin_off() -> None:
    policy = controller(spec([BatchRange(1, 15, PAIRS, 0, initial_off=True)]))
    assert chosen(policy.plan(view(0, 8))) == (0, None, 0, None, "off")


# -- where costs come from ------------------------------------------------------------------------


def test_without_costs_gains_follow_from_off_and_then_from_the_ideal_model() -> None:
    generous = BatchRange(1, 15, (Candidate(1, 2, off=0.0),))
    policy = AdaptiveController(spec([generous]), None, geometry())
    assert all(plan.draft_steps for plan in zero(policy, 0, 20))  # its rounds cost no more than plain ones
    ideal = AdaptiveController(spec([BatchRange(1, 15, (Candidate(1, 2),))]), None, geometry())
    assert zero(ideal, 0, 5)[-1].reason == "off"
    assert policy.status()["gains_from"] == "config or idealized model"


def test_other_drafters_choose_k_alone_and_without_any_boundary_are_never_off() -> None:
    pairs = (Candidate(1, up=0.8, acceptance=0.7), Candidate(3, down=0.5, acceptance=0.6))
    given = replace(spec([BatchRange(1, 32, pairs)]), model=ModelFacts("mtp"))
    policy = AdaptiveController(given, None, CandidateGeometry(LANES, (1, 2, 3)))
    first = policy.plan(view(0, 4))
    assert chosen(first) == (1, None, 0, 0, "candidate")
    tell(policy, first, accepted=1, rows=4)
    assert chosen(policy.plan(view(1, 4)))[0] == 3
    assert all(plan.draft_steps for plan in zero(policy, 1, 30, rows=4))


# -- in a world -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_spell_without_acceptance(rows: int) -> None:
    """Off soon, not more than 2 % below plain rounds while off, and on again within 64 rounds."""
    table = costs()
    lanes = LANES.fit(rows).rows
    plain = rows / (table.round_ms(0, lanes, lanes) or 0.0)
    world = Streams(AdaptiveController(config(table), table, geometry()), table, seed=3)
    world.run(200, lambda n: rows, lambda n: CODE.rates)
    spell = world.run(400, lambda n: rows, lambda n: NOTHING)
    off = next(n for n, one in enumerate(spell) if one.plan.reason == "off")
    assert off <= 64
    assert tokens_per_ms(spell[off:]) >= 0.98 * plain
    assert any(one.plan.reason == "probe" for one in spell)
    back = world.run(200, lambda n: rows, lambda n: CODE.rates)
    on = next(n for n, one in enumerate(back) if one.plan.reason == "candidate")
    assert on <= 64
    assert tokens_per_ms(back[on + 8 :]) > 1.02 * plain


def test_candidates_follow_acceptance_and_a_run_repeats() -> None:
    runs = []
    for _ in range(2):
        table = costs()
        world = Streams(AdaptiveController(config(table), table, geometry()), table, seed=5)
        world.run(300, lambda n: 1, lambda n: CODE.rates)
        world.run(300, lambda n: 1, lambda n: PROSE.rates)
        runs.append([one.plan for one in world.played])
    assert runs[0] == runs[1]
    code, prose = ([p.draft_steps for p in runs[0][a:b]] for a, b in ((150, 300), (450, 600)))
    assert sum(code) > 1.3 * sum(prose)


def deep_or_nothing() -> tuple[Streams, float, float]:
    """A config that believes in one loop as much as in three, whose rounds no allowance for probes could pay:
    its world, what a plain round takes, and how many plain rounds more one of three loops."""
    table = costs()
    deep, told = Candidate(4, 3, down=0.3, acceptance=0.85), Candidate(4, 1, up=0.95, acceptance=0.85)
    plain_ms, deep_ms = table.round_ms(0, 1, 1), table.round_ms(4, 1, 5, 3)
    assert plain_ms is not None and deep_ms is not None
    extra = deep_ms / plain_ms - 1.0
    assert extra > USUAL.probe_share * USUAL.backoff_cap
    given = replace(spec([BatchRange(1, 1, (told, deep))]), ema=EmaSettings(beta=0.05))
    return Streams(AdaptiveController(given, table, geometry()), table, seed=3), plain_ms, extra


@pytest.mark.parametrize("rate", [0.95, 0.0])
def test_candidates_that_never_ran_are_tried_however_dear(rate: float) -> None:
    """One loop drafts badly, whatever the config says; three draft well (or nothing does). Each candidate is
    tried once: the good one is found within 64 rounds, the bad one left alone."""
    world, plain_ms, _ = deep_or_nothing()
    world.run(600, lambda n: 1, lambda n: (0.1 * rate, 0.5 * rate, rate))
    rounds = [(one.plan.draft_steps, one.plan.depth) for one in world.played]
    if rate:
        assert rounds.index((4, 3)) <= 64
        assert rounds[100:].count((4, 3)) > 0.95 * 500
        assert tokens_per_ms(world.played[100:]) > 1.1 / plain_ms
    else:
        assert rounds.count((4, 3)) == 1
        assert tokens_per_ms(world.played[100:]) >= 0.98 / plain_ms


def test_what_no_probe_can_pay_is_tried_again_now_and_then() -> None:
    """Its one trial failed, and then it would pay."""
    world, plain_ms, extra = deep_or_nothing()
    spell = world.run(3000, lambda n: 1, lambda n: NOTHING)
    trials = [n for n, one in enumerate(spell) if one.plan.depth == 3]
    assert len(trials) >= 3
    assert all(b - a >= extra / 0.0025 for a, b in zip(trials, trials[1:], strict=False))
    assert tokens_per_ms(spell[100:]) >= 0.98 / plain_ms
    back = world.run(3000, lambda n: 1, lambda n: (0.1, 0.5, 0.95))
    first = next(n for n, one in enumerate(back) if one.plan.depth == 3)
    assert first <= extra / 0.0025 + 64
    assert tokens_per_ms(back[-500:]) > 1.1 / plain_ms  # a trial of four drafts may fail once more
