"""The text contract under row budgets: the device decides what is verified, and no text may show it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from scripted import ScriptedDrafter
from test_engine import SCHEDULES, model, plain
from test_lossless import Plain, Scheduled, check_load, speculating, texts_of

from xspec.core.round import SpeculationPlan
from xspec.core.shapes import TargetTiers
from xspec.draft.base import Draft, DraftContext
from xspec.engine import build
from xspec.exec.assemble import Speculation
from xspec.policy.base import PolicyView

__all__ = ["model", "plain"]  # fixtures

GRAPHS = [name for name in SCHEDULES if SCHEDULES[name].get("enable_graph", True)]
"""A budget is a prepared size, so there must be graphs."""

WIDTH = 5


class Moody(ScriptedDrafter):
    """Signals that have nothing to do with what is right, NaN among them."""

    def draft(self, context: DraftContext, steps: int) -> Draft:
        draft = super().draft(context, steps)
        mood = (draft.tokens * 7 + context.positions[:, None] * 5 + torch.arange(steps) * 3) % 11 / 10
        return Draft(draft.tokens, torch.where(mood > 0.9, float("nan"), mood).float())


class Budgeted(Scheduled):
    """Full width, plain rounds and budgets by turns, from one row more than the anchors on."""

    def plan(self, view: PolicyView) -> SpeculationPlan:
        turn = view.plan_id % 7
        rows = len(view.sequence_ids)
        if turn == 3 or not rows:
            return SpeculationPlan(view.plan_id, self.name, 0)
        budget = None if turn == 5 else max(rows, rows * (1 + turn) - 1)
        return SpeculationPlan(view.plan_id, self.name, WIDTH, target_rows=budget)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("right", [1.0, 0.6])
@pytest.mark.parametrize("schedule", GRAPHS)
async def test_budgets_on_every_schedule(
    model: Path,
    plain: Plain,
    schedule: str,
    right: float,
    synchronous: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Budgeted([WIDTH])
    drafter = Moody(texts_of(plain), right=right)

    def speculation(*parts: object) -> Speculation:
        grid = parts[-1]
        tiers = TargetTiers.listed(grid, range(1, 200), WIDTH)
        return Speculation(steps=(WIDTH,), widths=(WIDTH,), tiers=tiers)

    monkeypatch.setattr(build, "speculation_of", speculation)
    flags = {"disable_graph_warmup": True, **SCHEDULES[schedule]}
    async with speculating(model, policy, drafter, monkeypatch, **flags) as engine:
        runner = engine._driver.pipeline._executor
        if not synchronous:
            abilities = runner._platform.abilities
            slow = dataclasses.replace(abilities, synchronous=False)
            monkeypatch.setattr(runner._platform, "abilities", slow)
        await check_load(engine, plain)
    rows = [row for feedback in policy.told for row in feedback.rows]
    pruned = [row for row in rows if 0 < row.admitted < row.proposed]
    assert len(pruned) > 20
    assert any(row.admitted == 0 < row.proposed for row in rows)
    for feedback in policy.told:
        if feedback.plan.target_rows is not None:
            assert sum(row.admitted + 1 for row in feedback.rows) <= feedback.shape.target_rows
        if feedback.signals is not None:
            assert feedback.signals.shape == (len(feedback.rows), WIDTH)
