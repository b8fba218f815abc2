"""Counters of one engine, in Prometheus' words: `xspec:` with vLLM's metric tails.

The engine reports plain ints and floats from its loop thread; nothing is locked and nothing global.
Families are built only when somebody scrapes. Knows nothing about HTTP, devices or text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from xspec.core.drafts import DraftCounts, DraftTally, DraftTotals
from xspec.core.request import FinishReason
from xspec.core.round import RoundFeedback

PREFIX = "xspec:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
_REQUEST_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
_ROUND_MS = (
    0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0, 512.0, 1024.0,
)  # fmt: skip
_ROUND_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def _tokens_upto(max_tokens: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to the model's context."""
    edges = [step * 10**power for power in range(8) for step in (1, 2, 5)]
    return (*(edge for edge in edges if edge < max_tokens), max_tokens)


class _Family(Protocol):
    def render(self, model_name: str) -> Metric: ...


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    about: str,
    model_name: str,
    samples: Iterable[tuple[str, float]],
    label: str | None = None,
) -> Metric:
    """A family of (value of the label, amount) samples; without a label there is one sample at most."""
    family = kind(PREFIX + name, about, labels=["model_name", *([] if label is None else [label])])
    for value, amount in samples:
        family.add_metric([model_name] if label is None else [model_name, value], amount)
    return family


class _Counter:
    """A monotone count, or several under one label."""

    __slots__ = ("about", "label", "name", "values")

    def __init__(self, name: str, about: str, label: str | None = None, known: Iterable[str] = ("",)) -> None:
        self.name, self.about, self.label = name, about, label
        self.values: dict[str, int] = dict.fromkeys(known, 0)

    def add(self, amount: int = 1, value: str = "") -> None:
        self.values[value] = self.values.get(value, 0) + amount

    def render(self, model_name: str) -> Metric:
        samples = self.values.items()
        return _family(CounterMetricFamily, self.name, self.about, model_name, samples, self.label)


class _Gauge:
    __slots__ = ("about", "name", "value")

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about
        self.value: float = 0.0

    def render(self, model_name: str) -> Metric:
        return _family(GaugeMetricFamily, self.name, self.about, model_name, [("", self.value)])


class _Histogram:
    """Counts per bucket, kept apart and only summed up when scraped."""

    __slots__ = ("about", "counts", "edges", "name", "total")

    def __init__(self, name: str, about: str, edges: Sequence[float]) -> None:
        self.name, self.about, self.edges = name, about, edges
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.total += value * times

    def render(self, model_name: str) -> Metric:
        buckets: list[tuple[str, float]] = []
        seen = 0
        for edge, count in zip((*map(float, self.edges), float("inf")), self.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if edge == float("inf") else repr(edge), float(seen)))
        family = HistogramMetricFamily(PREFIX + self.name, self.about, labels=["model_name"])
        family.add_metric([model_name], buckets, self.total)
        return family


class _Drafts:
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
            yield _family(CounterMetricFamily, f"spec_decode_num_{name}", about, model_name, samples)
        yield _family(
            CounterMetricFamily,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts of which the token at this position was accepted.",
            model_name,
            ((str(i), count) for i, count in enumerate(totals.accepted_per_position)),
            "position",
        )
        length = totals.mean_acceptance_length
        yield _family(
            GaugeMetricFamily,
            "spec_decode_mean_acceptance_length",
            "Accepted tokens of a draft and the target's own.",
            model_name,
            [] if length is None else [("", length)],
        )
        yield _family(
            GaugeMetricFamily,
            "spec_decode_conditional_acceptance_rate_per_pos",
            "Share of the drafts accepted up to the position before that were accepted here too.",
            model_name,
            ((str(i), rate) for i, rate in enumerate(totals.conditional_rates) if rate is not None),
            "position",
        )


class Metrics(Collector):
    """What one engine counts. Called on the event loop thread only, so nothing here locks.

    `draft_width`: most tokens drafted in a round. 0: no drafter is loaded, and no series speaks of drafts.
    """

    def __init__(self, model_name: str, *, max_model_len: int = 131072, draft_width: int = 0) -> None:
        self._model_name = model_name
        self.draft_width = draft_width
        self._drafts = _Drafts(draft_width) if draft_width else None
        tokens = _tokens_upto(max_model_len)
        reasons = [str(reason) for reason in FinishReason]
        self._running = _Gauge("num_requests_running", "Requests in execution.")
        self._waiting = _Gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        self._kv_used = _Gauge("kv_cache_usage_perc", "Share of KV pages in use; 1 is all of them.")
        self._preemptions = _Counter("num_preemptions", "Sequences whose pages were taken back.")
        self._prompt_tokens = _Counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._generated_tokens = _Counter("generation_tokens", "Tokens delivered in answers.")
        self._prefix_queries = _Counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._prefix_hits = _Counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._success = _Counter("request_success", "Choices ended, by reason.", "finished_reason", reasons)
        self._rejections = _Counter("admission_rejections", "Requests refused at admission.", "reason", ())
        self._rounds = _Counter("rounds", "Rounds retired.")
        self._ttft = _Histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self._inter_token = _Histogram(
            "inter_token_latency_seconds", "Between tokens, amortised over the tokens of an output.", _TOKEN_S
        )
        self._e2e = _Histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_S)
        self._queue = _Histogram("request_queue_time_seconds", "Arrival to first round.", _REQUEST_S)
        self._prefill = _Histogram("request_prefill_time_seconds", "First round to first token.", _REQUEST_S)
        self._decode = _Histogram("request_decode_time_seconds", "First token to last token.", _REQUEST_S)
        self._round_tokens = _Histogram("iteration_tokens_total", "Tokens of a round.", _ROUND_TOKENS)
        self._round_ms = _Histogram("round_time_ms", "Between retirements of rounds in a row.", _ROUND_MS)
        self._request_prompt = _Histogram("request_prompt_tokens", "Prompt tokens.", tokens)
        self._request_generated = _Histogram("request_generation_tokens", "Answer tokens.", tokens)
        self._families: tuple[_Family, ...] = (
            self._running, self._waiting, self._kv_used, self._preemptions, self._prompt_tokens,
            self._generated_tokens, self._prefix_queries, self._prefix_hits, self._success, self._rejections,
            self._rounds, self._ttft, self._inter_token, self._e2e, self._queue, self._prefill, self._decode,
            self._round_tokens, self._round_ms, self._request_prompt, self._request_generated,
        )  # fmt: skip
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # ── reported by the engine ──

    def round_retired(self, feedback: RoundFeedback) -> None:
        self._rounds.add()
        self._round_tokens.observe(feedback.prefill_tokens + feedback.committed_tokens)
        if feedback.round_ms is not None:
            self._round_ms.observe(feedback.round_ms)

    def delivered(self, tokens: int, drafts: DraftCounts | None = None) -> None:
        """An answer grew by `tokens`: what is left of a round once stop strings have cut it."""
        self._generated_tokens.add(tokens)
        if drafts is not None and self._drafts is not None:
            self._drafts.tally.add(drafts, tokens)

    def gauges(self, running: int, waiting: int, kv_used_fraction: float) -> None:
        self._running.value = running
        self._waiting.value = waiting
        self._kv_used.value = kv_used_fraction

    def prefix(self, queried_tokens: int, hit_tokens: int) -> None:
        self._prefix_queries.add(queried_tokens)
        self._prefix_hits.add(hit_tokens)

    def preempted(self) -> None:
        self._preemptions.add()

    def admitted(self, prompt_tokens: int) -> None:
        self._prompt_tokens.add(prompt_tokens)

    def rejected(self, reason: str) -> None:
        self._rejections.add(1, reason)

    def first_token(self, ttft_s: float, queue_s: float) -> None:
        self._ttft.observe(ttft_s)
        self._queue.observe(queue_s)

    def inter_token(self, seconds: float, tokens: int) -> None:
        """`seconds` passed while `tokens` came in one output; each counts with its share."""
        if tokens > 0:
            self._inter_token.observe(seconds / tokens, tokens)

    def finished(
        self,
        reason: FinishReason,
        e2e_s: float,
        prefill_s: float,
        decode_s: float,
        prompt_tokens: int,
        generated_tokens: int,
    ) -> None:
        self._success.add(1, str(reason))
        self._e2e.observe(e2e_s)
        self._prefill.observe(prefill_s)
        self._decode.observe(decode_s)
        self._request_prompt.observe(prompt_tokens)
        self._request_generated.observe(generated_tokens)

    # ── read by surfaces ──

    def draft_totals(self) -> DraftTotals | None:
        """What became of drafts since the start; None without a drafter."""
        return None if self._drafts is None else self._drafts.tally.totals()

    def collect(self) -> Iterator[Metric]:
        """Every family in a fixed order; prometheus-client calls this for each scrape."""
        yield from (family.render(self._model_name) for family in self._families)
        if self._drafts is not None:
            yield from self._drafts.render(self._model_name)

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE
