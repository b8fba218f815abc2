"""Counters of one engine, in Prometheus' words: `xspec:` with vLLM's metric tails.

The engine reports plain ints and floats from its loop thread; nothing is locked and nothing global.
Families are built only when somebody scrapes. Knows nothing about HTTP, devices or text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from xspec.core.drafts import DraftCounts, DraftTotals
from xspec.core.request import FinishReason
from xspec.core.round import RoundFeedback
from xspec.metrics_families import Counter, Family, Gauge, Histogram
from xspec.metrics_speculation import AdaptiveSeries, DraftSeries, PairSeries

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


class Metrics(Collector):
    """What one engine counts. Called on the event loop thread only, so nothing here locks.

    `draft_width`: most tokens drafted in a round. 0: no drafter is loaded, and no series speaks of drafts.
    `adaptive`: whether a policy that adapts plans the rounds, which has series of its own; `pairs`: whether
    it chooses (K, d), which has more.
    """

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int = 131072,
        draft_width: int = 0,
        adaptive: bool = False,
        pairs: bool = False,
    ) -> None:
        self.observers: list[Callable[[RoundFeedback], None]] = []  # told of every round, for benchmarks
        self._model_name = model_name
        self.draft_width = draft_width
        self._drafts = DraftSeries(draft_width) if draft_width else None
        self._adaptive = AdaptiveSeries(draft_width) if adaptive else None
        self._pairs = PairSeries() if pairs else None
        tokens = _tokens_upto(max_model_len)
        reasons = [str(reason) for reason in FinishReason]
        self._running = Gauge("num_requests_running", "Requests in execution.")
        self._waiting = Gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        self._kv_used = Gauge("kv_cache_usage_perc", "Share of KV pages in use; 1 is all of them.")
        self._preemptions = Counter("num_preemptions", "Sequences whose pages were taken back.")
        self._prompt_tokens = Counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._generated_tokens = Counter("generation_tokens", "Tokens delivered in answers.")
        self._prefix_queries = Counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._prefix_hits = Counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._success = Counter("request_success", "Choices ended, by reason.", "finished_reason", reasons)
        self._rejections = Counter("admission_rejections", "Requests refused at admission.", "reason", ())
        self._rounds = Counter("rounds", "Rounds retired.")
        self._ttft = Histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self._inter_token = Histogram(
            "inter_token_latency_seconds", "Between tokens, amortised over the tokens of an output.", _TOKEN_S
        )
        self._e2e = Histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_S)
        self._queue = Histogram("request_queue_time_seconds", "Arrival to first round.", _REQUEST_S)
        self._prefill = Histogram("request_prefill_time_seconds", "First round to first token.", _REQUEST_S)
        self._decode = Histogram("request_decode_time_seconds", "First token to last token.", _REQUEST_S)
        self._round_tokens = Histogram("iteration_tokens_total", "Tokens of a round.", _ROUND_TOKENS)
        self._round_ms = Histogram("round_time_ms", "Between retirements of rounds in a row.", _ROUND_MS)
        self._request_prompt = Histogram("request_prompt_tokens", "Prompt tokens.", tokens)
        self._request_generated = Histogram("request_generation_tokens", "Answer tokens.", tokens)
        self._families: tuple[Family, ...] = (
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
        if self._adaptive is not None:
            self._adaptive.observe(feedback)
        if self._pairs is not None:
            self._pairs.observe(feedback)
        for observer in self.observers:
            observer(feedback)

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

    def adaptive_summary(self) -> dict[str, Any] | None:
        """What adaptation did and how its predictions fared, JSON-ready; None where no policy adapts."""
        if self._adaptive is None:
            return None
        return self._adaptive.summary() | ({} if self._pairs is None else self._pairs.summary())

    def collect(self) -> Iterator[Metric]:
        """Every family in a fixed order; prometheus-client calls this for each scrape."""
        yield from (family.render(self._model_name) for family in self._families)
        if self._drafts is not None:
            yield from self._drafts.render(self._model_name)
        if self._adaptive is not None:
            yield from self._adaptive.render(self._model_name)
        if self._pairs is not None:
            yield from self._pairs.render(self._model_name)

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE
