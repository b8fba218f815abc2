"""Policies by name on one engine: the one its flags ask for, and the fixed ones it is compared with.

Knows what has been prepared; makes a fresh policy, without any memory, each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.cost.model import Costs
from xspec.cost.settings import Control
from xspec.errors import ConfigError
from xspec.policy.base import Policy
from xspec.policy.fixed import FixedPolicy
from xspec.policy.geometry import PolicyGeometry
from xspec.policy.make import make_policy
from xspec.policy.settings import DraftStepSettings


@dataclass(frozen=True, slots=True)
class Adaptive:
    """What an adaptive policy is made of."""

    control: Control
    costs: Costs
    settings: DraftStepSettings
    uncovered: str


@dataclass(frozen=True, slots=True)
class Policies:
    """`steps`: draft steps that are prepared; `verify_width`: drafts the fixed default verifies.

    `adaptive` None: the flags ask for a fixed width.
    """

    lanes: BucketGrid
    tiers: TargetTiers
    steps: Sequence[int] = ()
    draft_width: int = 0
    verify_width: int = 0
    adaptive: Adaptive | None = None

    def default(self) -> Policy:
        """What the flags say."""
        if self.adaptive is None:
            return FixedPolicy(self.draft_width, self.verify_width)
        geometry = PolicyGeometry(self.lanes, self.tiers, self.draft_width, self.adaptive.uncovered)
        return make_policy(self.adaptive.control, self.adaptive.costs, geometry, self.adaptive.settings)

    def named(self, name: str) -> Policy:
        """ "adaptive", "plain", "fixed:K" (all K verified) or "fixed:K:V"; ConfigError says what there is."""
        kind, *numbers = name.split(":")
        if kind == "plain" and not numbers:
            return FixedPolicy()
        if kind == "adaptive" and not numbers:
            if self.adaptive is None:
                raise ConfigError(f"policy {name!r}: no --enable_adaptive_... flag is on")
            return self.default()
        if kind == "fixed" and 1 <= len(numbers) <= 2 and all(n.isascii() and n.isdigit() for n in numbers):
            steps = int(numbers[0])
            verify = int(numbers[1]) if len(numbers) == 2 else steps
            if steps in (0, *self.steps) and verify <= steps:
                return FixedPolicy(steps, verify)
        prepared = ", ".join(map(str, (0, *self.steps)))
        raise ConfigError(
            f"policy {name!r}: allowed: adaptive, plain, fixed:K or fixed:K:V with K of {prepared} "
            "and V up to K"
        )
