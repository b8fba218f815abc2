"""Tiny random checkpoints for tests: complete Hugging Face directories, written without transformers.

`make_checkpoint(path, "qwen3")` writes config.json, generation_config.json, safetensors (one file or
shards), tokenizer.json (byte-level BPE, 300 entries) and tokenizer_config.json with a ChatML template.
Every family loads in transformers with no missing and no unexpected tensor (a test holds that).
The weights are wide enough that greedy text wanders instead of repeating one token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

EOS, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (EOS, IM_START, IM_END)  # ids 0, 1, 2
TOKENIZER_SIZE = 300
VOCAB_SIZE = 320  # the model's table is padded past the tokenizer's, as real ones are

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA},
    "llama-tied": {**_LLAMA, "tie_word_embeddings": True, "num_hidden_layers": 3},
    "llama-mha": {**_LLAMA, "num_key_value_heads": 4},
    "llama-bias": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama3": {**_LLAMA, "rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE},
    "llama-linear": {**_LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 64,
        "max_window_layers": 2,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 32,  # not hidden_size / num_attention_heads
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "num_hidden_layers": 3,
    },
    "qwen3-bias": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 32,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}
FAMILIES = tuple(VARIANTS)


def make_checkpoint(
    path: Path,
    variant: str = "llama",
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write a complete model directory at `path` (created) and return it. Same arguments, same bytes."""
    config = make_config(variant, overrides)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    generation = {
        "bos_token_id": 0,
        "eos_token_id": [0, 2],
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }
    _write_json(path / "generation_config.json", generation)
    write_tokenizer(path)
    write_weights(path, make_weights(config, seed=seed, dtype=dtype), shards=shards)
    return path


def make_config(variant: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {**_COMMON, **VARIANTS[variant], **(overrides or {})}


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a checkpoint, written out here on its own so that it can check the loader."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention_bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    output_bias = config["model_type"] != "qwen2" and attention_bias
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        linears = {
            "self_attn.q_proj": (heads * head_dim, hidden, attention_bias),
            "self_attn.k_proj": (kv_heads * head_dim, hidden, attention_bias),
            "self_attn.v_proj": (kv_heads * head_dim, hidden, attention_bias),
            "self_attn.o_proj": (hidden, heads * head_dim, output_bias),
            "mlp.gate_proj": (inner, hidden, config.get("mlp_bias", False)),
            "mlp.up_proj": (inner, hidden, config.get("mlp_bias", False)),
            "mlp.down_proj": (hidden, inner, config.get("mlp_bias", False)),
        }
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        if config["model_type"] == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def make_weights(
    config: Mapping[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random tensors, each seeded by its place in the sorted name list."""
    weights = {}
    for index, (name, shape) in enumerate(sorted(tensor_shapes(config).items())):
        generator = torch.Generator().manual_seed(seed * 100_003 + index)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if len(shape) == 1:
            weight = noise * 0.2 if name.endswith("bias") else 1.0 + noise * 0.2
        else:
            weight = noise * (0.5 if "embed" in name or "lm_head" in name else 1.5 / shape[1] ** 0.5)
        weights[name] = weight.to(dtype).contiguous()
    return weights


def write_weights(path: Path, weights: Mapping[str, torch.Tensor], *, shards: int = 1) -> None:
    """model.safetensors, or `shards` files and their index."""
    names = sorted(weights)
    if shards == 1:
        save_file(dict(weights), path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(weight.nbytes for weight in weights.values())
    _write_json(
        path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def write_tokenizer(path: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE of 3 specials, 256 bytes and 41 merges."""
    vocab, merges = _bpe()
    specials = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    _write_json(path / "tokenizer.json", tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": EOS,
        "eos_token": IM_END,
        "unk_token": EOS,
        "pad_token": IM_END,
        "additional_special_tokens": [IM_START, IM_END],
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(path / "tokenizer_config.json", config)


def _bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocab = {token: index for index, token in enumerate(SPECIALS)}
    for char in _byte_chars():
        vocab[char] = len(vocab)
    space = "\u0120"  # how byte-level BPE writes a space
    pairs = [
        (space, "t"),
        ("h", "e"),
        ("i", "n"),
        ("r", "e"),
        ("o", "n"),
        (space + "t", "he"),
        ("e", "r"),
        ("a", "t"),
    ]
    pairs += [(space, letter) for letter in "aswobcfpdmlhnig"]
    pairs += [("e", "s"), ("o", "u"), ("i", "s"), ("o", "r"), ("in", "g"), ("e", "d"), ("a", "l"), ("e", "n")]
    pairs += [("s", "t"), ("l", "l"), ("i", "t"), (space + "a", "n"), (space + "an", "d"), (space + "o", "f")]
    pairs += [("i", "c"), ("a", "r"), ("u", "s"), ("\u00c3", "\u00a9")]  # e with acute accent
    for left, right in pairs:
        vocab[left + right] = len(vocab)
    assert len(vocab) == TOKENIZER_SIZE, len(vocab)
    return vocab, pairs


def _byte_chars() -> list[str]:
    """The printable stand-in of each byte 0..255 in byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
