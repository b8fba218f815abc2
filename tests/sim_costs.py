"""Costs for simulations: those of a 2-core machine, from its measured ratios, as a plain function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.cost.bundle import Bundle
from xspec.cost.fit import fit_table
from xspec.cost.model import Sample
from xspec.cost.settings import CalibrationSettings, Control, Geometry, resolve
from xspec.policy.geometry import PolicyGeometry
from xspec.sched.scheduler import Limits
from xspec.sim.simulate import EngineShape

MEASURED_ROWS = (1, 2, 4, 8, 16, 32)
MEASURED_MS = (27.0, 29.0, 31.0, 37.0, 52.0, 90.0)
RATES = (0.60, 0.52, 0.67, 0.70, 0.50)
K = 5


def plain_ms(rows: int) -> float:
    if rows > MEASURED_ROWS[-1]:
        return MEASURED_MS[-1] + 2.0 * (rows - MEASURED_ROWS[-1])
    return float(np.interp(rows, MEASURED_ROWS, MEASURED_MS))


@dataclass(frozen=True)
class CpuCosts:
    """`draft_ms`: what a draft step takes (base, per request). `block_ms`: None: drafts come step by step;
    else one block takes this (base, per request) whatever its width."""

    draft_ms: tuple[float, float] = (3.2, 0.12)
    block_ms: tuple[float, float] | None = None
    most_rows: int = 10_000
    prefill_ms_per_token: float = 0.4

    def at(self, kv_lengths: Sequence[int]) -> CpuCosts | None:
        return None if max(kv_lengths) > 4096 else self

    def round_ms(
        self, draft_steps: int, requests: int, target_rows: int, depth: int | None = None
    ) -> float | None:
        if target_rows > self.most_rows:
            return None
        if self.block_ms is not None and draft_steps:
            return plain_ms(target_rows) + self.block_ms[0] + self.block_ms[1] * requests
        return plain_ms(target_rows) + draft_steps * (self.draft_ms[0] + self.draft_ms[1] * requests)


LANES = BucketGrid([1, 2, 4, 8, 12, 16, 20, 24, 28, 32])


def engine(
    *, tiers: TargetTiers | None = None, width: int = K, lanes: BucketGrid = LANES, slots: int = 2
) -> EngineShape:
    geometry = PolicyGeometry(lanes, tiers or TargetTiers(), width, "full_width")
    limits = Limits(
        max_tokens_per_batch=512,
        max_seqs_per_batch=lanes.max_rows,
        max_tokens_per_chunk=512,
        admission_memory_threshold=1.0,
    )
    return EngineShape(geometry, limits, slots)


def verify_tiers(width: int = K, lanes: BucketGrid = LANES) -> TargetTiers:
    """As captured: the first buckets that cover B, 2 B and so on."""
    return TargetTiers.pruned(lanes, BucketGrid.fine(lanes.max_rows * (width + 1)), width)


def bundle_of(
    control: Control, costs: CpuCosts, buckets: tuple[int, ...] = (1, 2, 4, 8), width: int = 3
) -> Bundle:
    """A saved table as a calibration would make it of these costs."""
    grid = BucketGrid(buckets)
    tiers = verify_tiers(width, grid)
    geometry = Geometry(
        control=control,
        draft_width=width,
        request_buckets=buckets,
        max_model_len=4096,
        cache_tokens=1_000_000,
        block_size=32,
        slots=2,
    )
    settings = CalibrationSettings(window_steps=4, windows_per_point=1)
    effective = resolve(settings, geometry, lambda lanes: tiers.of(lanes, width))
    samples = [
        Sample(
            draft_steps=point.draft_steps,
            requests=point.requests,
            target_rows=point.target_rows,
            context=point.context,
            kv_length=2500.0,
            windows_ms=(costs.round_ms(point.draft_steps, point.requests, point.target_rows) or 0.0,),
        )
        for point in effective.points
    ]
    return Bundle(
        control=control,
        algorithm="MTP",
        draft_width=width,
        fingerprint={"machine": "somewhere else"},
        effective=effective,
        samples=tuple(samples),
        table=fit_table(effective, samples, costs.prefill_ms_per_token),
        created_at="2025-01-01T00:00:00+00:00",
    )
