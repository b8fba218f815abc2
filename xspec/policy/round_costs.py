"""What the rounds of a batch's candidates cost beside a plain one, as (K, d) policies ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xspec.cost.looped import IdealCosts, gain
from xspec.cost.model import Costs, CostsAt
from xspec.policy.base import PolicyView
from xspec.policy.batch_costs import BatchCosts
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.spec_config import Candidate

PLAIN = Candidate(0)


@dataclass(frozen=True, slots=True)
class Prices:
    """Of one batch. `ratios`: T_spec / T_native of each candidate; None where nothing is known of it."""

    plain_ms: float | None
    spec_ms: tuple[float | None, ...]
    ratios: tuple[float | None, ...]


class RoundCosts:
    """T_spec / T_native from measured costs; where those say nothing from a candidate's `off`, which means
    1 + K off; else from the idealized model of a looped target, 1 + K d / D; else not known."""

    def __init__(self, costs: Costs | None, geometry: CandidateGeometry) -> None:
        self._costs = None if costs is None else BatchCosts(costs)
        self._lanes = geometry.lanes
        self._priced: tuple[CostsAt | None, int, Sequence[Candidate], Prices] | None = None
        self._ideal = None if geometry.loops is None else IdealCosts(geometry.loops)
        self.source = (
            "costs" if costs is not None else "config or idealized model" if self._ideal else "config"
        )

    def lanes(self, view: PolicyView) -> int:
        return self._lanes.fit(len(view.sequence_ids)).rows

    def of(self, view: PolicyView, candidates: Sequence[Candidate]) -> Prices:
        """`candidates`: the same object where they are the same, so that what was priced can be kept."""
        at = None if self._costs is None else self._costs.at(view)
        lanes, last = self.lanes(view), self._priced
        if last is not None and last[0] is at and last[1] == lanes and last[2] is candidates:
            return last[3]
        prices = self._price(lanes, at, candidates)
        self._priced = (at, lanes, candidates, prices)
        return prices

    def _price(self, lanes: int, at: CostsAt | None, candidates: Sequence[Candidate]) -> Prices:
        if at is None:
            nothing = (None,) * len(candidates)
            return Prices(None, nothing, tuple(self._unmeasured(one) for one in candidates))
        plain_ms = round_ms(at, lanes, PLAIN)
        spec_ms = tuple(round_ms(at, lanes, one) for one in candidates)
        ratios = tuple(
            self._unmeasured(one) if ms is None or plain_ms is None else ms / plain_ms
            for one, ms in zip(candidates, spec_ms, strict=True)
        )
        return Prices(plain_ms, spec_ms, ratios)

    def _unmeasured(self, candidate: Candidate) -> float | None:
        if candidate.off is not None:
            return 1.0 + candidate.draft_steps * candidate.off
        loops = None if self._ideal is None else round_ms(self._ideal, 1, candidate)
        return None if loops is None or self._ideal is None else loops / self._ideal.loops


def gain_from(candidate: Candidate, acceptance: float, ratio: float | None) -> float | None:
    """(1 + K a) / (T_spec / T_native)."""
    return None if ratio is None else gain(candidate.draft_steps, acceptance, ratio, 1.0)


def round_ms(at: CostsAt, lanes: int, candidate: Candidate) -> float | None:
    """A round of `lanes` padded requests, all drafts verified; K = 0: a plain one. None: not measured."""
    steps = candidate.draft_steps
    return at.round_ms(steps, lanes, lanes * (steps + 1), candidate.draft_loops)
