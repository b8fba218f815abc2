"""How often drafts are accepted, position by position, from the rows of completed rounds.

Rates are conditional: q_i is the chance that draft i is accepted where all before it were. So rounds of any
depth add to the same numbers. Knows nothing about costs or decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from xspec.core.round import RowFeedback

PRIOR_RATE = 0.6
PRIOR_TRIALS = 4.0
LONG_MAX_WEIGHT = 32.0
LONG_MAX_TRIALS = 400.0
AGING_HALF_LIFE_BATCHES = 2000.0


class PrefixRates:
    """Conditional rates over the last `window_size` speculative batches, anchored to a longer memory.

    q_i = (accepted_i + m_i long_i) / (trials_i + m_i). The longer memory, long_i = (accepted + 0.6 * 4) /
    (trials + 4), holds what left the window, decayed to at most 400 trials, and a prior of 0.6 worth 4
    trials. It weighs as many trials as it holds, m_i = 32 at most. Evidence at a position without a trial
    halves every 2000 completed decode batches, so its rate drifts to the prior.
    """

    def __init__(self, width: int, window_size: int) -> None:
        self._width, self._size = width, window_size
        # Plain lists: a few numbers a round, which arrays would take many times as long over.
        self._window: deque[tuple[list[float], list[float]]] = deque()  # (trials, accepted) of each batch
        self._long_trials = [0.0] * width
        self._long_accepted = [0.0] * width
        self._unseen = [0] * width  # batches without a trial whose aging is still to be done

    def observe(self, rows: Sequence[RowFeedback]) -> None:
        """A completed decode batch. A plain one, in which nothing was verified, only ages the evidence."""
        reached, kept = [0.0] * (self._width + 1), [0.0] * (self._width + 1)
        for row in rows:
            accepted = min(row.accepted, row.verified)
            kept[min(accepted, self._width)] += 1.0
            reached[min(accepted + (not row.censored), row.verified, self._width)] += 1.0
        trials, accepted_at = _beyond(reached), _beyond(kept)
        for i, tried in enumerate(trials):
            if not tried:
                self._unseen[i] += 1
            elif self._unseen[i]:
                self._age(i)
        if trials and trials[0]:
            self._push(trials, accepted_at)

    def conditional(self) -> list[float]:
        """q_1 .. q_K."""
        return [self._rate(i) for i in range(self._width)]

    def prefix(self) -> list[float]:
        """P_1 .. P_K: the chance that the first i drafts are all accepted."""
        return list(accumulate(self.conditional(), mul))

    def _rate(self, i: int) -> float:
        # Nothing is aged here: what is asked, and how often, must leave no trace, not even in rounding.
        aged = _aging(self._unseen[i])
        held = self._long_trials[i] * aged + PRIOR_TRIALS
        long = (self._long_accepted[i] * aged + PRIOR_RATE * PRIOR_TRIALS) / held
        weight = min(held, LONG_MAX_WEIGHT)
        trials = sum(batch[0][i] for batch in self._window) * aged
        accepted = sum(batch[1][i] for batch in self._window) * aged
        return (accepted + weight * long) / (trials + weight)

    def _push(self, trials: list[float], accepted: list[float]) -> None:
        self._window.append((trials, accepted))
        if len(self._window) <= self._size:
            return
        left = self._window.popleft()
        for i in range(self._width):
            held = self._long_trials[i] + left[0][i]
            scale = LONG_MAX_TRIALS / max(held, LONG_MAX_TRIALS)
            self._long_trials[i] = held * scale
            self._long_accepted[i] = (self._long_accepted[i] + left[1][i]) * scale

    def _age(self, i: int) -> None:
        factor = _aging(self._unseen[i])
        self._unseen[i] = 0
        self._long_trials[i] *= factor
        self._long_accepted[i] *= factor
        for trials, accepted in self._window:
            trials[i] *= factor
            accepted[i] *= factor


def _aging(batches: int) -> float:
    return float(0.5 ** (batches / AGING_HALF_LIFE_BATCHES))


def _beyond(counts: list[float]) -> list[float]:
    """[i]: the sum of counts[i + 1:]."""
    return list(accumulate(reversed(counts[1:])))[::-1]
