"""A GGUF file as a Checkpoint: config from its metadata, weights dequantised a few rows at a time.

Names become Hugging Face's. Files of arch llama hold q and k with their rotary halves interleaved;
that is undone here, so that the rest of xspec knows one rotary convention.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize

from xspec.errors import CheckpointError, UnsupportedError
from xspec.kernels.quantised import Blocks, stack
from xspec.models.blocks import ROPE_FACTORS
from xspec.models.gguf_blocks import kept_kinds, read_blocks
from xspec.text.gguf_file import GgufTensor, read_header

ARCHITECTURES = ("llama", "qwen2", "qwen3")
INTERLEAVED = ("llama",)

_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": ROPE_FACTORS,
}

_CHUNK_ELEMENTS = 1 << 20
"""Weights dequantised at a time: 4 MB in fp32."""


class GgufCheckpoint:
    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"cannot read {path}: {error}") from error
        header = read_header(self._data, path)
        self._tensors = {_hf_name(name): tensor for name, tensor in header.tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.config: Mapping[str, Any] = gguf_config(header.metadata, self.shapes, self.name)

    def read(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensors[name]
        heads = self._interleaved_heads(name)
        if heads is None:
            self._dequantize(tensor, out)
            return
        straight = torch.empty(tensor.shape, dtype=torch.float32)
        self._dequantize(tensor, straight)
        out.copy_(straight[_straight_order(tensor.shape[0], heads)])

    def blocks(self, name: str) -> Blocks | None:
        """A matrix as its blocks in the file, value for value; None for a type that is not kept."""
        tensor = self._tensors[name]
        if tensor.kind not in kept_kinds():
            return None
        stored = self._stored(tensor)
        step = max(1, _CHUNK_ELEMENTS // tensor.shape[-1])
        parts = (stored[start : start + step] for start in range(0, len(stored), step))
        blocks = stack([read_blocks(part, tensor.kind) for part in parts])
        heads = self._interleaved_heads(name)
        return blocks if heads is None else blocks.rows(_straight_order(tensor.shape[0], heads))

    def kinds(self) -> Counter[str]:
        """How many matrices are stored in which type."""
        return Counter(tensor.kind.name for tensor in self._tensors.values() if len(tensor.shape) == 2)

    def close(self) -> None:
        # After an error its traceback may still hold a view of the map, which then goes with it.
        with contextlib.suppress(BufferError):
            self._data.close()

    def _interleaved_heads(self, name: str) -> int | None:
        """Heads of a q or k projection stored interleaved, None for every other tensor."""
        if self.config["model_type"] not in INTERLEAVED:
            return None
        if ".self_attn.q_proj." in name:
            return int(self.config["num_attention_heads"])
        if ".self_attn.k_proj." in name:
            return int(self.config["num_key_value_heads"])
        return None

    def _dequantize(self, tensor: GgufTensor, out: torch.Tensor) -> None:
        columns = tensor.shape[-1]
        rows = out.reshape(-1, columns) if out.is_contiguous() else out.view(-1, columns)
        stored = self._stored(tensor)
        step = max(1, _CHUNK_ELEMENTS // columns)
        for start in range(0, rows.shape[0], step):
            rows[start : start + step].copy_(self._values(tensor, stored[start : start + step]))

    def _values(self, tensor: GgufTensor, stored: np.ndarray) -> torch.Tensor:
        """fp32. What is kept in blocks goes through them: three times as fast as the gguf package."""
        if tensor.kind in kept_kinds():
            return read_blocks(stored, tensor.kind).dequantised()
        try:
            return torch.from_numpy(np.array(dequantize(stored, tensor.kind), dtype=np.float32))
        except NotImplementedError:
            raise CheckpointError(
                f"{self.name}: tensor {tensor.name} is {tensor.kind.name}, which cannot be dequantised"
            ) from None

    def _stored(self, tensor: GgufTensor) -> np.ndarray:
        """uint8 [rows, bytes of a row], in the file's order."""
        rows = math.prod(tensor.shape[:-1])
        return np.frombuffer(self._data, np.uint8, tensor.size_bytes, tensor.start).reshape(rows, -1)


def _straight_order(rows: int, heads: int) -> torch.Tensor:
    """Which stored row comes where once rotary halves lie one after the other."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def gguf_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Any]:
    """The config.json that the metadata amounts to. Switches without a counterpart are refused by name."""
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{where}: architecture {arch!r} is not supported; known: {known}")

    def field(key: str) -> Any:
        return metadata.get(f"{arch}.{key}")

    _refuse(metadata, str(arch), where)
    heads = field("attention.head_count")
    embedding = shapes.get("model.embed_tokens.weight", ())
    layer = "model.layers.0."
    attention_bias = f"{layer}self_attn.q_proj.bias" in shapes
    config: dict[str, Any] = {
        "model_type": arch,
        "vocab_size": embedding[0] if embedding else field("vocab_size"),
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv") or heads,
        "head_dim": field("attention.key_length") or field("rope.dimension_count"),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base") or 10000.0,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": attention_bias,
        "mlp_bias": f"{layer}mlp.gate_proj.bias" in shapes,
    }
    if field("rope.scaling.type") == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": field("rope.scaling.factor")}
    return config


def _refuse(metadata: Mapping[str, Any], arch: str, where: str) -> None:
    reasons = []
    scaling = metadata.get(f"{arch}.rope.scaling.type")
    if scaling not in (None, "none", "linear"):
        reasons.append(f"{arch}.rope.scaling.type={scaling!r} (known: none, linear)")
    for key in ("expert_count", "attention.sliding_window"):
        if metadata.get(f"{arch}.{key}"):
            reasons.append(f"{arch}.{key}={metadata[f'{arch}.{key}']!r}")
    split = metadata.get("split.count")
    if isinstance(split, int) and split > 1:
        reasons.append(f"split.count={split}: a model in several files")
    key_length = metadata.get(f"{arch}.attention.key_length")
    for key in ("attention.value_length", "rope.dimension_count"):
        value = metadata.get(f"{arch}.{key}")
        if key_length and value and value != key_length:
            reasons.append(f"{arch}.{key}={value!r} differs from {arch}.attention.key_length={key_length!r}")
    if reasons:
        raise UnsupportedError(f"{where} asks for what is not implemented", reasons)


def _hf_name(name: str) -> str:
    """Unknown names stay as they are and are reported as extra."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _BLOCK_NAMES:
        return name
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
