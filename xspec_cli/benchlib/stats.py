"""Summaries of samples: pure functions of numbers, without clocks, I/O or numpy.

Percentiles interpolate linearly between the two nearest samples, as numpy's default does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Spread of one quantity over the samples of a run."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Paired comparison of two targets: median of the per-round ratios and its bootstrap interval."""

    median: float
    low: float
    high: float
    pairs: int


def mean(values: Sequence[float]) -> float:
    if not values:
        raise ValueError("the mean of no values is undefined")
    return sum(values) / len(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile (0 to 100) of `values`, in any order."""
    if not values:
        raise ValueError("a percentile of no values is undefined")
    if not 0.0 <= percent <= 100.0:
        raise ValueError(f"percent must be within 0 and 100, got {percent}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100.0
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50.0)


def summarise(values: Sequence[float]) -> Summary | None:
    """None where there is nothing to summarise (no request produced two tokens, say)."""
    if not values:
        return None
    return Summary(
        count=len(values),
        mean=mean(values),
        p50=percentile(values, 50.0),
        p95=percentile(values, 95.0),
        p99=percentile(values, 99.0),
    )


def bootstrap_interval(
    values: Sequence[float],
    *,
    seed: int,
    statistic: Callable[[Sequence[float]], float] = median,
    resamples: int = 2000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile bootstrap interval of `statistic` over `values`; the same seed gives the same interval."""
    rng = random.Random(seed)
    estimates = [statistic(rng.choices(values, k=len(values))) for _ in range(resamples)]
    tail = (1.0 - level) / 2.0 * 100.0
    return percentile(estimates, tail), percentile(estimates, 100.0 - tail)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], *, seed: int) -> Ratio:
    """Round i of one target over round i of the other: what the machine does to both cancels out."""
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"pairs needed, got {len(numerators)} and {len(denominators)} values")
    ratios = [top / bottom for top, bottom in zip(numerators, denominators, strict=True)]
    low, high = bootstrap_interval(ratios, seed=seed)
    return Ratio(median=median(ratios), low=low, high=high, pairs=len(ratios))
