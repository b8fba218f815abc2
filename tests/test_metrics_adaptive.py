"""Series of an adaptive policy: exact values from rounds worked by hand, there only where one adapts."""

from __future__ import annotations

import dataclasses

import pytest
from test_metrics import names, value

from xspec.core.round import RoundFeedback, RowFeedback, SpeculationPlan
from xspec.core.shapes import RoundShape
from xspec.metrics import Metrics

PREFIX = "spec_decode_adaptive_"
ALWAYS = {
    "draft_steps", "target_rows", "rounds_total", "switches_total", "probes_total",
    "predicted_round_time_ms", "round_time_ratio_bucket", "round_time_ratio_sum", "round_time_ratio_count",
}  # fmt: skip
ONCE_KNOWN = {"fallbacks_total", "round_time_ratio_median", "admitted_share", "survival_per_pos"}


def row(verified: int, accepted: int, proposed: int = 3, *, ended: bool = False) -> RowFeedback:
    """`ended`: it stopped with its last accepted draft."""
    return RowFeedback(1, proposed, verified, verified, accepted + (not ended), ended)


def told(
    steps: int,
    *rows: RowFeedback,
    reason: str = "hold",
    predicted_ms: float | None = 10.0,
    round_ms: float | None = 10.0,
    prefill_tokens: int = 0,
    target_rows: int = 8,
) -> RoundFeedback:
    plan = SpeculationPlan(0, "p", steps, reason=reason, predicted_ms=predicted_ms)
    shape = RoundShape(2 if steps else 0, target_rows, prefill_tokens, 1)
    committed = sum(row.committed for row in rows)
    return RoundFeedback(plan, shape, rows, round_ms, prefill_tokens, committed)


def counted(*rounds: RoundFeedback, width: int = 3) -> Metrics:
    metrics = Metrics("m", draft_width=width, adaptive=True)
    for feedback in rounds:
        metrics.round_retired(feedback)
    return metrics


def own(metrics: Metrics) -> set[str]:
    return {name.removeprefix(PREFIX) for name in names(metrics) if name.startswith(PREFIX)}


def adaptive(metrics: Metrics, name: str, **labels: str) -> float:
    return value(metrics, PREFIX + name, **labels)


def test_series_are_there_only_where_a_policy_adapts() -> None:
    fixed = Metrics("m", draft_width=3)
    fixed.round_retired(told(3, row(3, 2)))
    assert own(fixed) == set() and fixed.adaptive_summary() is None
    assert own(counted()) == ALWAYS
    assert (
        own(counted(told(3, row(3, 2), predicted_ms=None, reason="uncovered"), told(3)))
        == ALWAYS | ONCE_KNOWN
    )


def test_the_gauges_are_those_of_the_last_decode_round() -> None:
    metrics = counted(
        told(3, target_rows=32),
        told(2, target_rows=24, predicted_ms=7.5),
        told(0, target_rows=0, predicted_ms=None, prefill_tokens=64, reason="no rows"),  # a prompt alone
    )
    assert adaptive(metrics, "draft_steps") == 2
    assert adaptive(metrics, "target_rows") == 24
    assert adaptive(metrics, "predicted_round_time_ms") == 7.5
    assert [adaptive(metrics, "rounds_total", draft_steps=str(k)) for k in range(4)] == [0, 0, 1, 1]
    assert "fallbacks_total" not in own(metrics)


def test_a_round_in_which_nobody_may_draft_is_a_plain_one() -> None:
    planned = told(3)
    shape = dataclasses.replace(planned.shape, draft_rows=0, target_rows=2)
    metrics = counted(dataclasses.replace(planned, shape=shape))
    assert adaptive(metrics, "draft_steps") == 0
    assert adaptive(metrics, "rounds_total", draft_steps="0") == 1


def test_predictions_are_judged_on_pure_decode_rounds_with_a_time() -> None:
    metrics = counted(
        told(3, predicted_ms=10.0, round_ms=9.0),
        told(3, predicted_ms=10.0, round_ms=12.0),
        told(3, predicted_ms=20.0, round_ms=22.0),
        told(3, predicted_ms=10.0, round_ms=None),
        told(3, predicted_ms=10.0, round_ms=50.0, prefill_tokens=8),
        told(3, predicted_ms=None, round_ms=50.0, reason="uncovered"),
    )
    assert adaptive(metrics, "round_time_ratio_count") == 3
    assert adaptive(metrics, "round_time_ratio_sum") == pytest.approx(0.9 + 1.2 + 1.1)
    assert adaptive(metrics, "round_time_ratio_bucket", le="0.9") == 1
    assert adaptive(metrics, "round_time_ratio_bucket", le="1.15") == 2
    assert adaptive(metrics, "round_time_ratio_median") == pytest.approx(1.1)
    summary = metrics.adaptive_summary()
    assert summary is not None
    assert (summary["predicted_round_ms"], summary["measured_round_ms"]) == (10.0, 22.0)


def test_the_median_forgets_after_200_rounds() -> None:
    rounds = [told(3, round_ms=10.0)] * 100 + [told(3, round_ms=20.0)] * 200
    assert adaptive(counted(*rounds), "round_time_ratio_median") == 2.0
    assert adaptive(counted(*rounds[:200]), "round_time_ratio_median") == 1.5
    assert adaptive(counted(*rounds), "round_time_ratio_count") == 300, "the histogram never does"


def test_switches_are_counted_by_where_they_lead() -> None:
    metrics = counted(
        told(3, reason="initial"),  # from nowhere
        told(3),
        told(5, reason="probe"),  # learns, settles nothing
        told(2, reason="switch: gain 7 %"),
        told(0, reason="nothing_to_draft", predicted_ms=None),
        told(5, reason="uncovered_kv", predicted_ms=None),
        told(3, reason="switch"),
        told(0, reason="switch"),
        told(0),
        told(1, reason="probe: depth 1"),
        told(2, reason="switch"),
        told(5, reason="switch"),
        told(5, reason="switch"),  # leads nowhere
        width=5,
    )
    switches = {
        direction: adaptive(metrics, "switches_total", direction=direction)
        for direction in ("deeper", "shallower", "to_plain", "from_plain")
    }
    assert switches == {"deeper": 2, "shallower": 1, "to_plain": 1, "from_plain": 1}
    assert adaptive(metrics, "probes_total") == 2


def test_what_is_held_is_settled_on_while_another_choice_leads() -> None:
    """Held at another size of the batch than before: the switch begins there."""
    metrics = counted(told(3, reason="initial"), told(2, reason="lead"), told(3, reason="switch"))
    assert adaptive(metrics, "switches_total", direction="deeper") == 1


def test_a_switch_counts_though_prompts_go_first_and_no_new_start_is_one() -> None:
    """Without mixed batches the round that a switch was decided for may run prompts alone."""
    metrics = counted(
        told(0, reason="initial"),
        told(3, reason="switch", target_rows=0, prefill_tokens=64),
        told(3, reason="tier"),
        told(2, reason="initial"),  # the policy was exchanged
        told(0, reason="switch"),
    )
    summary = metrics.adaptive_summary()
    assert summary is not None
    assert summary["switches"] == {"deeper": 0, "shallower": 0, "to_plain": 1, "from_plain": 1}
    assert adaptive(metrics, "rounds_total", draft_steps="3") == 1


def test_a_text_that_ended_early_lifts_no_share_above_one() -> None:
    """Three drafts were admitted of three, and the text ended with the first."""
    ended = RowFeedback(1, proposed=1, admitted=3, verified=1, committed=1, censored=True)
    assert adaptive(counted(told(3, ended)), "admitted_share") == 1.0
    assert adaptive(counted(told(3, ended, row(1, 0))), "admitted_share") == (1 + 1) / (1 + 3)


def test_rounds_without_a_cost_are_counted_by_reason() -> None:
    metrics = counted(
        told(3, predicted_ms=None, reason="uncovered: kv length 5000"),
        told(3, predicted_ms=None, reason="uncovered: 64 requests"),
        told(3, predicted_ms=None, reason="uncovered_kv"),
        told(3, predicted_ms=None, reason=""),  # a fixed policy, put in for comparison
        told(3),
    )
    assert adaptive(metrics, "fallbacks_total", reason="uncovered") == 2
    assert adaptive(metrics, "fallbacks_total", reason="uncovered_kv") == 1
    summary = metrics.adaptive_summary()
    assert summary is not None and summary["fallbacks"] == {"uncovered": 2, "uncovered_kv": 1}


def test_survival_counts_only_what_was_verified() -> None:
    """
    position        0          1          2
    row(3, 3)       accepted   accepted   accepted
    row(3, 1)       accepted   rejected   behind it
    row(2, 2)       accepted   accepted   not verified
    row(1, 0)       rejected   not verified
    row(2, 2, end)  accepted   accepted   behind the stop
    """
    first = told(3, row(3, 3), row(3, 1), row(2, 2), row(1, 0))
    second = told(2, row(2, 2, proposed=2, ended=True))
    metrics = counted(first, told(0, RowFeedback(1, 0, 0, 0, 1)), second)
    survival = [adaptive(metrics, "survival_per_pos", position=str(i)) for i in range(3)]
    assert survival == [4 / 5, 3 / 4, 1 / 2]
    assert adaptive(metrics, "admitted_share") == (3 + 3 + 2 + 1 + 2) / (4 * 3 + 2)


def test_the_window_slides() -> None:
    rounds = [told(3, row(3, 3)), *[told(2, row(2, 0, proposed=2))] * 200]
    assert counted(*rounds[:-1]).adaptive_summary() == {
        "draft_steps": 2,
        "target_rows": 8,
        "predicted_round_ms": 10.0,
        "measured_round_ms": 10.0,
        "round_time_ratio_median": 1.0,
        "survival": {"0": 1 / 200, "1": 1 / 200, "2": 1.0},
        "admitted_share": 1.0,
        "rounds": {"0": 0, "1": 0, "2": 199, "3": 1},
        "switches": {"deeper": 0, "shallower": 0, "to_plain": 0, "from_plain": 0},
        "probes": 0,
        "fallbacks": {},
    }
    summary = counted(*rounds).adaptive_summary()
    assert summary is not None
    assert summary["survival"] == {"0": 0.0, "1": 0.0}, "nothing verified at position 2 lately"


def test_rows_deeper_than_the_width_told_do_no_harm() -> None:
    metrics = counted(told(3, row(3, 3)), width=2)
    assert [adaptive(metrics, "survival_per_pos", position=str(i)) for i in range(2)] == [1.0, 1.0]
    assert adaptive(metrics, "rounds_total", draft_steps="3") == 1


def test_a_round_costs_the_event_loop_little() -> None:
    """Work, not time: as many steps for a round late as for one early."""
    metrics = counted(*[told(3, *[row(3, 2)] * 32)] * 1000)
    series = metrics._adaptive
    assert series is not None and len(series._drafted) == len(series._ratios) == 200


def chose(
    steps: int,
    depth: int | None = None,
    *,
    reason: str = "candidate",
    range_index: int | None = 0,
    candidate: int | None = None,
) -> RoundFeedback:
    plan = SpeculationPlan(
        0, "p", steps, depth=depth, reason=reason, range_index=range_index, candidate_index=candidate
    )
    return RoundFeedback(plan, RoundShape(1 if steps else 0, steps + 1, 0, 1), (row(0, 0, 0),), None, 0, 1)


def test_pairs_and_why_they_changed_by_hand() -> None:
    """Probes and rounds that can draft nothing are run but not settled on."""
    metrics = Metrics("m", draft_width=8, adaptive=True, pairs=True)
    for feedback in (
        chose(4, 2, candidate=1),
        chose(8, 2, candidate=2),  # candidate
        chose(0, reason="off"),  # off
        chose(4, 2, candidate=1, reason="probe"),
        chose(0, reason="nothing_to_draft", range_index=None),
        chose(4, 2, candidate=1),  # on
        chose(1, 3, candidate=0, range_index=1),  # range
        chose(1, 3, candidate=0, range_index=1),
        chose(1, 2, reason="switch", range_index=1),  # switch
        chose(2, 2, reason="hold", range_index=1),  # batch: held for another batch size
    ):
        metrics.round_retired(feedback)
    assert adaptive(metrics, "draft_loops") == 2 and adaptive(metrics, "range_index") == 1
    assert adaptive(metrics, "candidate_index") == 0
    summary = metrics.adaptive_summary()
    assert summary is not None
    assert summary["pair_rounds"] == {"plain": 2, "4@2": 3, "8@2": 1, "1@3": 2, "1@2": 1, "2@2": 1}
    assert summary["pair_switches"] == {
        "range": 1, "off": 1, "on": 1, "candidate": 1, "switch": 1, "batch": 1,
    }  # fmt: skip
    assert adaptive(metrics, "pair_switches_total", reason="range") == 1
    assert adaptive(metrics, "pair_rounds_total", pair="4@2") == 3
    # in numbers of draft steps: 4 to 8, to plain, back, 4 to 1; the last two chose other loops, or nothing
    assert summary["switches"] == {"deeper": 1, "shallower": 1, "to_plain": 1, "from_plain": 1}
    without = Metrics("m", draft_width=8, adaptive=True)
    without.round_retired(chose(4, 2))
    assert PREFIX + "pair_rounds_total" not in names(without)
