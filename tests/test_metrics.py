"""Metrics: exact values in the exposition text, one registry per engine."""

from __future__ import annotations

import subprocess
import sys

from prometheus_client.parser import text_string_to_metric_families

from xspec.core.drafts import DraftCounts, DraftTotals
from xspec.core.request import FinishReason
from xspec.core.round import RoundFeedback, RowFeedback, SpeculationPlan
from xspec.core.shapes import RoundShape
from xspec.metrics import Metrics

SERIES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "rounds_total",
    *(
        f"{name}_{part}"
        for part in ("bucket", "sum", "count")
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "iteration_tokens_total",
            "round_time_ms",
            "request_prompt_tokens",
            "request_generation_tokens",
        )
    ),
}


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = metrics.render()[0].decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m"
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)["xspec:" + name, frozenset(labels.items())]


def feedback(round_ms: float | None) -> RoundFeedback:
    rows = (RowFeedback(sequence_id=1, proposed=4, admitted=4, verified=4, committed=3),)
    plan = SpeculationPlan(plan_id=1, policy="fixed", draft_steps=4)
    return RoundFeedback(plan, RoundShape(0, 4, 7, 1), rows, round_ms, prefill_tokens=7, committed_tokens=3)


def test_every_series_has_vllms_tail_and_no_created_twin() -> None:
    names = {name for name, _ in samples(Metrics("m"))}
    assert names == {"xspec:" + name for name in SERIES}


def test_counters_and_gauges_hold_what_was_reported() -> None:
    metrics = Metrics("m")
    metrics.admitted(11)
    metrics.admitted(4)
    metrics.prefix(queried_tokens=11, hit_tokens=8)
    metrics.preempted()
    metrics.rejected("queue_full")
    metrics.rejected("queue_full")
    metrics.rejected("invalid")
    metrics.gauges(3, 2, 0.25)
    assert value(metrics, "prompt_tokens_total") == 15
    assert value(metrics, "prefix_cache_queries_total") == 11
    assert value(metrics, "prefix_cache_hits_total") == 8
    assert value(metrics, "num_preemptions_total") == 1
    assert value(metrics, "admission_rejections_total", reason="queue_full") == 2
    assert value(metrics, "admission_rejections_total", reason="invalid") == 1
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_perc") == 0.25


def test_a_round_counts_its_tokens_and_its_time_only_in_steady_state() -> None:
    metrics = Metrics("m")
    metrics.round_retired(feedback(None))
    metrics.round_retired(feedback(8.0))
    assert value(metrics, "rounds_total") == 2
    assert value(metrics, "generation_tokens_total") == 0, "they count when they are delivered"
    assert value(metrics, "iteration_tokens_total_sum") == 20
    assert value(metrics, "iteration_tokens_total_count") == 2
    assert value(metrics, "iteration_tokens_total_bucket", le="8.0") == 0
    assert value(metrics, "iteration_tokens_total_bucket", le="16.0") == 2
    assert value(metrics, "round_time_ms_count") == 1
    assert value(metrics, "round_time_ms_bucket", le="6.0") == 0
    assert value(metrics, "round_time_ms_bucket", le="8.0") == 1, "an edge belongs to its bucket"


SPECULATION = {
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_verified_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_committed_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
}
RATES = {"spec_decode_mean_acceptance_length", "spec_decode_conditional_acceptance_rate_per_pos"}


def names(metrics: Metrics) -> set[str]:
    return {name.removeprefix("xspec:") for name, _ in samples(metrics)}


def test_series_of_speculation_are_there_with_a_drafter_and_rates_once_it_drafted() -> None:
    assert names(Metrics("m", draft_width=3)) == SERIES | SPECULATION
    metrics = Metrics("m", draft_width=3)
    metrics.delivered(1, DraftCounts(3, 3, 0))
    assert names(metrics) == SERIES | SPECULATION | RATES
    plain = Metrics("m")
    plain.delivered(2)
    assert names(plain) == SERIES and plain.draft_totals() is None
    assert value(plain, "generation_tokens_total") == 2


def test_drafts_are_counted_by_position() -> None:
    metrics = Metrics("m", draft_width=3)
    metrics.delivered(1)  # the token of a prompt: no draft
    metrics.delivered(4, DraftCounts(3, 3, 3))
    metrics.delivered(2, DraftCounts(3, 2, 1))
    metrics.delivered(1, DraftCounts(3, 3, 0))
    metrics.delivered(1, DraftCounts(1, 1, 1))  # a stop string cut it there
    assert value(metrics, "generation_tokens_total") == 9
    assert value(metrics, "spec_decode_num_drafts_total") == 4
    assert value(metrics, "spec_decode_num_draft_tokens_total") == 10
    assert value(metrics, "spec_decode_num_verified_tokens_total") == 9
    assert value(metrics, "spec_decode_num_accepted_tokens_total") == 5
    assert value(metrics, "spec_decode_num_committed_tokens_total") == 8
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, per_position, position=str(i)) for i in range(3)] == [3, 1, 1]
    conditional = "spec_decode_conditional_acceptance_rate_per_pos"
    assert [value(metrics, conditional, position=str(i)) for i in range(3)] == [0.75, 1 / 3, 1.0]
    assert value(metrics, "spec_decode_mean_acceptance_length") == 2.25
    assert metrics.draft_totals() == DraftTotals(4, 10, 5, (3, 1, 1))


def test_a_position_nobody_reached_has_no_rate() -> None:
    metrics = Metrics("m", draft_width=3)
    metrics.delivered(1, DraftCounts(3, 3, 0))
    text = metrics.render()[0].decode()
    rates = [line for line in text.splitlines() if line.startswith("xspec:spec_decode_conditional")]
    assert rates == ['xspec:spec_decode_conditional_acceptance_rate_per_pos{model_name="m",position="0"} 0.0']


def test_inter_token_time_is_shared_by_the_tokens_of_an_output() -> None:
    metrics = Metrics("m")
    metrics.inter_token(0.4, 4)
    metrics.inter_token(0.2, 1)
    metrics.inter_token(9.0, 0)
    assert value(metrics, "inter_token_latency_seconds_count") == 5
    assert round(value(metrics, "inter_token_latency_seconds_sum"), 9) == 0.6
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.075") == 0
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.1") == 4
    assert value(metrics, "inter_token_latency_seconds_bucket", le="+Inf") == 5


def test_a_finished_request_fills_every_request_histogram() -> None:
    metrics = Metrics("m", max_model_len=2048)
    metrics.first_token(ttft_s=0.3, queue_s=0.01)
    metrics.finished(FinishReason.LENGTH, 4.0, 0.2, 3.5, 2048, 17)
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.3
    assert value(metrics, "request_queue_time_seconds_sum") == 0.01
    assert value(metrics, "e2e_request_latency_seconds_sum") == 4.0
    assert value(metrics, "request_prefill_time_seconds_sum") == 0.2
    assert value(metrics, "request_decode_time_seconds_sum") == 3.5
    assert value(metrics, "request_prompt_tokens_bucket", le="2000.0") == 0
    assert value(metrics, "request_prompt_tokens_bucket", le="2048.0") == 1
    assert value(metrics, "request_generation_tokens_sum") == 17


def test_engines_do_not_share_counts() -> None:
    one, other = Metrics("m"), Metrics("m")
    one.preempted()
    assert value(one, "num_preemptions_total") == 1
    assert value(other, "num_preemptions_total") == 0


def test_a_hostile_model_name_is_escaped() -> None:
    text = Metrics('a"b\\c\nd').render()[0].decode()
    assert 'model_name="a\\"b\\\\c\\nd"' in text


def test_the_content_type_is_the_one_every_scraper_reads() -> None:
    assert Metrics("m").render()[1] == "text/plain; version=0.0.4; charset=utf-8"


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, xspec.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
