"""Whatever an engine could show a policy, in any order: plans stay legal, nothing of lost rounds is kept."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_world import FakeCosts, feedback, geometry, row

from xspec.core.shapes import BucketGrid
from xspec.policy.base import PolicyView
from xspec.policy.draft_step import DraftStepPolicy
from xspec.policy.target_verify import TargetVerifyPolicy

K = 3
LANES = BucketGrid([1, 2, 4, 8])
TIERS = {(b.rows, K): (b.rows, b.rows + 1, 2 * b.rows) for b in LANES.buckets}
REASONS = {
    "hold",
    "switch",
    "probe",
    "initial",
    "tier",
    "prefill_only",
    "nothing_to_draft",
    "uncovered_kv",
    "uncovered_bucket",
}


def any_view(rng: np.random.Generator, plan_id: int) -> PolicyView:
    rows = int(rng.choice([0, 1, 2, 3, 8]))
    told = rng.random() < 0.7
    return PolicyView(
        plan_id=plan_id,
        sequence_ids=tuple(int(i) for i in rng.permutation(12)[:rows] + plan_id // 50),
        kv_bounds=tuple(int(kv) for kv in rng.integers(1, 1050, rows)),
        waiting=int(rng.integers(0, 5)),
        prefill_tokens=int(rng.integers(0, 100)),
        rooms=tuple(int(room) for room in rng.integers(1, 9, rows)) if told else (),
        speculative=tuple(bool(flag) for flag in rng.random(rows) < 0.8) if told else (),
    )


def any_feedback(rng: np.random.Generator, plan: Any, view: PolicyView) -> Any:
    """Some sequences have left, some rows are cut short, some signals are broken or missing."""
    stayed = [s for s in view.sequence_ids if rng.random() < 0.9]
    verified = rng.integers(0, plan.draft_steps + 1, len(stayed))
    rows = [
        row(s, int(v), int(rng.integers(0, v + 1)), censored=rng.random() < 0.1, proposed=plan.draft_steps)
        for s, v in zip(stayed, verified, strict=True)
    ]
    signals = rng.choice([0.0, 0.3, 1.0, 2.0, -1.0, math.nan, math.inf], (len(rows), K))
    shown = signals if plan.draft_steps and rng.random() < 0.9 else None
    lanes = LANES.fit(len(view.sequence_ids)).rows if view.sequence_ids else 1
    alone = not view.sequence_ids or rng.random() < 0.05
    return feedback(
        plan, [] if alone else rows, lanes=lanes, signals=None if alone else shown, prefill_only=alone
    )


@pytest.mark.parametrize("kind", [DraftStepPolicy, TargetVerifyPolicy])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    missing=st.floats(0.0, 0.9),
    uncovered=st.sampled_from(["plain", "full_width"]),
)
def test_any_traffic(kind: type, seed: int, missing: float, uncovered: str) -> None:
    rng = np.random.default_rng(seed)
    known = {}

    def cost(steps: int, requests: int, rows: int) -> float | None:
        if (steps, requests, rows) not in known:
            known[steps, requests, rows] = None if rng.random() < missing else float(rng.uniform(5.0, 40.0))
        return known[steps, requests, rows]

    costs = FakeCosts(cost, lambda kv: kv <= 1000)
    policy = kind(costs, geometry(K, LANES, tiers=TIERS, uncovered=uncovered))
    for plan_id in range(120):
        shown = any_view(rng, plan_id)
        if rng.random() < 0.2:
            policy.plan(any_view(rng, plan_id))
        plan = policy.plan(shown)
        assert plan.plan_id == plan_id and plan.reason in REASONS and 0 <= plan.draft_steps <= K
        lanes = LANES.fit(len(shown.sequence_ids)).rows if shown.sequence_ids else 0
        if plan.target_rows is not None:
            assert plan.draft_steps == K and plan.target_rows in TIERS[lanes, K]
        if plan.predicted_ms is not None:
            full = lanes * (plan.draft_steps + 1)
            assert plan.predicted_ms == known[plan.draft_steps, lanes, plan.target_rows or full]
        elif shown.sequence_ids:
            assert plan.reason in ("uncovered_kv", "uncovered_bucket", "nothing_to_draft")
        json.dumps(policy.status(), allow_nan=False)
        if rng.random() < 0.95:  # else the round failed
            policy.observe(any_feedback(rng, plan, shown))
    last = policy.plan(any_view(rng, 120))
    policy.observe(any_feedback(rng, last, PolicyView(120, (), (), 0, 0)))
    assert not policy._ledger._planned
