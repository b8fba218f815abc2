"""The `goodput` policy: the (K, d) that promises most tokens per measured ms, plain rounds included.

What a pair would have accepted follows from match flags, without running it (`loop_flags.py`). Other depths
than the present one tell theirs in shadow rounds; a drafter that is not looped is probed instead. Own
derivation, see docs/looped.md for all rules and constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.cost.looped import rate_of
from xspec.cost.model import Costs
from xspec.policy.base import PolicyView
from xspec.policy.geometry import CandidateGeometry, draft_limits
from xspec.policy.looking import Looking
from xspec.policy.loop_candidates import range_of
from xspec.policy.loop_flags import FlagStreams
from xspec.policy.round_costs import PLAIN, RoundCosts
from xspec.policy.spec_config import AdaptiveSpecConfig, Candidate, DisableSettings, GoodputSettings

STALE_BATCHES = 64
"""A choice that was not looked at for so many decode rounds is made anew, by the best."""

SMALL_LEAD = 0.25
"""Of the margin. A lead of more than that counts for so much of a look: what lasts is no noise."""

CALM_ROUNDS, RARE_ROUNDS = 32, 16
"""Each time nothing promised more for so many rounds, looks become rarer by an interval, to one in so many
rounds; of few requests to one in as many intervals, because they tell too little at every look as it is."""

READ_ROWS = 32
"""Rounds are read together, right before a look: only the first finds cold caches. While it is calm the last
of them that have so many rows tell enough, and each row costs some 5 us."""

KEEP_EVERY = 256
"""Decode rounds after which sequences that have left are forgotten."""


@dataclass(frozen=True, slots=True)
class Held:
    """The choice for one request bucket. `wins`: looks in a row at which another one promised more, one that
    is less than the margin ahead counted as SMALL_LEAD."""

    choice: int
    looked: int  # decode rounds that had retired
    wins: float = 0.0
    rows: int = 0  # requests of the last round
    ms: float | None = None  # what a round of the choice cost at the last look


class GoodputPolicy:
    """argmax over (K, d) of (B + sum of survivals) / cost_ms, held against noise."""

    name = "goodput"

    def __init__(self, config: AdaptiveSpecConfig | None, costs: Costs, geometry: CandidateGeometry) -> None:
        """Every prepared (K, d) with a cost is a choice. `config` brings settings, priors, and what runs
        where no cost is known (without one: plain rounds)."""
        self._config = config
        self._settings = GoodputSettings() if config is None else config.goodput
        self._costs = RoundCosts(costs, geometry)
        self._steps, self._depths = geometry.steps, geometry.depths or (None,)
        pairs = [Candidate(steps, depth) for steps in self._steps for depth in self._depths]
        self._choices = (PLAIN, *pairs)
        self._flags = FlagStreams(self._steps, self._depths, self._settings.window_flags, priors_of(config))
        self._looking = Looking(
            self._settings,
            DisableSettings() if config is None else config.disable,
            shadows=bool(geometry.depths),
        )
        self._held: dict[int, Held] = {}  # by lanes
        self._resting: Held | None = None  # what the last rounds ran with; None: to be thought about
        self._asked: tuple[int, int, Held | None] | None = None  # last plan: id, lanes, held before
        self._batches = 0
        self._calm = 0  # of them, since anything else was held or promised more
        self._rows = 1  # requests of the last
        self._unread: list[RoundFeedback] = []
        self._switches: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._last: SpeculationPlan | None = None

    # -- plans --------------------------------------------------------------------------------

    def plan(self, view: PolicyView) -> SpeculationPlan:
        if (held := self._resting) is not None and self._rests(held, view):
            self._last = self._plan(view, self._choices[held.choice], reason_of(held), held.ms)
            return self._last
        self._begin(view.plan_id)
        self._resting = None
        self._last = self._decide(view)
        return self._last

    def _rests(self, held: Held, view: PolicyView) -> bool:
        """Whether there is nothing to think about, as in most rounds: between two looks, no burst or probe
        due. Nothing is changed by that, so such plans need not be taken back."""
        return (
            held.rows == len(view.sequence_ids)
            and self._settled(held)
            and not self._looking.open
            and not self._looking.probe_due()
            and (self._asked is None or self._asked[0] != view.plan_id)
            and any(draft_limits(view, self._steps[-1]))
        )

    def _begin(self, plan_id: int) -> None:
        """Asked again for a plan that no round came of, what was held before it is held again."""
        if self._asked is not None and self._asked[0] == plan_id:
            _, lanes, before = self._asked
            if before is None:
                self._held.pop(lanes, None)
            else:
                self._held[lanes] = before
        self._asked = None
        self._looking.release(plan_id)

    def _decide(self, view: PolicyView) -> SpeculationPlan:
        if not view.sequence_ids:
            return self._plan(view, PLAIN, "prefill_only")
        limits = draft_limits(view, self._steps[-1])
        if not any(limits):
            return self._plan(view, PLAIN, "nothing_to_draft")
        rows, lanes = len(view.sequence_ids), self._costs.lanes(view)
        before = self._held.get(lanes)
        self._asked = (view.plan_id, lanes, before)
        shadow = self._looking.shadow(view.plan_id)
        if before is not None and self._settled(before) and not self._looking.probe_due():
            self._held[lanes] = self._resting = replace(before, rows=rows)
            return self._plan(view, self._choices[before.choice], reason_of(before), before.ms, shadow)
        costs_ms = self._costs.of(view, self._choices).spec_ms
        if all(ms is None for ms in costs_ms):
            return self._uncovered(view, shadow)
        scores = self._scores(limits, costs_ms)
        held, reason = self._hold(before, scores)
        held = replace(held, rows=rows, ms=costs_ms[held.choice])
        self._held[lanes] = self._resting = held
        if (probe := self._probe(view.plan_id, held, costs_ms, scores)) is not None:
            return self._plan(view, self._choices[probe], "probe", costs_ms[probe])
        return self._plan(view, self._choices[held.choice], reason, costs_ms[held.choice], shadow)

    def _settled(self, held: Held) -> bool:
        """Whether it is not to be looked at yet. What it cost then still tells what it costs, also with other
        numbers of requests in its bucket."""
        return not self._due(held) and held.ms is not None

    def _due(self, held: Held) -> bool:
        """Whether it is to be looked at again: right behind reading, by what is fresh."""
        waited = self._batches - held.looked
        return waited >= self._settings.interval and (not self._unread or waited >= 2 * self._gap)

    @property
    def _gap(self) -> int:
        """Rounds from one look to the next. By what retired, not by what was asked."""
        interval = self._settings.interval
        return max(interval, min(interval * min(1 + self._calm // CALM_ROUNDS, self._rows), RARE_ROUNDS))

    def _hold(self, held: Held | None, scores: Sequence[float]) -> tuple[Held, str]:
        """The choice for the coming round, and why. `scores`: below 0 where a choice has no cost."""
        settings, batches = self._settings, self._batches
        best = max(range(len(scores)), key=scores.__getitem__)  # ties to the smaller
        if held is None:
            return Held(best, batches), "initial"
        if scores[held.choice] < 0.0 or batches - held.looked > STALE_BATCHES:
            return Held(best, batches), "hold" if best == held.choice else "switch"
        if not self._due(held):
            return held, reason_of(held)
        lead = scores[best] / scores[held.choice] - 1.0
        if lead <= SMALL_LEAD * settings.margin:
            return Held(held.choice, batches), "hold"
        wins = held.wins + (1.0 if lead > settings.margin else SMALL_LEAD)
        if wins < settings.checks:
            return replace(held, looked=batches, wins=wins), "lead"
        return Held(best, batches), "switch"

    def _scores(self, limits: Sequence[int], costs_ms: Sequence[float | None]) -> list[float]:
        """Tokens per ms of every choice; -1 where it is none. `limits`: drafts that matter, by request."""
        rows, width = len(limits), self._steps[-1]
        tokens = [float(rows)]
        if min(limits) == width:  # nearly always
            gains = [evidence.gains() for evidence in self._flags.evidence]
            tokens += [rows * (1.0 + of_depth[n]) for n in range(len(self._steps)) for of_depth in gains]
        else:
            useful = [float(sum(limit > k for limit in limits)) for k in range(width)]
            survivals = [evidence.survivals() for evidence in self._flags.evidence]
            for n in range(len(self._steps)):
                tokens += [rows + sum(map(mul, useful, of_depth[n])) for of_depth in survivals]
        return [-1.0 if ms is None else each / ms for each, ms in zip(tokens, costs_ms, strict=True)]

    def _probe(
        self, plan_id: int, held: Held, costs_ms: Sequence[float | None], scores: Sequence[float]
    ) -> int | None:
        """The deeper K to look at now: only where nothing else would ever tell what it does."""
        ms = costs_ms[held.choice]
        if ms is None or not self._looking.probe_due():
            return None
        steps = self._choices[held.choice].draft_steps
        extra_ms = {
            index: max(0.0, cost - ms)
            for index, cost in enumerate(costs_ms)
            if cost is not None and self._choices[index].draft_steps > steps
        }
        return self._looking.probe(plan_id, extra_ms, scores) if extra_ms else None

    def _uncovered(self, view: PolicyView, shadow: bool) -> SpeculationPlan:
        """No cost is known: what the config begins with at this size, or a plain round."""
        if self._config is None:
            return self._plan(view, PLAIN, "uncovered", shadow=shadow)
        one = self._config.ranges[range_of(self._config.ranges, len(view.sequence_ids))]
        choice = PLAIN if one.initial_off else one.candidates[one.initial]
        return self._plan(view, choice, "uncovered", shadow=shadow)

    def _plan(
        self,
        view: PolicyView,
        choice: Candidate,
        reason: str,
        ms: float | None = None,
        shadow: bool = False,
    ) -> SpeculationPlan:
        return SpeculationPlan(
            plan_id=view.plan_id,
            policy=self.name,
            draft_steps=choice.draft_steps,
            depth=choice.draft_loops,
            shadow=shadow,
            reason=reason,
            predicted_ms=ms,
        )

    # -- feedback -----------------------------------------------------------------------------

    def observe(self, feedback: RoundFeedback) -> None:
        """Rounds in order. What a round says does not depend on what is held by now."""
        plan = feedback.plan
        self._unread.append(feedback)
        if feedback.shape.target_rows:
            self._batches += 1
            self._rows = max(1, len(feedback.rows))
            self._calm = self._calm + 1 if plan.reason == "hold" else 0
            self._reasons[plan.reason] += 1
            self._switches["switch"] += plan.reason == "switch"
            if self._batches % KEEP_EVERY == 0:
                self._flags.keep([row.sequence_id for row in feedback.rows])
        if len(self._unread) >= self._gap or self._looking.open:
            self._read()

    def _read(self) -> None:
        """What rounds tell that were not read yet."""
        unread, self._unread = self._unread, []
        decoded = [one for one in unread if one.shape.target_rows]
        rows = sum([len(one.rows) for one in decoded])
        if self._calm >= CALM_ROUNDS and rows > READ_ROWS and len(decoded) > 1:
            self._flags.skip()
            decoded = decoded[-max(1, READ_ROWS * len(decoded) // rows) :]
        shifted = self._flags.observe(decoded)
        if shifted:
            self._calm = 0
        self._looking.observe(unread, self._flags, shifted)

    def status(self) -> dict[str, Any]:
        last = self._last
        survivals = [evidence.survivals() for evidence in self._flags.evidence]
        return {
            "control": self.name,
            "draft_steps": None if last is None else last.draft_steps,
            "draft_loops": None if last is None else last.depth,
            "reason": None if last is None else last.reason,
            "predicted_ms": None if last is None else last.predicted_ms,
            "held": {str(lanes): str(self._choices[held.choice]) for lanes, held in self._held.items()},
            "match_rates": {
                "all" if depth is None else str(depth): evidence.rate
                for depth, evidence in zip(self._depths, self._flags.evidence, strict=True)
            },
            "acceptance": {
                str(Candidate(steps, depth)): sum(survivals[x][n]) / steps
                for n, steps in enumerate(self._steps)
                for x, depth in enumerate(self._depths)
            },
            "shifts": self._flags.shifts,
            "switches": self._switches["switch"],
            "rounds": dict(self._reasons),
            "decode_batches": self._batches,
            **self._looking.status(),
        }


def reason_of(held: Held) -> str:
    """Of a round of what was held before: "lead" while another choice has to promise more once again."""
    return "lead" if held.wins else "hold"


def priors_of(config: AdaptiveSpecConfig | None) -> dict[int | None, float]:
    """Match rate of each depth by the acceptance that the config gives, the mean over its candidates."""
    rates: dict[int | None, list[float]] = {}
    for candidate in () if config is None else config.candidates:
        if candidate.acceptance is not None:
            rate = rate_of(candidate.acceptance, candidate.draft_steps)
            rates.setdefault(candidate.draft_loops, []).append(rate)
    return {depth: sum(found) / len(found) for depth, found in rates.items()}
