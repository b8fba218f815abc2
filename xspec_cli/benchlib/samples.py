"""What one benchmark request did, and the figures of a run made from such samples.

All times are seconds on the run's own clock (0 is the start of the run). A chunk is whatever arrived in one
piece: with speculation, or a slow reader, it may carry several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xspec_cli.benchlib.speculation import AnswerDrafts
from xspec_cli.benchlib.stats import Summary, summarise


@dataclass(frozen=True, slots=True)
class Sample:
    """`chunk_s` are arrivals of chunks that carry tokens. `error` is set for a request that failed.

    `chunk_tokens`: tokens of each chunk, empty where the target does not tell. `digest` is the same for equal
    answers of targets of one kind.
    """

    prompt_index: int
    start_s: float
    end_s: float
    chunk_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    chunk_tokens: tuple[int, ...] = ()
    traffic: str = ""
    digest: str = ""
    drafts: AnswerDrafts | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token; None for an answer without any visible token."""
        return (self.chunk_s[0] - self.start_s) * 1e3 if self.chunk_s else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for answers of fewer than two tokens."""
        if len(self.chunk_s) == 0 or self.completion_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) * 1e3 / (self.completion_tokens - 1)

    @property
    def itl_ms(self) -> list[float]:
        """Inter-token latencies: the gaps between chunks, as a reader of the stream sees them."""
        return [(late - early) * 1e3 for early, late in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def e2e_ms(self) -> float:
        return (self.end_s - self.start_s) * 1e3

    def tokens_within(self, begin_s: float, end_s: float) -> float:
        """Tokens whose chunk arrived in [begin_s, end_s).

        Where the tokens of chunks are not told, each has an equal share of them. A failed request has none;
        tokens of an answer without any visible chunk arrive with its end.
        """
        if not self.ok:
            return 0.0
        times = self.chunk_s or (self.end_s,)
        share = self.completion_tokens / len(times)
        counts = self.chunk_tokens or (share,) * len(times)
        return sum(count for time, count in zip(times, counts, strict=True) if begin_s <= time < end_s)


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run of one target at one level. `duration_s` spans first start to last end, tail included."""

    completed: int
    failed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Summary | None
    tpot_ms: Summary | None
    itl_ms: Summary | None
    e2e_ms: Summary | None


def figures(samples: Sequence[Sample]) -> RunFigures:
    """Figures of a run. Failed requests take part in nothing but the `failed` count and the duration."""
    if not samples:
        raise ValueError("a run without samples has no figures")
    done = [sample for sample in samples if sample.ok]
    duration_s = max(sample.end_s for sample in samples) - min(sample.start_s for sample in samples)
    output_tokens = sum(sample.completion_tokens for sample in done)

    def per_s(amount: int) -> float:
        return amount / duration_s if duration_s > 0.0 else 0.0

    return RunFigures(
        completed=len(done),
        failed=len(samples) - len(done),
        duration_s=duration_s,
        prompt_tokens=sum(sample.prompt_tokens for sample in done),
        output_tokens=output_tokens,
        output_tokens_per_s=per_s(output_tokens),
        requests_per_s=per_s(len(done)),
        ttft_ms=summarise([value for sample in done if (value := sample.ttft_ms) is not None]),
        tpot_ms=summarise([value for sample in done if (value := sample.tpot_ms) is not None]),
        itl_ms=summarise([gap for sample in done for gap in sample.itl_ms]),
        e2e_ms=summarise([sample.e2e_ms for sample in done]),
    )
