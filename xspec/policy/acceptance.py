"""How often drafts are accepted, position by position, from the rows of completed rounds.

Rates are conditional: q_i is the chance that draft i is accepted where all before it were. So rounds of any
depth add to the same numbers. Knows nothing about costs or decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xspec.core.round import RowFeedback

PRIOR_RATE = 0.6
PRIOR_TRIALS = 4.0
LONG_MAX_WEIGHT = 32.0
LONG_MAX_TRIALS = 400.0
AGING_HALF_LIFE_BATCHES = 2000.0

Floats = NDArray[np.float64]


class PrefixRates:
    """Conditional rates over the last `window_size` speculative batches, anchored to a longer memory.

    q_i = (accepted_i + m_i long_i) / (trials_i + m_i). The longer memory, long_i = (accepted + 0.6 * 4) /
    (trials + 4), holds what left the window, decayed to at most 400 trials, and a prior of 0.6 worth 4
    trials. It weighs as many trials as it holds, m_i = 32 at most. Evidence at a position without a trial
    halves every 2000 completed decode batches, so its rate drifts to the prior.
    """

    def __init__(self, width: int, window_size: int) -> None:
        self._positions = np.arange(1, width + 1)
        self._trials = np.zeros((window_size, width))
        self._accepted = np.zeros((window_size, width))
        self._long_trials = np.zeros(width)
        self._long_accepted = np.zeros(width)
        self._next = 0  # the oldest batch of the window, replaced next

    def observe(self, rows: Sequence[RowFeedback]) -> None:
        """A completed decode batch. A plain one, in which nothing was verified, only ages the evidence."""
        verified = np.array([row.verified for row in rows], dtype=np.int64)
        accepted = np.minimum([row.accepted for row in rows], verified)
        failed = np.array([not row.censored for row in rows], dtype=np.int64)
        tried = np.minimum(verified, accepted + failed)
        trials = (tried[:, None] >= self._positions).sum(axis=0).astype(np.float64)
        self._age(trials == 0.0)
        if trials.any():
            self._push(trials, (accepted[:, None] >= self._positions).sum(axis=0).astype(np.float64))

    def conditional(self) -> Floats:
        """q_1 .. q_K."""
        held = self._long_trials + PRIOR_TRIALS
        long = (self._long_accepted + PRIOR_RATE * PRIOR_TRIALS) / held
        weight = np.minimum(held, LONG_MAX_WEIGHT)
        trials, accepted = self._trials.sum(axis=0), self._accepted.sum(axis=0)
        return np.asarray((accepted + weight * long) / (trials + weight))

    def prefix(self) -> Floats:
        """P_1 .. P_K: the chance that the first i drafts are all accepted."""
        return np.asarray(np.cumprod(self.conditional()), dtype=np.float64)

    def _push(self, trials: Floats, accepted: Floats) -> None:
        self._long_trials += self._trials[self._next]
        self._long_accepted += self._accepted[self._next]
        kept = LONG_MAX_TRIALS / np.maximum(self._long_trials, LONG_MAX_TRIALS)
        self._long_trials *= kept
        self._long_accepted *= kept
        self._trials[self._next], self._accepted[self._next] = trials, accepted
        self._next = (self._next + 1) % len(self._trials)

    def _age(self, unseen: NDArray[np.bool_]) -> None:
        kept = np.where(unseen, 0.5 ** (1.0 / AGING_HALF_LIFE_BATCHES), 1.0)
        for counts in (self._trials, self._accepted, self._long_trials, self._long_accepted):
            counts *= kept
