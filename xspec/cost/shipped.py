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

    Buckets beyond the engine's largest give way to that one; prefills shrink to fit model and cache,
    contexts beyond the model go; target rows gain the full width of every bucket and lose what no bucket
    can use.
    """
    notes: list[str] = []
    if settings.request_buckets is not None:
        buckets = _reachable(settings.request_buckets, geometry)
        if gone := sorted(set(settings.request_buckets) - set(buckets)):
            notes.append(f"request buckets left out: {gone}")
        if new := sorted(set(buckets) - set(settings.request_buckets)):
            notes.append(f"request bucket added: {new}, the engine's largest")
        settings = replace(settings, request_buckets=buckets)
    if settings.contexts is not None:
        settings = replace(settings, contexts=_fitting_contexts(settings, settings.contexts, geometry, notes))
    if geometry.control is Control.TARGET_VERIFY and settings.target_graph_rows is not None:
        settings = _fitting_rows(settings, settings.target_graph_rows, geometry, notes)
    return settings, tuple(notes)


def _reachable(buckets: Sequence[int], geometry: Geometry) -> tuple[int, ...]:
    """Captured ones of `buckets`. Where some exceed the engine's largest, that one stands for them."""
    largest = geometry.request_buckets[-1]
    found = set(buckets) & set(geometry.request_buckets)
    return tuple(sorted(found | {largest} if max(buckets) > largest or not found else found))


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
        buckets = context.request_buckets and _reachable(context.request_buckets, geometry)
        most = max(buckets or settings.request_buckets or geometry.request_buckets)
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
