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
from xspec.policy.geometry import CandidateGeometry, PolicyGeometry
from xspec.policy.make import make_policy
from xspec.policy.make_spec import ACCEPTANCE_EMA, FIXED, GOODPUT, make_speculation_policy
from xspec.policy.settings import DraftStepSettings
from xspec.policy.spec_config import AdaptiveSpecConfig


@dataclass(frozen=True, slots=True)
class Adaptive:
    """What an adaptive policy is made of."""

    control: Control
    costs: Costs
    settings: DraftStepSettings
    uncovered: str


@dataclass(frozen=True, slots=True)
class Selection:
    """What `--speculation_policy` and its files say. `depth`: that of a fixed looped drafter."""

    policy: str
    config: AdaptiveSpecConfig | None = None
    costs: Costs | None = None
    depth: int | None = None


@dataclass(frozen=True, slots=True)
class Policies:
    """`steps`: draft steps that are prepared; `verify_width`: drafts the fixed default verifies.

    `depths` and `loops`: those of a looped drafter and its target. `adaptive` None and `selection` None: the
    flags ask for a fixed width.
    """

    lanes: BucketGrid
    tiers: TargetTiers
    steps: Sequence[int] = ()
    draft_width: int = 0
    verify_width: int = 0
    adaptive: Adaptive | None = None
    depths: Sequence[int] = ()
    loops: int | None = None
    selection: Selection | None = None

    def default(self) -> Policy:
        """What the flags say."""
        if self.selection is not None:
            return self._selected(self.selection, self.selection.policy)
        if self.adaptive is None:
            return FixedPolicy(self.draft_width, self.verify_width)
        geometry = PolicyGeometry(self.lanes, self.tiers, self.draft_width, self.adaptive.uncovered)
        return make_policy(self.adaptive.control, self.adaptive.costs, geometry, self.adaptive.settings)

    def named(self, name: str) -> Policy:
        """ "adaptive", "plain", "fixed:K" (all K verified) or "fixed:K:V"; with a looped drafter "fixed:K@d",
        "acceptance_ema" and "goodput". ConfigError says what there is."""
        kind, *numbers = name.split(":")
        if kind in (ACCEPTANCE_EMA, GOODPUT) and not numbers:
            return self._selected(self.selection or Selection(kind), kind)
        if self.depths and kind != "plain":
            return self._looped(name, kind, numbers)
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

    def _selected(self, selection: Selection, policy: str) -> Policy:
        geometry = CandidateGeometry(self.lanes, tuple(self.steps), tuple(self.depths), self.loops)
        return make_speculation_policy(
            policy,
            selection.config,
            selection.costs,
            geometry,
            draft_steps=self.draft_width,
            depth=selection.depth,
        )

    def _looped(self, name: str, kind: str, numbers: Sequence[str]) -> Policy:
        """ "fixed:K@d"; "adaptive": what the flags say, where that adapts."""
        if (
            kind == "adaptive"
            and not numbers
            and self.selection is not None
            and self.selection.policy != FIXED
        ):
            return self.default()
        steps, at, depth = numbers[0].partition("@") if len(numbers) == 1 else ("", "", "")
        written = kind == "fixed" and at and all(n.isascii() and n.isdigit() for n in (steps, depth))
        if written and int(steps) in self.steps and int(depth) in self.depths:
            return FixedPolicy(int(steps), depth=int(depth))
        raise ConfigError(
            f"policy {name!r}: allowed: plain, acceptance_ema, goodput, or fixed:K@d with K of "
            f"{', '.join(map(str, self.steps))} and d of {', '.join(map(str, self.depths))}"
        )
