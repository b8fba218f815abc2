"""Moves along an ordered list of candidates by the average of draft acceptance: the RFC's rule, step by step.

r = sum A / sum K_actual over a round's requests; E <- (1 - beta) E + beta r for the candidate that ran; above
its upper threshold the next candidate, below the lower one the one before (RFC, "Overall flow" 4 and 5).
docs/looped.md has every corner case. Knows nothing about costs of its own, plans or switching off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from xspec.core.round import RowFeedback
from xspec.policy.spec_config import BatchRange, Candidate, EmaSettings

STALE_HALF_LIFE_ROUNDS = 256
"""Feedback rounds of its range after which an average that was not renewed is half way to its seed."""

FRESH_ROUNDS = 512
"""So long what a neighbour has shown itself may keep a move to it from being made."""

Gain = Callable[[int, float], float | None]
"""(candidate's place, acceptance) -> modelled gain over plain rounds; None: nothing is known of its cost."""


def acceptance_counts(rows: Sequence[RowFeedback], draft_steps: int) -> tuple[int, int]:
    """(sum A, sum K_actual) of a round: verified counts, before what follows a stop is cut off.

    Rows that had all K drafts count. A row cut short by room has a shorter run to fill, which reads as more
    acceptance, so those count only where a round has no others; a row that ended inside its accepted run says
    nothing but yes and never counts.
    """
    whole = [row for row in rows if row.verified >= draft_steps and not row.censored]
    told = whole or [row for row in rows if row.verified and not row.censored]
    return sum(min(row.accepted, row.verified) for row in told), sum(row.verified for row in told)


@dataclass(slots=True)
class Average:
    """E of one candidate in one range. `seed`: acceptance offline, None if it is not known.

    With a seed the first feedback is one like any other. Without one the average is that of what was seen,
    weighted as the recursion weighs it (bias corrected), so it never starts from 0.
    """

    seed: float | None
    mean: float = 0.0
    weight: float = 0.0
    updated: int | None = None  # the range's feedback round that renewed it last

    def __post_init__(self) -> None:
        if self.seed is not None:
            self.mean, self.weight = self.seed, 1.0

    def value(self, clock: int) -> float | None:
        """E as of feedback round `clock` of its range; None: nothing is known."""
        if not self.weight:
            return None
        seen = self.mean / self.weight
        if self.seed is None or self.updated is None:
            return seen
        missed = max(0, clock - self.updated - 1)
        return float(self.seed + (seen - self.seed) * 0.5 ** (missed / STALE_HALF_LIFE_ROUNDS))

    def update(self, rate: float, beta: float, clock: int) -> None:
        """Feedback round `clock` of its range had acceptance `rate`."""
        aged = self.value(clock)
        if aged is not None:
            self.mean = aged * self.weight
        self.mean = (1.0 - beta) * self.mean + beta * rate
        self.weight = (1.0 - beta) * self.weight + beta
        self.updated = clock

    def settle(self, rate: float, clock: int) -> None:
        """Begin again from `rate`, which enough drafts in a row have shown."""
        self.mean, self.weight, self.updated = rate, 1.0, clock

    def fresh(self, clock: int) -> bool:
        """Whether it was itself seen of late."""
        return self.updated is not None and clock - self.updated < FRESH_ROUNDS


@dataclass(slots=True)
class BucketState:
    """One batch range: the present candidate, and the average of every candidate.

    `clock`: feedback rounds with drafts, of any candidate. `drafts`: evidence of the present candidate since
    it was taken up. `rounds`: its feedback rounds since it was last looked at.
    """

    index: int
    averages: list[Average]
    clock: int = 0
    drafts: int = 0
    rounds: int = 0
    moves: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})

    @staticmethod
    def of(one: BatchRange) -> BucketState:
        return BucketState(one.initial, [Average(candidate.acceptance) for candidate in one.candidates])

    def enter(self, index: int) -> None:
        """Take up a candidate: it is looked at once it has shown enough itself."""
        self.index, self.drafts, self.rounds = index, 0, 0

    def value(self, index: int) -> float | None:
        return self.averages[index].value(self.clock)


class CandidatePolicy(Protocol):
    """How feedback of a candidate moves the choice inside its range."""

    def learn(self, bucket: BucketState, index: int, accepted: int, drafted: int) -> bool:
        """A round of candidate `index` had `accepted` of `drafted` (1 or more) drafts accepted.

        Whether the present candidate is due to be looked at.
        """

    def next_index(self, bucket: BucketState, gain: Gain) -> int:
        """The candidate from now on: the present one or a neighbour."""


class AcceptanceEma:
    """The RFC's policy for one range."""

    def __init__(self, candidates: Sequence[Candidate], settings: EmaSettings) -> None:
        self._candidates = tuple(candidates)
        self._settings = settings

    def learn(self, bucket: BucketState, index: int, accepted: int, drafted: int) -> bool:
        bucket.clock += 1
        bucket.averages[index].update(accepted / drafted, self._settings.beta, bucket.clock)
        if index != bucket.index:  # it was planned before the last move
            return False
        bucket.drafts += drafted
        bucket.rounds += 1
        if bucket.rounds < self._settings.interval or bucket.drafts < self._settings.min_feedback:
            return False
        bucket.rounds = 0
        return True

    def next_index(self, bucket: BucketState, gain: Gain) -> int:
        j, value = bucket.index, bucket.value(bucket.index)
        candidate = self._candidates[j]
        if value is None:
            return j
        if candidate.up is not None and value > candidate.up:
            wanted = j + 1
        elif candidate.down is not None and value < candidate.down:
            wanted = j - 1
        else:
            return j
        return j if self._shown_worse(bucket, wanted, gain(j, value), gain) else wanted

    def _shown_worse(self, bucket: BucketState, wanted: int, held: float | None, gain: Gain) -> bool:
        """Thresholds guess what the neighbour will do. Where it has shown that lately, that counts instead:
        else two candidates whose thresholds send to one another would be swapped for ever."""
        average = bucket.averages[wanted]
        value = average.value(bucket.clock)
        if value is None or held is None or not average.fresh(bucket.clock):
            return False
        there = gain(wanted, value)
        return there is not None and there <= held
