"""What an adaptive policy knows of the engine: the sizes rounds are padded to. No device, no costs."""

from __future__ import annotations

from dataclasses import dataclass

from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.errors import ConfigError
from xspec.policy.base import PolicyView

UNCOVERED = ("full_width", "plain")


@dataclass(frozen=True, slots=True)
class PolicyGeometry:
    """`lanes`: request buckets; `tiers`: verify rows by bucket; `draft_width`: K, most drafts of a request.

    `uncovered`: what a round without measured costs runs, "full_width" (K drafts, all verified) or "plain".
    ConfigError for anything else.
    """

    lanes: BucketGrid
    tiers: TargetTiers
    draft_width: int
    uncovered: str

    def __post_init__(self) -> None:
        if self.draft_width < 1:
            raise ConfigError(f"draft_width is {self.draft_width}; an adaptive policy needs at least 1 draft")
        if self.uncovered not in UNCOVERED:
            raise ConfigError(f"uncovered is {self.uncovered!r}; allowed: {', '.join(UNCOVERED)}")

    @property
    def uncovered_steps(self) -> int:
        """Drafts of a round without measured costs."""
        return self.draft_width if self.uncovered == "full_width" else 0


@dataclass(frozen=True, slots=True)
class CandidateGeometry:
    """What a (K, d) policy knows of the engine. `steps`: the K that are prepared, ascending; `depths`: the d
    that the drafter takes, () where no loops draft; `loops`: D of the target, None likewise."""

    lanes: BucketGrid
    steps: tuple[int, ...]
    depths: tuple[int, ...] = ()
    loops: int | None = None

    def __post_init__(self) -> None:
        if not self.steps or self.steps[0] < 1 or list(self.steps) != sorted(set(self.steps)):
            raise ConfigError(f"prepared draft steps are {self.steps}; allowed: ascending, from 1")
        if bool(self.depths) != (self.loops is not None):
            raise ConfigError(f"{self.loops} loops and draft depths {self.depths}: one without the other")

    @property
    def max_steps(self) -> int:
        return self.steps[-1]


def all_may_draft(view: PolicyView, width: int) -> bool:
    """Whether `width` drafts can matter to every decode row, as nearly always."""
    return min(view.rooms, default=width + 1) > width and all(view.speculative)


def draft_limits(view: PolicyView, width: int) -> list[int]:
    """Drafts of each decode row that can matter, 0 .. `width`. [rows]

    None where drafts may not be verified, and room - 1 at most: the token that fills a sequence is the
    target's.
    """
    limits = [width] * len(view.sequence_ids)
    if min(view.rooms, default=width + 1) <= width:
        limits = [min(max(room - 1, 0), width) for room in view.rooms]
    if not all(view.speculative):
        limits = [limit if wanted else 0 for limit, wanted in zip(limits, view.speculative, strict=True)]
    return limits
