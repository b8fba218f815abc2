"""What drafters' signals say of requests, and how far they may be believed.

A survival s_j is the chance that the first j drafts of a request are all accepted, the running product of the
signals of one round, clipped to [0, 1]. Signals are proxies, so expected tokens use survivals corrected by
what verification found. Knows nothing about costs or decisions. Plain lists: these are a few numbers a
request, which arrays would take many times as long over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from operator import mul

from xspec.core.round import RowFeedback
from xspec.policy.acceptance import PRIOR_RATE, PRIOR_TRIALS

CORRECTION_WEIGHT = 16.0
CORRECTION_MAX_ROWS = 400.0
PROFILE_MAX_ROWS = 64.0
OWN_MAX_ROUNDS = 8.0
PROFILE_WEIGHT_ROUNDS = 8.0
OWN_CORRECTION_WEIGHT = 4.0
OWN_CORRECTION_MAX = 16.0
STALE_BATCHES = 64
FORGET_BATCHES = 512
"""A sequence without feedback for so many decode batches is gone, or begins anew."""

Survivals = Sequence[float]
"""s_1 .. s_K of one request."""


class Correction:
    """Calibration in the large: factor_j = (accepted_j + 16) / (predicted_j + 16) over verified rows.

    accepted_j counts rows whose first j drafts were accepted, predicted_j adds up what signals said of that,
    both decayed to the last 400 rows that verified position j. A row cut short counts up to what it kept.
    """

    def __init__(self, width: int) -> None:
        self._rows = [0.0] * width
        self._accepted = [0.0] * width
        self._predicted = [0.0] * width
        self.factors = [1.0] * width

    def observe(self, rows: Sequence[RowFeedback], drafted: Sequence[RequestSignals]) -> None:
        """`drafted`: of each row the signals of the very drafts that were verified; each is settled with."""
        factors, width = self.factors, len(self.factors)
        asked, kept = [0] * (width + 1), [0] * (width + 1)
        decided = []
        for row, signals in zip(rows, drafted, strict=True):
            # Where the answer ended at the target's own token, the drafts behind it had been decided too.
            accepted = row.accepted
            told = signals.latest[: accepted if row.censored else row.admitted]
            decided.append(told)
            count = len(told)
            if accepted > count:
                accepted = count
            asked[count] += 1
            kept[accepted] += 1
            least, promised = 1.0, 0.0
            for survival in map(mul, told, factors):
                if survival < least:
                    least = survival
                promised += least
            signals.settle(accepted, promised)
        self._add(asked, kept, map(sum, zip_longest([0.0] * width, *decided, fillvalue=0.0)))

    def apply(self, raw: Survivals, own_factor: float = 1.0) -> list[float]:
        """Corrected survivals, in the end times `own_factor`: at most 1, never above the position before."""
        least, corrected = 1.0, []
        for survival in map(mul, raw, self.factors):
            if survival < least:
                least = survival
            corrected.append(least * own_factor)
        if corrected[0] > 1.0:  # none is above the first
            corrected = [min(survival, 1.0) for survival in corrected]
        return corrected

    def _add(self, asked: list[int], kept: list[int], predicted: Iterable[float]) -> None:
        """`asked[n]`: rows of which n drafts were decided, `kept[n]`: of which n were accepted."""
        asked_here, kept_here = sum(asked), sum(kept)
        for j, said in enumerate(predicted):
            asked_here -= asked[j]
            kept_here -= kept[j]
            rows = self._rows[j] + asked_here
            scale = CORRECTION_MAX_ROWS / max(rows, CORRECTION_MAX_ROWS)
            self._rows[j] = rows * scale
            self._accepted[j] = held = (self._accepted[j] + kept_here) * scale
            self._predicted[j] = promised = (self._predicted[j] + said) * scale
            self.factors[j] = (held + CORRECTION_WEIGHT) / (promised + CORRECTION_WEIGHT)


class Profile:
    """Mean survivals, for requests nothing is known of: over the last 64 rows with signals and a prior.

    The prior is 0.6^j and worth 4 rows.
    """

    def __init__(self, width: int) -> None:
        self.mean = list(accumulate([PRIOR_RATE] * width, mul))
        self._sums = [PRIOR_TRIALS * each for each in self.mean]
        self._rows = PRIOR_TRIALS

    def observe(self, raw: Sequence[Survivals]) -> None:
        rows = self._rows + len(raw)
        self._rows = min(rows, PROFILE_MAX_ROWS)
        scale = self._rows / rows
        for j, column in enumerate(zip(*raw, strict=True)):
            self._sums[j] = held = (self._sums[j] + sum(column)) * scale
            self.mean[j] = held / self._rows


class RequestSignals:
    """Survivals of one sequence, the latest and a mean over its last 8 or so rounds.

    `own_factor`: what became of its drafts, (accepted + 4) / (promised + 4) over the last 16 or so promised.
    """

    __slots__ = ("_accepted", "_promised", "alive", "batch", "latest", "mean", "own_factor", "rounds")

    def __init__(self, width: int) -> None:
        self.latest: list[float] = []
        self.mean = [0.0] * width
        self.rounds = 0.0
        self.batch = 0  # decode batch of the latest
        self.alive = 0  # decode batch of the last feedback
        self.own_factor = 1.0
        self._accepted = 0.0
        self._promised = 0.0

    def observe(self, signals: Sequence[float], batch: int) -> None:
        """Fresh signals, of decode batch number `batch`, as they are: what is not a number counts 0."""
        if self.rounds < OWN_MAX_ROUNDS:
            self.rounds += 1.0
        rounds, mean = self.rounds, self.mean
        product, latest = 1.0, []
        for j, signal in enumerate(signals):
            if 0.0 <= signal <= 1.0:
                product *= signal
            elif not signal > 1.0:
                product = 0.0
            latest.append(product)
            before = mean[j]
            mean[j] = before + (product - before) / rounds
        self.latest = latest
        self.batch = self.alive = batch

    def settle(self, accepted: float, promised: float) -> None:
        """Drafts accepted of those just observed, and how many their signals had promised."""
        accepted += self._accepted
        promised += self._promised
        if promised > OWN_CORRECTION_MAX:
            kept = OWN_CORRECTION_MAX / promised
            accepted *= kept
            promised *= kept
        self._accepted, self._promised = accepted, promised
        self.own_factor = (accepted + OWN_CORRECTION_WEIGHT) / (promised + OWN_CORRECTION_WEIGHT)

    def typical(self, profile: Survivals) -> list[float]:
        """The mean shrunk to the profile, which counts as 8 rounds."""
        own = self.rounds
        held = own + PROFILE_WEIGHT_ROUNDS
        return [(own * mean + PROFILE_WEIGHT_ROUNDS * profile[j]) / held for j, mean in enumerate(self.mean)]


class SignalMemory:
    """Signals by sequence, of those that had feedback in the last 512 decode batches or so.

    `get`: what is known of a sequence, None: nothing.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._known: dict[int, RequestSignals] = {}
        self.get = self._known.get
        self._swept = 0

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, sequence_id: int) -> RequestSignals:
        """A sequence that nothing is known of."""
        known = self._known[sequence_id] = RequestSignals(self._width)
        return known

    def sweep(self, batch: int) -> None:
        """Now and then forgets those that took no part for long, after decode batch `batch`."""
        if batch - self._swept >= FORGET_BATCHES:
            self._swept = batch
            for sequence_id, known in list(self._known.items()):
                if batch - known.alive >= FORGET_BATCHES:
                    del self._known[sequence_id]
