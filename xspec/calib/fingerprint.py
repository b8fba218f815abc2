"""What measured costs hold for, as plain facts: a saved table is only used where every one of them agrees.

Reads files and settings, runs nothing. What a fact's absence or change means is `cost.bundle`'s business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from xspec import __version__
from xspec.config import Config
from xspec.core.shapes import BucketGrid
from xspec.cost.settings import Control, Pair
from xspec.draft.choose import DraftChoice
from xspec.errors import CheckpointError
from xspec.exec.assemble import draft_quantization, ring_slots
from xspec.platform.base import Platform

Fingerprint = dict[str, str | int | bool]

EDGE_BYTES = 2**20
"""Read of the beginning and of the end of a large weight file."""

SAMPLES, SAMPLE_BYTES = 64, 2**14
"""Evenly spaced pieces read in between: a fine-tuned copy differs everywhere, so one of them tells."""


def fingerprint(
    config: Config,
    platform: Platform,
    *,
    model: Path,
    choice: DraftChoice,
    control: Control,
    dtype: torch.dtype,
    grid: BucketGrid,
    loops: int = 1,
    pairs: Sequence[Pair] = (),
) -> Fingerprint:
    """Everything the cost of a round depends on, apart from what the round itself says (its shape and KV
    length).

    How rounds are filled (token and chunk limits, admission) is left out: it decides which rounds run, not
    what they cost. Only `torch_patch` may differ between the table and the engine that loads it, and of
    `pairs`, the (K, d) to choose among, a table may have more.
    """
    execution, scheduler = config.execution, config.scheduler
    backend = execution.python_graph_backend
    chosen: Fingerprint = {}
    if control is Control.SPEC:
        named = ",".join(str(k) if d is None else f"{k}@{d}" for k, d in pairs)
        chosen = {"loops": loops, "pairs": named}
    return {
        **chosen,
        "control": str(control),
        "algorithm": choice.algorithm,
        "draft_width": choice.steps,
        "probabilistic_draft": config.speculation.enable_probabilistic_draft,
        "target": checkpoint_digest(model),
        "drafter": checkpoint_digest(model if choice.path is None else choice.path),
        "platform": platform.name,
        "device": platform.device_name(),
        "kernels": platform.kernels_name(),
        "compute_threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": config.model.quantization,
        "draft_quantization": draft_quantization(config, platform, choice, dtype),
        "xspec": __version__,
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "torch_patch": str(torch.__version__),
        "block_size": config.cache.block_size,
        "request_buckets": ",".join(str(bucket.rows) for bucket in grid.buckets),
        "slots": ring_slots(config, platform),
        "schedule_overlap": scheduler.enable_schedule_overlap,
        "task_pipeline": scheduler.enable_task_pipeline,
        "graph": execution.enable_graph,
        "graph_backend": platform.abilities.default_graph_backend if backend == "auto" else backend,
        "unified_graph": False,
        "dp_size": 1,
        "tp_size": 1,
        "cp_size": 1,
    }


def checkpoint_digest(path: Path) -> str:
    """A digest of a checkpoint's content that is quick however large it is.

    SHA-256 over config.json and, for every weight file by name, its name, size and bytes: of a large file its
    edges and `SAMPLES` pieces between, of a small one all. CheckpointError if a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        if path.is_dir():
            digest.update((path / "config.json").read_bytes())
            files = sorted(path.glob("*.safetensors"))
        else:
            files = [path]
        for file in files:
            size = file.stat().st_size
            digest.update(f"\0{file.name}\0{size}\0".encode())
            with file.open("rb") as opened:
                for piece in _pieces(opened, size):
                    digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """What is looked at of a file of `size` bytes."""
    if size <= 2 * EDGE_BYTES + SAMPLES * SAMPLE_BYTES:
        yield file.read()
        return
    yield file.read(EDGE_BYTES)
    stride = (size - 2 * EDGE_BYTES) // SAMPLES
    for index in range(SAMPLES):
        file.seek(EDGE_BYTES + index * stride)
        yield file.read(SAMPLE_BYTES)
    file.seek(size - EDGE_BYTES)
    yield file.read(EDGE_BYTES)
