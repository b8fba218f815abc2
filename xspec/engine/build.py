"""The composition root: from a Config to a running engine. Everything is built once and handed over.

All device work happens on the launch thread, under inference mode; nothing here is imported by the
parts it assembles.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xspec import __version__
from xspec.config import Config
from xspec.core.shapes import BucketGrid
from xspec.draft.none import NoDrafter
from xspec.engine.engine import Admission, AsyncEngine
from xspec.engine.threads import Threads
from xspec.errors import ConfigError, UnsupportedError
from xspec.exec.driver import Driver
from xspec.exec.graphs import DecodeGraphs
from xspec.exec.pipeline import Pipeline
from xspec.exec.rows import DeviceRows
from xspec.exec.runner import Runner
from xspec.kv.layout import KVLayout
from xspec.kv.pool import KVPool
from xspec.metrics import Metrics
from xspec.models.base import Target
from xspec.models.loader import load_target
from xspec.models.locate import is_gguf, locate_model
from xspec.platform.base import Platform
from xspec.platform.select import select_platform
from xspec.policy.fixed import FixedPolicy
from xspec.progress import Progress, silent
from xspec.sched.pages import PageAllocator
from xspec.sched.scheduler import Limits, Scheduler
from xspec.text.tokenizer import TextAssets, load_text
from xspec.verify.state import SamplingState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the launch thread builds."""

    target: Target
    runner: Runner
    pool: KVPool
    grid: BucketGrid
    max_model_len: int
    dtype: torch.dtype


async def build_engine(config: Config, *, progress: Progress = silent) -> AsyncEngine:
    """Load, allocate, warm up and start. ConfigError names the flag that cannot be honoured."""
    platform = select_platform(config.execution.device)
    dtype = _check_abilities(config, platform)
    path = locate_model(config.model.model or None)
    text = await asyncio.to_thread(load_text, path)
    threads = Threads()
    try:
        parts = await threads.call(lambda: _assemble(config, platform, dtype, path, progress))
    except BaseException:
        await asyncio.to_thread(threads.close)
        raise
    return _start(config, platform, text, parts, threads, path)


def _check_abilities(config: Config, platform: Platform) -> torch.dtype:
    """Every demand on the platform at once; returns the dtype to compute in."""
    reasons: list[str] = []
    abilities = platform.abilities
    name = config.model.dtype
    dtype = abilities.default_dtype if name == "auto" else getattr(torch, name)
    if dtype not in abilities.dtypes:
        allowed = sorted(str(d).removeprefix("torch.") for d in abilities.dtypes)
        reasons.append(f"--dtype={name}: {platform.name} computes in {', '.join(allowed)}")
    backend = config.execution.python_graph_backend
    if backend != "auto" and backend not in abilities.graph_backends:
        known = ", ".join(sorted(abilities.graph_backends))
        reasons.append(f"--python_graph_backend={backend}: {platform.name} has {known}")
    if reasons:
        raise UnsupportedError("this configuration cannot run", reasons)
    return dtype


@torch.inference_mode()
def _assemble(
    config: Config, platform: Platform, dtype: torch.dtype, path: Path, progress: Progress
) -> _Parts:
    kernels = platform.kernels()
    target = load_target(
        path, kernels, dtype=dtype, device=platform.device(), progress=partial(progress, "loading")
    )
    spec = target.spec
    layout = spec.kv_layout(config.cache.block_size, dtype)
    pages, max_model_len = _size_cache(config, platform, target, layout)
    pool = KVPool(layout, pages, kernels)
    max_seqs = config.scheduler.max_seqs_per_batch
    rows = DeviceRows(max_seqs, layout.pages_of(max_model_len), layout.block_size, platform.device())
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    sampling = SamplingState(max_seqs + 1, spec.vocab_size, platform.device(), dtype=exact)
    grid = _grid(config, platform)
    backend = config.execution.python_graph_backend
    backend = platform.abilities.default_graph_backend if backend == "auto" else backend
    graphs = DecodeGraphs(
        platform,
        target,
        rows,
        pool.slabs,
        grid=grid,
        slots=_slots(config, platform),
        enabled=config.execution.enable_graph and backend != "off",
    )
    runner = Runner(
        platform=platform,
        target=target,
        drafter=NoDrafter(),
        rows=rows,
        sampling=sampling,
        kv=pool.slabs,
        graphs=graphs,
    )
    if not config.execution.disable_graph_warmup:
        graphs.capture_all(progress)
    return _Parts(target, runner, pool, grid, max_model_len, dtype)


def _slots(config: Config, platform: Platform) -> int:
    """Overlap off is the same engine with the ring cut to one slot."""
    overlapped = config.scheduler.enable_schedule_overlap and config.scheduler.enable_task_pipeline
    return platform.abilities.ring_slots if overlapped else 1


def _grid(config: Config, platform: Platform) -> BucketGrid:
    max_seqs = config.scheduler.max_seqs_per_batch
    if config.execution.enable_graph_mode_decode_no_padding:
        return BucketGrid.exact(max_seqs)
    return platform.bucket_grid(max_seqs)


def _size_cache(config: Config, platform: Platform, target: Target, layout: KVLayout) -> tuple[int, int]:
    """(pages with scratch, max_model_len): one sequence of full length must always fit."""
    asked = config.model.max_model_len
    longest = target.spec.max_position
    if asked > longest:
        raise ConfigError(f"--max_model_len={asked}: the checkpoint allows at most {longest}")
    max_model_len = asked or longest
    budget = config.cache.max_cache_size or _default_cache_bytes(config, platform, layout, max_model_len)
    useful = config.scheduler.max_seqs_per_batch * layout.pages_of(max_model_len) + 1
    pages = min(layout.pages_for(budget), useful)
    capacity = max(0, pages - 1) * layout.block_size
    if capacity < max_model_len and asked:
        raise ConfigError(
            f"--max_model_len={asked} does not fit a KV cache of {budget} bytes, which holds {capacity} "
            f"tokens of {layout.token_bytes} bytes: raise --max_cache_size or lower --max_model_len"
        )
    if capacity < max_model_len:
        logger.warning(
            "max_model_len is %d, not the checkpoint's %d: the KV cache holds no more", capacity, longest
        )
        max_model_len = capacity
    if not config.scheduler.enable_chunked_prefill and config.scheduler.max_tokens_per_batch < max_model_len:
        raise ConfigError(
            f"--enable_chunked_prefill=false needs --max_tokens_per_batch of at least max_model_len "
            f"({max_model_len}), got {config.scheduler.max_tokens_per_batch}"
        )
    return pages, max_model_len


def _default_cache_bytes(config: Config, platform: Platform, layout: KVLayout, max_model_len: int) -> int:
    """`max_memory_utilization` of what is free, but no more than the platform takes unasked."""
    free, _ = platform.memory_bytes()
    share = int(free * config.cache.max_memory_utilization)
    modest = platform.abilities.modest_cache_bytes
    one_sequence = (layout.pages_of(max_model_len) + 1) * layout.page_bytes
    return share if modest is None else min(share, max(modest, one_sequence))


def _start(
    config: Config, platform: Platform, text: TextAssets, parts: _Parts, threads: Threads, path: Path
) -> AsyncEngine:
    scheduler_config = config.scheduler
    pages = PageAllocator(
        parts.pool.usable_pages, config.cache.block_size, prefix_cache=config.cache.enable_prefix_cache
    )
    chunk = scheduler_config.max_tokens_per_chunk_for_prefill
    limits = Limits(
        max_tokens_per_batch=scheduler_config.max_tokens_per_batch,
        max_seqs_per_batch=scheduler_config.max_seqs_per_batch,
        max_tokens_per_chunk=scheduler_config.max_tokens_per_batch if chunk == -1 else chunk,
        chunked_prefill=scheduler_config.enable_chunked_prefill,
        mix_batch=scheduler_config.enable_mix_batch,
        admission_memory_threshold=scheduler_config.prefill_scheduling_memory_usage_threshold,
    )
    scheduler = Scheduler(pages, limits, parts.grid)
    pipeline = Pipeline(parts.runner, threads, _slots(config, platform))
    driver = Driver(scheduler, FixedPolicy(), pipeline, clock_s=time.monotonic)
    seed = config.execution.random_seed
    model_id = config.model.model_id or (path.stem if is_gguf(path) else path.resolve().name)
    info = _info(config, platform, parts)
    logger.info("engine ready: %s", info)
    return AsyncEngine(
        model_id=model_id,
        text=text,
        driver=driver,
        threads=threads,
        metrics=Metrics(model_id, max_model_len=parts.max_model_len),
        admission=Admission(
            max_model_len=parts.max_model_len,
            vocab_size=parts.target.spec.vocab_size,
            max_concurrent_requests=config.service.max_concurrent_requests,
            random_seed=random.SystemRandom().getrandbits(31) if seed == -1 else seed,
        ),
        info=info,
    )


def _info(config: Config, platform: Platform, parts: _Parts) -> dict[str, Any]:
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
        "slots": _slots(config, platform),
        "buckets": [bucket.rows for bucket in parts.grid.buckets],
        "settings": config.to_flat(non_default_only=True),
    }
