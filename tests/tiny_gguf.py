"""Tiny GGUF files (weights and config only, no tokenizer) holding the same weights as tests/tiny.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import tiny
import torch

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    path: Path,
    variant: str,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    fields: Mapping[str, Any] | None = None,
    rope_factors: torch.Tensor | None = None,
) -> Path:
    """`kind` applies to matrices, `kinds` instead to those whose name ends so; `fields` adds or overrides
    metadata (None removes)."""
    config = tiny.make_config(variant)
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    metadata: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        f"{arch}.attention.key_length": config.get("head_dim"),
        **(fields or {}),
    }
    for key, value in metadata.items():
        match value:
            case str():
                writer.add_string(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "\u4f60"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
    for name, weight in tiny.make_weights(config).items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            weight = interleave(weight, heads if ".q_proj." in name else kv_heads)
        own = (other for end, other in (kinds or {}).items() if name.endswith(end))
        quantised = next(own, kind) if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(weight.numpy(), quantised)
        writer.add_tensor(gguf_name(name), data, raw_dtype=quantised)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row order of arch llama: within a head, first-half and second-half rows alternate."""
    per_head = weight.view(heads, -1, *weight.shape[1:])
    half = per_head.shape[1] // 2
    order = [index for pair in zip(range(half), range(half, 2 * half), strict=True) for index in pair]
    return per_head[:, order].reshape(weight.shape).contiguous()


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"
