"""The composition root: from a Config to a running engine. Everything is built once and handed over.

All device work happens on the launch thread, under inference mode; nothing here is imported by the
parts it assembles.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xspec import __version__
from xspec.config import Config
from xspec.draft.base import Drafter
from xspec.draft.choose import DraftChoice, choose_drafter
from xspec.engine.engine import Admission, AsyncEngine
from xspec.engine.threads import Threads
from xspec.exec.assemble import (
    Assembly,
    Speculation,
    assemble,
    check_abilities,
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
from xspec.policy.fixed import FixedPolicy
from xspec.progress import Progress, silent
from xspec.text.tokenizer import TextAssets, load_text

logger = logging.getLogger(__name__)


async def build_engine(config: Config, *, progress: Progress = silent) -> AsyncEngine:
    """Load, allocate, warm up and start. ConfigError names the flag that cannot be honoured."""
    platform = select_platform(config.execution.device)
    check_abilities(config, platform)
    path = locate_model(config.model.model or None)
    choice = choose_drafter(config.speculation, embedded=not config.model.model)
    text = await asyncio.to_thread(load_text, path)
    threads = Threads()
    drafter_of = partial(make_drafter, config, platform, path, choice)
    try:
        parts = await threads.call(
            lambda: assemble(config, platform, path, drafter_of, partial(_speculation, choice), progress)
        )
    except BaseException:
        await asyncio.to_thread(threads.close)
        raise
    return _start(config, platform, text, parts, threads, path, choice)


def _speculation(choice: DraftChoice | None, drafter: Drafter) -> Speculation:
    """A fixed policy plans one depth and one width."""
    if choice is None or choice.verify == 0:
        return Speculation()
    return Speculation(steps=(choice.steps,), widths=(choice.verify,))


def _start(
    config: Config,
    platform: Platform,
    text: TextAssets,
    parts: Assembly,
    threads: Threads,
    path: Path,
    choice: DraftChoice | None,
) -> AsyncEngine:
    pipeline = Pipeline(parts.runner, threads, ring_slots(config, platform))
    policy = FixedPolicy() if choice is None else FixedPolicy(choice.steps, choice.verify)
    driver = Driver(make_scheduler(config, parts), policy, pipeline, clock_s=time.monotonic)
    seed = config.execution.random_seed
    model_id = config.model.model_id or (path.stem if is_gguf(path) else path.resolve().name)
    info = _info(config, platform, parts, choice)
    logger.info("engine ready: %s", info)
    return AsyncEngine(
        model_id=model_id,
        text=text,
        driver=driver,
        threads=threads,
        metrics=Metrics(
            model_id,
            max_model_len=parts.max_model_len,
            draft_width=0 if choice is None else choice.steps,
        ),
        admission=Admission(
            max_model_len=parts.max_model_len,
            vocab_size=parts.target.spec.vocab_size,
            max_concurrent_requests=config.service.max_concurrent_requests,
            random_seed=random.SystemRandom().getrandbits(31) if seed == -1 else seed,
        ),
        info=info,
    )


def _info(config: Config, platform: Platform, parts: Assembly, choice: DraftChoice | None) -> dict[str, Any]:
    return {
        "version": __version__,
        "device": platform.name,
        "dtype": str(parts.dtype).removeprefix("torch."),
        "compute_threads": torch.get_num_threads(),
        "model_type": parts.target.spec.model_type,
        "max_model_len": parts.max_model_len,
        "block_size": config.cache.block_size,
        "kv_cache_bytes": parts.pool.bytes,
        "kv_cache_tokens": parts.pool.usable_pages * config.cache.block_size,
        "slots": ring_slots(config, platform),
        "buckets": [bucket.rows for bucket in parts.grid.buckets],
        "speculation": None
        if choice is None
        else {
            "algorithm": choice.algorithm,
            "drafter": "the target's own layers" if choice.path is None else choice.path.name,
            "num_speculative_tokens": choice.steps,
            "target_verify_width": choice.verify,
        },
        "settings": config.to_flat(non_default_only=True),
    }
