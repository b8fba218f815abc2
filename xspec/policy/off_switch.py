"""Switching speculation off in one batch range, probing with backoff, and on again (RFC, phase 2).

Counts feedback rounds, never time. Gains come from outside; what a probe costs is paid from an allowance that
all ranges share. docs/looped.md has the rules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from xspec.policy.candidates import BucketState, Gain
from xspec.policy.quota import Quota
from xspec.policy.spec_config import DisableSettings

PROBE_DRAFTS = 8
"""Drafts that a probe must have seen before it may switch on."""

MAX_PROBE_ROUNDS = 16
"""A probe that is still undecided then has failed."""

PROBE_BETA = 0.5
"""Weight of a failed probe in its candidate's average, which nothing else moves while off."""

TRIAL_SHARE = 0.0025
"""Of the time, that trials of candidates too dear for any probe may cost beside probes."""

CHANGED_SHARE = 0.5
"""Requests that must be others than those of the last probe for the prompts to count as new."""


class Allowance:
    """What probes may still cost, in plain rounds: a share of all decode rounds, saved up for one probe.

    What a probe in progress needs is lent and taken from what is earned later."""

    def __init__(self, settings: DisableSettings) -> None:
        self._share, self._rounds = settings.probe_share, settings.probe_rounds
        self._dearest = settings.probe_share * settings.backoff_cap
        self.left = 0.0

    def earn(self, extra: float) -> None:
        """A decode round retired. `extra`: what a round of the cheapest candidate costs beyond a plain one,
        in plain rounds. What is saved is at most a probe of that, or one round of the dearest one."""
        most = max(self._rounds * extra, self._dearest, self._share)
        self.left = max(self.left, min(self.left + self._share, most))

    def pay(self, extra: float, *, trial: bool) -> None:
        """A probe round retired. Trials are few: of one no more is owed than the longest wait earns."""
        self.left -= extra
        if trial:
            self.left = max(self.left, -self._dearest)

    def affords(self, extra: float) -> bool:
        """Whether a round that costs so much more can be paid in the longest wait."""
        return extra <= self._dearest

    def rounds(self, extra: float) -> int:
        """Probe rounds that can be paid now, at most those of one probe."""
        return self._rounds if extra <= 0.0 else min(self._rounds, int(self.left / extra + 1e-9))


@dataclass(slots=True)
class Probe:
    """A probe in progress, over all its batches of rounds. `trial`: one that no allowance had to pay for
    first."""

    candidate: int
    rounds: int
    trial: bool = False
    accepted: int = 0
    drafted: int = 0


@dataclass(slots=True)
class OffSwitch:
    """Of one range. `trusted`: the last switching on has stood its first look.

    `waited`: plain feedback rounds since the last probe or switching off; `backoff`: how many to wait for.
    `untried`: since the last trial; `trials`: how many of each candidate.
    """

    settings: DisableSettings
    off: bool = False
    trusted: bool = True
    strikes: int = 0
    waited: int = 0
    untried: int = 0
    trials: Counter[int] = field(default_factory=Counter)
    backoff: int = 0
    probes: int = 0
    probe: Probe | None = None
    quota: Quota = field(default_factory=Quota)
    requests: frozenset[int] = frozenset()  # those of the last probe or switching off
    events: dict[str, int] = field(
        default_factory=lambda: {"off": 0, "on": 0, "probe_failed": 0, "entered": 0, "new_requests": 0}
    )

    def __post_init__(self) -> None:
        self.backoff = self.settings.backoff_first

    # -- on -----------------------------------------------------------------------------------

    def look(self, gain: float | None, last: bool) -> None:
        """The present candidate was looked at; `gain`: its modelled gain, `last`: no cheaper one is next."""
        if gain is None or not self.settings.enabled:
            return
        fails = gain < 1.0 - self.settings.margin
        if not self.trusted:  # switched on by a probe: the first look decides
            self.trusted = not fails
            if fails:
                self._switch_off(min(2 * self.backoff, self.settings.backoff_cap))
            else:
                self.backoff = self.settings.backoff_first
            return
        self.strikes = self.strikes + 1 if fails and last else 0
        if self.strikes >= self.settings.checks:
            self._switch_off(self.settings.backoff_first)

    def _switch_off(self, backoff: int) -> None:
        self.off, self.trusted, self.strikes = True, True, 0
        self.waited, self.backoff, self.requests = 0, backoff, frozenset()
        self.events["off"] += 1

    # -- off ----------------------------------------------------------------------------------

    def entered(self) -> None:
        """The load has come to this range: what was found before may not hold, so a probe is due."""
        if self.off and self.probe is None:
            self.backoff, self.waited = self.settings.backoff_first, self.settings.backoff_first
            self.events["entered"] += 1

    def plain_round(
        self, bucket: BucketState, gain: Gain, requests: frozenset[int], purse: Allowance
    ) -> None:
        """A plain round of this range retired while off; begins a probe where one is due and can be paid."""
        self.waited += 1
        self.untried += 1
        if not self.requests:
            self.requests = requests
        elif len(requests - self.requests) > CHANGED_SHARE * len(requests):
            self.requests = requests
            self.backoff = self.settings.backoff_first
            self.events["new_requests"] += 1
        if self.probe is not None or self.waited < self.backoff:
            return
        candidate, rounds = self._trial(bucket, gain, purse), 1
        trial = candidate is not None
        if candidate is None:
            candidate = self._choose(bucket, gain, purse)
            rounds = purse.rounds(extra_cost(gain, candidate))
        if rounds:
            self.probe = Probe(candidate, rounds, trial=trial)
            self.probes += 1
            if trial:
                self.trials[candidate] += 1
                self.untried = 0
            self.requests = requests
            self.quota.start(rounds)

    def probe_round(
        self, plan_id: int, bucket: BucketState, gain: Gain, counts: tuple[int, int], purse: Allowance
    ) -> None:
        """A round of the probe in progress retired; `counts`: (sum A, sum K_actual) of it."""
        probe = self.probe
        if probe is None or not self.quota.retire(plan_id):
            return
        purse.pay(extra_cost(gain, probe.candidate), trial=probe.trial)
        probe.accepted += counts[0]
        probe.drafted += counts[1]
        if not self.quota.open:
            self._judge(probe, bucket, gain)

    def settle_lost(self, plan_id: int, bucket: BucketState, gain: Gain) -> None:
        """Some other round retired; a probe whose last rounds failed is judged by what there is."""
        if self.probe is None:
            return
        self.quota.retire(plan_id)
        if not self.quota.open:
            self._judge(self.probe, bucket, gain)

    def _judge(self, probe: Probe, bucket: BucketState, gain: Gain) -> None:
        if not probe.drafted:  # every round failed or had no room for a draft
            self.probe, self.waited = None, 0
            return
        rate = probe.accepted / probe.drafted
        found = gain(probe.candidate, rate)
        promising = found is not None and found > 1.0
        enough = probe.drafted >= PROBE_DRAFTS
        if found is not None and found > 1.0 + self.settings.margin and enough:
            self._switch_on(probe, bucket, rate)
        elif promising and not enough and probe.rounds < MAX_PROBE_ROUNDS:
            self.quota.start(min(probe.rounds, MAX_PROBE_ROUNDS - probe.rounds))
            probe.rounds = min(2 * probe.rounds, MAX_PROBE_ROUNDS)
        else:
            bucket.clock += 1
            bucket.averages[probe.candidate].update(rate, PROBE_BETA, bucket.clock)
            self.probe, self.waited = None, 0
            self.backoff = min(2 * self.backoff, self.settings.backoff_cap)
            self.events["probe_failed"] += 1

    def _switch_on(self, probe: Probe, bucket: BucketState, rate: float) -> None:
        bucket.clock += 1
        bucket.averages[probe.candidate].settle(rate, bucket.clock)
        bucket.enter(probe.candidate)
        bucket.drafts = probe.drafted
        self.off, self.trusted, self.probe, self.waited = False, False, None, 0
        self.events["on"] += 1

    def _trial(self, bucket: BucketState, gain: Gain, purse: Allowance) -> int | None:
        """Of the candidates to be tried, whatever a round of them costs, one least tried; of those that with
        the largest promise.

        Each is once, if it never ran: what the one before it failed at says nothing of a deeper one. Those
        too dear for probes are again, now and then, by what they promised offline: nothing else would tell.
        """
        due: dict[int, tuple[int, float]] = {}
        reached = self._reached(bucket, gain, purse)
        for j, average in enumerate(bucket.averages):
            waited = j not in reached and extra_cost(gain, j) <= TRIAL_SHARE * self.untried
            if average.updated is not None and not waited:
                continue
            promised = gain(j, 1.0 if average.seed is None else average.seed)
            if promised is not None and promised > 1.0 + self.settings.margin:
                due[j] = (-self.trials[j], promised)
        return max(due, key=due.__getitem__, default=None)

    def _reached(self, bucket: BucketState, gain: Gain, purse: Allowance) -> list[int]:
        """Candidates that probes go to: those that can be afforded, or else the first."""
        return [j for j in range(len(bucket.averages)) if purse.affords(extra_cost(gain, j))] or [0]

    def _choose(self, bucket: BucketState, gain: Gain, purse: Allowance) -> int:
        """Every other probe goes to the cheapest candidate that its average promises a gain of (without an
        average it does), else to the first; the others go in turn to all that can be afforded."""
        places = self._reached(bucket, gain, purse)
        if self.probes % 2:
            return places[self.probes // 2 % len(places)]
        for j in places:
            value = bucket.value(j)
            promised = gain(j, 1.0 if value is None else value)
            if promised is not None and promised > 1.0 + self.settings.margin:
                return j
        return 0

    def status(self) -> dict[str, Any]:
        return {
            "off": self.off,
            "probing": self.probe is not None,
            "probe_after_rounds": self.backoff if self.off else None,
            "waited_rounds": self.waited if self.off else None,
            "probes": self.probes,
            "events": dict(self.events),
        }


def extra_cost(gain: Gain, candidate: int) -> float:
    """What a round of the candidate costs beyond a plain one, in plain rounds: T_spec / T_native - 1."""
    without = gain(candidate, 0.0)
    return 0.0 if not without else 1.0 / without - 1.0
