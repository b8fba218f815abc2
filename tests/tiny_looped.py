"""Tiny random checkpoints of the looped families, under their published tensor names and config keys.

`write_ouro(path, loops=3)` writes a complete directory (tokenizer included, see tests/tiny.py) and returns
it; `write_huginn` and `write_nanbeige` likewise. Other keyword arguments are config keys. Same arguments,
same bytes. Loops change a state mildly, so that the head after d loops agrees with the last one often, not
always.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tiny
import torch

Shapes = dict[str, tuple[int, ...]]
Write = Callable[..., Path]

LOOPS_KEY = {"ouro": "total_ut_steps", "huginn_raven": "mean_recurrence", "nanbeige": "num_loops"}

_LLAMA_KEYS: dict[str, Any] = {
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
    "transformers_version": "4.54.1",
}

OURO: dict[str, Any] = {
    **_LLAMA_KEYS,
    "model_type": "ouro",
    "architectures": ["OuroForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"},
    "num_key_value_heads": 4,
    "layer_types": ["full_attention", "full_attention"],
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 2,
    "early_exit_threshold": 1.0,
}

NANBEIGE: dict[str, Any] = {
    **_LLAMA_KEYS,
    "model_type": "nanbeige",
    "architectures": ["NanbeigeForCausalLM"],
    "num_attention_heads": 6,  # query width is not the hidden size
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "qk_layernorm": False,
    "emb_neighbor_num": None,
    "insert_ngram_layer_idx": [],
    "ngram_fused_mode": "average",
    "loop_loss_weights": [],
    "skip_loop_final_norm": False,
    "enable_double_loop_split": False,
    "loop_share_kv": False,
    "enable_hyper_connection": False,
    "num_residual_streams": 4,
    "enable_depth_attention": False,
    "pad_token_id": 0,
}

HUGINN: dict[str, Any] = {
    "model_type": "huginn_raven",
    "architectures": ["RavenForCausalLM"],
    "architecture_class_name": "RecurrentGPT",
    "n_embd": 64,
    "n_heads": 4,
    "n_layers": 5,
    "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2,
    "mean_backprop_depth": 8,
    "block_size": 512,
    "vocab_size": tiny.VOCAB_SIZE,
    "padding_multiple": 64,
    "tie_embeddings": True,
    "intermediate_size": 96,
    "bias": False,
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "norm_eps": 1e-6,
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "init_strategy": "takase",
    "init_orthogonal": False,
    "state_init": "like-init",
    "injection_type": "linear",
    "sampling_scheme": "poisson-lognormal-filling",
    "qk_bias": True,
    "activation_checkpoint_impl": "per-iteration",
    "rope_base": 50000,
    "test_time_noise": 0,
    "test_time_noise_type": "fixed",
    "torch_dtype": "float32",
    "transformers_version": "4.47.1",
}


def write_ouro(
    path: Path, loops: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    return _write(path, {**OURO, "total_ut_steps": loops, **overrides}, seed, dtype)


def write_nanbeige(
    path: Path, loops: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    return _write(path, {**NANBEIGE, "num_loops": loops, **overrides}, seed, dtype)


def write_huginn(
    path: Path, loops: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    return _write(path, {**HUGINN, "mean_recurrence": loops, **overrides}, seed, dtype)


WRITERS: dict[str, Write] = {"ouro": write_ouro, "huginn_raven": write_huginn, "nanbeige": write_nanbeige}


def read_config(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config


def tensor_shapes(config: Mapping[str, Any]) -> Shapes:
    """The names and shapes of a checkpoint, written out on their own so that they can check the loader."""
    return _huginn_shapes(config) if config["model_type"] == "huginn_raven" else _llama_shapes(config)


def make_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """fp64, each seeded by its place in the sorted name list."""
    weights = {}
    for index, (name, shape) in enumerate(sorted(tensor_shapes(config).items())):
        if name == "freqs_cis":
            weights[name] = rotary_table(config)
            continue
        noise = torch.randn(
            shape, generator=torch.Generator().manual_seed(seed * 100_003 + index), dtype=torch.float64
        )
        weights[name] = _scaled(name, noise, gain=2.0 if config["model_type"] == "ouro" else 0.7)
    return weights


def rotary_table(config: Mapping[str, Any]) -> torch.Tensor:
    """[1, block_size, 1, head_dim / 2, 2] fp32: cosines and sines."""
    dim = config["n_embd"] // config["n_heads"]
    inverse = 1.0 / config["rope_base"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(config["block_size"], dtype=torch.float32), inverse)
    return torch.stack((angles.cos(), angles.sin()), dim=-1)[None, :, None]


def _scaled(name: str, noise: torch.Tensor, gain: float) -> torch.Tensor:
    if name.endswith("early_exit_gate.weight"):
        return noise * 0.2  # spreads the exits over the loops
    if name.endswith(("bias", "qk_bias")):
        return noise * 0.2
    if name.endswith("layernorm_2.weight"):
        return 0.12 + noise * 0.02  # what a sublayer adds: small, so that loops refine
    if noise.ndim == 1:
        return 1.0 + noise * 0.2
    if "embed_tokens" in name:
        return noise
    if "lm_head" in name or "wte" in name:
        return noise * 0.5
    return noise * (gain / noise.shape[-1] ** 0.5)


def _llama_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    ouro = config["model_type"] == "ouro"
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    if ouro:
        shapes |= {"model.early_exit_gate.weight": (1, hidden), "model.early_exit_gate.bias": (1,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
        if config.get("attention_bias"):
            rows = {"q": queries, "k": keys, "v": keys, "o": hidden}
            shapes |= {f"{prefix}self_attn.{kind}_proj.bias": (size,) for kind, size in rows.items()}
        if config.get("mlp_bias"):
            rows = {"gate": inner, "up": inner, "down": hidden}
            shapes |= {f"{prefix}mlp.{kind}_proj.bias": (size,) for kind, size in rows.items()}
        if ouro:
            shapes[f"{prefix}input_layernorm_2.weight"] = (hidden,)
            shapes[f"{prefix}post_attention_layernorm_2.weight"] = (hidden,)
    return shapes


def _huginn_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, heads = config["n_embd"], config["intermediate_size"], config["n_heads"]
    shapes: Shapes = {
        "transformer.wte.weight": (config["vocab_size"], hidden),
        "transformer.adapter.weight": (hidden, 2 * hidden),
        "transformer.ln_f.weight": (hidden,),
        "freqs_cis": (1, config["block_size"], 1, hidden // heads // 2, 2),
    }
    if not config["tie_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    groups = {"prelude": "prelude", "core_block": "recurrent_block", "coda": "coda"}
    for group, key in groups.items():
        for layer in range(config[f"n_layers_in_{key}"]):
            prefix = f"transformer.{group}.{layer}."
            shapes |= {f"{prefix}norm_{index}.weight": (hidden,) for index in range(1, 5)}
            shapes |= {
                f"{prefix}attn.Wqkv.weight": (3 * hidden, hidden),
                f"{prefix}attn.proj.weight": (hidden, hidden),
                f"{prefix}mlp.fc.weight": (2 * inner, hidden),
                f"{prefix}mlp.proj.weight": (hidden, inner),
            }
            if config["qk_bias"]:
                shapes[f"{prefix}attn.qk_bias"] = (2, 1, heads, hidden // heads)
    return shapes


def _write(path: Path, config: dict[str, Any], seed: int, dtype: torch.dtype) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {**config, "torch_dtype": str(dtype).removeprefix("torch.")}
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": [0, 2]}
    (path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    tiny.write_tokenizer(path)
    weights = make_weights(config, seed)
    kept = {name: weight if name == "freqs_cis" else weight.to(dtype) for name, weight in weights.items()}
    tiny.write_weights(path, {name: weight.contiguous() for name, weight in kept.items()})
    return path
