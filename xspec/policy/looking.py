"""When the goodput policy looks at what it does not run: bursts of shadow rounds, or probes of a deeper K.

Bursts are of consecutive rounds, so that the flags of a sequence are contiguous. They come at a share of
rounds, less often while nothing changes, at once when acceptance shifts; while speculation is off, with the
backoff that probes would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.policy.quota import Quota
from xspec.policy.spec_config import DisableSettings, GoodputSettings

MAX_STRETCH = 4
"""A stable state is looked at down to a quarter of the share."""

STABLE_RATE = 0.05
"""Match rates that differ by less between two bursts are the same."""

STABLE_SIGMAS = 2.0
"""So are those that differ by so many standard deviations of what the least known depth stands on."""

THIN_FLAGS, THIN_SHARE = 128.0, 4.0
"""Until every depth has so many flags, bursts come at so many times the share: few flags are noise."""

OFF_BURST = 4
"""Rounds of a burst while speculation is off."""

PROBE_SHARE = 0.01
"""Predicted time that probes of a deeper K may cost."""

DEEP_PROBE_EVERY = 4
"""Each fourth probe goes to the deepest K: nothing else would ever look below the best alternative."""


class Evidence(Protocol):
    """What is known of all depths (`loop_flags.FlagStreams`)."""

    def rates(self) -> list[float]:
        """Match rate of each."""

    def least(self) -> float:
        """Flags that the least known of them stands on."""


class Looking:
    """`shadows`: the drafter is looped, so that every round can tell all depths."""

    def __init__(self, settings: GoodputSettings, disable: DisableSettings, *, shadows: bool) -> None:
        self._settings, self._disable, self._shadows = settings, disable, shadows
        self._quota = Quota()
        self._waited = 0  # decode rounds since the last burst ended
        self._stretch = 1
        self._off_gap = disable.backoff_first
        self._off = False
        self._rates: list[float] | None = None  # at the end of the last burst
        self._allowance_ms = 0.0
        self._probes = 0
        self._probe_id: int | None = None
        self._probe_ms = 0.0  # what it costs beyond a round of what was held
        self._dearest_ms = 0.0
        self._retired_id = -1
        self._shadow_rounds = 0
        self._thin = True
        self._unsure = False  # acceptance has shifted: burst follows burst until one says nothing new
        if shadows:
            self._quota.start(settings.shadow_burst)

    def release(self, plan_id: int) -> None:
        self._quota.release(plan_id)
        if self._probe_id == plan_id:
            self._probe_id = None
            self._probes -= 1

    # -- shadow rounds ------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether shadow rounds are under way."""
        return self._quota.open

    def shadow(self, plan_id: int) -> bool:
        """Whether the coming round tells all depths."""
        return self._shadows and self._quota.take(plan_id)

    def observe(self, feedbacks: Sequence[RoundFeedback], evidence: Evidence, shifted: bool) -> None:
        """Rounds retired, in order. `evidence`: what is known after them; `shifted`: match rates jumped.

        While `open` they are to be told one by one.
        """
        burst, off, decoded = self._quota.open, self._off, 0
        for feedback in feedbacks:
            self._retired_id = feedback.plan.plan_id
            self._quota.retire(self._retired_id)
            self._shadow_rounds += feedback.matches is not None
            if feedback.shape.target_rows:
                decoded += 1
                off = feedback.plan.draft_steps == 0
                if not self._shadows:
                    self._earn(feedback.plan)
        if not decoded or not self._shadows:
            return
        self._thin = self._thin and evidence.least() < THIN_FLAGS
        if off != self._off:
            self._off, self._off_gap, self._stretch = off, self._disable.backoff_first, 1
        if shifted:
            self._stretch, self._off_gap, self._unsure = 1, self._disable.backoff_first, True
        if burst and not self._quota.open:
            self._end_burst(evidence.rates(), evidence.least())
        elif not self._quota.open:
            self._waited += decoded
        if not self._quota.open and (self._unsure or self._waited >= self._gap):
            self._quota.start(OFF_BURST if off else self._settings.shadow_burst)

    @property
    def _gap(self) -> int:
        """Rounds between two bursts, so that bursts make up their share."""
        if self._off:
            return self._off_gap
        share = self._settings.shadow_share / self._stretch
        if self._thin:
            share = min(0.5, THIN_SHARE * self._settings.shadow_share)
        return max(0, round(self._settings.shadow_burst * (1.0 / share - 1.0)))

    def _end_burst(self, rates: list[float], flags: float) -> None:
        before, self._rates, self._waited = self._rates, list(rates), 0
        stable = before is not None and all(
            abs(a - b) < max(STABLE_RATE, STABLE_SIGMAS * (b * (1.0 - b) / max(flags, 1.0)) ** 0.5)
            for a, b in zip(before, rates, strict=True)
        )
        if stable:
            self._stretch, self._unsure = min(2 * self._stretch, MAX_STRETCH), False
            self._off_gap = min(2 * self._off_gap, self._disable.backoff_cap)
        else:
            self._stretch, self._off_gap = 1, self._disable.backoff_first

    # -- probes -------------------------------------------------------------------------------

    def probe_due(self) -> bool:
        """Whether one may be looked for: one at a time, and from an allowance that is not spent."""
        waiting = self._probe_id is not None and self._probe_id > self._retired_id
        return not self._shadows and not waiting and self._allowance_ms > 0.0

    def probe(self, plan_id: int, extra_ms: Mapping[int, float], scores: Sequence[float]) -> int | None:
        """The choice to probe, of those that `extra_ms` has the extra cost of; None: it must be saved for."""
        self._dearest_ms = max(self._dearest_ms, *extra_ms.values())
        deepest = self._probes % DEEP_PROBE_EVERY == DEEP_PROBE_EVERY - 1
        chosen = max(extra_ms) if deepest else max(extra_ms, key=lambda index: scores[index])
        if extra_ms[chosen] > self._allowance_ms:
            return None
        self._probes += 1
        self._probe_id, self._probe_ms = plan_id, extra_ms[chosen]
        return chosen

    def _earn(self, plan: SpeculationPlan) -> None:
        """What is saved is at most one probe of the dearest kind."""
        if plan.predicted_ms is not None:
            earned = self._allowance_ms + PROBE_SHARE * plan.predicted_ms
            self._allowance_ms = min(earned, max(self._dearest_ms, PROBE_SHARE * plan.predicted_ms))
        if plan.reason == "probe":
            self._allowance_ms -= self._probe_ms

    def status(self) -> dict[str, Any]:
        return {
            "shadow_rounds": self._shadow_rounds,
            "shadow_gap_rounds": self._gap if self._shadows else None,
            "probes": self._probes,
            "probe_allowance_ms": self._allowance_ms,
        }
