"""From files to a Target: open the checkpoint, check it against its config, build, pack.

Knows no family and no kernel by name; peak memory is the packed model and the matrix being packed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from xspec.errors import CheckpointError
from xspec.kernels.base import Kernels
from xspec.kernels.quantised import Blocks
from xspec.models.base import Target
from xspec.models.blocks import (
    ROPE_FACTORS,
    LayerBuilder,
    build_decoder,
    optional_tensors,
    tensor_shapes,
)
from xspec.models.checkpoint import Checkpoint, Shapes, check_tensors
from xspec.models.config import DecoderConfig
from xspec.models.gguf_loader import GgufCheckpoint
from xspec.models.locate import is_gguf
from xspec.models.looped import LoopedConfig, LoopedDecoder, check_planes, with_exit_threshold
from xspec.models.quantised import block_source
from xspec.models.registry import LOOPED, read_config
from xspec.models.safetensors_loader import SafetensorsCheckpoint
from xspec.nn.rope import RopeScaling

Progress = Callable[[int, int], None]
"""Called with (weights read, weights in all) after every tensor."""

_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")


def open_checkpoint(path: Path) -> Checkpoint:
    """`path` as models/locate.py returns it."""
    return GgufCheckpoint(path) if is_gguf(path) else SafetensorsCheckpoint(path)


def decoder_config(checkpoint: Checkpoint) -> DecoderConfig:
    config = read_config(checkpoint.config, checkpoint.name)
    if config.num_layers > len(checkpoint.shapes):  # before listing what a billion layers would lack
        raise CheckpointError(
            f"{checkpoint.name}: its config says {config.num_layers} layers, "
            f"it holds {len(checkpoint.shapes)} tensors"
        )
    if isinstance(config, LoopedConfig):
        check_planes(config, checkpoint.shapes, checkpoint.name)
    if ROPE_FACTORS in checkpoint.shapes:  # only GGUF stores scaled frequencies as a tensor
        rope = dataclasses.replace(config.rope, scaling=RopeScaling.FACTORS)
        config = dataclasses.replace(config, rope=rope)
    return config


def mtp_tensors(config: DecoderConfig, names: Iterable[str]) -> frozenset[str]:
    """Those of the MTP layers the config announces after its own: a drafter's business (draft/mtp.py)."""
    first, last = config.num_layers, config.num_layers + config.mtp_layers - 1
    numbered = ((name, _LAYER.match(name)) for name in names)
    return frozenset(name for name, layer in numbered if layer and first <= int(layer[1]) <= last)


def load_target(
    path: Path,
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "none",
    early_exit_threshold: float | None = None,
    progress: Progress | None = None,
) -> Target:
    """The checkpoint at `path`, its linears kept as --quantization says (see models.quantised).

    A LoopedTarget if its spec has a state_size. `early_exit_threshold`: in place of its config's.
    """
    checkpoint = open_checkpoint(path)
    try:
        config = with_exit_threshold(decoder_config(checkpoint), early_exit_threshold, checkpoint.name)
        expected, optional = _tensors(config)
        check_tensors(checkpoint, expected, optional | mtp_tensors(config, checkpoint.shapes))
        source = block_source(checkpoint, quantization, "quantization")
        left = {name: math.prod(shape) for name, shape in expected.items()}
        total = sum(left.values())

        def read(name: str) -> None:
            left.pop(name, None)  # a tied embedding is read twice
            if progress is not None:
                progress(total - sum(left.values()), total)

        def fill(name: str, out: torch.Tensor) -> None:
            checkpoint.read(name, out)
            read(name)

        def blocks(name: str) -> Blocks | None:
            found = None if source is None else source(name)
            if found is not None:
                read(name)
            return found

        build = LayerBuilder(config, fill, kernels, dtype, device, None if source is None else blocks)
        if isinstance(config, LoopedConfig):
            return LoopedDecoder(config, LOOPED[config.model_type].build(config, build), dtype)
        return build_decoder(build)
    finally:
        checkpoint.close()


def _tensors(config: DecoderConfig) -> tuple[Shapes, frozenset[str]]:
    """Tensors that must be there, and those that may be."""
    if isinstance(config, LoopedConfig):
        family = LOOPED[config.model_type]
        return family.tensor_shapes(config), family.optional_tensors(config)
    return tensor_shapes(config), optional_tensors(config)
