"""Adaptive draft steps: one depth for the whole batch, by measured costs and what was accepted of late.

Says what each depth is worth; `switching.py` says whether it may be taken, `ledger.py` what retired rounds
add up to. docs/adaptive.md explains the rules and all constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import inf, isnan, nan
from typing import Any

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.cost.model import Costs, CostsAt
from xspec.policy.acceptance import PrefixRates
from xspec.policy.base import PolicyView
from xspec.policy.batch_costs import BatchCosts
from xspec.policy.geometry import PolicyGeometry, all_may_draft, draft_limits
from xspec.policy.ledger import CLEAR_LOSS, Ledger, Planned
from xspec.policy.resting import Rest
from xspec.policy.settings import DEFAULTS, DraftStepSettings
from xspec.policy.switching import Held, Turns, best_choice, choose, meet_load, scoring_due, start

DEEP_PROBE_EVERY = 4
"""Each fourth probe goes to the deepest depth: nothing else would ever look below the best alternative."""


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """What tokens and costs of a decode batch depend on.

    `useful[i]`: requests that draft i + 1 can matter to.
    """

    rows: int
    lanes: int
    useful: tuple[float, ...]


@dataclass(slots=True)
class Menu:
    """What a round of `lanes` costs at every depth 0 .. K; NaN where it is not measured or not allowed.

    `probe_ms[depth]`: what the cheapest deeper one takes beyond it, inf if there is none; `probe_cap_ms`: the
    dearest, then 0.
    """

    at: CostsAt
    lanes: int
    costs_ms: list[float]
    probe_ms: list[float]
    probe_cap_ms: list[float]

    @staticmethod
    def of(at: CostsAt, lanes: int, costs_ms: list[float]) -> Menu:
        least, most = [], []
        for depth, here in enumerate(costs_ms):
            extra_ms = [ms - here for ms in costs_ms[depth + 1 :] if not isnan(ms)]
            least.append(min(extra_ms, default=inf))
            most.append(max([0.0, *extra_ms]))
        return Menu(at, lanes, costs_ms, least, most)


class DraftStepPolicy:
    """Architecture decision 2: argmax over depths of expected tokens / measured ms, held against noise."""

    name = "draft_step"

    def __init__(
        self, costs: Costs, geometry: PolicyGeometry, settings: DraftStepSettings = DEFAULTS
    ) -> None:
        self._costs = BatchCosts(costs)
        self._geometry = geometry
        self._settings = settings
        self._rates = PrefixRates(geometry.draft_width, settings.window_size)
        self._ledger: Ledger[BatchLoad] = Ledger()
        self._turns = Turns()
        self._menu: Menu | None = None
        self._rest: Rest[BatchLoad] | None = None
        self._full_load: BatchLoad | None = None  # the last one in which every draft could matter
        self._last: SpeculationPlan | None = None

    def plan(self, view: PolicyView) -> SpeculationPlan:
        if (rest := self._rest) and rest.holds(view, self._ledger, self._turns, self._geometry.draft_width):
            self._ledger.plan(view.plan_id, rest.planned)
            self._last = self._plan(view, rest.steps, "hold", rest.ms)
            return self._last
        self._rest = None
        held = self._turns.begin(view.plan_id)
        self._ledger.plan(view.plan_id, None)
        self._last = self._decide(view, held) if view.sequence_ids else self._plan(view, 0, "prefill_only")
        return self._last

    def observe(self, feedback: RoundFeedback) -> None:
        """Credited to the depth that `feedback.plan` ran, whatever is held by now: rates are by position."""
        if self._ledger.retire(feedback):
            self._rates.observe(feedback.rows)

    def status(self) -> dict[str, Any]:
        held, last = self._turns.held, self._last
        return {
            "control": self.name,
            "draft_steps": None if held is None else held.choice,
            "predicted_ms": None if last is None else last.predicted_ms,
            "reason": None if last is None else last.reason,
            "survival": self._rates.prefix(),
            "conditional_rates": self._rates.conditional(),
            "dwell_ms": 0.0 if held is None else held.dwell_ms,
            **self._ledger.counts(),
        }

    # -- one round ----------------------------------------------------------------------------

    def _decide(self, view: PolicyView, held: Held | None) -> SpeculationPlan:
        load = self._load(view)
        at = self._costs.at(view)
        if not any(load.useful):  # the round is plain whatever is planned
            return self._uncosted(view, load, 0, "nothing_to_draft", at)
        if at is None:
            return self._uncosted(view, load, self._geometry.uncovered_steps, "uncovered_kv", at)
        menu = self._menu_at(at, load.lanes)
        if all(map(isnan, menu.costs_ms)):
            return self._uncosted(view, load, self._geometry.uncovered_steps, "uncovered_bucket", at)
        held, reason, cause = self._hold(view, held, load, menu)
        depth, hopeless = held.choice, False
        if cause is None:
            held, probe = self._probe(held, view.plan_id, load, menu)
            if probe is not None:
                depth, reason = probe, "probe"
                scores = self._scores(held.load_id, load, menu)
                deeper = [score for score in scores[held.choice + 1 :] if not isnan(score)]
                hopeless = max(deeper) < CLEAR_LOSS * scores[held.choice]
        self._turns.held = held
        planned = Planned(
            rows=load.rows,
            load=load,
            probe_ms=max(0.0, menu.costs_ms[depth] - menu.costs_ms[held.choice]),
            probe_cap_ms=menu.probe_cap_ms[held.choice],
            hopeless=hopeless,
            cause=cause,
        )
        self._ledger.plan(view.plan_id, planned)
        if reason == "hold" and held.strange_rounds == 0 and all_may_draft(view, self._geometry.draft_width):
            until = held.scored_batches + self._settings.update_interval
            ms = menu.costs_ms[depth]
            price_ms = max(menu.probe_ms[depth], held.saving_ms)
            self._rest = Rest(load.rows, until, price_ms, depth, ms, planned)
        return self._plan(view, depth, reason, menu.costs_ms[depth])

    def _hold(
        self, view: PolicyView, held: Held | None, load: BatchLoad, menu: Menu
    ) -> tuple[Held, str, str | None]:
        """The choice to hold, the reason of the plan and, if the choice changed, the cause."""
        now = self._ledger.moment(view.plan_id, load.rows, load.lanes, held)
        if held is None:
            scores = self._scores(now.plan_id, load, menu)
            return start(best_choice(scores), now), "initial", None
        held = meet_load(held, now)
        covered = not isnan(menu.costs_ms[held.choice])
        if covered and not scoring_due(held, now, self._settings.update_interval):
            return held, "hold", None
        scores = self._scores(held.load_id, load, menu)
        # The minimum gain is against noise at a load: a new one, and the first window, are met by the best.
        settled = held.load_id != now.plan_id and now.batches >= self._settings.window_size
        held, cause = choose(held, now, scores, self._settings.switch_min_gain if settled else 0.0)
        return held, "hold" if cause is None else "switch", cause

    def _probe(self, held: Held, plan_id: int, load: BatchLoad, menu: Menu) -> tuple[Held, int | None]:
        """The deeper depth to look at now, if one is due. If the allowance does not pay it, it is saved for.

        One at a time: the next waits until this one retired.
        """
        ledger, costs_ms = self._ledger, menu.costs_ms
        price_ms = max(menu.probe_ms[held.choice], held.saving_ms)
        if held.probe_id > ledger.retired_id or price_ms > ledger.allowance_ms:
            return held, None
        extra_ms = {
            depth: ms - costs_ms[held.choice]
            for depth, ms in enumerate(costs_ms)
            if depth > held.choice and load.useful[depth - 1] and not isnan(ms)
        }
        if not extra_ms:
            return held, None
        if held.probes % DEEP_PROBE_EVERY == DEEP_PROBE_EVERY - 1:
            depth = max(extra_ms)
        else:
            scores = self._scores(held.load_id, load, menu)
            depth = max(extra_ms, key=lambda deeper: scores[deeper])
        if extra_ms[depth] > ledger.allowance_ms:
            return replace(held, saving_ms=extra_ms[depth]), None
        return replace(held, probes=held.probes + 1, probe_id=plan_id, saving_ms=0.0), depth

    # -- worth --------------------------------------------------------------------------------

    def _scores(self, since_id: int, load: BatchLoad, menu: Menu) -> list[float]:
        """Tokens per ms at every depth 0 .. K (NaN: no choice), of this batch and recent ones of its load.

        (sum of rows + sum over i <= depth of useful_i P_i) / sum of cost_ms, sums over batches; the others
        cost what they would at this batch's KV lengths. At a steady load that is the objective of the
        document.
        """
        costs_ms = menu.costs_ms
        total_ms, rows, useful = [0.0] * len(costs_ms), 0, [0.0] * len(load.useful)
        by_lanes = {load.lanes: costs_ms}
        for _, run in groupby([load, *self._ledger.recent(since_id)], key=id):
            batch, *more = run  # equal batches follow one another as one and the same object
            count = 1 + len(more)
            if batch.lanes not in by_lanes:
                by_lanes[batch.lanes] = self._costs_ms(menu.at, batch.lanes)
            ms = by_lanes[batch.lanes]
            if any(isnan(there) and not isnan(here) for there, here in zip(ms, costs_ms, strict=True)):
                continue  # cannot be compared at every choice of this batch
            rows += count * batch.rows
            for depth, there in enumerate(ms):
                total_ms[depth] += count * there
            for i, requests in enumerate(batch.useful):
                useful[i] += count * requests
        tokens = accumulate(
            (each * p for each, p in zip(useful, self._rates.prefix(), strict=True)), initial=rows
        )
        return [
            nan if isnan(here) else each / ms
            for here, each, ms in zip(costs_ms, tokens, total_ms, strict=True)
        ]

    def _menu_at(self, at: CostsAt, lanes: int) -> Menu:
        """Most often that of the round before."""
        if self._menu is None or self._menu.at is not at or self._menu.lanes != lanes:
            self._menu = Menu.of(at, lanes, self._costs_ms(at, lanes))
        return self._menu

    def _costs_ms(self, at: CostsAt, lanes: int) -> list[float]:
        """Round cost at every depth 0 .. K; NaN where it is not measured or not allowed."""
        least = 0 if self._settings.allow_plain_rounds else 1
        costs = [
            at.round_ms(depth, lanes, lanes * (depth + 1)) if depth >= least else None
            for depth in range(self._geometry.draft_width + 1)
        ]
        return [nan if ms is None else ms for ms in costs]

    def _load(self, view: PolicyView) -> BatchLoad:
        rows, width = len(view.sequence_ids), self._geometry.draft_width
        lanes = self._geometry.lanes.fit(rows).rows
        if all_may_draft(view, width):  # nearly always
            if self._full_load is None or self._full_load.rows != rows:
                self._full_load = BatchLoad(rows=rows, lanes=lanes, useful=(float(rows),) * width)
            return self._full_load
        limits = draft_limits(view, width)
        useful = tuple(float(sum(limit > i for limit in limits)) for i in range(width))
        return BatchLoad(rows=rows, lanes=lanes, useful=useful)

    # -- plans --------------------------------------------------------------------------------

    def _uncosted(
        self, view: PolicyView, load: BatchLoad, depth: int, reason: str, at: CostsAt | None
    ) -> SpeculationPlan:
        self._ledger.plan(view.plan_id, Planned(rows=load.rows))
        ms = None if at is None else at.round_ms(depth, load.lanes, load.lanes * (depth + 1))
        return self._plan(view, depth, reason, ms)

    def _plan(self, view: PolicyView, depth: int, reason: str, ms: float | None = None) -> SpeculationPlan:
        return SpeculationPlan(
            plan_id=view.plan_id, policy=self.name, draft_steps=depth, reason=reason, predicted_ms=ms
        )
