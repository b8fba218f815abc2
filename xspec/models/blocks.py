"""The decoder that llama-shaped families share: its tensor set, how it is built, its forward pass.

Families differ only in their DecoderConfig. Weights arrive one at a time and are packed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xspec.kernels.base import AttentionShape, Kernels, PackedLinear
from xspec.models.base import Hidden, TargetSpec
from xspec.models.config import DecoderConfig
from xspec.nn.attention import GroupedAttention
from xspec.nn.embed import Embedding
from xspec.nn.inputs import ForwardInputs
from xspec.nn.linear import Fill, LinearPart, fused_linear
from xspec.nn.mlp import SwiGLU
from xspec.nn.norm import RMSNorm
from xspec.nn.rope import RopeScaling, RopeTable, inverse_frequencies

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: RMSNorm
    attention: GroupedAttention
    mlp_norm: RMSNorm
    mlp: SwiGLU


class Decoder:
    """A Target (models/base.py)."""

    def __init__(
        self,
        config: DecoderConfig,
        kernels: Kernels,
        shape: AttentionShape,
        embedding: Embedding,
        layers: tuple[Layer, ...],
        norm: RMSNorm,
        head: PackedLinear,
        rope: RopeTable,
    ) -> None:
        self.config = config
        self.spec = TargetSpec(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position=config.max_position,
        )
        self._kernels, self._shape = kernels, shape
        self._embedding, self._layers, self._rope = embedding, layers, rope
        self._norm, self._head = norm, head

    def forward(
        self,
        tokens: torch.Tensor,
        inputs: ForwardInputs,
        kv: tuple[torch.Tensor, ...],
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """Tap i is the residual stream after i layers (0: the embedding)."""
        paged = self._kernels.paged_attention(inputs, self._shape, kv[0])
        cos_sin = self._rope.gather(inputs.positions)
        residual = self._embedding(tokens)
        streams = {0: residual}
        for index, (layer, slab) in enumerate(zip(self._layers, kv, strict=True), start=1):
            residual = layer.attention(layer.input_norm(residual), residual, cos_sin, paged, slab)
            residual = layer.mlp(layer.mlp_norm(residual), residual)
            if index in taps:
                streams[index] = residual
        return Hidden(self._norm(residual), residual, tuple(streams[tap] for tap in taps))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, and no other."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        qkv, output, gate_up, down = _linear_parts(config, layer)
        inputs = (hidden, config.heads * config.head_dim, hidden, config.inner_size)
        for parts, size in zip((qkv, output, gate_up, down), inputs, strict=True):
            for part in parts:
                shapes[f"{part.name}.weight"] = (part.rows, size)
                if part.bias:
                    shapes[f"{part.name}.bias"] = (part.rows,)
        for name, size in _norm_names(config, layer).items():
            shapes[name] = (size,)
    shapes[FINAL_NORM] = (hidden,)
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    if config.rope.scaling is RopeScaling.FACTORS:
        shapes[ROPE_FACTORS] = (config.head_dim // 2,)
    return shapes


def optional_tensors(config: DecoderConfig) -> frozenset[str]:
    return frozenset({HEAD}) if config.tied_head else frozenset()


def build_decoder(
    config: DecoderConfig,
    fill: Fill,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int,
) -> Decoder:
    """Read, fuse and pack layer by layer. Besides the packed model only the matrix at hand is alive."""

    def vector(name: str, size: int, kind: torch.dtype = dtype) -> torch.Tensor:
        out = torch.empty(size, dtype=kind, device=device)
        fill(name, out)
        return out

    def linear(parts: tuple[LinearPart, ...], columns: int) -> PackedLinear:
        return fused_linear(kernels, fill, parts, columns, dtype, device)

    shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5, dtype)
    table = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
    fill(EMBEDDING, table)
    layers = []
    for index in range(config.num_layers):
        qkv, output, gate_up, down = _linear_parts(config, index)
        norms = {name: vector(name, size) for name, size in _norm_names(config, index).items()}
        head_norm = None
        first, second, *head_norms = norms.values()
        if config.head_norm:
            weight = torch.cat(
                (head_norms[0].expand(config.heads, -1), head_norms[1].expand(config.kv_heads, -1))
            )
            head_norm = RMSNorm(kernels, weight, config.norm_eps)
        attention = GroupedAttention(
            kernels,
            shape,
            linear(qkv, config.hidden_size),
            linear(output, config.heads * config.head_dim),
            head_norm,
        )
        mlp = SwiGLU(kernels, linear(gate_up, config.hidden_size), linear(down, config.inner_size))
        layers.append(
            Layer(
                RMSNorm(kernels, first, config.norm_eps),
                attention,
                RMSNorm(kernels, second, config.norm_eps),
                mlp,
            )
        )
    norm = RMSNorm(kernels, vector(FINAL_NORM, config.hidden_size), config.norm_eps)
    if config.tied_head:
        head = kernels.pack_linear(table)
    else:
        head = linear(
            (LinearPart(HEAD.removesuffix(".weight"), config.vocab_size, False),), config.hidden_size
        )
    factors = None
    if config.rope.scaling is RopeScaling.FACTORS:
        factors = vector(ROPE_FACTORS, config.head_dim // 2, torch.float32).cpu()
    rope = RopeTable(inverse_frequencies(config.rope, config.head_dim, factors), max_position, dtype, device)
    return Decoder(config, kernels, shape, Embedding(table), tuple(layers), norm, head, rope)


def _linear_parts(config: DecoderConfig, layer: int) -> tuple[tuple[LinearPart, ...], ...]:
    """The fused linears of a layer: qkv, output, gate-up, down."""
    attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return (
        (
            LinearPart(f"{attention}q_proj", q_rows, config.qkv_bias),
            LinearPart(f"{attention}k_proj", kv_rows, config.qkv_bias),
            LinearPart(f"{attention}v_proj", kv_rows, config.qkv_bias),
        ),
        (LinearPart(f"{attention}o_proj", config.hidden_size, config.output_bias),),
        (
            LinearPart(f"{mlp}gate_proj", config.inner_size, config.mlp_bias),
            LinearPart(f"{mlp}up_proj", config.inner_size, config.mlp_bias),
        ),
        (LinearPart(f"{mlp}down_proj", config.hidden_size, config.mlp_bias),),
    )


def _norm_names(config: DecoderConfig, layer: int) -> dict[str, int]:
    """Norm weights of a layer with their sizes: before attention, before the MLP, then of q and k heads."""
    prefix = f"model.layers.{layer}."
    names = {
        f"{prefix}input_layernorm.weight": config.hidden_size,
        f"{prefix}post_attention_layernorm.weight": config.hidden_size,
    }
    if config.head_norm:
        names[f"{prefix}self_attn.q_norm.weight"] = config.head_dim
        names[f"{prefix}self_attn.k_norm.weight"] = config.head_dim
    return names
