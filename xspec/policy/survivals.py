"""What drafters' signals say of requests, and how far they may be believed.

A survival s_j is the chance that the first j drafts of a request are all accepted, the running product of the
signals of one round. Signals are proxies, so expected tokens use survivals corrected by what verification
found. Knows nothing about costs or decisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


def survivals(signals: NDArray[np.float32]) -> Floats:
    """Running products along the last axis of signals clipped to [0, 1]; what is not a number counts 0."""
    clipped = np.fmax(np.fmin(signals.astype(np.float64), 1.0), 0.0)
    return np.asarray(np.cumprod(np.where(np.isnan(signals), 0.0, clipped), axis=-1), dtype=np.float64)


class Correction:
    """Calibration in the large: factor_j = (accepted_j + 16) / (predicted_j + 16) over verified rows.

    accepted_j counts rows whose first j drafts were accepted, predicted_j adds up what signals said of that,
    both decayed to the last 400 rows that verified position j. A row cut short counts up to what it kept.
    """

    def __init__(self, width: int) -> None:
        self._positions = np.arange(1, width + 1)
        self._rows = np.zeros(width)
        self._accepted = np.zeros(width)
        self._predicted = np.zeros(width)
        self.factors: Floats = np.ones(width)

    def observe(self, rows: Sequence[RowFeedback], predicted: Floats) -> tuple[Floats, Floats]:
        """`predicted` [rows, K]: survivals of the very drafts that were verified.

        -> accepted drafts of each row, and how many its corrected signals had promised. [rows] each
        """
        accepted = np.array([row.accepted for row in rows])
        # Where the answer ended at the target's own token, the drafts behind it had been decided too.
        decided = np.array([row.accepted if row.censored else row.admitted for row in rows])
        asked = decided[:, None] >= self._positions
        self._rows += asked.sum(axis=0)
        self._accepted += (asked & (accepted[:, None] >= self._positions)).sum(axis=0)
        self._predicted += np.where(asked, predicted, 0.0).sum(axis=0)
        kept = CORRECTION_MAX_ROWS / np.maximum(self._rows, CORRECTION_MAX_ROWS)
        for sums in (self._rows, self._accepted, self._predicted):
            sums *= kept
        promised = np.where(asked, self.apply(predicted), 0.0).sum(axis=1)
        self.factors = (self._accepted + CORRECTION_WEIGHT) / (self._predicted + CORRECTION_WEIGHT)
        return np.minimum(accepted, decided).astype(np.float64), promised

    def apply(self, raw: Floats) -> Floats:
        """Corrected survivals: at most 1, and never above the position before. [..., K]"""
        return np.minimum.accumulate(np.minimum(raw * self.factors, 1.0), axis=-1)


class Profile:
    """Mean survivals, for requests nothing is known of: over the last 64 rows with signals and a prior.

    The prior is 0.6^j and worth 4 rows.
    """

    def __init__(self, width: int) -> None:
        self._sum = PRIOR_TRIALS * np.cumprod(np.full(width, PRIOR_RATE))
        self._rows = PRIOR_TRIALS

    def observe(self, raw: Floats) -> None:
        self._sum += raw.sum(axis=0)
        self._rows += len(raw)
        if self._rows > PROFILE_MAX_ROWS:
            self._sum *= PROFILE_MAX_ROWS / self._rows
            self._rows = PROFILE_MAX_ROWS

    @property
    def mean(self) -> Floats:
        return np.asarray(self._sum / self._rows)


class SignalMemory:
    """Survivals by sequence: the latest, and a mean over its last 8 or so rounds.

    Sequences live in places of arrays; place 0 stands for those nothing is known of.
    """

    def __init__(self, width: int) -> None:
        self._place: dict[int, int] = {}
        self._free: list[int] = []
        self._latest = np.ones((1, width))
        self._mean = np.zeros((1, width))
        self._rounds = np.zeros(1)
        self._batch = np.zeros(1, dtype=np.int64)  # of the latest
        self._alive = np.zeros(1, dtype=np.int64)  # batch of the last feedback
        self._accepted = np.zeros(1)
        self._promised = np.zeros(1)
        self._swept = 0

    def __len__(self) -> int:
        return len(self._place)

    def observe(self, sequence_ids: Sequence[int], raw: Floats, batch: int) -> None:
        """Fresh survivals [sequences, K] of decode batch number `batch`."""
        places = np.array([self._place_of(sequence_id) for sequence_id in sequence_ids], dtype=np.int64)
        rounds = np.minimum(self._rounds[places] + 1.0, OWN_MAX_ROUNDS)
        self._latest[places], self._rounds[places] = raw, rounds
        self._mean[places] += (raw - self._mean[places]) / rounds[:, None]
        self._batch[places] = self._alive[places] = batch

    def settle(self, sequence_ids: Sequence[int], accepted: Floats, promised: Floats) -> None:
        """Drafts accepted of sequences just observed, and how many their signals had promised. [sequences]"""
        places = self.places(sequence_ids)
        accepted, promised = self._accepted[places] + accepted, self._promised[places] + promised
        kept = OWN_CORRECTION_MAX / np.maximum(promised, OWN_CORRECTION_MAX)
        self._accepted[places], self._promised[places] = accepted * kept, promised * kept

    def own_factors(self, places: Places) -> Floats:
        """(accepted + 4) / (promised + 4) over the last 16 or so promised drafts; 1: nothing known."""
        return np.asarray(
            (self._accepted[places] + OWN_CORRECTION_WEIGHT)
            / (self._promised[places] + OWN_CORRECTION_WEIGHT)
        )

    def touch(self, sequence_ids: Sequence[int], batch: int) -> None:
        """They took part in decode batch `batch`. Now and then forgets those that have not for long."""
        self._alive[self.places(sequence_ids)] = batch
        if batch - self._swept >= FORGET_BATCHES:
            self._swept = batch
            for sequence_id, place in list(self._place.items()):
                if batch - self._alive[place] >= FORGET_BATCHES:
                    self._free.append(self._place.pop(sequence_id))

    def places(self, sequence_ids: Sequence[int]) -> Places:
        """Where they live, 0 for sequences nothing is known of."""
        return np.array([self._place.get(sequence_id, 0) for sequence_id in sequence_ids], dtype=np.int64)

    def latest(self, places: Places) -> Floats:
        """Latest survivals, ones where nothing is known. [places, K]"""
        return self._latest[places]

    def stale(self, places: Places, batch: int) -> NDArray[np.bool_]:
        """Whose latest signals are more than 64 decode batches old."""
        return np.asarray(batch - self._batch[places] > STALE_BATCHES)

    def typical(self, places: Places, profile: Floats) -> Floats:
        """Means of the sequences shrunk to the profile, which counts as 8 rounds. [places, K]"""
        own = self._rounds[places, None]
        return np.asarray(
            (own * self._mean[places] + PROFILE_WEIGHT_ROUNDS * profile) / (own + PROFILE_WEIGHT_ROUNDS)
        )

    def _place_of(self, sequence_id: int) -> int:
        place = self._place.get(sequence_id)
        if place is None:
            if not self._free:
                self._grow()
            place = self._place[sequence_id] = self._free.pop()
            self._mean[place], self._rounds[place] = 0.0, 0.0
            self._accepted[place], self._promised[place] = 0.0, 0.0
        return place

    def _grow(self) -> None:
        size = len(self._latest)
        self._latest = np.pad(self._latest, ((0, size), (0, 0)))
        self._mean = np.pad(self._mean, ((0, size), (0, 0)))
        self._rounds = np.pad(self._rounds, (0, size))
        self._accepted = np.pad(self._accepted, (0, size))
        self._promised = np.pad(self._promised, (0, size))
        self._batch = np.pad(self._batch, (0, size))
        self._alive = np.pad(self._alive, (0, size))
        self._free = list(range(2 * size - 1, size - 1, -1))
