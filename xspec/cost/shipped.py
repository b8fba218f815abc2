"""Calibrations that ship with xspec, for platforms where the document's defaults would measure too long.

They are written for any engine of a platform, so what this one has no room for is left out, while settings
that a user wrote are refused instead.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Sequence
from dataclasses import replace

from xspec.cost.model import bucket_groups
from xspec.cost.room import Geometry, Room
from xspec.cost.schema import CalibrationSettings, ContextInterval, Control, parse_calibration
from xspec.errors import CalibrationError

SHIPPED_VERSION = 1


def shipped_calibration(platform_name: str, control: Control) -> CalibrationSettings | None:
    """What `calib_configs/<platform>.json` says for a control, before it is fitted to an engine.

    None: nothing ships for that platform, so the document's defaults hold.
    """
    file = importlib.resources.files("calib_configs") / f"{platform_name}.json"
    if not file.is_file():
        return None
    where = f"calib_configs/{platform_name}.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if content.get("version") != SHIPPED_VERSION:
        raise CalibrationError(f"{where}: version is {content.get('version')!r}, allowed: {SHIPPED_VERSION}")
    section = content.get(control.value)
    return None if section is None else parse_calibration(section, f"{where}: {control.value}")


def fit_shipped(
    settings: CalibrationSettings, geometry: Geometry
) -> tuple[CalibrationSettings, tuple[str, ...]]:
    """Shipped settings as this engine can measure them, and what was changed, in words for the log.

    Buckets beyond the largest that the engine has room for give way to that one; windows get fewer, then
    shorter, where even a prompt of one token leaves no room for them; prefills shrink to fit model and
    cache, contexts beyond the model go; target rows gain the full width of every bucket and lose what no
    bucket can use. `resolve` refuses the result only where one request has no room for one round's window.
    """
    notes: list[str] = []
    written = settings.contexts
    if written is not None:
        geometry = replace(geometry, request_buckets=_roomy(settings, written[0], geometry))
    if settings.request_buckets is not None:
        buckets = _reachable(settings.request_buckets, geometry)
        if gone := sorted(set(settings.request_buckets) - set(buckets)):
            notes.append(f"request buckets left out: {gone}")
        if new := sorted(set(buckets) - set(settings.request_buckets)):
            notes.append(f"request bucket added: {new}, the largest that the engine has room for")
        settings = replace(settings, request_buckets=buckets)
    if written is not None:
        settings = _fitting_windows(settings, written[0], geometry, notes)
        settings = replace(settings, contexts=_fitting_contexts(settings, written, geometry, notes))
    if geometry.control is Control.TARGET_VERIFY and settings.target_graph_rows is not None:
        settings = _fitting_rows(settings, settings.target_graph_rows, geometry, notes)
    return settings, tuple(notes)


def _reachable(buckets: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """Those of `buckets` that are there. Where some exceed the largest that is, that one stands for them."""
    largest = geometry.request_buckets[-1]
    found = set(buckets) & set(geometry.request_buckets)
    return tuple(sorted(found | {largest} if max(buckets) > largest or not found else found))


def _roomy(settings: CalibrationSettings, first: ContextInterval, geometry: Geometry) -> tuple[int, ...]:
    """Captured buckets whose requests last for at least one window of one round; the smallest in any case."""
    room = Room(replace(settings, windows_per_point=1, window_steps=1), geometry)
    captured = geometry.request_buckets
    return tuple(bucket for bucket in captured if room.lasts(first, bucket)) or captured[:1]


def _buckets_of(
    settings: CalibrationSettings, context: ContextInterval, geometry: Geometry
) -> tuple[tuple[int, ...] | None, int]:
    """The context's own buckets, if it has any, and the largest it is measured at."""
    own = context.request_buckets and _reachable(context.request_buckets, geometry)
    return own, max(own or settings.request_buckets or geometry.request_buckets)


def _fitting_windows(
    settings: CalibrationSettings, first: ContextInterval, geometry: Geometry, notes: list[str]
) -> CalibrationSettings:
    """Fewer windows, then shorter ones, until the largest bucket lasts. Later contexts may join the first."""
    _, most = _buckets_of(settings, first, geometry)
    fitted = settings
    while not Room(fitted, geometry).lasts(first, most):
        if fitted.windows_per_point > 1:
            fitted = replace(fitted, windows_per_point=fitted.windows_per_point - 1)
        elif fitted.window_steps > 1:
            fitted = replace(fitted, window_steps=fitted.window_steps - 1)
        else:
            break
    if fitted != settings:
        notes.append(
            f"{settings.windows_per_point} windows of {settings.window_steps} rounds a point reduced to "
            f"{fitted.windows_per_point} of {fitted.window_steps}"
        )
    return fitted


def _fitting_contexts(
    settings: CalibrationSettings,
    contexts: Sequence[ContextInterval],
    geometry: Geometry,
    notes: list[str],
) -> tuple[ContextInterval, ...]:
    room = Room(settings, geometry)
    found: list[ContextInterval] = []
    for context in contexts:
        if context.min_kv_length > geometry.max_model_len:
            notes.append(
                f"context left out: {context.kv}, beyond the model's {geometry.max_model_len} tokens"
            )
            continue
        buckets, most = _buckets_of(settings, context, geometry)
        prefill = room.prefill_within(context, most)
        if prefill < context.prefill_tokens:
            notes.append(f"prefill_tokens {context.prefill_tokens} ({context.kv}) reduced to {prefill}")
        if found and prefill < context.min_kv_length:  # it could only be measured among shorter lengths
            notes.append(f"context left out: {context.kv}; costs of {found[-1].kv} hold there too")
            found[-1] = replace(found[-1], max_kv_length=context.max_kv_length)
        else:
            found.append(replace(context, prefill_tokens=prefill, request_buckets=buckets))
    return tuple(found)


def _fitting_rows(
    settings: CalibrationSettings, listed: Sequence[int], geometry: Geometry, notes: list[str]
) -> CalibrationSettings:
    most = settings.max_target_rows
    rows_of: dict[int, set[int]] = {}
    for bucket in settings.request_buckets or geometry.request_buckets:
        full = bucket * (geometry.draft_width + 1)
        rows = {*(size for size in listed if bucket <= size < full), full}
        rows_of[bucket] = {size for size in rows if most is None or size <= most}
    kept = tuple(sorted(set().union(*rows_of.values())))
    if gone := sorted(set(listed) - set(kept)):
        notes.append(f"target_graph_rows left out: {gone}")
    if new := sorted(set(kept) - set(listed)):
        notes.append(f"target_graph_rows added: {new}, full widths")
    contexts = settings.contexts
    if contexts is not None and settings.model == "additive":
        contexts = tuple(_linked(context, rows_of, notes) for context in contexts)
    return replace(settings, target_graph_rows=kept, contexts=contexts)


def _linked(context: ContextInterval, rows_of: dict[int, set[int]], notes: list[str]) -> ContextInterval:
    """With narrow drafts, sparse buckets share no target rows: then all up to the largest are measured."""
    if context.request_buckets is None:
        return context
    cells = [(bucket, rows) for bucket in context.request_buckets for rows in rows_of[bucket]]
    if len(bucket_groups(cells)) <= 1:
        return context
    buckets = tuple(bucket for bucket in rows_of if bucket <= max(context.request_buckets))
    notes.append(f"request buckets of {context.kv}: {list(buckets)}, to share target rows")
    return replace(context, request_buckets=buckets)
