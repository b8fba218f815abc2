"""Tiny random MTP drafters for the targets of tests/tiny.py, in every format that loads.

Weights are made once under neutral names (`enorm.weight`, `layer.self_attn.q_proj.weight`, ...), so that the
formats of one drafter differ in nothing but names, files and config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file

LAYER = "model.layers.0."

# Neutral name -> where exported directories put it; a bundled one prefixes the neutral name.
OURS = {"enorm": "model.enorm", "hnorm": "model.hnorm", "eh_proj": "model.eh_proj", "norm": "model.norm"}
EXPORTS: dict[str, dict[str, str]] = {
    "ours": OURS,
    "xllm": {**OURS, "norm": "model.shared_head.norm"},
    "final_norm": {**OURS, "norm": "model.final_norm"},
    "qwen3_5": {
        "enorm": "model.pre_fc_norm_embedding",
        "hnorm": "model.pre_fc_norm_hidden",
        "eh_proj": "model.fc",
        "norm": "model.norm",
    },
}


def mtp_config(variant: str = "llama", **overrides: Any) -> dict[str, Any]:
    """config.json of an exported drafter for `tiny.make_checkpoint(path, variant)`."""
    config = tiny.make_config(variant)
    return config | {"model_type": f"{config['model_type']}_mtp", "num_hidden_layers": 1} | overrides


def mtp_weights(variant: str = "llama", *, seed: int = 7) -> dict[str, torch.Tensor]:
    """All weights in fp32, neutral names."""
    config = tiny.make_config(variant, {"num_hidden_layers": 1})
    layer = tiny.make_weights(config, seed=seed)
    weights = {
        f"layer.{name.removeprefix(LAYER)}": weight
        for name, weight in layer.items()
        if name.startswith(LAYER)
    }
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    for norm in ("enorm", "hnorm", "norm"):
        weights[f"{norm}.weight"] = 1.0 + 0.3 * torch.randn(hidden, generator=generator)
    join = torch.randn(hidden, 2 * hidden, generator=generator)
    weights["eh_proj.weight"] = join * (2.0 / (2 * hidden) ** 0.5)
    return weights


def exported_names(weights: Mapping[str, torch.Tensor], names: str = "ours") -> dict[str, torch.Tensor]:
    renamed = {}
    for name, weight in weights.items():
        role, _, rest = name.partition(".")
        renamed[LAYER + rest if role == "layer" else f"{EXPORTS[names][role]}.{rest}"] = weight
    return renamed


def write_directory(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    file: str = "model.safetensors",
    index: str | None = None,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
    if index is not None:
        (path / index).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
    return path


def make_mtp(
    path: Path,
    variant: str = "llama",
    *,
    names: str = "ours",
    seed: int = 7,
    draft_ids: torch.Tensor | None = None,
    **overrides: Any,
) -> Path:
    """An exported directory. `draft_ids` [D] ascending: a reduced draft vocabulary."""
    tensors = exported_names(mtp_weights(variant, seed=seed), names)
    if draft_ids is not None:
        overrides = {"draft_vocab_size": len(draft_ids), **overrides}
        tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    return write_directory(path, mtp_config(variant, **overrides), tensors)


def make_bundled(
    path: Path, variant: str = "llama", *, seed: int = 7, copies: bool = True, **overrides: Any
) -> Path:
    """A target whose checkpoint brings the MTP layer after its own, as DeepSeek's do.

    `copies`: with its own copies of embedding and head, filled with what must never be used.
    """
    tiny.make_checkpoint(path, variant, overrides={"num_nextn_predict_layers": 1, **overrides})
    config = tiny.make_config(variant)
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors = tiny.make_weights(config)
    for name, weight in mtp_weights(variant, seed=seed).items():
        role, _, rest = name.partition(".")
        tensors[prefix + {"layer": rest, "norm": f"shared_head.norm.{rest}"}.get(role, name)] = weight
    if copies:
        wrong = torch.full((config["vocab_size"], config["hidden_size"]), 3.0)
        tensors |= {f"{prefix}embed_tokens.weight": wrong, f"{prefix}shared_head.head.weight": wrong + 1}
    tiny.write_weights(path, tensors)
    return path
