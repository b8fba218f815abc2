"""The policy without a choice: the same (K, d) every round."""

from __future__ import annotations

from typing import Any

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.policy.base import PolicyView


class FixedPolicy:
    """Drafts `draft_steps` tokens every round and verifies `verify_steps` of them (None: all); `depth`: with
    so many loops of a looped target.

    0 of either is plain decoding: what is not verified need not be drafted.
    """

    name = "fixed"

    def __init__(
        self, draft_steps: int = 0, verify_steps: int | None = None, depth: int | None = None
    ) -> None:
        self._draft_steps = 0 if verify_steps == 0 else draft_steps
        self._verify_steps = verify_steps if self._draft_steps else None
        self._depth = depth if self._draft_steps else None

    def plan(self, view: PolicyView) -> SpeculationPlan:
        decodes = bool(view.sequence_ids)
        return SpeculationPlan(
            plan_id=view.plan_id,
            policy=self.name,
            draft_steps=self._draft_steps if decodes else 0,
            verify_steps=self._verify_steps,
            depth=self._depth if decodes else None,
        )

    def observe(self, feedback: RoundFeedback) -> None:
        """Nothing to learn."""

    def status(self) -> dict[str, Any]:
        return {
            "draft_steps": self._draft_steps,
            "verify_steps": self._verify_steps,
            "draft_loops": self._depth,
        }
