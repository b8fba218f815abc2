"""Costs for a policy to adapt by: loaded from a table, found in the cache, or measured, fitted and kept.

Everything a user can learn of them is logged here once. Runs on any thread but the launch thread; no asyncio.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from xspec.calib.cache import cache_path, keep, read_cached
from xspec.calib.choose import Adaptation
from xspec.calib.fingerprint import Fingerprint, fingerprint
from xspec.calib.probe import probe
from xspec.calib.quality import describe, disturbances, quality_of
from xspec.calib.service import Deliver, Service, Thinker, ignore, service_of
from xspec.config import Config
from xspec.cost.bundle import Bundle, check_output, effective_json, read_bundle, write_bundle
from xspec.cost.fit import curves_of, fit_table
from xspec.cost.model import CostTable
from xspec.cost.settings import (
    CalibrationSettings,
    Control,
    Effective,
    Geometry,
    Pair,
    fit_shipped,
    resolve,
    to_json,
)
from xspec.draft.choose import DraftChoice
from xspec.exec.assemble import Assembly, ring_slots
from xspec.exec.pipeline import Launcher, Pipeline
from xspec.platform.base import Platform
from xspec.progress import Progress, duration, silent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Costs and where they come from. `bundle` None: a bare legacy table, of which nothing else is known."""

    table: CostTable
    source: str
    bundle: Bundle | None

    @property
    def uncovered(self) -> str:
        """What rounds without a measured cost run."""
        return CalibrationSettings().uncovered if self.bundle is None else self.bundle.effective.uncovered

    def facts(self) -> dict[str, Any]:
        """JSON-ready, for operators."""
        facts: dict[str, Any] = {"source": self.source, "coverage": coverage(self.table)}
        if self.bundle is not None:
            quality = quality_of(self.table, self.bundle.samples)
            facts |= {
                "created_at": self.bundle.created_at,
                **effective_json(self.bundle.effective),
                "points": len(self.bundle.samples),
                "median_residual": quality.median,
                "worst_residual": abs(quality.worst.error),
                "prefill_ms_per_token": self.table.prefill_ms_per_token,
            }
        return facts


@dataclass(frozen=True, slots=True)
class _Engine:
    """What costs are asked for."""

    adaptation: Adaptation
    choice: DraftChoice
    facts: Fingerprint
    geometry: Geometry
    tiers: Callable[[int], tuple[int, ...]]
    service: Callable[[], Service]


def calibrated_costs(
    adaptation: Adaptation,
    config: Config,
    platform: Platform,
    parts: Assembly,
    choice: DraftChoice,
    launcher: Launcher,
    *,
    model: Path,
    progress: Progress = silent,
    clock_s: Callable[[], float] = time.monotonic,
    deliver: Deliver = ignore,
    thinker: Thinker | None = None,
) -> Calibrated:
    """Load the table that `adaptation` names, or measure on `parts`, idle and warm, and save where it says.

    CalibrationError (a ConfigError) with every reason if the table does not fit, the settings do not, or the
    output file exists, which is found out before anything is measured. EngineError if a round is lost.
    """
    width, control = choice.steps, adaptation.control
    slots, pairs = ring_slots(config, platform), pairs_of(adaptation, choice)
    engine = _Engine(
        adaptation,
        choice,
        fingerprint(
            config,
            platform,
            model=model,
            choice=choice,
            control=control,
            dtype=parts.dtype,
            grid=parts.grid,
            loops=parts.target.spec.loops,
            pairs=pairs,
        ),
        Geometry(
            control=control,
            draft_width=width,
            request_buckets=tuple(bucket.rows for bucket in parts.grid.buckets),
            max_model_len=parts.max_model_len,
            cache_tokens=parts.pool.usable_pages * config.cache.block_size,
            block_size=config.cache.block_size,
            slots=slots,
            pairs=pairs,
        ),
        lambda lanes: parts.tiers.of(lanes, width),
        lambda: service_of(
            config, platform, parts, Pipeline(parts.runner, launcher, slots), clock_s, deliver, thinker
        ),
    )
    return _load_or_calibrate(engine, progress)


def pairs_of(adaptation: Adaptation, choice: DraftChoice) -> tuple[Pair, ...]:
    """The (K, d) that costs are wanted of: the candidates, without any all that are prepared. Ascending."""
    if adaptation.control is not Control.SPEC:
        return ()
    config = None if adaptation.spec is None else adaptation.spec.config
    if config is not None:
        named = {(one.draft_steps, one.draft_loops) for one in config.candidates}
    else:
        depths: tuple[int | None, ...] = choice.loops or (None,)
        named = {(steps, depth) for steps in choice.widths or (choice.steps,) for depth in depths}
    return tuple(sorted(named, key=lambda pair: (pair[0], pair[1] or 0)))


def _load_or_calibrate(engine: _Engine, progress: Progress) -> Calibrated:
    adaptation = engine.adaptation
    if adaptation.table is not None:
        return _load(engine, adaptation.table)
    if adaptation.output is not None:
        check_output(adaptation.output, flag=adaptation.output_flag)
    settings = adaptation.settings
    notes: tuple[str, ...] = ()
    if adaptation.shipped:
        settings, notes = fit_shipped(settings, engine.geometry)
    effective = resolve(settings, engine.geometry, engine.tiers)
    notes = (*notes, *effective.notes, *_deviations(adaptation, settings))
    if not adaptation.cached:
        return _measured(engine, effective, notes, progress)
    path = cache_path(engine.facts, effective)
    bundle = read_cached(
        path,
        engine.facts,
        effective,
        control=adaptation.control,
        algorithm=engine.choice.algorithm,
        draft_width=engine.choice.steps,
    )
    if bundle is not None:
        source = f"{adaptation.source}, measured {bundle.created_at} and kept in {path}"
        _announce(engine, source, bundle.effective, notes)
        return Calibrated(bundle.table, source, bundle)
    measured = _measured(engine, effective, notes, progress)
    assert measured.bundle is not None
    if disturbances(measured.bundle):
        log.warning("costs of a busy machine are not kept: the next start measures again")
    else:
        keep(path, measured.bundle)
    return measured


def _measured(
    engine: _Engine, effective: Effective, notes: tuple[str, ...], progress: Progress
) -> Calibrated:
    adaptation = engine.adaptation
    _announce(engine, adaptation.source, effective, notes)
    bundle = calibrate(engine.service(), effective, engine.choice.algorithm, engine.facts, progress)
    if adaptation.output is not None:
        write_bundle(adaptation.output, bundle, flag=adaptation.output_flag)
        log.info("measured costs are saved in %s", adaptation.output)
    return Calibrated(bundle.table, adaptation.source, bundle)


def calibrate(
    service: Service, effective: Effective, algorithm: str, facts: Fingerprint, progress: Progress
) -> Bundle:
    """Measure every point of `effective` on an idle engine and fit the curves; logs how well they fit, and
    what in them says that the engine was not alone on the machine."""
    began_s = service.clock_s()
    measured = probe(service, effective, progress)
    table = fit_table(effective, measured.samples, measured.prefill_ms_per_token)
    quality = quality_of(table, measured.samples)
    log.info(
        "%d points measured in %s; residuals of the fit: median %.2f %%, worst %.2f %% (%s); a prompt token "
        "takes %.3f ms",
        len(measured.samples), duration(service.clock_s() - began_s), 100 * quality.median,
        100 * abs(quality.worst.error), describe(quality.worst.sample), measured.prefill_ms_per_token,
    )  # fmt: skip
    for fall in quality.falls:
        log.warning("costs fall with more rows: %s", fall)
    bundle = Bundle(
        control=effective.geometry.control,
        algorithm=algorithm,
        draft_width=effective.draft_width,
        fingerprint=facts,
        effective=effective,
        samples=measured.samples,
        table=table,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if busy := disturbances(bundle):
        log.warning(
            "something else ran on the machine while costs were measured, and by them how much is speculated "
            "may be chosen badly: %s%s", "; ".join(busy[:3]),
            f"; and {len(busy) - 3} more" if len(busy) > 3 else "",
        )  # fmt: skip
    return bundle


def _load(engine: _Engine, path: Path) -> Calibrated:
    adaptation = engine.adaptation
    loaded = read_bundle(
        path,
        flag=adaptation.table_flag,
        control=adaptation.control,
        algorithm=engine.choice.algorithm,
        draft_width=engine.choice.steps,
        fingerprint=engine.facts,
    )
    for warning in loaded.warnings:
        log.warning("%s", warning)
    source = f"--{adaptation.table_flag}={path}"
    if loaded.bundle is None:
        log.info(
            "%s adaptive effective configuration: source: %s, a bare table; coverage: %s",
            engine.choice.algorithm, source, json.dumps(coverage(loaded.table)),
        )  # fmt: skip
    else:
        source += f", measured {loaded.bundle.created_at}"
        _announce(engine, source, loaded.bundle.effective, (), loaded.table)
    return Calibrated(loaded.table, source, loaded.bundle)


def _announce(
    engine: _Engine,
    source: str,
    effective: Effective,
    notes: tuple[str, ...],
    table: CostTable | None = None,
) -> None:
    """The one line about what is measured: its source, every setting, what was captured, and what was
    changed."""
    described = effective_json(effective)
    words = f"; {'; '.join(notes)}" if notes else ""
    if table is not None:
        words += f"; coverage: {json.dumps(coverage(table))}"
    log.info(
        "%s adaptive effective configuration: source: %s; control: %s; settings: %s; captured: %s; "
        "%d points%s",
        engine.choice.algorithm, source, engine.adaptation.control, json.dumps(described["settings"]),
        json.dumps(described["captured"]), len(effective.points), words,
    )  # fmt: skip


def _deviations(adaptation: Adaptation, settings: CalibrationSettings) -> tuple[str, ...]:
    """Shipped settings are not the document's defaults, and the log says in what."""
    if not adaptation.shipped:
        return ()
    ours, defaults = to_json(settings), to_json(CalibrationSettings())
    other = [key for key in ours if ours[key] != defaults.get(key)]
    return (f"other than the built-in defaults: {', '.join(other)}",) if other else ()


def coverage(table: CostTable) -> list[dict[str, Any]]:
    """KV lengths by context, and for each number of draft steps (with loops, K@d) the rows that costs are
    known for."""
    curves = curves_of(table)
    return [
        {
            "kv_length": [context.min_kv_length, context.max_kv_length],
            "draft_steps": {
                f"{steps}@{depth}" if depth else str(steps): [curve.target_rows[0], curve.target_rows[-1]]
                for (at, steps, depth), curve in curves.items()
                if at == index
            },
        }
        for index, context in enumerate(table.contexts)
    ]
