"""A number of rounds to run in some special way: probes, or rounds that tell all depths.

What was granted is kept by plan id, so a plan that is asked for again takes nothing twice, and a round that
failed is not waited for.
"""

from __future__ import annotations

LATE_ROUNDS = 8
"""A plan so many ids behind one that retired will not retire any more: its round failed."""


class Quota:
    """Opened for a number of rounds, taken from round by round, done once all of them have retired."""

    def __init__(self) -> None:
        self._size = 0
        self._flying: set[int] = set()
        self._settled = 0

    @property
    def open(self) -> bool:
        return self._settled < self._size

    def start(self, rounds: int) -> None:
        """Begin anew; rounds of before that are still in flight count no more."""
        self._size, self._settled = rounds, 0
        self._flying.clear()

    def release(self, plan_id: int) -> None:
        """The round is planned again: it has taken nothing yet."""
        self._flying.discard(plan_id)

    def take(self, plan_id: int) -> bool:
        """Whether this round is one of them."""
        if self._settled + len(self._flying) >= self._size:
            return False
        self._flying.add(plan_id)
        return True

    def retire(self, plan_id: int) -> bool:
        """A round retired; whether it was one of them."""
        if not self._flying:
            return False
        mine = plan_id in self._flying
        gone = {one for one in self._flying if one == plan_id or one < plan_id - LATE_ROUNDS}
        self._flying -= gone
        self._settled += len(gone)
        return mine
