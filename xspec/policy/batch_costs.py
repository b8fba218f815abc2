"""`Costs.at` for the batch of each plan, asked anew only where the batch has become another one.

What a table says of a batch hardly changes from round to round, but costs time to work out: the interpreter
runs between two passes over all weights, on cold caches and on a core that the next round computes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xspec.cost.model import Costs, CostsAt
from xspec.policy.base import PolicyView

SAME_TOKENS, SAME_SHARE = 32, 0.125
"""Costs of a batch are kept until its requests are so much longer or shorter on average, or by that share."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """`tokens`: KV lengths of all its requests together."""

    requests: int
    tokens: int
    at: CostsAt


class BatchCosts:
    """Gives one and the same object as long as nothing has changed, so what follows from it can be kept too.

    A plan that is asked for again starts from before it, so that a replay decides alike.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._kept: _Kept | None = None
        self._kept_before: _Kept | None = None
        self._plan_id: int | None = None

    def at(self, view: PolicyView) -> CostsAt | None:
        """None: a length lies in no interval. Of lengths that grow out of it, that is noticed when it is
        asked anew."""
        if view.plan_id != self._plan_id:
            self._plan_id, self._kept_before = view.plan_id, self._kept
        self._kept = self._of(view.kv_bounds)
        return None if self._kept is None else self._kept.at

    def _of(self, lengths: Sequence[int]) -> _Kept | None:
        kept, requests, tokens = self._kept_before, len(lengths), sum(lengths)
        if kept and kept.requests == requests:
            same = max(SAME_TOKENS * requests, SAME_SHARE * kept.tokens)
            if abs(tokens - kept.tokens) <= same:
                return kept
        at = self._costs.at(lengths)
        return None if at is None else _Kept(requests, tokens, at)
