"""The policy without a choice: the same (K, d) every round."""

from __future__ import annotations

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.policy.base import PolicyView


class FixedPolicy:
    """Plans `draft_steps` tokens every round; 0 is plain decoding."""

    name = "fixed"

    def __init__(self, draft_steps: int = 0) -> None:
        self._draft_steps = draft_steps

    def plan(self, view: PolicyView) -> SpeculationPlan:
        steps = self._draft_steps if view.sequence_ids else 0
        return SpeculationPlan(plan_id=view.plan_id, policy=self.name, draft_steps=steps)

    def observe(self, feedback: RoundFeedback) -> None:
        """Nothing to learn."""
