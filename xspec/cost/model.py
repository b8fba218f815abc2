"""Measured costs of full rounds: what a policy may ask, and the two models that answer.

A cost is that of a whole cycle (draft forwards, verify, sampling, refresh of the draft context, retirement),
so nothing is ever added to it (architecture decision 1). None means not measured. Knows nothing about how
costs are measured or saved.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from xspec.cost.schema import ContextInterval
from xspec.errors import CalibrationError

LONGEST_ROUND_S = 1e6
"""What is slower was not measured but made up; sums of such numbers would leave the range of floats."""


class CostsAt(Protocol):
    """Costs for a batch whose KV lengths are settled. Equal ones say the same of every round."""

    def round_ms(
        self, draft_steps: int, requests: int, target_rows: int, depth: int | None = None
    ) -> float | None:
        """A decode round that drafts `draft_steps` tokens (0: plain) for `requests` padded lanes and
        verifies on `target_rows` padded rows. `depth`: loops that a looped target drafts with; None for
        other drafters, of no meaning in a plain round. None: not measured."""


class Costs(Protocol):
    """What policies and the simulator decide by."""

    def at(self, kv_lengths: Sequence[int]) -> CostsAt | None:
        """Costs for requests of these KV lengths; None if some length lies in no calibrated interval."""

    @property
    def prefill_ms_per_token(self) -> float:
        """What a prompt token adds to a round that carries prefill chunks."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of the probe grid as it was measured."""

    draft_steps: int  # 0: plain
    requests: int  # physical draft request bucket (padded lanes)
    target_rows: int  # padded verify rows
    context: int  # index of the context interval
    kv_length: float  # mean KV length of the requests while it was measured
    windows_ms: tuple[float, ...]  # median round of each window
    depth: int | None = None  # loops that drafted, of a looped target

    @property
    def median_ms(self) -> float:
        return statistics.median(self.windows_ms)

    @property
    def spread(self) -> float:
        """How far the median window lies above the fastest, relative: what else runs only ever slows."""
        return self.median_ms / min(self.windows_ms) - 1.0


@dataclass(frozen=True, slots=True)
class Sps:
    """Steps per second over padded target rows G alone: a round costs 1000 / SPS(G) milliseconds.

    Between two probed G the milliseconds are interpolated linearly; outside them nothing is known, unless
    `clamped` (bare legacy tables), which continues the first and the last value.
    """

    target_rows: tuple[int, ...]  # strictly ascending
    steps_per_second: tuple[float, ...]  # aligned with target_rows
    clamped: bool = False

    def __post_init__(self) -> None:
        _check_axis("target_rows", self.target_rows, "steps_per_second", self.steps_per_second)
        if min(self.steps_per_second) < 1 / LONGEST_ROUND_S:
            found = min(self.steps_per_second)
            raise CalibrationError(
                f"steps_per_second must be at least {1 / LONGEST_ROUND_S:g}, found {found}"
            )

    def ms(self, requests: int, target_rows: int) -> float | None:
        """Milliseconds of a round; the number of requests does not matter here."""
        spot = _spot(self.target_rows, target_rows, self.clamped)
        if spot is None:
            return None
        left, right, share = spot
        low, high = 1000.0 / self.steps_per_second[left], 1000.0 / self.steps_per_second[right]
        return low + share * (high - low)


@dataclass(frozen=True, slots=True)
class Additive:
    """Seconds of a round as bias + alpha(requests) + theta(target rows).

    The gauge is alpha(first) = theta(first) = 0. Both are interpolated linearly between probes; outside them
    nothing is known unless `clamped`.
    """

    bias_s: float
    requests: tuple[int, ...]  # strictly ascending request buckets
    alpha_s: tuple[float, ...]  # aligned with requests
    target_rows: tuple[int, ...]  # strictly ascending
    theta_s: tuple[float, ...]  # aligned with target_rows
    clamped: bool = False

    def __post_init__(self) -> None:
        _check_axis("requests", self.requests, "alpha_s", self.alpha_s)
        _check_axis("target_rows", self.target_rows, "theta_s", self.theta_s)
        if not max(map(abs, (self.bias_s, *self.alpha_s, *self.theta_s))) <= LONGEST_ROUND_S:
            raise CalibrationError(f"bias_s, alpha_s and theta_s must be within {LONGEST_ROUND_S:g} seconds")
        if self.alpha_s[0] != 0 or self.theta_s[0] != 0:
            raise CalibrationError("alpha_s and theta_s must begin with 0: the level is in bias_s")

    def ms(self, requests: int, target_rows: int) -> float | None:
        """Milliseconds of a round. A sum of parts that is not positive was never measured either: None."""
        alpha = _along(self.requests, self.alpha_s, requests, self.clamped)
        theta = _along(self.target_rows, self.theta_s, target_rows, self.clamped)
        if alpha is None or theta is None:
            return None
        seconds = self.bias_s + alpha + theta
        return 1000.0 * seconds if seconds > 0 else None


Curve = Sps | Additive

_Cell = tuple[int, int, int, int, int | None]
"""Context, draft steps, requests, target rows, depth."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Curves by (index of the context interval, draft steps), and what they were measured at. Of a looped
    target they are those of its plain rounds, and `looped` has the others by (context, draft steps, depth).

    With several contexts, the cost at a KV length is interpolated linearly between the KV lengths that the
    contexts were measured at (continued level at both ends), and a batch's cost is the mean over its
    requests, because the work of attention adds up over them.
    """

    contexts: tuple[ContextInterval, ...]  # ascending, none overlapping
    curves: Mapping[tuple[int, int], Curve]
    kv_means: tuple[float, ...]  # mean KV length each context was measured at, ascending
    prefill_ms_per_token: float
    looped: Mapping[tuple[int, int, int], Curve] = field(default_factory=dict)
    # By KV length, as lengths come up: this is asked every round, for lengths below the model's context.
    _places: dict[int, tuple[int, float] | None] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _known: dict[_Cell, float | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        if not self.contexts or len(self.kv_means) != len(self.contexts):
            raise CalibrationError(f"{len(self.contexts)} contexts with {len(self.kv_means)} mean KV lengths")
        for one, two in zip(self.contexts, self.contexts[1:], strict=False):
            if two.min_kv_length <= one.max_kv_length:
                raise CalibrationError(f"contexts overlap or are out of order: {one.kv} and {two.kv}")
        if not all(math.isfinite(kv) and kv > 0 for kv in self.kv_means) or not _ascending(self.kv_means):
            raise CalibrationError(
                "the mean KV lengths that contexts were measured at must be positive and grow from context "
                f"to context, found {', '.join(f'{kv:g}' for kv in self.kv_means)}"
            )
        if any(not 0 <= key[0] < len(self.contexts) for key in (*self.curves, *self.looped)):
            raise CalibrationError(f"a curve for a context that is none of 0 to {len(self.contexts) - 1}")
        if any(steps < 1 or depth < 1 for _, steps, depth in self.looped):
            raise CalibrationError("a curve of a looped draft needs draft steps and a depth from 1")
        if not math.isfinite(self.prefill_ms_per_token) or self.prefill_ms_per_token < 0:
            raise CalibrationError(
                f"prefill_ms_per_token must be 0 or more, found {self.prefill_ms_per_token}"
            )

    def at(self, kv_lengths: Sequence[int]) -> TableCosts | None:
        """Costs for a batch of these KV lengths; None for an empty one or if any is in no interval."""
        if not kv_lengths:
            return None
        if len(self.contexts) == 1:
            only = self.contexts[0]
            covered = only.min_kv_length <= min(kv_lengths) and max(kv_lengths) <= only.max_kv_length
            return TableCosts(self.curves, ((0, 1.0),), self.looped, self._known) if covered else None
        weights = [0.0] * (len(self.contexts) + 1)
        for length in kv_lengths:
            if length not in self._places:
                self._places[length] = self._place(length)
            place = self._places[length]
            if place is None:
                return None
            left, share = place
            weights[left] += 1.0 - share
            weights[left + 1] += share
        shares = tuple((i, each / len(kv_lengths)) for i, each in enumerate(weights) if each > 0)
        return TableCosts(self.curves, shares, self.looped, self._known)

    def _place(self, length: int) -> tuple[int, float] | None:
        """(context, share of the next one) whose costs make up that of one request; None: not covered."""
        if not any(c.min_kv_length <= length <= c.max_kv_length for c in self.contexts):
            return None
        right = bisect_left(self.kv_means, length)
        if right in (0, len(self.kv_means)):
            return max(right - 1, 0), 0.0
        low, high = self.kv_means[right - 1], self.kv_means[right]
        return right - 1, (length - low) / (high - low)


@dataclass(frozen=True, slots=True)
class TableCosts:
    """The curves of a table, weighted by how much of a batch falls to each context."""

    curves: Mapping[tuple[int, int], Curve]
    weights: tuple[tuple[int, float], ...]  # (context, weight), weights add up to 1
    looped: Mapping[tuple[int, int, int], Curve] = field(default_factory=dict)
    known: dict[_Cell, float | None] = field(default_factory=dict, repr=False, compare=False)
    """What the curves said so far, kept by the table: the sizes of rounds are few."""

    def round_ms(
        self, draft_steps: int, requests: int, target_rows: int, depth: int | None = None
    ) -> float | None:
        """None where any context that the batch touches lacks the value."""
        total = 0.0
        for context, weight in self.weights:
            cell = (context, draft_steps, requests, target_rows, depth)
            if cell not in self.known:
                self.known[cell] = self._read(*cell)
            ms = self.known[cell]
            if ms is None:
                return None
            total += weight * ms
        return total

    def _read(
        self, context: int, draft_steps: int, requests: int, target_rows: int, depth: int | None
    ) -> float | None:
        if depth is None or not draft_steps:
            curve = self.curves.get((context, draft_steps))
        else:
            curve = self.looped.get((context, draft_steps, depth))
        return None if curve is None else curve.ms(requests, target_rows)


def monotone_violations(curve: Curve, tolerance: float = 0.02) -> list[tuple[int, int, float, float]]:
    """(rows_a, rows_b, ms_a, ms_b) where more rows cost less, by more than `tolerance` of the cost.

    `rows_a` is the dearest size below `rows_b`. For an additive curve at its smallest request bucket, where
    a fall weighs most. Such falls are measuring errors or kernels that dislike a size: to report, not to
    repair.
    """
    requests = curve.requests[0] if isinstance(curve, Additive) else 1
    costs = [(rows, curve.ms(requests, rows)) for rows in curve.target_rows]
    found: list[tuple[int, int, float, float]] = []
    dearest: tuple[int, float] | None = None
    for rows, ms in costs:
        if ms is None:
            continue
        if dearest is None or ms >= dearest[1]:
            dearest = (rows, ms)
        elif ms < dearest[1] * (1.0 - tolerance):
            found.append((dearest[0], rows, dearest[1], ms))
    return found


def bucket_groups(cells: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Request buckets of (requests, target rows) cells, grouped by being linked through shared target rows.

    Least squares can tell the two parts of an additive curve apart only within a group, so more than one is
    an error. Ascending inside, groups by their first bucket.
    """
    groups: list[tuple[set[int], set[int]]] = []  # (buckets, rows)
    for requests, rows in cells:
        touched = [group for group in groups if requests in group[0] or rows in group[1]]
        groups = [group for group in groups if group not in touched]
        buckets = {requests}.union(*(group[0] for group in touched))
        groups.append((buckets, {rows}.union(*(group[1] for group in touched))))
    return tuple(sorted(tuple(sorted(buckets)) for buckets, _ in groups))


def _spot(axis: Sequence[int], value: int, clamped: bool) -> tuple[int, int, float] | None:
    """(left, right, share of the way): the probes around `value`; None outside them, unless clamped."""
    right = bisect_left(axis, value)
    if right < len(axis) and axis[right] == value:
        return right, right, 0.0
    if right in (0, len(axis)):
        edge = min(right, len(axis) - 1)
        return (edge, edge, 0.0) if clamped else None
    left = right - 1
    return left, right, (value - axis[left]) / (axis[right] - axis[left])


def _along(axis: Sequence[int], values: Sequence[float], value: int, clamped: bool) -> float | None:
    spot = _spot(axis, value, clamped)
    if spot is None:
        return None
    left, right, share = spot
    return values[left] + share * (values[right] - values[left])


def _ascending(values: Sequence[float]) -> bool:
    return all(one < two for one, two in zip(values, values[1:], strict=False))


def _check_axis(axis_name: str, axis: Sequence[int], name: str, values: Sequence[float]) -> None:
    if not axis or len(axis) != len(values):
        raise CalibrationError(
            f"{axis_name} and {name} must be equally long, found {len(axis)} and {len(values)}"
        )
    if axis[0] < 1 or not _ascending(axis):
        raise CalibrationError(f"{axis_name} must be positive and strictly ascending, found {list(axis)}")
    if not all(map(math.isfinite, values)):
        raise CalibrationError(f"{name} must be finite, found {list(values)}")
