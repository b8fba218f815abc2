"""The policy contract: decide from what retired rounds said, and from nothing else.

A policy is deterministic: no clock, no rank, no torch. The same views and feedback in the same order
give the same plans, so a recorded trace replays to the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from xspec.core.round import RoundFeedback, SpeculationPlan


@dataclass(frozen=True, slots=True)
class PolicyView:
    """What a policy may look at when it plans: the batch to be, never the results of rounds in flight."""

    plan_id: int
    sequence_ids: tuple[int, ...]  # decode rows of the coming round
    kv_bounds: tuple[int, ...]  # their KV length bounds, aligned
    waiting: int
    prefill_tokens: int
    rooms: tuple[int, ...] = ()  # most tokens each may still get (the device knows exactly), aligned
    speculative: tuple[bool, ...] = ()  # whether drafts may be verified for it, aligned


class Policy(Protocol):
    name: str

    def plan(self, view: PolicyView) -> SpeculationPlan:
        """The speculation of the coming round, prefill-only rounds included.

        Called again with the same plan id where no round could be planned then: how often depends on
        timing, so nothing may be learnt from being asked.
        """

    def observe(self, feedback: RoundFeedback) -> None:
        """A round retired and its commit succeeded. Called in round order."""

    def status(self) -> dict[str, Any]:
        """What it does now and why, in JSON-ready values, for operators. Nothing reads it to decide."""
