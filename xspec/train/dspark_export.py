"""A trained DSpark drafter as a directory in the published flat layout, fp16, and its config.

Embedding and head are the target's and not stored. Ours beyond the published keys: `mask_embedding`, d2t for
a reduced draft vocabulary, the calibration of the confidence head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xspec.errors import CheckpointError
from xspec.train.dspark_model import DSparkModel
from xspec.train.loss import DraftHead
from xspec.train.mtp import write_model
from xspec.train.sts import Calibration


@dataclass(frozen=True, slots=True)
class Origin:
    """The target a drafter was made for. `taps` are residual streams after that many layers."""

    name: str
    digest: str
    layers: int
    max_position: int
    taps: tuple[int, ...]


def export(
    path: Path,
    model: DSparkModel,
    head: DraftHead,
    origin: Origin,
    training: Mapping[str, Any],
    calibration: Mapping[str, Calibration],
) -> None:
    """Write config.json and the weights."""
    path.mkdir(parents=True, exist_ok=True)
    write_model(path, make_config(model, origin, training, calibration), tensors(model, head))


def tensors(model: DSparkModel, head: DraftHead) -> dict[str, torch.Tensor]:
    """Everything under its published name. The confidence head stays fp32. CheckpointError out of range."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        wide = name.startswith("confidence_head.")
        tensor = parameter.detach().cpu().to(torch.float32 if wide else torch.float16).contiguous()
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{name} holds values that fp16 cannot: the run has diverged")
        state[name] = tensor
    if model.sizes.draft_vocab < model.sizes.vocab:
        state["d2t"] = head.offsets.cpu()
    return state


def make_config(
    model: DSparkModel,
    origin: Origin,
    training: Mapping[str, Any],
    calibration: Mapping[str, Calibration],
) -> dict[str, Any]:
    sizes, layer = model.sizes, model.sizes.layer
    return {
        "architectures": ["LlamaDSparkModel"],
        "model_type": "llama",
        "vocab_size": sizes.vocab,
        "draft_vocab_size": sizes.draft_vocab,
        "hidden_size": layer.hidden,
        "intermediate_size": layer.inner,
        "num_hidden_layers": sizes.layers,
        "num_target_layers": origin.layers,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": origin.max_position,
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "block_size": sizes.block,
        "target_layer_ids": layer_ids(origin.taps),
        "mask_token_id": None,
        "markov_rank": sizes.markov_rank,
        "markov_head_type": "gated" if sizes.gated else "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "confidence_calibration": {name: table.to_config() for name, table in calibration.items()} or None,
        "target": {"name": origin.name, "digest": origin.digest},
        "training": dict(training),
    }


def layer_ids(taps: Sequence[int]) -> list[int]:
    """The published keys count decoder-layer outputs from 0: the stream after i layers is layer i - 1's."""
    return [tap - 1 for tap in taps]
