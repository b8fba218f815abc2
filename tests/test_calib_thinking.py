"""A calibration has the policy that will serve think along, for the time it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from calib_fake import Device, Rig, effective_of, make_looped_rig, make_rig
from test_engine import engine_of
from test_spec_costs import spec
from tiny import make_checkpoint
from tiny_drafters import make_mtp
from tiny_looped import write_ouro

from xspec.calib.calibrate import Calibrated
from xspec.calib.probe import probe
from xspec.calib.service import OnlyPoint, Thinker
from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.core.shapes import TargetTiers
from xspec.cost.model import Costs
from xspec.cost.settings import ContextInterval, Control, Point
from xspec.engine import build
from xspec.policy.base import Policy, PolicyView
from xspec.policy.draft_step import DraftStepPolicy
from xspec.policy.geometry import CandidateGeometry, PolicyGeometry
from xspec.policy.goodput import GoodputPolicy
from xspec.policy.make import make_policy
from xspec.policy.target_verify import TargetVerifyPolicy
from xspec.progress import silent

CONTEXTS = (ContextInterval(20, 1, 400), ContextInterval(100, 401, 500))
TIERS = TargetTiers({(2, 2): [3, 4], (4, 2): [8]})
PLAIN = [Point(0, 0, 4, 4), Point(0, 0, 2, 2), Point(1, 0, 1, 1)]
POINTS = {
    Control.DRAFT_STEP: [*PLAIN, Point(0, 1, 4, 8), Point(0, 2, 4, 12), Point(1, 2, 2, 6), Point(0, 1, 1, 2)],
    Control.TARGET_VERIFY: [*PLAIN, Point(0, 2, 4, 8), Point(0, 2, 4, 12), Point(0, 2, 2, 3)],
    Control.SPEC: [*PLAIN, Point(0, 1, 4, 8, 1), Point(0, 2, 4, 12, 3), Point(1, 2, 2, 6, 1)],
}


@dataclass
class Overheard:
    """A policy, and what it was asked and told."""

    policy: Policy
    costs: OnlyPoint
    plans: list[SpeculationPlan]
    observed: list[int]
    name: str = "overheard"

    def plan(self, view: PolicyView) -> SpeculationPlan:
        self.plans.append(self.policy.plan(view))
        return self.plans[-1]

    def observe(self, feedback: RoundFeedback) -> None:
        self.observed.append(feedback.plan.plan_id)
        self.policy.observe(feedback)

    def status(self) -> dict[str, Any]:
        return self.policy.status()


def listening(make: Thinker) -> tuple[Thinker, list[Overheard]]:
    heard: list[Overheard] = []

    def thinker(costs: Costs) -> Policy:
        assert isinstance(costs, OnlyPoint)
        heard.append(Overheard(make(costs), costs, [], []))
        return heard[-1]

    return thinker, heard


def thinker_of(rig: Rig, control: Control) -> Thinker:
    parts = rig.parts
    if control is Control.SPEC:
        pairs = CandidateGeometry(parts.grid, (1, 2), (1, 3), parts.target.spec.loops)
        return lambda costs: GoodputPolicy(None, costs, pairs)
    geometry = PolicyGeometry(parts.grid, parts.tiers, 2, "full_width")
    return lambda costs: make_policy(control, costs, geometry)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("thinking")


def rig_of(folder: Path, control: Control) -> Rig:
    if control is Control.SPEC:
        return make_looped_rig(folder, adaptation=spec())
    return make_rig(folder, tiers=TIERS)


@pytest.mark.parametrize("control", list(POINTS))
def test_it_comes_to_what_is_measured_and_changes_nothing(folder: Path, control: Control) -> None:
    """Of each point one policy that decides as the point is, every time; rounds are those without it."""
    rig, points = rig_of(folder, control), POINTS[control]
    thinker, heard = listening(thinker_of(rig, control))
    alone, beside = rig.device(lambda plan: 1.0), rig.device(lambda plan: 1.0)
    probe(rig.service(alone), effective_of(points, CONTEXTS), silent)
    probe(replace(rig.service(beside), thinker=thinker), effective_of(points, CONTEXTS), silent)
    assert rounds_of(alone) == rounds_of(beside)
    assert {policy.costs.point for policy in heard} == set(points) and len(heard) == len(points)
    decoded = [plan.spec.plan_id for plan in beside.plans if plan.batch.rows]
    assert sorted(plan_id for policy in heard for plan_id in policy.observed) == decoded
    for policy in heard:
        point = policy.costs.point
        full = point.requests * (point.draft_steps + 1)
        rows = None if point.target_rows == full else point.target_rows
        wanted = (point.draft_steps, point.depth, rows)
        assert {(p.draft_steps, p.depth, p.target_rows) for p in policy.plans} == {wanted}, point
        assert len(policy.plans) >= len(policy.observed) > 3


def rounds_of(device: Device) -> list[Any]:
    return [(plan.spec, plan.batch, plan.shape) for plan in device.plans]


class Asked(Exception):
    pass


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({"enable_adaptive_draft_step": True}, DraftStepPolicy),
        ({"enable_adaptive_target_verify": True}, TargetVerifyPolicy),
        ({"speculative_algorithm": "Looped", "speculation_policy": "goodput"}, GoodputPolicy),
    ],
    ids=["draft_step", "target_verify", "goodput"],
)
async def test_an_engine_has_its_own_policy_think_along(
    folder: Path, flags: dict[str, Any], kind: type[Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    looped = kind is GoodputPolicy
    model = folder / ("looped" if looped else "llama")
    if not model.exists():
        if looped:
            write_ouro(model)
        else:
            make_checkpoint(model, "llama")
    if not looped:
        flags = flags | {"draft_model": str(make_mtp(folder / "drafter", "llama"))}
    made: list[Policy] = []

    def measure(*_: Any, thinker: Callable[[Costs], Policy], **__: Any) -> Calibrated:
        made.append(thinker(OnlyPoint(Point(0, 1, 2, 4, 1 if looped else None))))
        raise Asked

    monkeypatch.setattr(build, "calibrated_costs", measure)
    with pytest.raises(Asked):
        async with engine_of(model, num_speculative_tokens=2, **flags):
            pass
    assert isinstance(made[0], kind)
    view = PolicyView(0, (1, 2), (9, 9), 0, 0, rooms=(9, 9), speculative=(True, True))
    assert made[0].plan(view).draft_steps == (2 if kind is TargetVerifyPolicy else 1)


def test_costs_of_one_point() -> None:
    costs = OnlyPoint(Point(0, 2, 4, 8)).at([9])
    assert costs.round_ms(2, 4, 8) == 1.0 and costs.round_ms(2, 4, 12) == 5.0
    assert costs.round_ms(0, 4, 4) == costs.round_ms(1, 4, 8) == 1e6
    looped = OnlyPoint(Point(0, 2, 4, 12, 3))
    assert looped.round_ms(2, 4, 12, 3) == 1.0 and looped.round_ms(2, 4, 12, 1) == 1e6
    assert OnlyPoint(Point(0, 0, 4, 4)).round_ms(0, 4, 4, 3) == 1.0  # of plain rounds depths say nothing
