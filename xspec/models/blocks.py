"""The decoder that llama-shaped families share: its tensor set, how it is built, its forward pass.

Families differ only in their DecoderConfig. Weights arrive one at a time and are packed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xspec.kernels.base import AttentionShape, Kernels, PackedLinear
from xspec.models.base import Hidden, TargetSpec
from xspec.models.config import DecoderConfig
from xspec.nn.attention import GroupedAttention
from xspec.nn.embed import Embedding
from xspec.nn.inputs import ForwardInputs
from xspec.nn.linear import BlockSource, Fill, LinearPart, fused_linear
from xspec.nn.mlp import SwiGLU
from xspec.nn.norm import RMSNorm
from xspec.nn.rope import Rope, RopeScaling, inverse_frequencies
from xspec.nn.stack import DecoderLayer, Layer, LayerStack

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ROPE_FACTORS = "rope_freqs.weight"


class Decoder:
    """A Target (models/base.py)."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Embedding,
        layers: LayerStack,
        head: PackedLinear,
        dtype: torch.dtype,
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
        self._embedding, self._layers, self._head, self._dtype = embedding, layers, head, dtype

    def forward(
        self,
        tokens: torch.Tensor,
        inputs: ForwardInputs,
        kv: tuple[torch.Tensor, ...],
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """Tap i is the residual stream after i layers (0: the embedding)."""
        streams = self._layers(self._embedding(tokens), inputs, kv, taps)
        return Hidden(streams.last, streams.residual, streams.taps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._embedding(tokens)

    def embedding(self) -> torch.Tensor | None:
        return self._embedding.table

    def head(self) -> PackedLinear | None:
        return self._head

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return rows_of_head(self._head, ids, self.spec.hidden_size, self._dtype)


def rows_of_head(head: PackedLinear, ids: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights [D, size] of token ids [D]."""
    # The head exists only in packed form: its products with unit vectors are its columns, exactly.
    unit = torch.eye(size, dtype=dtype, device=ids.device)
    return torch.cat([head(part)[:, ids] for part in unit.split(64)]).T.contiguous()


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, and no other."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes.update(layer_shapes(config, layer_prefix(layer)))
    shapes[FINAL_NORM] = (hidden,)
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    if config.rope.scaling is RopeScaling.FACTORS:
        shapes[ROPE_FACTORS] = (config.head_dim // 2,)
    return shapes


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def layer_shapes(config: DecoderConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """The tensors of one layer."""
    shapes: dict[str, tuple[int, ...]] = {}
    qkv, output, gate_up, down = _linear_parts(config, prefix)
    inputs = (config.hidden_size, config.heads * config.head_dim, config.hidden_size, config.inner_size)
    for parts, size in zip((qkv, output, gate_up, down), inputs, strict=True):
        for part in parts:
            shapes[f"{part.name}.weight"] = (part.rows, size)
            if part.bias:
                shapes[f"{part.name}.bias"] = (part.rows,)
    shapes.update({name: (size,) for name, size in _norm_names(config, prefix).items()})
    return shapes


def optional_tensors(config: DecoderConfig) -> frozenset[str]:
    return frozenset({HEAD}) if config.tied_head else frozenset()


def build_decoder(build: LayerBuilder) -> Decoder:
    """Read, fuse and pack layer by layer. Besides the packed model only the matrix at hand is alive."""
    config = build.config
    table = build.table(EMBEDDING)
    stack = build.stack(
        [build.layer(layer_prefix(index), build.shape) for index in range(config.num_layers)],
        build.norm(FINAL_NORM, config.hidden_size),
    )
    return Decoder(config, Embedding(table), stack, build.head(EMBEDDING, table, HEAD), build.dtype)


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Reads and packs the parts of a decoder, one at a time; drafters build their layers with it too."""

    config: DecoderConfig
    fill: Fill
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    blocks: BlockSource | None = None  # linears it has are kept quantised

    @property
    def shape(self) -> AttentionShape:
        """Of every layer of a target."""
        size = self.config.head_dim
        return AttentionShape(self.config.heads, self.config.kv_heads, size, size**-0.5, self.dtype)

    def table(self, name: str) -> torch.Tensor:
        """The token embedding [vocab, hidden], always dense."""
        out = torch.empty(
            self.config.vocab_size, self.config.hidden_size, dtype=self.dtype, device=self.device
        )
        self.fill(name, out)
        return out

    def head(self, embedding: str, table: torch.Tensor, own: str) -> PackedLinear:
        """The head over all tokens: the embedding's `table` where it is tied, else the tensor `own`."""
        if not self.config.tied_head:
            part = LinearPart(own.removesuffix(".weight"), self.config.vocab_size, False)
            return self.linear((part,), self.config.hidden_size)
        quantised = None if self.blocks is None else self.blocks(embedding)
        return self.kernels.pack_linear(table) if quantised is None else self.kernels.pack_blocks(quantised)

    def stack(self, layers: Sequence[DecoderLayer], norm: RMSNorm) -> LayerStack:
        """Of a target's layers, with the rotation its config says."""
        factors = None
        if self.config.rope.scaling is RopeScaling.FACTORS:
            factors = torch.empty(self.config.head_dim // 2)
            self.fill(ROPE_FACTORS, factors)
        frequencies = inverse_frequencies(self.config.rope, self.config.head_dim, factors)
        return LayerStack(self.kernels, self.shape, layers, norm, Rope(frequencies, self.dtype, self.device))

    def layer(self, prefix: str, shape: AttentionShape) -> Layer:
        """The layer whose tensors start with `prefix`."""
        config = self.config
        hidden = config.hidden_size
        qkv, output, gate_up, down = _linear_parts(config, prefix)
        input_norm, mlp_norm, *head_norms = _norm_names(config, prefix)
        attention = GroupedAttention(
            self.kernels,
            shape,
            self.linear(qkv, hidden),
            self.linear(output, config.heads * config.head_dim),
            self.head_norm(*head_norms) if head_norms else None,
        )
        mlp = SwiGLU(self.linear(gate_up, hidden, gated=True), self.linear(down, config.inner_size))
        return Layer(self.norm(input_norm, hidden), attention, self.norm(mlp_norm, hidden), mlp)

    def linear(self, parts: tuple[LinearPart, ...], columns: int, *, gated: bool = False) -> PackedLinear:
        return fused_linear(
            self.kernels,
            self.fill,
            parts,
            columns,
            self.dtype,
            self.device,
            gated=gated,
            blocks=self.blocks,
        )

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.kernels, self.vector(name, size), self.config.norm_eps)

    def head_norm(self, query: str, key: str) -> RMSNorm:
        """qk-norm over query and key heads at once: one weight row per head."""
        config = self.config
        queries = self.vector(query, config.head_dim).expand(config.heads, -1)
        keys = self.vector(key, config.head_dim).expand(config.kv_heads, -1)
        return RMSNorm(self.kernels, torch.cat((queries, keys)), config.norm_eps)

    def vector(self, name: str, size: int) -> torch.Tensor:
        out = torch.empty(size, dtype=self.dtype, device=self.device)
        self.fill(name, out)
        return out


def _linear_parts(config: DecoderConfig, prefix: str) -> tuple[tuple[LinearPart, ...], ...]:
    """The fused linears of a layer: qkv, output, gate-up, down."""
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
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


def _norm_names(config: DecoderConfig, prefix: str) -> dict[str, int]:
    """Norm weights of a layer with their sizes: before attention, before the MLP, then of q and k heads."""
    names = {
        f"{prefix}input_layernorm.weight": config.hidden_size,
        f"{prefix}post_attention_layernorm.weight": config.hidden_size,
    }
    if config.head_norm:
        names[f"{prefix}self_attn.q_norm.weight"] = config.head_dim
        names[f"{prefix}self_attn.k_norm.weight"] = config.head_dim
    return names
