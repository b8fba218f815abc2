"""The kinds of series there are: counters, gauges and histograms of one engine, in Prometheus' words.

Plain values that are turned into families only when somebody scrapes. Knows nothing about what is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

PREFIX = "xspec:"


class Family(Protocol):
    def render(self, model_name: str) -> Metric: ...


def family_of(
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


class Counter:
    """A monotone count, or several under one label."""

    __slots__ = ("about", "label", "name", "values")

    def __init__(self, name: str, about: str, label: str | None = None, known: Iterable[str] = ("",)) -> None:
        self.name, self.about, self.label = name, about, label
        self.values: dict[str, int] = dict.fromkeys(known, 0)

    def add(self, amount: int = 1, value: str = "") -> None:
        self.values[value] = self.values.get(value, 0) + amount

    def render(self, model_name: str) -> Metric:
        samples = self.values.items()
        return family_of(CounterMetricFamily, self.name, self.about, model_name, samples, self.label)


class Gauge:
    __slots__ = ("about", "name", "value")

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about
        self.value: float = 0.0

    def render(self, model_name: str) -> Metric:
        return family_of(GaugeMetricFamily, self.name, self.about, model_name, [("", self.value)])


class Histogram:
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
