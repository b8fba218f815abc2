"""From a config and a checkpoint to everything that computes a round, built once on the launch thread.

Shared by the engine, calibration and training; knows nothing of asyncio, text or HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from xspec.config import Config
from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.draft.base import Drafter, DraftMemory
from xspec.draft.choose import DraftChoice
from xspec.draft.looped import LoopedDrafter
from xspec.draft.make import load_drafter
from xspec.draft.none import NoDrafter
from xspec.errors import ConfigError, UnsupportedError
from xspec.exec.graphs import Parts, RoundGraphs
from xspec.exec.passes import LoopedPasses, TargetPasses, WholePasses
from xspec.exec.pick import Picker
from xspec.exec.rows import DeviceRows
from xspec.exec.runner import Runner
from xspec.kv.layout import KVLayout
from xspec.kv.pool import RESERVED_PAGES, KVPool
from xspec.models.base import Target
from xspec.models.loader import load_target
from xspec.platform.base import Platform
from xspec.progress import Progress
from xspec.sched.pages import PageAllocator
from xspec.sched.scheduler import Limits, Scheduler
from xspec.verify.state import SamplingState

logger = logging.getLogger(__name__)

MakeDrafter = Callable[[Target], Drafter]


@dataclass(frozen=True, slots=True)
class Assembly:
    """What the launch thread builds."""

    target: Target
    drafter: Drafter
    runner: Runner
    pool: KVPool
    grid: BucketGrid
    tiers: TargetTiers
    max_model_len: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the policy may plan: draft steps and verified drafts, 0 (plain) always included; row budgets.

    `pairs`: the (K, d) of a looped target; `shadows`: its rounds may be shadow rounds.
    """

    steps: Sequence[int] = ()
    widths: Sequence[int] = ()
    tiers: TargetTiers = field(default_factory=TargetTiers)
    pairs: Sequence[tuple[int, int]] = ()
    shadows: bool = False


def check_abilities(config: Config, platform: Platform) -> torch.dtype:
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
    reasons += _quantization_gaps(config, platform, dtype)
    if reasons:
        raise UnsupportedError("this configuration cannot run", reasons)
    return dtype


def _quantization_gaps(config: Config, platform: Platform, dtype: torch.dtype) -> list[str]:
    reasons = []
    gap = platform.abilities.quantization_gap
    for flag, value in (
        ("quantization", config.model.quantization),
        ("draft_quantization", config.speculation.draft_quantization),
    ):
        if value in ("none", "auto"):
            continue
        if dtype is not torch.bfloat16:
            found = str(dtype).removeprefix("torch.")
            shown = f"--dtype={config.model.dtype}" + (
                f" means {found} here" if config.model.dtype == "auto" else ""
            )
            reasons.append(f"--{flag}={value} needs --dtype=bfloat16; {shown}")
        if gap:
            reasons.append(f"--{flag}={value}: {gap}; allowed: none")
    return reasons


def draft_quantization(config: Config, platform: Platform, choice: DraftChoice, dtype: torch.dtype) -> str:
    """How the drafter's weights are kept. auto: the shipped drafters draft as well with int4, and faster."""
    asked = config.speculation.draft_quantization
    if asked != "auto":
        return asked
    able = dtype is torch.bfloat16 and not platform.abilities.quantization_gap
    return "int4" if choice.shipped and able else "none"


@torch.inference_mode()
def assemble(
    config: Config,
    platform: Platform,
    path: Path,
    make_drafter: MakeDrafter,
    speculation: Callable[[BucketGrid], Speculation],
    progress: Progress,
) -> Assembly:
    """Load target and drafter, allocate, warm up. ConfigError names the flag that cannot be honoured."""
    dtype = check_abilities(config, platform)
    kernels, device = platform.kernels(), platform.device()
    threshold = config.model.early_exit_threshold
    target = load_target(
        path,
        kernels,
        dtype=dtype,
        device=device,
        quantization=config.model.quantization,
        early_exit_threshold=threshold or None,
        progress=partial(progress, "loading"),
    )
    spec = target.spec
    if config.execution.batch_invariant:
        _check_row_dependence(kernels.row_dependence(config.cache.block_size, spec.head_dim, dtype))
    drafter = make_drafter(target)
    layout = KVLayout(spec.planes, config.cache.block_size, dtype, drafter.spec.planes)
    pages, max_model_len = _size_cache(config, platform, target, layout)
    pool = KVPool(layout, pages, kernels, device)
    max_seqs = config.scheduler.max_seqs_per_batch
    rows = DeviceRows(
        max_seqs,
        layout.pages_of(max_model_len),
        layout.block_size,
        device,
        sink_page=pool.sink_page,
        kernels=kernels,
    )
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    sampling = SamplingState(
        max_seqs + 1, spec.vocab_size, device, dtype=exact, fused=kernels.fuse_draws(dtype)
    )
    drafter.attach(
        DraftMemory(
            rows=max_seqs + 1,
            slabs=pool.draft,
            page_state=pool.page_state,
            sink_page=pool.sink_page,
            block_size=layout.block_size,
            target_slabs=pool.target,
        )
    )
    grid = _grid(config, platform)
    backend = config.execution.python_graph_backend
    backend = platform.abilities.default_graph_backend if backend == "auto" else backend
    picker = Picker(sampling, probabilistic=config.speculation.enable_probabilistic_draft)
    allowed = speculation(grid)
    graphs = RoundGraphs(
        Parts(platform, _passes(target, drafter, pool.target, picker), drafter, rows, picker),
        grid=grid,
        slots=ring_slots(config, platform),
        steps=allowed.steps,
        widths=allowed.widths,
        tiers=allowed.tiers,
        pairs=allowed.pairs,
        shadows=allowed.shadows,
        enabled=config.execution.enable_graph and backend != "off",
    )
    runner = Runner(
        platform=platform,
        target=target,
        drafter=drafter,
        rows=rows,
        sampling=sampling,
        kv=pool.target,
        slabs=pool.slabs,
        graphs=graphs,
    )
    if not config.execution.disable_graph_warmup:
        graphs.capture_all(progress)
    return Assembly(target, drafter, runner, pool, grid, allowed.tiers, max_model_len, dtype)


def _passes(target: Target, drafter: Drafter, kv: tuple[torch.Tensor, ...], pick: Picker) -> TargetPasses:
    if isinstance(drafter, LoopedDrafter):
        return LoopedPasses(target, drafter, pick)
    return WholePasses(target, kv, drafter.spec.taps)


def _check_row_dependence(reasons: Sequence[str]) -> None:
    if reasons:
        raise UnsupportedError(
            "--batch_invariant=true needs the whole target on the native kernels (--dtype=bfloat16)",
            reasons,
        )


def make_drafter(
    config: Config, platform: Platform, model: Path, choice: DraftChoice | None, target: Target
) -> Drafter:
    """The drafter of `choice` for `target`, not attached yet; the null drafter without one."""
    if choice is None:
        return NoDrafter()
    dtype = check_abilities(config, platform)
    return load_drafter(
        choice.algorithm,
        choice.path,
        model=model,
        target=target,
        kernels=platform.kernels(),
        dtype=dtype,
        device=platform.device(),
        steps=choice.steps,
        quantization=draft_quantization(config, platform, choice, dtype),
        loops=choice.loops,
    )


def make_scheduler(config: Config, parts: Assembly, *, prefix_cache: bool | None = None) -> Scheduler:
    """`prefix_cache`: overrides the configuration's."""
    settings = config.scheduler
    cached = config.cache.enable_prefix_cache if prefix_cache is None else prefix_cache
    pages = PageAllocator(parts.pool.usable_pages, config.cache.block_size, prefix_cache=cached)
    chunk = settings.max_tokens_per_chunk_for_prefill
    limits = Limits(
        max_tokens_per_batch=settings.max_tokens_per_batch,
        max_seqs_per_batch=settings.max_seqs_per_batch,
        max_tokens_per_chunk=settings.max_tokens_per_batch if chunk == -1 else chunk,
        chunked_prefill=settings.enable_chunked_prefill,
        mix_batch=settings.enable_mix_batch,
        admission_memory_threshold=settings.prefill_scheduling_memory_usage_threshold,
    )
    return Scheduler(pages, limits, parts.grid, draft_block=parts.drafter.spec.block, tiers=parts.tiers)


def ring_slots(config: Config, platform: Platform) -> int:
    """Overlap off is the same engine with the ring cut to one slot."""
    overlapped = config.scheduler.enable_schedule_overlap and config.scheduler.enable_task_pipeline
    return platform.abilities.ring_slots if overlapped else 1


def _grid(config: Config, platform: Platform) -> BucketGrid:
    max_seqs = config.scheduler.max_seqs_per_batch
    if config.execution.enable_graph_mode_decode_no_padding:
        return BucketGrid.exact(max_seqs)
    return platform.bucket_grid(max_seqs)


def _size_cache(config: Config, platform: Platform, target: Target, layout: KVLayout) -> tuple[int, int]:
    """(pages with the reserved ones, max_model_len): one sequence of full length must always fit."""
    asked = config.model.max_model_len
    longest = target.spec.max_position
    if asked > longest:
        raise ConfigError(f"--max_model_len={asked}: the checkpoint allows at most {longest}")
    max_model_len = asked or longest
    budget = config.cache.max_cache_size or _default_cache_bytes(config, platform, layout, max_model_len)
    useful = config.scheduler.max_seqs_per_batch * layout.pages_of(max_model_len) + RESERVED_PAGES
    pages = min(layout.pages_for(budget), useful)
    capacity = max(0, pages - RESERVED_PAGES) * layout.block_size
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
    one_sequence = (layout.pages_of(max_model_len) + RESERVED_PAGES) * layout.page_bytes
    return share if modest is None else min(share, max(modest, one_sequence))
