"""Match flags: whether a draft would have held, by depth and position; and what any (K, d) makes of them.

Every committed token has a flag per depth: would d loops have picked it? Rounds of (K, d) are replayed over
the flags of d, each beginning behind a rejection or a bonus, as real ones do (averages over all positions
would promise too much). What comes of it are hazards by draft position, as Kaplan and Meier count them, so
rounds cut short do not bias them. Own derivation. Knows nothing about costs or decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from xspec.core.round import RoundFeedback, RowFeedback
from xspec.policy.acceptance import PRIOR_RATE, PRIOR_TRIALS

SHRINK_TRIALS = 8.0
"""Trials that a rate must have itself before it counts as much as the one it is derived from."""

SHORT_FLAGS = (24.0, 96.0)
"""Flags of late, without a gap, that are held against the longer memory: few show a jump, more a step."""

SHIFT_SIGMAS, SHIFT_RATE, SHIFT_LEAST = 3.5, 0.15, 3.5
"""They show a shift if they differ by so many standard deviations, and by so much, and are so many."""

Flags = Sequence[int | None]
"""Of consecutive committed tokens: 1 match, 0 none, None not known."""


@dataclass(slots=True)
class DepthFlags:
    """Evidence of one depth. `trials[n][k]`: drafts k + 1 of rounds with steps[n] drafts that were reached;
    `hits`: those that held. Both decay by what is added, to about `window` flags."""

    steps: tuple[int, ...]
    window: float
    prior: float
    trials: list[list[float]] = field(init=False)
    hits: list[list[float]] = field(init=False)
    total: float = 0.0
    matched: float = 0.0
    late_total: list[float] = field(init=False)  # by SHORT_FLAGS
    late_matched: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.trials = [[0.0] * steps for steps in self.steps]
        self.hits = [[0.0] * steps for steps in self.steps]
        self._forget_late()

    def add(self, counts: Mapping[int, Sequence[int]]) -> None:
        """`counts[r]`: (misses, matches) at flags behind exactly r matches since a round surely began there.

        That is behind a rejection, a gap or the beginning. So in rounds of K drafts it is draft r mod (K + 1)
        + 1, and with remainder K a bonus, which no draft was made for.
        """
        flags = sum(map(sum, counts.values()))
        if not flags:
            self._forget_late()
            return
        self._scale((1.0 - 1.0 / self.window) ** flags)
        matched = sum(matches for _, matches in counts.values())
        self.total += flags
        self.matched += matched
        for w, short in enumerate(SHORT_FLAGS):
            kept = (1.0 - 1.0 / short) ** flags
            self.late_total[w] = self.late_total[w] * kept + flags
            self.late_matched[w] = self.late_matched[w] * kept + matched
        for run, (misses, matches) in counts.items():
            for n, steps in enumerate(self.steps):
                draft = run % (steps + 1)
                if draft < steps:
                    self.trials[n][draft] += misses + matches
                    self.hits[n][draft] += matches

    def shifted(self) -> bool:
        """Whether the flags of late are not like those of the longer memory."""
        if self.late_total[0] < SHIFT_LEAST:
            return False
        rate = self.matched / self.total
        inside = min(max(rate, 0.02), 0.98)
        for total, matched in zip(self.late_total, self.late_matched, strict=True):
            deviation = (inside * (1.0 - inside) / total) ** 0.5
            if abs(matched / total - rate) > max(SHIFT_SIGMAS * deviation, SHIFT_RATE):
                return True
        return False

    def forget(self) -> None:
        """Begin anew, from what the flags of late say: what is older may not be true any more."""
        self.prior = (self.late_matched[0] + self.rate) / (self.late_total[0] + 1.0)
        self._scale(0.0)
        self._forget_late()

    def _forget_late(self) -> None:
        self.late_total, self.late_matched = [0.0] * len(SHORT_FLAGS), [0.0] * len(SHORT_FLAGS)

    def _scale(self, factor: float) -> None:
        self.total *= factor
        self.matched *= factor
        self.trials = [[each * factor for each in row] for row in self.trials]
        self.hits = [[each * factor for each in row] for row in self.hits]

    # -- rates --------------------------------------------------------------------------------

    def survivals(self) -> list[list[float]]:
        """[n][k]: the chance that drafts 1 to k + 1 of a round with steps[n] drafts all hold.

        A hazard without evidence of its own leans on that of the same position in rounds of any length, and
        that one on the position before.
        """
        pooled, before, weight = [], self.prior, PRIOR_TRIALS
        for k in range(self.steps[-1]):
            deep = [n for n, steps in enumerate(self.steps) if steps > k]
            trials = sum(self.trials[n][k] for n in deep) / len(deep)
            hits = sum(self.hits[n][k] for n in deep) / len(deep)
            before = (hits + weight * before) / (trials + weight)
            weight = SHRINK_TRIALS
            pooled.append(before)
        found = []
        for trials_of, hits_of in zip(self.trials, self.hits, strict=True):
            survival, row = 1.0, []
            for k, (tried, held) in enumerate(zip(trials_of, hits_of, strict=True)):
                survival *= (held + SHRINK_TRIALS * pooled[k]) / (tried + SHRINK_TRIALS)
                row.append(survival)
            found.append(row)
        return found

    @property
    def rate(self) -> float:
        """Share of flags that match, with the prior."""
        return (self.matched + PRIOR_TRIALS * self.prior) / (self.total + PRIOR_TRIALS)


class FlagStreams:
    """The flags of all sequences, as rounds retire in order. Depth None: a drafter that is not looped."""

    def __init__(
        self,
        steps: Iterable[int],
        depths: Iterable[int | None],
        window_flags: float,
        priors: Mapping[int | None, float] | None = None,
    ) -> None:
        self.depths = tuple(depths)
        rates = priors or {}
        ascending = tuple(sorted(steps))
        self.evidence = [
            DepthFlags(ascending, window_flags, rates.get(depth, PRIOR_RATE)) for depth in self.depths
        ]
        self._runs: dict[int, list[int]] = {}  # by sequence: matches since the last known beginning, by depth
        self.shifts = 0

    def observe(self, feedback: RoundFeedback) -> bool:
        """A round retired. Whether some depth's flags have shifted: all memories are cut down then."""
        plan, matches = feedback.plan, feedback.matches
        drafted = plan.draft_steps and plan.depth in self.depths  # else by another policy, before this one
        present = self.depths.index(plan.depth) if drafted else None
        counts: list[dict[int, list[int]]] = [{} for _ in self.depths]
        for index, row in enumerate(feedback.rows):
            runs = self._runs.setdefault(row.sequence_id, [0] * len(self.depths))
            told = None if matches is None else matches[index]
            for x in range(len(self.depths)):
                own = x == present
                if told is None and not own:
                    runs[x] = 0
                    continue
                runs[x] = _walk(row_flags(row, told, x, own), runs[x], counts[x])
        for evidence, counted in zip(self.evidence, counts, strict=True):
            evidence.add(counted)
        if not any(evidence.shifted() for evidence in self.evidence):
            return False
        self.shifts += 1
        for evidence in self.evidence:
            evidence.forget()
        return True

    def keep(self, sequence_ids: Iterable[int]) -> None:
        """Forget all other sequences: they have left."""
        self._runs = {one: self._runs[one] for one in sequence_ids if one in self._runs}

    def __len__(self) -> int:
        return len(self._runs)


def row_flags(row: RowFeedback, told: np.ndarray | None, x: int, own: bool) -> Flags:
    """Flags of one depth for the tokens that a row committed.

    `told` [width + 1, depths]: what a shadow round said of them. `own`: it is the depth that drafted, whose
    drafts say it themselves: 1 for each accepted one, 0 for the rejected one. A bonus has no draft.
    """
    known: list[int | None] = [None] * row.committed
    if told is not None:
        width = min(row.committed, len(told))
        known[:width] = [int(flag) for flag in told[:width, x]]
    if own and row.verified:
        known[: row.accepted] = [1] * row.accepted
        if not row.censored and row.accepted < row.verified:
            known[row.accepted] = 0
    return known


def _walk(flags: Flags, run: int, counts: dict[int, list[int]]) -> int:
    """Counts the flags of one sequence, which has matched `run` times since a beginning; the run after them.

    What is not known ends the replayed round, and the next one is taken to begin behind it.
    """
    for flag in flags:
        if flag is None:
            run = 0
            continue
        counts.setdefault(run, [0, 0])[flag] += 1
        run = run + 1 if flag else 0
    return run
