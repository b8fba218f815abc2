"""Adaptive target verification: each round a row budget, by measured costs and lagged signals, or plain.

Says what each budget is worth; `switching.py` says when to change between plain and speculative rounds, the
device which requests get the rows. docs/adaptive.md explains the rules and all constants.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan
from operator import truediv
from typing import Any

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.cost.model import Costs, CostsAt
from xspec.policy.base import PolicyView
from xspec.policy.batch_costs import BatchCosts
from xspec.policy.budget import Tier, best_tier
from xspec.policy.geometry import PolicyGeometry, draft_limits
from xspec.policy.ledger import CLEAR_LOSS, RECENT_ROUNDS, Ledger, Planned
from xspec.policy.resting import Rest
from xspec.policy.settings import VERIFY_DEFAULTS
from xspec.policy.survivals import STALE_BATCHES, Correction, Profile, SignalMemory
from xspec.policy.switching import Held, Moment, Turns, best_choice, choose, meet_load, scoring_due, start

PLAIN, SPECULATIVE = 0, 1
LOOK_EVERY = (20, 5)
"""Completed decode batches between two looks at plain against speculative rounds: in a plain spell, and else.
A spell learns nothing between two probes, and a new load is looked at at once."""
ALIVE_EVERY = 32
"""Plain rounds tell of a sequence only that it is there, which need not be noted every time."""

Promised = list[list[float]]
"""Of each request the corrected survivals of the drafts that can matter to it."""


# What is made anew every round is not frozen: that doubles what it takes to make.
@dataclass(slots=True)
class Duel:
    """A batch as a plain and as a speculative round. NaN where a kind of round is no choice.

    `fought`: both are.
    """

    tokens: tuple[float, float]
    ms: tuple[float, float]
    fought: bool


@dataclass(slots=True)
class Menu:
    """What a round of `rows` requests in `lanes` may cost: with K drafts at each of `target_rows`, ascending,
    and plain.

    Without what was not measured; `plain_ms` is NaN where a plain round is no choice. `probes`: the first
    tier that verifies some draft.
    """

    at: CostsAt | None
    rows: int
    lanes: int
    target_rows: list[int]
    tiers_ms: list[float]
    plain_ms: float
    probes: int = field(init=False)
    probe_ms: float = field(init=False)  # the cheapest of them, beyond a plain round
    probe_cap_ms: float = field(init=False)  # the dearest tier, beyond a plain round

    def __post_init__(self) -> None:
        self.probes, self.probe_ms, self.probe_cap_ms = bisect_right(self.target_rows, self.rows), inf, 0.0
        if self.tiers_ms and not isnan(self.plain_ms):
            self.probe_ms = min(self.tiers_ms[self.probes :], default=inf) - self.plain_ms
            self.probe_cap_ms = max(self.tiers_ms) - self.plain_ms


class TargetVerifyPolicy:
    """Architecture decision 3: argmax over tiers of (B + best survivals that fit) / measured ms."""

    name = "target_verify"

    def __init__(
        self,
        costs: Costs,
        geometry: PolicyGeometry,
        switch_min_gain: float = VERIFY_DEFAULTS.switch_min_gain,
        allow_plain_rounds: bool = True,
    ) -> None:
        self._costs = BatchCosts(costs)
        self._geometry = geometry
        self._width = geometry.draft_width
        self._switch_min_gain = switch_min_gain
        self._allow_plain_rounds = allow_plain_rounds
        self._signals = SignalMemory(self._width)
        self._correction = Correction(self._width)
        self._profile = Profile(self._width)
        self._ledger: Ledger[Duel] = Ledger()
        self._turns = Turns()
        self._menu = Menu(None, 0, 0, [], [], nan)
        self._rest: Rest[Duel] | None = None
        self._last: SpeculationPlan | None = None

    def plan(self, view: PolicyView) -> SpeculationPlan:
        if (rest := self._rest) and rest.holds(view, self._ledger, self._turns, self._width):
            self._ledger.plan(view.plan_id, rest.planned)
            self._last = self._plan(view, "hold", ms=rest.ms)
            return self._last
        self._rest = None
        held = self._turns.begin(view.plan_id)
        if view.sequence_ids:
            self._last = self._decide(view, held)
        else:
            self._ledger.plan(view.plan_id, None)
            self._last = self._plan(view, "prefill_only")
        return self._last

    def observe(self, feedback: RoundFeedback) -> None:
        if not self._ledger.retire(feedback):
            return
        batch = self._ledger.batches
        if feedback.signals is None and batch % ALIVE_EVERY:
            return
        told = None if feedback.signals is None else feedback.signals.tolist()
        rows, drafted = [], []
        for index, row in enumerate(feedback.rows):
            signals = self._signals.get(row.sequence_id)
            if told is not None and row.proposed:
                if signals is None:
                    signals = self._signals.begin(row.sequence_id)
                signals.observe(told[index][: self._width], batch)
                rows.append(row)
                drafted.append(signals)
            elif signals is not None:
                signals.alive = batch
        self._signals.sweep(batch)
        if rows:
            self._correction.observe(rows, drafted)
            self._profile.observe([signals.latest for signals in drafted])

    def status(self) -> dict[str, Any]:
        held, last = self._turns.held, self._last
        survival = self._correction.apply(self._profile.mean)
        before = [1.0, *survival[:-1]]
        rates = [here / there if there else 0.0 for here, there in zip(survival, before, strict=True)]
        return {
            "control": self.name,
            "mode": None if held is None else ("plain", "speculative")[held.choice],
            "target_rows": None if last is None else last.target_rows,
            "predicted_ms": None if last is None else last.predicted_ms,
            "reason": None if last is None else last.reason,
            "survival": survival,
            "conditional_rates": rates,
            "signal_correction": list(self._correction.factors),
            "sequences_known": len(self._signals),
            "dwell_ms": 0.0 if held is None else held.dwell_ms,
            **self._ledger.counts(),
        }

    # -- one round ----------------------------------------------------------------------------

    def _decide(self, view: PolicyView, held: Held | None) -> SpeculationPlan:
        rows = len(view.sequence_ids)
        at = self._costs.at(view)
        menu = self._menu_at(at, rows)
        limits = draft_limits(view, self._width)
        if not any(limits):  # the round is plain whatever is planned
            return self._unscored(view, menu, "nothing_to_draft", 0)
        if at is None or (not menu.target_rows and isnan(menu.plain_ms)):
            reason = "uncovered_kv" if at is None else "uncovered_bucket"
            return self._unscored(view, menu, reason, self._geometry.uncovered_steps)
        now = self._ledger.moment(view.plan_id, rows, menu.lanes, held)
        if held is not None:
            held = meet_load(held, now)
            if self._rests(held, now, menu):
                self._turns.held = held
                return self._begin_rest(view, held, menu)
        promised = self._promised(view, limits, held)
        best = best_tier(promised, menu.target_rows, menu.tiers_ms) if menu.target_rows else None
        duel = Duel(
            tokens=(float(rows), nan if best is None else best.tokens),
            ms=(menu.plain_ms, nan if best is None else best.ms),
            fought=best is not None and not isnan(menu.plain_ms),
        )
        held, reason, cause = self._hold(held, now, duel)
        planned = Planned(rows=rows, load=duel, cause=cause)
        if held.choice == SPECULATIVE:
            reason = "tier" if reason == "hold" else reason
            assert best is not None  # speculative rounds have a cost, or they would not be held
        else:
            held, best = self._probe(held, view.plan_id, promised, menu) if reason == "hold" else (held, None)
            if best is not None:
                reason, planned.probe_ms = "probe", max(0.0, best.ms - menu.plain_ms)
                plain, drafted = self._scores(held.load_id, duel)
                planned.hopeless = drafted < CLEAR_LOSS * plain
            planned.probe_cap_ms = menu.probe_cap_ms
        self._turns.held = held
        self._ledger.plan(view.plan_id, planned)
        if best is None:
            return self._plan(view, reason, ms=menu.plain_ms)
        full = best.target_rows == menu.lanes * (self._width + 1)
        target_rows = None if full else best.target_rows
        return self._plan(view, reason, steps=self._width, target_rows=target_rows, ms=best.ms)

    def _rests(self, held: Held, now: Moment, menu: Menu) -> bool:
        """Whether there is nothing to think about: a plain spell between two looks, and no probe to be paid.

        Most rounds of a spell are such, and adding up promises would be a cost that drafts do not repay.
        """
        return (
            held.choice == PLAIN
            and not isnan(menu.plain_ms)
            and not scoring_due(held, now, LOOK_EVERY[PLAIN])
            and not self._may_probe(held, menu)
        )

    def _begin_rest(self, view: PolicyView, held: Held, menu: Menu) -> SpeculationPlan:
        planned: Planned[Duel] = Planned(rows=menu.rows, probe_cap_ms=menu.probe_cap_ms)
        self._ledger.plan(view.plan_id, planned)
        if held.strange_rounds == 0:  # else a new load is about to be met
            until = held.scored_batches + LOOK_EVERY[PLAIN]
            price_ms = max(menu.probe_ms, held.saving_ms)
            self._rest = Rest(menu.rows, until, price_ms, 0, menu.plain_ms, planned)
        return self._plan(view, "hold", ms=menu.plain_ms)

    def _hold(self, held: Held | None, now: Moment, duel: Duel) -> tuple[Held, str, str | None]:
        """Plain or speculative rounds from now on, the reason of the plan and, if that changed, the cause."""
        if held is None:
            return start(best_choice(self._scores(now.plan_id, duel)), now), "initial", None
        covered = not isnan(duel.ms[held.choice])
        if covered and not scoring_due(held, now, LOOK_EVERY[held.choice]):
            return held, "hold", None
        # The minimum gain is against noise at a load; a new load is met by the better kind of round. Drafts
        # need it to be taken up, not to be given up once a whole window tells their worth.
        told = held.choice == SPECULATIVE and len(self._ledger.recent(held.load_id)) == RECENT_ROUNDS
        min_gain = 0.0 if told or held.load_id == now.plan_id else self._switch_min_gain
        held, cause = choose(held, now, self._scores(held.load_id, duel), min_gain)
        return held, "hold" if cause is None else "switch", cause

    def _scores(self, since_id: int, duel: Duel) -> list[float]:
        """Tokens per ms of plain and speculative rounds, over this batch and the recent ones of its load."""
        duels = [duel]
        if duel.fought:
            duels += [one for one in self._ledger.recent(since_id) if one.fought]
        tokens = map(sum, zip(*[one.tokens for one in duels], strict=True))
        ms = map(sum, zip(*[one.ms for one in duels], strict=True))
        return list(map(truediv, tokens, ms))

    def _may_probe(self, held: Held, menu: Menu) -> bool:
        """One at a time, the next waits until this one retired; and from an allowance."""
        price_ms = max(menu.probe_ms, held.saving_ms)
        return held.probe_id <= self._ledger.retired_id and price_ms <= self._ledger.allowance_ms

    def _probe(self, held: Held, plan_id: int, promised: Promised, menu: Menu) -> tuple[Held, Tier | None]:
        """The budget to look with in a plain spell, if a probe is due: the best one that verifies some draft.
        If the allowance does not pay it, it is saved for."""
        if not self._may_probe(held, menu):
            return held, None
        tier = best_tier(promised, menu.target_rows[menu.probes :], menu.tiers_ms[menu.probes :])
        price_ms = tier.ms - menu.plain_ms
        if price_ms > self._ledger.allowance_ms:
            return replace(held, saving_ms=price_ms), None
        return replace(held, probes=held.probes + 1, probe_id=plan_id, saving_ms=0.0), tier

    # -- what drafts promise ------------------------------------------------------------------

    def _promised(self, view: PolicyView, limits: Sequence[int], held: Held | None) -> Promised:
        """Corrected survivals, by which rounds of all kinds are compared.

        The latest signals where they are fresh. In a plain spell, and for requests without fresh ones, what
        the request showed on average, shrunk to the mean profile: one lucky probe must not decide.
        """
        apply, profile = self._correction.apply, self._profile.mean
        spell = held is None or held.choice == PLAIN
        fresh_from = self._ledger.batches + 1 if spell else self._ledger.batches - STALE_BATCHES
        promised = []
        for one, limit in zip(map(self._signals.get, view.sequence_ids), limits, strict=True):
            if one is None:
                promise = apply(profile)
            elif one.batch >= fresh_from:
                promise = apply(one.latest, one.own_factor)
            else:
                promise = apply(one.typical(profile), one.own_factor)
            promised.append(promise if limit == self._width else promise[:limit])
        return promised

    def _menu_at(self, at: CostsAt | None, rows: int) -> Menu:
        """Most often that of the round before."""
        if self._menu.at is not at or self._menu.rows != rows:
            self._menu = self._new_menu(at, rows)
        return self._menu

    def _new_menu(self, at: CostsAt | None, rows: int) -> Menu:
        lanes, width = self._geometry.lanes.fit(rows).rows, self._width
        if at is None:
            return Menu(None, rows, lanes, [], [], nan)
        costs = [(size, at.round_ms(width, lanes, size)) for size in self._geometry.tiers.of(lanes, width)]
        plain_ms = at.round_ms(0, lanes, lanes) if self._allow_plain_rounds else None
        return Menu(
            at,
            rows,
            lanes,
            target_rows=[size for size, ms in costs if ms is not None],
            tiers_ms=[ms for _, ms in costs if ms is not None],
            plain_ms=nan if plain_ms is None else plain_ms,
        )

    # -- plans --------------------------------------------------------------------------------

    def _unscored(self, view: PolicyView, menu: Menu, reason: str, steps: int) -> SpeculationPlan:
        self._ledger.plan(view.plan_id, Planned(rows=menu.rows))
        at = menu.at
        ms = None if at is None else at.round_ms(steps, menu.lanes, menu.lanes * (steps + 1))
        return self._plan(view, reason, steps=steps, ms=ms)

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
