"""Match flags: whether a draft would have held, by depth and position; and what any (K, d) makes of them.

Every committed token has a flag per depth: would d loops have picked it? Rounds of (K, d) are replayed over
the flags of d, each beginning behind a rejection or a bonus, as real ones do (averages over all positions
would promise too much). What comes of it are hazards by draft position, as Kaplan and Meier count them, so
rounds cut short do not bias them. Own derivation. Knows nothing about costs or decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from xspec.core.round import RoundFeedback, RowFeedback
from xspec.policy.acceptance import PRIOR_RATE, PRIOR_TRIALS

SHRINK_TRIALS = 8.0
"""Trials that a rate must have itself before it counts as much as the one it is derived from."""

FRESH_SHARE = 0.25
"""Of a first draft's trials that get to a position, those that must have been made there. With fewer, as
shallower rounds run, the text may have become another one: what is missing leans too."""

SHORT_FLAGS = (24.0, 96.0)
"""Flags of late, without a gap, that are held against the longer memory: few show a jump, more a step."""

SHIFT_SIGMAS, SHIFT_LEAST = 3.5, 3.5
"""They show a shift if they differ by so many standard deviations, and are so many."""

SHIFT_RATE, SHIFT_RATE_LEAST = 0.25, 0.18
"""And by so much: an answer has easier and harder passages, which are no new text. The mean of n answers
differs by 1 / sqrt(n) of that; down to the second."""

MOST_UNITS = 1e9
"""Counts are brought back to units of 1 when these have grown so large."""

_Row = tuple[int, list[float], list[float]]
"""Of rounds with K drafts: K + 1, trials and hits by position."""

Flags = Sequence[int | None]
"""Of consecutive committed tokens: 1 match, 0 none, None not known."""


@dataclass(slots=True)
class DepthFlags:
    """Evidence of one depth, which decays by what is added, to about `window` flags.

    It is kept in units that grow instead, so that adding flags touches only what they say something of.
    """

    steps: tuple[int, ...]
    window: float
    prior: float
    total: float = 0.0
    matched: float = 0.0
    late_total: list[float] = field(default_factory=lambda: [0.0] * len(SHORT_FLAGS))  # by SHORT_FLAGS
    late_matched: list[float] = field(default_factory=lambda: [0.0] * len(SHORT_FLAGS))
    _unit: float = 1.0
    _found: tuple[list[list[float]], list[float]] | None = None  # survivals and gains, until flags come
    _rows: list[_Row] = field(init=False)
    _deep: list[list[_Row]] = field(init=False)  # by position: rounds that reach it

    def __post_init__(self) -> None:
        self._rows = [(steps + 1, [0.0] * steps, [0.0] * steps) for steps in self.steps]
        self._deep = [[row for row in self._rows if row[0] > k + 1] for k in range(self.steps[-1])]

    @property
    def trials(self) -> list[list[float]]:
        """[n][k]: drafts k + 1 of rounds with steps[n] drafts that were reached."""
        return [[each / self._unit for each in tried] for _, tried, _ in self._rows]

    @property
    def hits(self) -> list[list[float]]:
        """[n][k]: those of them that held."""
        return [[each / self._unit for each in held] for _, _, held in self._rows]

    def add(self, counts: Mapping[int, Sequence[int]]) -> None:
        """`counts[r]`: (misses, matches) at flags behind exactly r matches since a round surely began there.

        That is behind a rejection, a gap or the beginning. So in rounds of K drafts it is draft r mod (K + 1)
        + 1, and with remainder K a bonus, which no draft was made for.
        """
        if not counts:
            self.pause()
            return
        self._found = None
        matched = sum([matches for _, matches in counts.values()])
        flags = matched + sum([misses for misses, _ in counts.values()])
        kept = (1.0 - 1.0 / self.window) ** flags
        self.total = self.total * kept + flags
        self.matched = self.matched * kept + matched
        for w, short in enumerate(SHORT_FLAGS):
            kept_late = (1.0 - 1.0 / short) ** flags
            self.late_total[w] = self.late_total[w] * kept_late + flags
            self.late_matched[w] = self.late_matched[w] * kept_late + matched
        self._unit /= kept
        if self._unit > MOST_UNITS:
            self._rescale(1.0 / self._unit)
        unit = self._unit
        for run, (misses, matches) in counts.items():
            tried, held = unit * (misses + matches), unit * matches
            for span, trials, hits in self._rows:
                draft = run % span
                if draft < span - 1:
                    trials[draft] += tried
                    hits[draft] += held

    def pause(self) -> None:
        """Nothing is known of the next tokens: the flags of late end here."""
        if self.late_total[0]:
            self.late_total, self.late_matched = [0.0] * len(SHORT_FLAGS), [0.0] * len(SHORT_FLAGS)

    def shifted(self, rows: int) -> bool:
        """Whether the flags of late, of `rows` sequences, are not like those of the longer memory."""
        if self.late_total[0] < SHIFT_LEAST:
            return False
        rate = self.matched / self.total
        inside = min(max(rate, 0.02), 0.98)
        least = max(SHIFT_RATE / rows**0.5, SHIFT_RATE_LEAST)
        for total, matched in zip(self.late_total, self.late_matched, strict=True):
            deviation = (inside * (1.0 - inside) / total) ** 0.5
            if abs(matched / total - rate) > max(SHIFT_SIGMAS * deviation, least):
                return True
        return False

    def forget(self) -> None:
        """Begin anew, from what the flags of late say: what is older may not be true any more."""
        self.prior = (self.late_matched[0] + self.rate) / (self.late_total[0] + 1.0)
        self.total = self.matched = 0.0
        self._found = None
        self._rescale(0.0)
        self.pause()

    def _rescale(self, factor: float) -> None:
        """Counts times `factor`, in units of 1."""
        for _, trials, hits in self._rows:
            trials[:] = [each * factor for each in trials]
            hits[:] = [each * factor for each in hits]
        self._unit = 1.0

    # -- rates --------------------------------------------------------------------------------

    def survivals(self) -> list[list[float]]:
        """[n][k]: the chance that drafts 1 to k + 1 of a round with steps[n] drafts all hold.

        A hazard without evidence of its own, or with little beside that of the first draft, leans on that of
        the same position in rounds of any length, and that one on the position before.
        """
        return self._told()[0]

    def gains(self) -> list[float]:
        """[n]: drafts of a round with steps[n] of them that hold, the sum of their survivals."""
        return self._told()[1]

    def _told(self) -> tuple[list[list[float]], list[float]]:
        if self._found is None:
            survivals = self._survivals()
            self._found = survivals, list(map(sum, survivals))
        return self._found

    def _survivals(self) -> list[list[float]]:
        unit = self._unit
        pooled, before, weight = [], self.prior, PRIOR_TRIALS * unit
        lean, reach = SHRINK_TRIALS * unit, FRESH_SHARE  # of a first draft's trials, how many get there
        for k, deep in enumerate(self._deep):
            tried = held = first = 0.0
            for _, trials, hits in deep:
                tried += trials[k]
                held += hits[k]
                first += trials[0]
            missing = max(0.0, reach * first - tried)
            weight = weight * len(deep) + missing
            before = (held + weight * before) / (tried + weight)
            reach *= before
            weight = lean
            pooled.append(before)
        found = []
        for _, trials, hits in self._rows:
            survival, row = 1.0, []
            for tried, held, towards in zip(trials, hits, pooled, strict=False):
                leaned = lean + max(0.0, FRESH_SHARE * trials[0] * survival - tried)
                survival *= (held + leaned * towards) / (tried + leaned)
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
        self._runs: list[dict[int, int]] = [{} for _ in self.depths]  # matches since the last known beginning
        self.shifts = 0

    def observe(self, feedbacks: Sequence[RoundFeedback]) -> bool:
        """Rounds retired, in order. Whether flags of some depth have shifted: all memories are cut then."""
        shifted = False
        for _, alike in groupby(feedbacks, key=_told_of):
            shifted = self._add(list(alike)) or shifted
        return shifted

    def _add(self, alike: Sequence[RoundFeedback]) -> bool:
        """`alike`: rounds that tell of the same depths."""
        plan = alike[0].plan
        drafted = plan.draft_steps and plan.depth in self.depths  # else by another policy, before this one
        present = self.depths.index(plan.depth) if drafted else None
        rows = max(len(one.rows) for one in alike)
        shadows = [(one.rows, one.matches.tolist()) for one in alike if one.matches is not None]
        shifted = False
        for x, (evidence, runs) in enumerate(zip(self.evidence, self._runs, strict=True)):
            own = x == present
            if not shadows and not own:  # nothing is known: the next flags begin anew
                runs.clear()
                evidence.pause()
                continue
            counts: dict[int, list[int]] = {}
            for told_rows, told in shadows:
                for row, of_row in zip(told_rows, told, strict=True):
                    flags = row_flags(row, of_row, x, own)
                    runs[row.sequence_id] = walk(flags, runs.get(row.sequence_id, 0), counts)
            if not shadows:
                for feedback in alike:
                    for row in feedback.rows:
                        runs[row.sequence_id] = walk_own(row, runs.get(row.sequence_id, 0), counts)
            evidence.add(counts)
            shifted = evidence.shifted(rows) or shifted
        if shifted:
            self.shifts += 1
            for evidence in self.evidence:
                evidence.forget()
        return shifted

    def skip(self) -> None:
        """Rounds are left out. The next ones are replayed as if begun anew, which they were."""
        for runs in self._runs:
            runs.clear()

    def rates(self) -> list[float]:
        """Match rate of each depth."""
        return [evidence.rate for evidence in self.evidence]

    def least(self) -> float:
        """Flags that the least known depth stands on."""
        return min([evidence.total for evidence in self.evidence])

    def keep(self, sequence_ids: Iterable[int]) -> None:
        """Forget all other sequences: they have left."""
        kept = set(sequence_ids)
        self._runs = [{one: run for one, run in runs.items() if one in kept} for runs in self._runs]

    def __len__(self) -> int:
        """Sequences that something is remembered of."""
        return len(set().union(*self._runs))


def _told_of(feedback: RoundFeedback) -> tuple[bool, bool, int | None]:
    """Of what depths a round tells: all (a shadow round), the one it drafted with, or none."""
    plan = feedback.plan
    return feedback.matches is not None, plan.draft_steps > 0, plan.depth


def row_flags(row: RowFeedback, told: Sequence[Sequence[bool]], x: int, own: bool) -> Flags:
    """Flags of one depth for the tokens that a row of a shadow round committed.

    `told` [width + 1][depths]: what a shadow round said of them. `own`: it is the depth that drafted, whose
    drafts say it themselves: 1 for each accepted one, 0 for the rejected one. A bonus has no draft.
    """
    known: list[int | None] = [None] * row.committed
    width = min(row.committed, len(told))
    known[:width] = [int(flags[x]) for flags in told[:width]]
    if own and row.verified:
        known[: row.accepted] = [1] * row.accepted
        if not row.censored and row.accepted < row.verified:
            known[row.accepted] = 0
    return known


def walk(flags: Flags, run: int, counts: dict[int, list[int]]) -> int:
    """Counts the flags of one sequence, which has matched `run` times since a beginning; the run after them.

    What is not known ends the replayed round, and the next one is taken to begin behind it.
    """
    for flag in flags:
        if flag is None:
            run = 0
            continue
        if run not in counts:
            counts[run] = [0, 0]
        counts[run][flag] += 1
        run = run + 1 if flag else 0
    return run


def walk_own(row: RowFeedback, run: int, counts: dict[int, list[int]]) -> int:
    """`walk` over what drafts say themselves, in most rounds all there is: 1 for each accepted one, 0 for the
    rejected one, nothing of a bonus or of a row that did not draft."""
    if not row.verified:
        return 0 if row.committed else run
    for reached in range(run, run + row.accepted):
        if reached not in counts:
            counts[reached] = [0, 0]
        counts[reached][1] += 1
    run += row.accepted
    if not row.censored and row.accepted < row.verified:
        if run not in counts:
            counts[run] = [0, 0]
        counts[run][0] += 1
        run = 0
    return run if row.committed == row.accepted else 0
