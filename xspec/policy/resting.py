"""Spells in which a policy need not think: nothing has changed that a plan depends on, as in most rounds.

Thinking is not free: the interpreter runs between two passes over all weights, on cold caches and on a core
that the next round computes on. What lengths and loads that creep do is noticed at the next look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from xspec.policy.base import PolicyView
from xspec.policy.geometry import all_may_draft
from xspec.policy.ledger import Ledger, LoadT, Planned
from xspec.policy.switching import Turns


@dataclass(slots=True)
class Rest(Generic[LoadT]):
    """What every round of `rows` requests is until a look or a probe is due.

    `until`: completed decode batches at the next look; `probe_ms`: the allowance that pays a probe.
    """

    rows: int
    until: int
    probe_ms: float
    steps: int
    ms: float
    planned: Planned[LoadT]

    def holds(self, view: PolicyView, ledger: Ledger[LoadT], turns: Turns, width: int) -> bool:
        """Not for a plan that was thought about before: asked again, it is thought about again."""
        return (
            len(view.sequence_ids) == self.rows
            and ledger.batches < self.until
            and ledger.allowance_ms < self.probe_ms
            and turns.plan_id != view.plan_id
            and all_may_draft(view, width)
        )
