"""What a calibration measures: settings as a user writes them, and the points they mean on an engine.

`resolve` is where the two meet: what does not fit is refused with the numbers, before anything is sampled.
Plain values: no device, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xspec.cost.model import bucket_groups
from xspec.cost.room import Geometry, Pair, Room
from xspec.cost.schema import (
    CalibrationSettings,
    ContextInterval,
    Control,
    parse_calibration,
    to_json,
)
from xspec.cost.shipped import fit_shipped, shipped_calibration
from xspec.errors import CalibrationError

__all__ = [
    "CalibrationSettings",
    "ContextInterval",
    "Control",
    "Effective",
    "Geometry",
    "Pair",
    "Point",
    "fit_shipped",
    "parse_calibration",
    "resolve",
    "shipped_calibration",
    "to_json",
]

DEFAULT_PREFILL_TOKENS = 2048
DEFAULT_MAX_KV_LENGTH = 4096

MAX_DRAFT_STEP_BUCKET = 128
"""Largest bucket that draft steps are measured for where no buckets are given."""


@dataclass(frozen=True, slots=True)
class Point:
    """One combination to measure."""

    context: int  # index into the effective contexts
    draft_steps: int
    requests: int
    target_rows: int
    depth: int | None = None  # loops that draft, of a looped target


@dataclass(frozen=True, slots=True)
class Effective:
    """Settings with everything resolved on an engine, and the points they mean.

    `model` is "sps" where (K, d) is the choice: each runs at its full width alone, one point a bucket, so
    there is nothing to tell apart. Contexts name their own request buckets. `target_rows`: rows measured by
    request bucket, plain rounds left out. `captured_tiers`: what is captured by request bucket where the
    rows are a choice (target verify). `notes`: what was capped or left out, in words, for the log. Resolving
    `as_settings` again gives the same.
    """

    model: str
    draft_width: int
    request_buckets: tuple[int, ...]
    target_rows: Mapping[int, tuple[int, ...]]
    contexts: tuple[ContextInterval, ...]
    warmup_steps: int
    window_steps: int
    windows_per_point: int
    token_seed: int
    plain_rounds: bool
    max_target_rows: int | None
    uncovered: str
    geometry: Geometry
    captured_tiers: Mapping[int, tuple[int, ...]]
    points: tuple[Point, ...]  # context by context, in each by descending request bucket
    kv_growth: int | None = None
    least_point_ms: int | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    def as_settings(self) -> CalibrationSettings:
        """The same written out in full, omitted defaults included."""
        tiers = sorted(set().union(*self.target_rows.values()))
        budgets = self.geometry.control is Control.TARGET_VERIFY
        return CalibrationSettings(
            model=self.model,
            draft_width=self.draft_width,
            request_buckets=self.request_buckets,
            target_graph_rows=tuple(tiers) if budgets else None,
            contexts=self.contexts,
            warmup_steps=self.warmup_steps,
            window_steps=self.window_steps,
            windows_per_point=self.windows_per_point,
            token_seed=self.token_seed,
            plain_rounds=self.plain_rounds,
            max_target_rows=self.max_target_rows,
            uncovered=self.uncovered,
            kv_growth=self.kv_growth,
            least_point_ms=self.least_point_ms,
        )


def resolve(
    settings: CalibrationSettings, geometry: Geometry, tiers: Callable[[int], Sequence[int]]
) -> Effective:
    """The settings on an engine. `tiers(lanes)`: captured target rows for K drafts, full width included.

    CalibrationError with every reason if anything is not captured, does not fit the model's context or the
    cache, leaves out the full width of a bucket, or cannot be fitted.
    """
    mistakes: list[str] = []
    notes: list[str] = []
    if settings.draft_width not in (None, geometry.draft_width):
        mistakes.append(
            f"draft_width: found {settings.draft_width}; allowed: {geometry.draft_width}, the engine's"
        )
    if geometry.control is Control.SPEC:
        settings = replace(settings, model="sps")
        if not geometry.pairs:
            mistakes.append("nothing to measure: no number of draft steps is captured")
    buckets = _request_buckets(settings, geometry, mistakes)
    captured = _captured_tiers(buckets, geometry, tiers)
    grid = _Grid(settings, geometry, _chosen_rows(settings, geometry, captured, mistakes))
    kept = tuple(bucket for bucket in buckets if grid.cells(bucket, buckets))
    if len(kept) < len(buckets):
        left_out = _listed(set(buckets) - set(kept))
        notes.append(
            f"request buckets without a point of at most {settings.max_target_rows} rows: {left_out}"
        )
    if not buckets and not mistakes:
        mistakes.append(f"request_buckets: none up to {MAX_DRAFT_STEP_BUCKET} is captured; name larger ones")
    elif settings.max_target_rows is not None and not any(grid.rows(bucket, kept) for bucket in kept):
        mistakes.append(f"max_target_rows: {settings.max_target_rows} leaves no round with drafts to measure")
    contexts = _contexts(settings, geometry, buckets, kept, mistakes, notes) if kept else ()
    if not mistakes:
        mistakes.extend(grid.loose_ends(contexts))
    if mistakes:
        raise CalibrationError("the calibration does not fit this engine", mistakes)
    return Effective(
        model=settings.model,
        draft_width=geometry.draft_width,
        request_buckets=kept,
        target_rows={bucket: grid.rows(bucket, kept) for bucket in kept},
        contexts=contexts,
        warmup_steps=settings.warmup_steps,
        window_steps=settings.window_steps,
        windows_per_point=settings.windows_per_point,
        token_seed=settings.token_seed,
        plain_rounds=settings.plain_rounds,
        max_target_rows=settings.max_target_rows,
        uncovered=settings.uncovered,
        geometry=geometry,
        captured_tiers={bucket: rows for bucket, rows in captured.items() if bucket in kept},
        points=tuple(grid.points(contexts)),
        kv_growth=settings.kv_growth,
        least_point_ms=settings.least_point_ms,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class _Grid:
    """Which (draft steps, target rows) a request bucket is measured at.

    `chosen`: tiers by bucket where the rows are a choice (target verify), else empty.
    """

    settings: CalibrationSettings
    geometry: Geometry
    chosen: Mapping[int, tuple[int, ...]]

    def cells(self, bucket: int, beside: Sequence[int]) -> list[tuple[int, int | None, int]]:
        """(draft steps, depth, target rows) of one bucket among those `beside` it, plain rounds (0 draft
        steps) first.

        Draft steps run at full width, so an additive curve of one depth is connected by measuring each
        bucket on the next one's rows too, as padding.
        """
        found: list[tuple[int, int | None, int]] = [(0, None, bucket)] if self.settings.plain_rounds else []
        width = self.geometry.draft_width
        if self.geometry.control is Control.TARGET_VERIFY:
            found += [(width, None, rows) for rows in self.chosen.get(bucket, ())]
        elif self.geometry.control is Control.SPEC:
            found += [(steps, depth, bucket * (steps + 1)) for steps, depth in self.geometry.pairs]
        else:
            linked = [bucket]
            if self.settings.model == "additive":
                linked += sorted(other for other in beside if other > bucket)[:1]
            found += [(steps, None, lanes * (steps + 1)) for steps in range(1, width + 1) for lanes in linked]
        most = self.settings.max_target_rows
        return [cell for cell in found if most is None or cell[2] <= most]

    def rows(self, bucket: int, beside: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted({rows for steps, _, rows in self.cells(bucket, beside) if steps}))

    def points(self, contexts: Sequence[ContextInterval]) -> list[Point]:
        """Buckets descend, so that the prober only ever ends requests on its way through a context."""
        return [
            Point(index, steps, bucket, rows, depth)
            for index, context in enumerate(contexts)
            for bucket in sorted(context.request_buckets or (), reverse=True)
            for steps, depth, rows in self.cells(bucket, context.request_buckets or ())
        ]

    def loose_ends(self, contexts: Sequence[ContextInterval]) -> list[str]:
        """Additive grids that shared target rows do not connect. (Plain rounds need only rows.)"""
        if self.settings.model != "additive":
            return []
        points = self.points(contexts)
        found = []
        for index, steps in sorted({(p.context, p.draft_steps) for p in points if p.draft_steps}):
            cells = [
                (p.requests, p.target_rows) for p in points if (p.context, p.draft_steps) == (index, steps)
            ]
            groups = bucket_groups(cells)
            if len(groups) > 1:
                apart = " | ".join(_listed(group) for group in groups)
                found.append(
                    f"context {index} ({contexts[index].kv}): the additive model needs request buckets "
                    f"linked by shared target rows; not linked with {steps} drafts: {apart}. Give "
                    'target_graph_rows or request_buckets that link them, or model "sps"'
                )
        return found


def _request_buckets(
    settings: CalibrationSettings, geometry: Geometry, mistakes: list[str]
) -> tuple[int, ...]:
    captured = geometry.request_buckets
    if settings.request_buckets is None:
        if geometry.control is Control.TARGET_VERIFY:
            return captured
        return tuple(bucket for bucket in captured if bucket <= MAX_DRAFT_STEP_BUCKET)
    return _among("request_buckets", settings.request_buckets, captured, "captured", mistakes)


def _among(
    name: str, wanted: Sequence[int], there: Sequence[int], state: str, mistakes: list[str]
) -> tuple[int, ...]:
    """Those `wanted` that are there; the others are a mistake."""
    bad = sorted(set(wanted) - set(there))
    if bad:
        mistakes.append(f"{name}: {_listed(bad)} not {state}; {state}: {_listed(there)}")
    return tuple(sorted(set(wanted) & set(there)))


def _captured_tiers(
    buckets: Sequence[int], geometry: Geometry, tiers: Callable[[int], Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    if geometry.control is not Control.TARGET_VERIFY:
        return {}
    return {bucket: tuple(sorted(set(tiers(bucket)))) for bucket in buckets}


def _chosen_rows(
    settings: CalibrationSettings,
    geometry: Geometry,
    captured: Mapping[int, tuple[int, ...]],
    mistakes: list[str],
) -> dict[int, tuple[int, ...]]:
    """Tiers to measure by bucket: all that are captured, or the listed ones of them."""
    wanted = settings.target_graph_rows
    if geometry.control is not Control.TARGET_VERIFY:
        if wanted is not None:
            mistakes.append(
                "target_graph_rows: only for target verify; draft steps are measured at their full width"
            )
        return {}
    there = sorted(set().union(*captured.values()))
    if wanted is not None and captured:
        _among("target_graph_rows", wanted, there, "captured for these request buckets", mistakes)
    most = settings.max_target_rows
    chosen = {}
    for bucket, rows in captured.items():
        chosen[bucket] = tuple(size for size in rows if wanted is None or size in wanted)
        full = bucket * (geometry.draft_width + 1)
        if full not in chosen[bucket] and (most is None or full <= most):
            mistakes.append(
                f"target_graph_rows: {full}, the full width of request bucket {bucket}, is missing"
            )
    return chosen


def _contexts(
    settings: CalibrationSettings,
    geometry: Geometry,
    buckets: Sequence[int],
    kept: Sequence[int],
    mistakes: list[str],
    notes: list[str],
) -> tuple[ContextInterval, ...]:
    """With their buckets filled in, KV lengths capped by the model, and surely fitting model and cache."""
    room = Room(settings, geometry)
    if settings.contexts is None:
        default = ContextInterval(DEFAULT_PREFILL_TOKENS, 1, DEFAULT_MAX_KV_LENGTH)
        prefill = room.prefill_within(default, max(kept))
        given: tuple[ContextInterval, ...] = (replace(default, prefill_tokens=prefill),)
        if prefill < DEFAULT_PREFILL_TOKENS:
            notes.append(
                f"prefill_tokens {DEFAULT_PREFILL_TOKENS} reduced to {prefill} to fit model and cache"
            )
    else:
        given = settings.contexts
    found = []
    for index, context in enumerate(given):
        where = f"context {index} ({context.kv})"
        mine: Sequence[int] = kept
        if context.request_buckets is not None:
            name = f"{where}: request_buckets"
            listed = _among(name, context.request_buckets, buckets, "among request_buckets", mistakes)
            mine = [bucket for bucket in listed if bucket in kept]
        if context.min_kv_length > geometry.max_model_len:
            mistakes.append(f"{where}: begins beyond the model's context of {geometry.max_model_len} tokens")
        elif context.max_kv_length > geometry.max_model_len:
            notes.append(
                f"{where}: max_kv_length capped at the model's context of {geometry.max_model_len} tokens"
            )
        if not mine:
            mistakes.append(f"{where}: no request bucket to measure is left")
            continue
        mistakes.extend(room.lacking(where, context, mine))
        if context.prefill_tokens < context.min_kv_length:
            # Costs between contexts follow the measured KV lengths, which must grow with the intervals.
            below = f"{where}: prefill_tokens {context.prefill_tokens} is below the interval"
            (mistakes if index else notes).append(below)
        capped = min(context.max_kv_length, geometry.max_model_len)
        found.append(replace(context, max_kv_length=capped, request_buckets=tuple(mine)))
    return tuple(found)


def _listed(values: Sequence[int] | set[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, sorted(values)))
