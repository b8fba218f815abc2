"""The policy that knows: per round the best choice for the true chances and the true load of that very round.

It looks at the virtual device, which no policy of an engine can. It maximises the expected tokens of each
round over its cost; where chances differ between rounds that is close to the most possible, not exactly it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.cost.model import Costs
from xspec.cost.settings import Control
from xspec.policy.base import PolicyView
from xspec.policy.geometry import PolicyGeometry
from xspec.sim.device import UncoveredError, VirtualDevice, allocate


class OraclePolicy:
    """Chooses among plain rounds and all depths (draft step) or tiers (target verify) that have a cost."""

    name = "oracle"

    def __init__(
        self,
        device: VirtualDevice,
        costs: Costs,
        control: Control,
        geometry: PolicyGeometry,
    ) -> None:
        self._device = device
        self._costs = costs
        self._control = control
        self._lanes = geometry.lanes
        self._tiers = geometry.tiers
        self._draft_width = geometry.draft_width

    def plan(self, view: PolicyView) -> SpeculationPlan:
        if not view.sequence_ids:
            return SpeculationPlan(view.plan_id, self.name, 0, reason="no request decodes")
        kv_lengths = [self._device.residents[i].tokens for i in view.sequence_ids]
        costs = self._costs.at(kv_lengths)
        lanes = self._lanes.fit(len(view.sequence_ids)).rows
        best: tuple[float, int, int | None, float] | None = None
        for draft_steps, target_rows in self._choices(lanes):
            rows = self._tiers.fit(lanes, draft_steps, target_rows)
            ms = None if costs is None else costs.round_ms(draft_steps, lanes, rows)
            if ms is None:
                continue
            rate = self._tokens(view.sequence_ids, lanes, draft_steps, rows) / ms
            if best is None or rate > best[0]:
                best = (rate, draft_steps, target_rows, ms)
        if best is None:
            raise UncoveredError(
                f"the cost table has no round of {len(kv_lengths)} requests of {min(kv_lengths)} to "
                f"{max(kv_lengths)} tokens"
            )
        return SpeculationPlan(
            view.plan_id, self.name, best[1], target_rows=best[2], predicted_ms=best[3], reason="oracle"
        )

    def _choices(self, lanes: int) -> Iterator[tuple[int, int | None]]:
        yield 0, None
        if self._control is Control.DRAFT_STEP:
            yield from ((depth, None) for depth in range(1, self._draft_width + 1))
        else:
            yield from ((self._draft_width, rows) for rows in self._tiers.of(lanes, self._draft_width))

    def _tokens(self, ids: tuple[int, ...], lanes: int, draft_steps: int, target_rows: int) -> float:
        """Tokens that the round is expected to commit."""
        rooms = [self._device.residents[i].room for i in ids]
        anchors = float(sum(room > 0 for room in rooms))
        if not draft_steps:
            return anchors
        counts = [min(draft_steps, max(0, room - 1)) for room in rooms]
        if target_rows < lanes * (draft_steps + 1):
            counts = allocate(self._device.signals(ids, draft_steps), counts, len(ids), target_rows)
        survival = self._device.chances(ids, draft_steps).cumprod(axis=1)
        verified = np.arange(draft_steps) < np.asarray(counts)[:, None]
        return anchors + float(survival[verified].sum())

    def observe(self, feedback: RoundFeedback) -> None:
        """It knows already."""

    def status(self) -> dict[str, Any]:
        return {"control": self._control.value, "draft_width": self._draft_width}
