"""How far a calibration is, in padded rows: what a progress bar's time left can be told from.

Rounds differ in length by their rows, and those that are run cannot all be foretold.
"""

from __future__ import annotations

from xspec.progress import Progress

STAGE = "calibrating"

ROUND_WORTH_ROWS = 16
"""What a round takes beside its rows, in rows. A guess; only the time left rests on it."""

CALLS = 200
"""Most calls of the Progress."""


def work_of(rounds: int, rows: int) -> int:
    """What `rounds` rounds of `rows` padded rows each count."""
    return rounds * (rows + ROUND_WORTH_ROWS)


class Bar:
    """Tells a Progress of work done; done only when told so, however much was estimated."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._told = 0
        progress(STAGE, 0, total)

    def extend(self, work: int) -> None:
        """More has to be done than was known."""
        self._total += work

    def advance(self, work: int) -> None:
        self._done = min(self._done + work, self._total - 1)
        step = self._done * CALLS // self._total
        if step > self._told:
            self._told = step
            self._progress(STAGE, self._done, self._total)

    def finish(self) -> None:
        self._progress(STAGE, self._total, self._total)
