"""Series that speak of speculation: what became of drafts, and what an adaptive policy did with them.

Counted from what was delivered and from RoundFeedback alone. Knows no policy: of a plan's `reason` only what
stands before a colon is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from xspec.core.drafts import DraftTally
from xspec.core.round import RoundFeedback, RowFeedback, SpeculationPlan
from xspec.metrics_families import Counter, Family, Gauge, Histogram, family_of

WINDOW_ROUNDS = 200
"""Rounds that the gauges of the recent past look back on."""

SWITCH, PROBE = "switch", "probe"
CANDIDATE, OFF, LEAD = "candidate", "off", "lead"
SETTLED = ("initial", SWITCH, "hold", "tier", CANDIDATE, OFF, LEAD)
"""What the reason of a plan says whose depth the policy has settled on. A probe, a round without costs and
one in which nothing can be drafted run what they run once."""

_RATIOS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)


class DraftSeries:
    """Speculation in vLLM's counters, and the rates that xLLM shows (since the start of the engine)."""

    def __init__(self, width: int) -> None:
        self.tally = DraftTally(width)

    def render(self, model_name: str) -> Iterator[Metric]:
        totals = self.tally.totals()
        for name, about, count in (
            ("drafts", "Rows of rounds for which tokens were drafted.", totals.drafts),
            ("draft_tokens", "Tokens drafted.", totals.draft_tokens),
            ("verified_tokens", "Drafted tokens that the target verified.", self.tally.verified_tokens),
            ("accepted_tokens", "Drafted tokens that were accepted.", totals.accepted_tokens),
            ("committed_tokens", "Answer tokens of rows with drafts.", self.tally.committed_tokens),
        ):
            samples = [("", float(count))]
            yield family_of(CounterMetricFamily, f"spec_decode_num_{name}", about, model_name, samples)
        yield family_of(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts of which the token at this position was accepted.",
            model_name,
            ((str(i), count) for i, count in enumerate(totals.accepted_per_position)),
            "position",
        )
        length = totals.mean_acceptance_length
        yield family_of(
            GaugeMetricFamily,
            "spec_decode_mean_acceptance_length",
            "Accepted tokens of a draft and the target's own.",
            model_name,
            [] if length is None else [("", length)],
        )
        yield family_of(
            GaugeMetricFamily,
            "spec_decode_conditional_acceptance_rate_per_pos",
            "Share of the drafts accepted up to the position before that were accepted here too.",
            model_name,
            ((str(i), rate) for i, rate in enumerate(totals.conditional_rates) if rate is not None),
            "position",
        )


@dataclass(frozen=True, slots=True)
class _DraftedRound:
    """Counts of one round with drafts. By position: rows that verified a draft there, or accepted it."""

    proposed: int
    admitted: int  # as far as there was a text: never more than proposed
    verified: tuple[int, ...]
    accepted: tuple[int, ...]

    @staticmethod
    def of(rows: Sequence[RowFeedback], width: int) -> _DraftedRound:
        proposed = admitted = 0
        ends, misses = [0] * (width + 1), [0] * (width + 1)  # rows by the first position they did not get to
        for row in rows:
            proposed += row.proposed
            admitted += row.verified
            ends[min(row.verified, width)] += 1
            misses[min(row.verified, row.accepted, width)] += 1
        return _DraftedRound(proposed, admitted, _beyond(ends), _beyond(misses))


def _beyond(counts: Sequence[int]) -> tuple[int, ...]:
    """[i]: the sum of what stands after entry i; nothing of the last."""
    return tuple(accumulate(reversed(counts[1:])))[::-1]


class AdaptiveSeries:
    """What an adaptive policy planned, and what came of it. Rounds without decode rows tell nothing.

    `width`: most tokens drafted for a request. Survival at a position is the share of the rows that verified
    a draft there whose drafts up to it were all accepted, over the last rounds with drafts.
    """

    def __init__(self, width: int) -> None:
        name = "spec_decode_adaptive_"
        self._width = width
        self._depth: int | None = None  # last depth that was settled on
        self._measured_ms: float | None = None
        self._ratios: deque[float] = deque(maxlen=WINDOW_ROUNDS)
        self._drafted: deque[_DraftedRound] = deque(maxlen=WINDOW_ROUNDS)
        self._steps = Gauge(f"{name}draft_steps", "Tokens drafted a request in the last decode round.")
        self._rows = Gauge(f"{name}target_rows", "Padded rows the target ran on in the last decode round.")
        self._rounds = Counter(
            f"{name}rounds", "Decode rounds by tokens drafted.", "draft_steps", map(str, range(width + 1))
        )
        self._switches = Counter(
            f"{name}switches", "Changes of the depth settled on.", "direction",
            ("deeper", "shallower", "to_plain", "from_plain"),
        )  # fmt: skip
        self._probes = Counter(f"{name}probes", "Rounds run to learn about a depth not in use.")
        self._fallbacks = Counter(
            f"{name}fallbacks", "Decode rounds without a measured cost, by the policy's reason.", "reason", ()
        )
        self._predicted = Gauge(f"{name}predicted_round_time_ms", "Cost of the last round that had one.")
        self._ratio = Histogram(
            f"{name}round_time_ratio", "Measured over predicted time of rounds without prompts.", _RATIOS
        )

    def observe(self, feedback: RoundFeedback) -> None:
        plan, shape = feedback.plan, feedback.shape
        self._settle(plan)  # also where prompts went first and the decode rows had to wait
        if not shape.target_rows:
            return
        steps = plan.draft_steps if shape.draft_rows else 0
        self._steps.value, self._rows.value = steps, shape.target_rows
        self._rounds.add(1, str(steps))
        self._decision(plan)
        if steps and feedback.rows:
            self._drafted.append(_DraftedRound.of(feedback.rows, self._width))
        if plan.predicted_ms:
            self._predicted.value = plan.predicted_ms
            if feedback.round_ms is not None and not feedback.prefill_tokens:
                self._measured_ms = feedback.round_ms
                self._ratios.append(feedback.round_ms / plan.predicted_ms)
                self._ratio.observe(self._ratios[-1])

    def _decision(self, plan: SpeculationPlan) -> None:
        reason = plan.reason.partition(":")[0]
        if plan.predicted_ms is None and reason:  # a fixed policy, put in for comparison, gives none
            self._fallbacks.add(1, reason)
        if reason == PROBE:
            self._probes.add()

    def _settle(self, plan: SpeculationPlan) -> None:
        reason = plan.reason.partition(":")[0]
        if reason not in SETTLED:
            return
        before, self._depth = self._depth, plan.draft_steps
        # A policy of candidates says of every round what it is at, so that a change is a switch.
        if reason in (SWITCH, CANDIDATE, OFF) and before is not None and before != plan.draft_steps:
            self._switches.add(1, _direction(before, plan.draft_steps))

    def survival(self) -> dict[int, float]:
        """By position, from 0; positions that no row verified lately are left out."""
        shares = {}
        for position in range(self._width):
            verified = sum(drafted.verified[position] for drafted in self._drafted)
            if verified:
                shares[position] = sum(drafted.accepted[position] for drafted in self._drafted) / verified
        return shares

    def admitted_share(self) -> float | None:
        """Verified share of the drafts made lately."""
        proposed = sum(drafted.proposed for drafted in self._drafted)
        return sum(drafted.admitted for drafted in self._drafted) / proposed if proposed else None

    def summary(self) -> dict[str, Any]:
        """The same in JSON-ready values. Times are those of the last round that had both."""
        return {
            "draft_steps": self._steps.value,
            "target_rows": self._rows.value,
            "predicted_round_ms": self._predicted.value or None,
            "measured_round_ms": self._measured_ms,
            "round_time_ratio_median": median(self._ratios) if self._ratios else None,
            "survival": {str(position): share for position, share in self.survival().items()},
            "admitted_share": self.admitted_share(),
            "rounds": dict(self._rounds.values),
            "switches": dict(self._switches.values),
            "probes": self._probes.values[""],
            "fallbacks": dict(self._fallbacks.values),
        }

    def render(self, model_name: str) -> Iterator[Metric]:
        families: tuple[Family, ...] = (
            self._steps, self._rows, self._rounds, self._switches, self._probes, self._fallbacks,
            self._predicted, self._ratio,
        )  # fmt: skip
        yield from (family.render(model_name) for family in families)
        ratio, share = (median(self._ratios) if self._ratios else None), self.admitted_share()
        for name, about, value in (
            ("round_time_ratio_median", "Median of the ratios of the last rounds.", ratio),
            ("admitted_share", "Verified share of the drafts of the last rounds.", share),
        ):
            yield _gauge(name, about, model_name, [] if value is None else [("", value)])
        yield _gauge(
            "survival_per_pos",
            "Share of drafts verified here that were accepted up to here, in the last rounds.",
            model_name,
            ((str(position), share) for position, share in self.survival().items()),
            "position",
        )


class PairSeries:
    """Which (K, d) a policy of --speculation_policy ran, and why it changed.

    Reasons: "range" (a batch of another size), "off" and "on" (to and from plain rounds), "candidate" (a move
    inside the range), "switch" (another pair promises more), "batch" (what was held for another batch size).
    """

    def __init__(self) -> None:
        name = "spec_decode_adaptive_"
        self._settled: SpeculationPlan | None = None
        self._loops = Gauge(f"{name}draft_loops", "Loops that drafted in the last decode round; 0: none.")
        self._candidate = Gauge(f"{name}candidate_index", "Candidate of the last round that had one, from 0.")
        self._range = Gauge(f"{name}range_index", "Batch range of the last round that had one, from 0.")
        self._rounds = Counter(
            f"{name}pair_rounds", "Decode rounds by what they ran: plain, K or K@d.", "pair", ("plain",)
        )
        self._switches = Counter(
            f"{name}pair_switches", "Changes of the (K, d) settled on.", "reason",
            ("range", OFF, "on", CANDIDATE, SWITCH, "batch"),
        )  # fmt: skip

    def observe(self, feedback: RoundFeedback) -> None:
        plan, shape = feedback.plan, feedback.shape
        if plan.reason.partition(":")[0] in SETTLED:
            self._settle(plan)
        if not shape.target_rows:
            return
        drafted = bool(shape.draft_rows)
        self._loops.value = (plan.depth or 0) if drafted else 0
        self._rounds.add(1, pair_of(plan) if drafted else "plain")
        if plan.candidate_index is not None:
            self._candidate.value = plan.candidate_index
        if plan.range_index is not None:
            self._range.value = plan.range_index

    def _settle(self, plan: SpeculationPlan) -> None:
        before, self._settled = self._settled, plan
        if before is not None and pair_of(before) != pair_of(plan):
            self._switches.add(1, _why(before, plan))

    def summary(self) -> dict[str, Any]:
        return {
            "draft_loops": self._loops.value,
            "candidate_index": self._candidate.value,
            "range_index": self._range.value,
            "pair_rounds": dict(self._rounds.values),
            "pair_switches": dict(self._switches.values),
        }

    def render(self, model_name: str) -> Iterator[Metric]:
        families: tuple[Family, ...] = (
            self._loops, self._candidate, self._range, self._rounds, self._switches,
        )  # fmt: skip
        yield from (family.render(model_name) for family in families)


def pair_of(plan: SpeculationPlan) -> str:
    """ "plain", "K" or, of a looped target, "K@d"."""
    if not plan.draft_steps:
        return "plain"
    return str(plan.draft_steps) if plan.depth is None else f"{plan.draft_steps}@{plan.depth}"


def _why(before: SpeculationPlan, after: SpeculationPlan) -> str:
    if before.range_index != after.range_index:
        return "range"
    if not after.draft_steps:
        return OFF
    if not before.draft_steps:
        return "on"
    reason = after.reason.partition(":")[0]
    return reason if reason in (CANDIDATE, SWITCH) else "batch"


def _gauge(
    name: str, about: str, model_name: str, samples: Iterable[tuple[str, float]], label: str | None = None
) -> Metric:
    return family_of(GaugeMetricFamily, f"spec_decode_adaptive_{name}", about, model_name, samples, label)


def _direction(before: int, after: int) -> str:
    if not after:
        return "to_plain"
    if not before:
        return "from_plain"
    return "deeper" if after > before else "shallower"
