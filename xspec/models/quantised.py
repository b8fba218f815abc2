"""Where the quantised form of a checkpoint's linears comes from: its own blocks, or made as they are read.

Knows the values of --quantization and --draft_quantization, not how a device lays such weights out.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from xspec.errors import ConfigError, UnsupportedError
from xspec.kernels.quantised import GROUP, Blocks, quantise
from xspec.models.blocks import EMBEDDING, HEAD
from xspec.models.checkpoint import Checkpoint
from xspec.models.gguf_blocks import kept_kinds
from xspec.models.gguf_loader import GgufCheckpoint
from xspec.nn.linear import BlockSource

HEADS = frozenset((EMBEDDING, HEAD, "transformer.wte.weight"))  # a tied embedding is a head too

logger = logging.getLogger(__name__)


def block_source(checkpoint: Checkpoint, quantization: str, flag: str) -> BlockSource | None:
    """What `quantization` (a value of `flag`) makes of the checkpoint's linears; None: they stay dense.

    int8: all of them; int4: the head in 8 bits, as it decides between tokens, the others in 4. gguf: those
    stored in a kept type; the others stay dense, and so does a part that is fused with one that does.
    """
    match quantization:
        case "none":
            return None
        case "int8":
            return partial(_quantised, checkpoint, 8, flag)
        case "int4":
            return partial(_quantised, checkpoint, 4, flag)
        case "gguf":
            return _stored(checkpoint, flag)
    raise ConfigError(f"--{flag}={quantization}: allowed: none, int8, int4, gguf")


def _quantised(checkpoint: Checkpoint, bits: int, flag: str, name: str) -> Blocks:
    shape = checkpoint.shapes[name]
    if shape[-1] % GROUP:
        raise UnsupportedError(
            f"--{flag}=int{bits} cannot be had for {checkpoint.name}",
            [f"{name} has rows of {shape[-1]} weights; allowed: multiples of {GROUP}"],
        )
    weight = torch.empty(shape)
    checkpoint.read(name, weight)
    return quantise(weight, 8 if name in HEADS else bits)


def _stored(checkpoint: Checkpoint, flag: str) -> BlockSource:
    if not isinstance(checkpoint, GgufCheckpoint):
        raise ConfigError(
            f"--{flag}=gguf: {checkpoint.name} is not a GGUF file; allowed for it: none, int8, int4"
        )
    kept = {kind.name for kind in kept_kinds()}
    kinds = checkpoint.kinds()
    dense = {kind: count for kind, count in kinds.items() if kind not in kept}
    if len(dense) == len(kinds):
        raise UnsupportedError(
            f"--{flag}=gguf cannot be had for {checkpoint.name}",
            [f"its matrices are {_listed(kinds)}; kept are {', '.join(sorted(kept))}"],
        )
    if dense:
        logger.info("--%s=gguf: dequantised, as with none: %s", flag, _listed(dense))
    return checkpoint.blocks


def _listed(kinds: dict[str, int]) -> str:
    return ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items()))
