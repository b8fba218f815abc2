"""Adaptive target verification: each round a row budget, by measured costs and lagged signals, or plain.

Says what each budget is worth; `switching.py` says when to change between plain and speculative rounds, the
device which requests get the rows. docs/adaptive.md explains the rules and all constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.cost.model import Costs, CostsAt
from xspec.policy.base import PolicyView
from xspec.policy.budget import Tier, best_tier
from xspec.policy.geometry import PolicyGeometry, draft_limits
from xspec.policy.ledger import Ledger, Planned
from xspec.policy.survivals import Correction, Places, Profile, SignalMemory, survivals
from xspec.policy.switching import Held, Turns, choose, meet_load, scoring_due, start

PLAIN, SPECULATIVE = 0, 1
UPDATE_INTERVAL = 5
"""Completed decode batches between two looks at plain against speculative rounds."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Duel:
    """A batch as a plain and as a speculative round. NaN where a kind of round is no choice."""

    tokens: tuple[float, float]
    ms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Batch:
    """The decode rows of the coming round: where their signals live, and which drafts can count [rows, K]."""

    rows: int
    lanes: int
    places: Places
    matters: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Menu:
    """What the coming round may cost: (target rows, ms) with K drafts; and plain, if that is a choice."""

    tiers: list[tuple[int, float]]
    plain_ms: float | None


class TargetVerifyPolicy:
    """Architecture decision 3: argmax over tiers of (B + best survivals that fit) / measured ms."""

    name = "target_verify"

    def __init__(
        self,
        costs: Costs,
        geometry: PolicyGeometry,
        switch_min_gain: float = 0.05,
        allow_plain_rounds: bool = True,
    ) -> None:
        self._costs = costs
        self._geometry = geometry
        self._width = geometry.draft_width
        self._switch_min_gain = switch_min_gain
        self._allow_plain_rounds = allow_plain_rounds
        self._positions = np.arange(1, self._width + 1)
        self._signals = SignalMemory(self._width)
        self._correction = Correction(self._width)
        self._profile = Profile(self._width)
        self._ledger: Ledger[Duel] = Ledger()
        self._turns = Turns()
        self._last: SpeculationPlan | None = None

    def plan(self, view: PolicyView) -> SpeculationPlan:
        held = self._turns.begin(view.plan_id)
        self._ledger.plan(view.plan_id, None)
        self._last = self._decide(view, held) if view.sequence_ids else self._plan(view, "prefill_only")
        return self._last

    def observe(self, feedback: RoundFeedback) -> None:
        if not self._ledger.retire(feedback):
            return
        batch = self._ledger.batches
        drafted = [index for index, row in enumerate(feedback.rows) if row.proposed]
        if feedback.signals is None or not drafted:
            self._signals.touch([row.sequence_id for row in feedback.rows], batch)
            return
        rows = [feedback.rows[index] for index in drafted]
        sequence_ids = [row.sequence_id for row in rows]
        raw = survivals(feedback.signals[drafted, : self._width])
        self._signals.observe(sequence_ids, raw, batch)
        self._signals.touch([row.sequence_id for row in feedback.rows if not row.proposed], batch)
        self._signals.settle(sequence_ids, *self._correction.observe(rows, raw))
        self._profile.observe(raw)

    def status(self) -> dict[str, Any]:
        held, last = self._turns.held, self._last
        survival = self._correction.apply(self._profile.mean)
        before = np.concatenate(([1.0], survival[:-1]))
        rates = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0.0)
        return {
            "control": self.name,
            "mode": None if held is None else ("plain", "speculative")[held.choice],
            "target_rows": None if last is None else last.target_rows,
            "predicted_ms": None if last is None else last.predicted_ms,
            "reason": None if last is None else last.reason,
            "survival": survival.tolist(),
            "conditional_rates": rates.tolist(),
            "signal_correction": self._correction.factors.tolist(),
            "sequences_known": len(self._signals),
            "dwell_ms": 0.0 if held is None else held.dwell_ms,
            **self._ledger.counts(),
        }

    # -- one round ----------------------------------------------------------------------------

    def _decide(self, view: PolicyView, held: Held | None) -> SpeculationPlan:
        batch = self._batch(view)
        at = self._costs.at(view.kv_bounds)
        if not batch.matters.any():  # the round is plain whatever is planned
            return self._unscored(view, batch, 0, "nothing_to_draft", at)
        if at is None:
            return self._unscored(view, batch, self._geometry.uncovered_steps, "uncovered_kv", at)
        menu = self._menu(at, batch.lanes)
        if not menu.tiers and menu.plain_ms is None:
            return self._unscored(view, batch, self._geometry.uncovered_steps, "uncovered_bucket", at)
        promised = self._promised(batch, held)
        best = best_tier(promised, menu.tiers) if menu.tiers else None
        duel = _duel(batch.rows, menu, best)
        held, reason, cause = self._hold(view, held, batch, duel)
        self._turns.held = held
        if held.choice == SPECULATIVE:
            self._ledger.plan(view.plan_id, Planned(rows=batch.rows, load=duel, cause=cause))
            budgeted = self._budgeted(batch, promised)
            tier = best if budgeted is None else best_tier(budgeted, menu.tiers)
            assert tier is not None  # speculative rounds have a cost, or they would not be held
            return self._verify(view, batch, tier, "tier" if reason == "hold" else reason)
        probe = self._probe(held, promised, menu) if reason == "hold" else None
        if probe is not None:
            self._turns.held = replace(held, probes=held.probes + 1, probe_id=view.plan_id)
        plain_ms = duel.ms[PLAIN]
        planned = Planned(
            rows=batch.rows,
            load=duel,
            probe_ms=0.0 if probe is None else max(0.0, probe.ms - plain_ms),
            probe_cap_ms=max((ms - plain_ms for _, ms in menu.tiers), default=0.0),
            cause=cause,
        )
        self._ledger.plan(view.plan_id, planned)
        if probe is not None:
            return self._verify(view, batch, probe, "probe")
        return self._plan(view, reason, ms=plain_ms)

    def _hold(
        self, view: PolicyView, held: Held | None, batch: Batch, duel: Duel
    ) -> tuple[Held, str, str | None]:
        """Plain or speculative rounds from now on, the reason of the plan and, if that changed, the cause."""
        now = self._ledger.moment(view.plan_id, batch.rows, batch.lanes, held)
        if held is None:
            scores = self._scores(now.plan_id, duel)
            return start(int(np.nanargmax(scores)), now), "initial", None
        held = meet_load(held, now)
        covered = not np.isnan(duel.ms[held.choice])
        if covered and not scoring_due(held, now, UPDATE_INTERVAL):
            return held, "hold", None
        # The minimum gain is against noise at a load; a new load is met by the better kind of round.
        min_gain = 0.0 if held.load_id == now.plan_id else self._switch_min_gain
        held, cause = choose(held, now, self._scores(held.load_id, duel), min_gain)
        return held, "hold" if cause is None else "switch", cause

    def _scores(self, since_id: int, duel: Duel) -> Floats:
        """Tokens per ms of plain and speculative rounds, over this batch and the recent ones of its load."""
        if np.isnan(duel.ms).any():
            return np.asarray(np.array(duel.tokens) / np.array(duel.ms), dtype=np.float64)
        duels = [duel, *(one for one in self._ledger.recent(since_id) if not np.isnan(one.ms).any())]
        tokens = np.sum([one.tokens for one in duels], axis=0)
        return np.asarray(tokens / np.sum([one.ms for one in duels], axis=0))

    def _probe(self, held: Held, promised: Floats, menu: Menu) -> Tier | None:
        """The budget to look with in a plain spell, if a probe is due and the allowance pays it.

        The best one that verifies some draft. One at a time: the next waits until this one retired.
        """
        if held.probe_id > self._ledger.retired_id:
            return None
        telling = [(rows, ms) for rows, ms in menu.tiers if rows > len(promised)]
        if not telling or menu.plain_ms is None:
            return None
        tier = best_tier(promised, telling)
        return tier if tier.ms - menu.plain_ms <= self._ledger.allowance_ms else None

    # -- what drafts promise ------------------------------------------------------------------

    def _promised(self, batch: Batch, held: Held | None) -> Floats:
        """Corrected survivals by which plain and speculative rounds are compared; 0 where nothing can count.

        The latest signals where they are fresh. In a plain spell, and for requests without fresh ones, what
        the request showed on average, shrunk to the mean profile: one lucky probe must not decide.
        """
        if held is None or held.choice == PLAIN:
            raw = self._signals.typical(batch.places, self._profile.mean)
        else:
            raw = self._signals.latest(batch.places)
            vague = (batch.places == 0) | self._signals.stale(batch.places, self._ledger.batches)
            if vague.any():
                raw[vague] = self._signals.typical(batch.places[vague], self._profile.mean)
        corrected = self._correction.apply(raw) * self._signals.own_factors(batch.places)[:, None]
        return np.where(batch.matters, np.minimum(corrected, 1.0), 0.0)

    def _budgeted(self, batch: Batch, promised: Floats) -> Floats | None:
        """The same for the choice of a budget: a request without feedback counts as surely accepted.

        None: there is no such request.
        """
        unknown = batch.places == 0
        return np.where(unknown[:, None] & batch.matters, 1.0, promised) if unknown.any() else None

    def _batch(self, view: PolicyView) -> Batch:
        limits = draft_limits(view, self._width)
        rows = len(view.sequence_ids)
        return Batch(
            rows=rows,
            lanes=self._geometry.lanes.fit(rows).rows,
            places=self._signals.places(view.sequence_ids),
            matters=limits[:, None] >= self._positions,
        )

    def _menu(self, at: CostsAt, lanes: int) -> Menu:
        tiers = []
        for target_rows in self._geometry.tiers.of(lanes, self._width):
            ms = at.round_ms(self._width, lanes, target_rows)
            if ms is not None:
                tiers.append((target_rows, ms))
        return Menu(tiers, at.round_ms(0, lanes, lanes) if self._allow_plain_rounds else None)

    # -- plans --------------------------------------------------------------------------------

    def _unscored(
        self, view: PolicyView, batch: Batch, steps: int, reason: str, at: CostsAt | None
    ) -> SpeculationPlan:
        self._ledger.plan(view.plan_id, Planned(rows=batch.rows))
        ms = None if at is None else at.round_ms(steps, batch.lanes, batch.lanes * (steps + 1))
        return self._plan(view, reason, steps=steps, ms=ms)

    def _verify(self, view: PolicyView, batch: Batch, tier: Tier, reason: str) -> SpeculationPlan:
        full = tier.target_rows == batch.lanes * (self._width + 1)
        rows = None if full else tier.target_rows
        return self._plan(view, reason, steps=self._width, target_rows=rows, ms=tier.ms)

    def _plan(
        self,
        view: PolicyView,
        reason: str,
        *,
        steps: int = 0,
        target_rows: int | None = None,
        ms: float | None = None,
    ) -> SpeculationPlan:
        return SpeculationPlan(
            plan_id=view.plan_id,
            policy=self.name,
            draft_steps=steps,
            target_rows=target_rows,
            reason=reason,
            predicted_ms=ms,
        )


def _duel(rows: int, menu: Menu, best: Tier | None) -> Duel:
    """A plain round against the best tier."""
    nan = float("nan")
    tokens, ms = (nan, nan) if best is None else (best.tokens, best.ms)
    return Duel(tokens=(float(rows), tokens), ms=(nan if menu.plain_ms is None else menu.plain_ms, ms))
