"""Rounds in which policies do not think: what ends such a spell, and that nothing is lost by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from looped_world import costs as looped_costs
from looped_world import geometry as looped_geometry
from policy_world import FakeCosts, feedback, geometry, row, view

from xspec.core.round import SpeculationPlan
from xspec.core.shapes import BucketGrid
from xspec.policy.base import Policy, PolicyView
from xspec.policy.draft_step import DraftStepPolicy
from xspec.policy.goodput import GoodputPolicy
from xspec.policy.target_verify import LOOK_EVERY, TargetVerifyPolicy

WIDTH = 2
PLAIN_IS_BEST = {0: 10.0, 1: 31.0, 2: 33.0}
TIERS = {(lanes, WIDTH): (lanes, lanes + 1) for lanes in range(1, 9)}


@dataclass
class Counted(FakeCosts):
    """Counts how often a policy looks at lengths or costs."""

    asked: list[int] = field(default_factory=list)

    def at(self, kv_lengths: Sequence[int]) -> FakeCosts | None:
        self.asked.append(len(kv_lengths))
        return super().at(kv_lengths)


def costs() -> Counted:
    return Counted(lambda steps, requests, rows: PLAIN_IS_BEST[steps])


def draft_step(table: FakeCosts) -> Policy:
    return DraftStepPolicy(table, geometry(WIDTH, BucketGrid.exact(8)))


def target_verify(table: FakeCosts) -> Policy:
    return TargetVerifyPolicy(table, geometry(WIDTH, BucketGrid.exact(8), tiers=TIERS))


KINDS = pytest.mark.parametrize("kind", [draft_step, target_verify])


def serve(policy: Policy, views: Sequence[PolicyView], accepted: int = 0) -> list[SpeculationPlan]:
    plans = []
    for one in views:
        plan = policy.plan(one)
        steps = plan.draft_steps
        policy.observe(feedback(plan, [row(s, steps, min(accepted, steps)) for s in one.sequence_ids]))
        plans.append(plan)
    return plans


def test_lengths_are_looked_at_once_in_a_spell() -> None:
    """Each round's lengths have grown out of what was kept, so whoever looks has to ask."""
    table = costs()
    policy = target_verify(table)
    serve(policy, [view(n, 4) for n in range(LOOK_EVERY[0])])
    table.asked.clear()
    swinging = [view(n, 4, kv=100 if n % 2 else 1000) for n in range(LOOK_EVERY[0], 2 * LOOK_EVERY[0])]
    plans = serve(policy, swinging)
    assert [(plan.draft_steps, plan.reason) for plan in plans] == [(0, "hold")] * LOOK_EVERY[0]
    assert table.asked == [4, 4]  # at the look, and at the first round behind it


@KINDS
@pytest.mark.parametrize(
    "other",
    [
        view(9, 3),
        view(9, 0, prefill_tokens=64),
        view(9, 4, rooms=(9, 9, 9, 1)),
        view(9, 4, speculative=(True, True, True, False)),
    ],
    ids=["fewer requests", "prompts alone", "one without room", "one opted out"],
)
def test_another_batch_is_thought_about(kind: Callable[[FakeCosts], Policy], other: PolicyView) -> None:
    """As by a policy that was never at rest: it had been asked for every plan before."""
    policy, restless = kind(costs()), kind(costs())
    serve(policy, [view(n, 4) for n in range(9)])
    for n in range(9):
        asked_before = restless.plan(view(n, 4))
        assert serve(restless, [view(n, 4)]) == [asked_before]
    assert policy.plan(other) == restless.plan(other)
    assert policy.status() == restless.status()


@KINDS
def test_a_spell_counts_as_if_every_round_had_been_thought_about(
    kind: Callable[[FakeCosts], Policy],
) -> None:
    policy, restless = kind(costs()), kind(costs())
    plans = serve(policy, [view(n, 4) for n in range(600)], accepted=1)
    for n, plan in enumerate(plans):
        for _ in range(3):  # a plan that was asked for before is thought about again
            restless.plan(view(n, 4))
        assert serve(restless, [view(n, 4)], accepted=1) == [plan]
    assert policy.status() == restless.status()
    assert {plan.reason for plan in plans} >= {"initial", "hold", "probe"}


def test_goodput_at_rest_counts_as_if_it_had_thought() -> None:
    policy = GoodputPolicy(None, looped_costs(), looped_geometry())
    restless = GoodputPolicy(None, looped_costs(), looped_geometry())
    plans = serve(policy, [view(n, 4) for n in range(400)], accepted=3)
    for n, plan in enumerate(plans):
        restless.plan(view(n, 5))  # another batch: nothing may be learnt from being asked
        assert serve(restless, [view(n, 4)], accepted=3) == [plan]
    assert policy.status() == restless.status()
    assert {plan.shadow for plan in plans} == {False, True}
