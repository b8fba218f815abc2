"""model_type ouro (arXiv 2510.25741): sandwich norms, the model's norm inside every loop, an exit gate.

The normalised state of a loop is at once the next loop's input and what gate and head read: the head adds
no norm of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xspec.models import blocks
from xspec.models.blocks import EMBEDDING, FINAL_NORM, HEAD, LayerBuilder, layer_prefix
from xspec.models.config import read_decoder_as
from xspec.models.looped import (
    DECODER_KEYS,
    EXIT_FLAG,
    ExitGate,
    LoopedConfig,
    LoopedFamily,
    LoopedParts,
    read_threshold,
    refuse_unknown,
)
from xspec.nn.embed import Embedding
from xspec.nn.stack import SandwichLayer

LOOPS = "total_ut_steps"
GATE = "model.early_exit_gate"
OUTPUT_NORMS = ("input_layernorm_2.weight", "post_attention_layernorm_2.weight")
SWITCHES = {"attention_bias": False, "mlp_bias": False, "early_exit_step": None}
# What the published class reads and never uses.
UNUSED = frozenset({"chunk_size"})


def read_config(raw: Mapping[str, Any]) -> LoopedConfig:
    return read_decoder_as(
        LoopedConfig,
        raw,
        check=lambda config: refuse_unknown(config, DECODER_KEYS | UNUSED | {LOOPS, EXIT_FLAG}, SWITCHES),
        loops=lambda config: config.size(LOOPS, 4),
        exit_threshold=read_threshold,
    )


def tensor_shapes(config: LoopedConfig) -> dict[str, tuple[int, ...]]:
    shapes = blocks.tensor_shapes(config)
    for layer in range(config.num_layers):
        shapes |= {f"{layer_prefix(layer)}{name}": (config.hidden_size,) for name in OUTPUT_NORMS}
    return shapes | {f"{GATE}.weight": (1, config.hidden_size), f"{GATE}.bias": (1,)}


def build(config: LoopedConfig, build: LayerBuilder) -> LoopedParts:
    hidden = config.hidden_size
    table = build.table(EMBEDDING)
    layers = []
    for prefix in map(layer_prefix, range(config.num_layers)):
        norms = [build.norm(f"{prefix}{name}", hidden) for name in OUTPUT_NORMS]
        layers.append(SandwichLayer(build.layer(prefix, build.shape), *norms))
    gate = torch.empty(1, hidden, dtype=build.dtype, device=build.device)
    build.fill(f"{GATE}.weight", gate)
    return LoopedParts(
        embedding=Embedding(table),
        core=build.stack(layers, build.norm(FINAL_NORM, hidden)),
        head=build.head(EMBEDDING, table, HEAD),
        gate=ExitGate(gate, build.vector(f"{GATE}.bias", 1)),
    )


FAMILY = LoopedFamily(read_config, tensor_shapes, HEAD, build)
