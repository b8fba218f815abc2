"""The composition root: from a Config to a running engine. Everything is built once and handed over.

All device work happens on the launch thread, under inference mode; nothing here is imported by the
parts it assembles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xspec import __version__
from xspec.calib.calibrate import Calibrated, calibrated_costs
from xspec.calib.choose import (
    Adaptation,
    check_candidates,
    choose_adaptation,
    choose_spec,
    speculation_of,
)
from xspec.calib.service import Thinker
from xspec.config import Config
from xspec.cost.model import Costs
from xspec.cost.settings import CalibrationSettings, Control
from xspec.draft.choose import DraftChoice, choose_drafter
from xspec.engine.engine import Admission, AsyncEngine
from xspec.engine.rehearsal import Rehearsal
from xspec.engine.threads import Threads
from xspec.exec.assemble import (
    Assembly,
    assemble,
    check_abilities,
    draft_quantization,
    make_drafter,
    make_scheduler,
    ring_slots,
)
from xspec.exec.driver import Driver
from xspec.exec.pipeline import Pipeline
from xspec.metrics import Metrics
from xspec.models.locate import is_gguf, locate_model
from xspec.platform.base import Platform
from xspec.platform.select import select_platform
from xspec.policy.make_spec import ACCEPTANCE_EMA, FIXED
from xspec.policy.named import Adaptive, Policies, Selection
from xspec.policy.spec_config import spec_config_json
from xspec.progress import Progress, silent
from xspec.text.tokenizer import TextAssets, load_text
from xspec.trace import RoundTrace, check_trace_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choices:
    """What the flags mean, settled before anything is loaded."""

    config: Config
    platform: Platform
    model: Path
    drafter: DraftChoice | None
    adaptation: Adaptation | None


@dataclass(frozen=True, slots=True)
class Built:
    """Everything that computes rounds, warm and measured; `threads` run it."""

    choices: Choices
    parts: Assembly
    threads: Threads
    costs: Calibrated | None


def choose(config: Config, *, whole_grid: bool = False) -> Choices:
    """Refuses what cannot be honoured: ConfigError or UnsupportedError naming the flags.

    `whole_grid`: --speculation_policy is given no candidates, so that all (K, d) are prepared and measured.
    """
    platform = select_platform(config.execution.device, config.execution.cpu_kernels)
    check_abilities(config, platform)
    model = locate_model(config.model.model or None)
    spec = choose_spec(config, model, whole_grid=whole_grid)
    drafter = choose_drafter(
        config.speculation,
        embedded=not config.model.model,
        model=model,
        candidates=None if spec is None else spec.candidates,
        exit_threshold=config.model.early_exit_threshold,
    )
    adaptation = choose_adaptation(config, platform, drafter, spec)
    if spec is not None and drafter is not None:
        check_candidates(spec, drafter, model)
    if config.execution.round_trace:
        check_trace_file(config.execution.round_trace)
    return Choices(config, platform, model, drafter, adaptation)


async def build_parts(
    choices: Choices, *, progress: Progress = silent, text: TextAssets | None = None
) -> Built:
    """Load, allocate, warm up and calibrate. The caller closes the threads. `text`: where it is loaded."""
    config, platform = choices.config, choices.platform
    threads = Threads()
    drafter_of = partial(make_drafter, config, platform, choices.model, choices.drafter)
    speculation = partial(speculation_of, choices.adaptation, choices.drafter, platform)
    try:
        parts = await threads.call(
            lambda: assemble(config, platform, choices.model, drafter_of, speculation, progress)
        )
        costs = None
        if choices.adaptation is not None and choices.adaptation.measures:
            if text is None:
                text = await asyncio.to_thread(load_text, choices.model)
            costs = await asyncio.to_thread(_measure, choices, parts, threads, text, progress)
    except BaseException:
        await asyncio.to_thread(threads.close)
        raise
    return Built(choices, parts, threads, costs)


def _measure(
    choices: Choices, parts: Assembly, threads: Threads, text: TextAssets, progress: Progress
) -> Calibrated | None:
    adaptation, drafter = choices.adaptation, choices.drafter
    if adaptation is None or drafter is None:
        return None
    metrics = _metrics("calibration", choices, parts)
    with contextlib.closing(Rehearsal(text, metrics)) as rehearsal:
        return calibrated_costs(
            adaptation,
            choices.config,
            choices.platform,
            parts,
            drafter,
            threads,
            model=choices.model,
            progress=progress,
            deliver=rehearsal,
            thinker=_thinker(choices, parts),
        )


async def build_engine(config: Config, *, progress: Progress = silent) -> AsyncEngine:
    """Load, allocate, warm up, calibrate and start. ConfigError names the flag that cannot be honoured."""
    choices = choose(config)
    text = await asyncio.to_thread(load_text, choices.model)
    built = await build_parts(choices, progress=progress, text=text)
    try:
        return _start(built, text)
    except BaseException:
        await asyncio.to_thread(built.threads.close)
        raise


def _start(built: Built, text: TextAssets) -> AsyncEngine:
    choices, parts = built.choices, built.parts
    config, path = choices.config, choices.model
    pipeline = Pipeline(parts.runner, built.threads, ring_slots(config, choices.platform))
    costs = built.costs
    table, uncovered = (None, "") if costs is None else (costs.table, costs.uncovered)
    policies = _policies(choices, parts, table, uncovered)
    info = _info(built)
    trace = RoundTrace(config.execution.round_trace, info) if config.execution.round_trace else None
    driver = Driver(
        make_scheduler(config, parts), policies.default(), pipeline, clock_s=time.monotonic, witness=trace
    )
    seed = config.execution.random_seed
    model_id = config.model.model_id or (path.stem if is_gguf(path) else path.resolve().name)
    logger.info("engine ready: %s", info)
    return AsyncEngine(
        model_id=model_id,
        text=text,
        driver=driver,
        threads=built.threads,
        metrics=_metrics(model_id, choices, parts),
        admission=Admission(
            max_model_len=parts.max_model_len,
            vocab_size=parts.target.spec.vocab_size,
            max_concurrent_requests=config.service.max_concurrent_requests,
            random_seed=random.SystemRandom().getrandbits(31) if seed == -1 else seed,
        ),
        info=info,
        policies=policies.named,
        trace=trace,
    )


def _metrics(model_id: str, choices: Choices, parts: Assembly) -> Metrics:
    drafter, adaptation = choices.drafter, choices.adaptation
    return Metrics(
        model_id,
        max_model_len=parts.max_model_len,
        draft_width=0 if drafter is None else drafter.steps,
        adaptive=adaptation is not None,
        pairs=adaptation is not None and adaptation.spec is not None,
    )


def _policies(choices: Choices, parts: Assembly, costs: Costs | None, uncovered: str) -> Policies:
    """`uncovered`: what rounds without a cost run, of no meaning without costs."""
    drafter, adaptation = choices.drafter, choices.adaptation
    if drafter is None:
        return Policies(parts.grid, parts.tiers)
    adaptive = None
    if adaptation is not None and adaptation.spec is None and costs is not None:
        adaptive = Adaptive(adaptation.control, costs, adaptation.policy, uncovered)
    spec = parts.drafter.spec
    return Policies(
        parts.grid,
        parts.tiers,
        drafter.widths or spec.steps,
        drafter.steps,
        drafter.verify,
        adaptive,
        depths=spec.depths,
        loops=parts.target.spec.loops if spec.depths else None,
        selection=_selection(choices, costs),
    )


def _selection(choices: Choices, costs: Costs | None) -> Selection | None:
    """What --speculation_policy says, or the depth of a looped target that drafts by the flags alone."""
    drafter, adaptation = choices.drafter, choices.adaptation
    if adaptation is not None and adaptation.spec is not None:
        return Selection(adaptation.spec.policy, adaptation.spec.config, costs)
    if drafter is not None and drafter.loops:
        return Selection(FIXED, depth=drafter.loops[-1])
    return None


def _thinker(choices: Choices, parts: Assembly) -> Thinker | None:
    """What a calibration has think along; None where nothing will adapt by the flags, as while candidates
    are still being looked for."""
    spec = None if choices.adaptation is None else choices.adaptation.spec
    if spec is not None and spec.config is None and spec.policy == ACCEPTANCE_EMA:
        return None
    return lambda costs: _policies(choices, parts, costs, CalibrationSettings().uncovered).default()


def _adaptation_facts(adaptation: Adaptation) -> dict[str, Any]:
    """The control and every setting of its policy, defaults included."""
    if adaptation.spec is not None:
        spec = adaptation.spec
        facts = {"control": str(adaptation.control), "policy": spec.policy, "source": spec.source}
        return facts if spec.config is None else {**facts, "config": spec_config_json(spec.config)}
    settings = asdict(adaptation.policy)
    if adaptation.control is Control.TARGET_VERIFY:  # it has no more than these
        settings = {name: settings[name] for name in ("switch_min_gain", "allow_plain_rounds")}
    return {"control": str(adaptation.control), **settings}


def _info(built: Built) -> dict[str, Any]:
    choices, parts, costs = built.choices, built.parts, built.costs
    config, drafter = choices.config, choices.drafter
    return {
        "version": __version__,
        "device": choices.platform.name,
        "kernels": choices.platform.kernels_name(),
        "dtype": str(parts.dtype).removeprefix("torch."),
        "quantization": config.model.quantization,
        "compute_threads": torch.get_num_threads(),
        "model_type": parts.target.spec.model_type,
        "max_model_len": parts.max_model_len,
        "block_size": config.cache.block_size,
        "kv_cache_bytes": parts.pool.bytes,
        "kv_cache_tokens": parts.pool.usable_pages * config.cache.block_size,
        "slots": ring_slots(config, choices.platform),
        "buckets": [bucket.rows for bucket in parts.grid.buckets],
        "speculation": None
        if drafter is None
        else {
            "algorithm": drafter.algorithm,
            "drafter": "the target's own layers" if drafter.path is None else drafter.path.name,
            "quantization": draft_quantization(config, choices.platform, drafter, parts.dtype),
            "num_speculative_tokens": drafter.steps,
            "target_verify_width": drafter.verify,
            "draft_loops": list(drafter.loops),
        },
        "adaptation": None if choices.adaptation is None else _adaptation_facts(choices.adaptation),
        "calibration": None if costs is None else costs.facts(),
        "settings": config.to_flat(non_default_only=True),
    }
