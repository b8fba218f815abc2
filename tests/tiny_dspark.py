"""Tiny random DSpark drafters for the targets of tests/tiny.py, in every dialect that loads.

Weights are made once under the published bare names, so that the dialects of one drafter differ in nothing
but keys, names and shared copies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file

DIALECTS = ("flat", "prefixed", "aliases", "nested", "dflash_nest", "speculators")
BLOCK = 5
MASK_TOKEN = 300  # past the tokenizer, inside the model's table


@dataclass(frozen=True)
class Sizes:
    """What a drafter is made of. `layer_ids` count decoder-layer outputs; -1 is the embedding."""

    family: str = "llama"
    layer_ids: tuple[int, ...] = (0, 2)
    block: int = BLOCK
    layers: int = 2
    markov: str | None = "vanilla"
    rank: int = 8
    confidence: bool = True
    with_markov: bool = True
    mask_embedding: bool = True
    draft_ids: tuple[int, ...] | None = None  # ascending
    head_dim: int = 12
    inner: int = 48


def target_config() -> dict[str, Any]:
    """Overrides of `tiny.make_checkpoint`: deep enough that taps can be told apart."""
    return {"num_hidden_layers": 4}


def flat_config(sizes: Sizes) -> dict[str, Any]:
    qwen = sizes.family == "qwen3"
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel" if qwen else "LlamaDSparkModel"],
        "model_type": sizes.family,
        "vocab_size": tiny.VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_target_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "sliding_window": None,
        "layer_types": ["full_attention"] * sizes.layers,
        "tie_word_embeddings": False,
        "block_size": sizes.block,
        "target_layer_ids": list(sizes.layer_ids),
        "mask_token_id": None if sizes.mask_embedding else MASK_TOKEN,
        "markov_rank": sizes.rank if sizes.markov else 0,
        "enable_confidence_head": sizes.confidence,
        "confidence_head_with_markov": sizes.confidence and sizes.with_markov and sizes.markov is not None,
    }
    if sizes.markov:
        config["markov_head_type"] = sizes.markov
    if sizes.draft_ids is not None:
        config["draft_vocab_size"] = len(sizes.draft_ids)
    return config


def weights(sizes: Sizes, *, seed: int = 11) -> dict[str, torch.Tensor]:
    """All but shared copies and id maps, fp32, under the published names."""
    config = flat_config(sizes)
    hidden, rank = 64, config["markov_rank"]
    layers = tiny.make_weights({**config, "num_hidden_layers": sizes.layers}, seed=seed)
    made = {
        name.removeprefix("model."): weight for name, weight in layers.items() if ".layers." in f".{name}"
    }
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    taps, draft_vocab = len(sizes.layer_ids), len(sizes.draft_ids or range(tiny.VOCAB_SIZE))
    made["fc.weight"] = noise(hidden, taps * hidden, scale=1.5 / (taps * hidden) ** 0.5)
    made["hidden_norm.weight"] = 1.0 + noise(hidden, scale=0.2)
    made["norm.weight"] = 1.0 + noise(hidden, scale=0.2)
    mask = noise(hidden, scale=0.5)  # drawn in any case: the other weights do not depend on it
    if sizes.mask_embedding:
        made["mask_embedding"] = mask
    if sizes.markov:
        made["markov_head.markov_w1.weight"] = noise(tiny.VOCAB_SIZE, rank, scale=1.0)
        made["markov_head.markov_w2.weight"] = noise(draft_vocab, rank, scale=1.0)
    if sizes.markov == "gated":
        made["markov_head.gate_proj.weight"] = noise(rank, hidden + rank, scale=0.3)
        made["markov_head.gate_proj.bias"] = noise(rank, scale=0.5)
    if sizes.confidence:
        width = hidden + (rank if config["confidence_head_with_markov"] else 0)
        made["confidence_head.proj.weight"] = noise(1, width, scale=0.15)
        made["confidence_head.proj.bias"] = noise(1, scale=0.5)
    return made


def dialect_config(sizes: Sizes, dialect: str) -> dict[str, Any]:
    config = flat_config(sizes)
    match dialect:
        case "aliases":
            for key in ("block_size", "markov_rank", "target_layer_ids"):
                config[f"dspark_{key}"] = config.pop(key)
            config["dspark_noise_token_id"] = config.pop("mask_token_id")
        case "nested" | "dflash_nest":
            config["architectures"] = ["DSparkDraftModel"]
            moved = ("target_layer_ids", "mask_token_id", "markov_rank", "sample_from_anchor")
            config["sample_from_anchor"] = True
            nest: dict[str, Any] = {key: config.pop(key) for key in moved}
            nest["projector_type"] = "dspark"
            config["dflash_config" if dialect == "dflash_nest" else "dspark_config"] = nest
            config["target_layer_ids"] = nest["target_layer_ids"]  # in both places, as exporters do
        case "speculators":
            kept = {"block_size", "mask_token_id", "draft_vocab_size", "markov_rank", "markov_head_type"}
            kept |= {"enable_confidence_head", "confidence_head_with_markov"}
            config = {
                **{key: value for key, value in config.items() if key in kept},
                "architectures": ["DSparkDraftModel"],
                "speculators_model_type": "dspark",
                "speculators_config": {"algorithm": "dspark"},
                "sample_from_anchor": True,
                "aux_hidden_state_layer_ids": [index + 1 for index in sizes.layer_ids],
                "target_hidden_size": 64,
                "transformer_layer_config": {
                    key: value
                    for key, value in config.items()
                    if key not in kept | {"architectures", "target_layer_ids", "num_target_layers"}
                },
            }
            config.setdefault("draft_vocab_size", tiny.VOCAB_SIZE)
    return config


def make_dspark(
    path: Path,
    sizes: Sizes | None = None,
    dialect: str = "flat",
    *,
    changes: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor | None] | None = None,
    seed: int = 11,
) -> Path:
    """`changes` to config.json; `tensors` to add, replace or (None) leave out, by bare name."""
    sizes = sizes or Sizes()
    found: dict[str, torch.Tensor | None] = dict(weights(sizes, seed=seed))
    if sizes.draft_ids is not None:
        found["d2t"] = offsets(sizes.draft_ids)
    if dialect in ("prefixed", "speculators"):  # copies, filled with what must never be used
        wrong = torch.full((len(sizes.draft_ids or range(tiny.VOCAB_SIZE)), 64), 3.0)
        found |= {"embed_tokens.weight": torch.full((tiny.VOCAB_SIZE, 64), 3.0), "lm_head.weight": wrong}
    if dialect == "speculators" and sizes.draft_ids is not None:
        found["t2d"] = torch.isin(torch.arange(tiny.VOCAB_SIZE), torch.tensor(sizes.draft_ids))
    found |= tensors or {}
    prefix = "model." if dialect == "prefixed" else ""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**dialect_config(sizes, dialect), **(changes or {})}))
    named = {
        name if name in ("d2t", "t2d") else prefix + name: tensor
        for name, tensor in found.items()
        if tensor is not None
    }
    save_file(named, path / "model.safetensors")
    return path


def offsets(draft_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(draft_ids) - torch.arange(len(draft_ids))
