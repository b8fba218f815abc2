"""model_type huginn_raven (Huginn-0125, arXiv 2502.05171): prelude, a core run mean_recurrence times, coda.

Every loop gets the prelude's output injected again. Rotary positions turn adjacent pairs of a head by the
checkpoint's own table; query and key rows are reordered here, so that the rest of xspec knows one convention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from xspec.kernels.quantised import Blocks
from xspec.models.blocks import LayerBuilder
from xspec.models.config import ConfigReader, refuse_unimplemented
from xspec.models.looped import LoopedConfig, LoopedFamily, LoopedParts, refuse_unknown
from xspec.nn.attention import GroupedAttention
from xspec.nn.embed import Embedding
from xspec.nn.linear import BlockSource, Fill, LinearPart
from xspec.nn.mlp import SwiGLU
from xspec.nn.norm import RMSNorm
from xspec.nn.rope import RopeConfig, Rotation, TableRope
from xspec.nn.stack import Layer, LayerStack, NormedSumLayer

LOOPS = "mean_recurrence"
TABLE, ADAPTER, FINAL_NORM, HEAD, ROTARY = (
    "transformer.wte.weight",
    "transformer.adapter.weight",
    "transformer.ln_f.weight",
    "lm_head.weight",
    "freqs_cis",
)
KNOWN = frozenset(
    ("n_embd", "n_heads", "n_layers", "intermediate_size", "mean_recurrence", "n_layers_in_prelude")
    + ("n_layers_in_recurrent_block", "n_layers_in_coda", "block_size", "vocab_size", "padded_vocab_size")
    + ("norm_eps", "rope_base", "qk_bias", "tie_embeddings", "tie_word_embeddings", "init_values")
    + ("num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers", "num_attention_heads")
    + ("quantization_config", "compression_config")
)
# How it was trained and initialised; the state a generation starts from is 0 here, whatever `state_init` is.
UNUSED = frozenset(
    ("activation_checkpoint_impl", "architecture_class_name", "effective_expected_depth", "init_orthogonal")
    + ("init_strategy", "mean_backprop_depth", "padding_multiple", "sampling_scheme", "state_init")
    + ("test_time_noise_type",)
)
SWITCHES: Mapping[str, object] = {
    "block_class_name": "SandwichBlock",
    "norm_class_name": "RMSNorm_llama",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "bias": False,
    "test_time_noise": 0,
}


def read_config(raw: Mapping[str, Any]) -> LoopedConfig:
    config = ConfigReader(raw)
    hidden, heads = config.size("n_embd", 5280), config.size("n_heads", 55)
    prelude, core, coda = (
        config.size("n_layers_in_prelude", 2),
        config.size("n_layers_in_recurrent_block", 4),
        config.size("n_layers_in_coda", 2),
    )
    vocab = config.size("vocab_size", 65536)
    if hidden % heads or hidden // heads % 2:
        config.wrong(f"n_embd ({hidden}) must be an even multiple of n_heads ({heads})")
    dim = max(1, hidden // heads)
    derived = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": dim}
    derived |= {"hidden_size": hidden, "n_layers": prelude + core + coda, "padded_vocab_size": vocab}
    derived |= {"num_hidden_layers": prelude + core + coda}
    refuse_unimplemented(config)
    refuse_unknown(config, KNOWN | UNUSED, {**SWITCHES, **derived})
    tied = config.flag("tie_embeddings", True)
    if config.flag("tie_word_embeddings", tied) != tied:
        config.wrong(f"tie_word_embeddings differs from tie_embeddings={tied}")
    found = LoopedConfig(
        model_type=config.model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        inner_size=config.size("intermediate_size", 17920),
        num_layers=core,
        heads=heads,
        kv_heads=heads,
        head_dim=dim,
        max_position=config.size("block_size", 4096),
        norm_eps=config.number(raw, "norm_eps", 1e-6),
        rope=RopeConfig(config.number(raw, "rope_base", 5e4)),
        tied_head=tied,
        qkv_bias=config.flag("qk_bias", True),
        loops=config.size(LOOPS, 32),
        prelude_layers=prelude,
        coda_layers=coda,
        embed_scale=_embed_scale(config, hidden),
    )
    config.finish()
    return found


def tensor_shapes(config: LoopedConfig) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        TABLE: (config.vocab_size, hidden),
        ADAPTER: (hidden, 2 * hidden),
        FINAL_NORM: (hidden,),
        ROTARY: (1, config.max_position, 1, config.head_dim // 2, 2),
    }
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    for prefix in (prefix for group in _groups(config) for prefix in group):
        shapes |= {f"{prefix}norm_{index}.weight": (hidden,) for index in range(1, 5)}
        shapes |= {
            f"{prefix}attn.Wqkv.weight": (3 * hidden, hidden),
            f"{prefix}attn.proj.weight": (hidden, hidden),
            f"{prefix}mlp.fc.weight": (2 * config.inner_size, hidden),
            f"{prefix}mlp.proj.weight": (hidden, config.inner_size),
        }
        if config.qkv_bias:
            shapes[f"{prefix}attn.qk_bias"] = (2, 1, config.heads, config.head_dim)
    return shapes


def build(config: LoopedConfig, build: LayerBuilder) -> LoopedParts:
    hidden, dim = config.hidden_size, config.head_dim
    source = _Reordered(build.fill, build.blocks, hidden, dim)
    build = replace(build, fill=source.fill, blocks=None if build.blocks is None else source.blocks)
    table = build.table(TABLE)
    rotary = torch.empty(1, config.max_position, 1, dim // 2, 2, device=build.device)
    build.fill(ROTARY, rotary)
    rope = TableRope(rotary[0, :, 0, :, 0], rotary[0, :, 0, :, 1], build.dtype)
    norm = build.norm(FINAL_NORM, hidden)
    prelude, core, coda = _groups(config)
    return LoopedParts(
        embedding=Embedding(table, config.embed_scale),
        prelude=_stack(build, prelude, None, rope),
        inject=build.linear((LinearPart(ADAPTER.removesuffix(".weight"), hidden, False),), 2 * hidden),
        core=_stack(build, core, None, rope),
        exit_norm=norm,
        coda=_stack(build, coda, norm, rope),
        head=build.head(TABLE, table, HEAD),
    )


def _stack(build: LayerBuilder, prefixes: Sequence[str], norm: RMSNorm | None, rope: Rotation) -> LayerStack:
    layers = [_layer(build, prefix) for prefix in prefixes]
    return LayerStack(build.kernels, build.shape, layers, norm, rope)


def _layer(build: LayerBuilder, prefix: str) -> NormedSumLayer:
    config = build.config
    hidden, inner = config.hidden_size, config.inner_size
    first, second, third, fourth = (
        build.norm(f"{prefix}norm_{index}.weight", hidden) for index in range(1, 5)
    )
    attention = GroupedAttention(
        build.kernels,
        build.shape,
        build.linear((LinearPart(f"{prefix}attn.Wqkv", 3 * hidden, config.qkv_bias),), hidden),
        build.linear((LinearPart(f"{prefix}attn.proj", hidden, False),), hidden),
        None,
    )
    mlp = SwiGLU(
        build.linear((LinearPart(f"{prefix}mlp.fc", 2 * inner, False),), hidden, gated=True),
        build.linear((LinearPart(f"{prefix}mlp.proj", hidden, False),), inner),
    )
    return NormedSumLayer(Layer(first, attention, third, mlp), second, fourth)


@dataclass(frozen=True, slots=True)
class _Reordered:
    """The checkpoint with rotary pairs (2i, 2i + 1) at (i, i + dim / 2), and qk_bias as a bias of Wqkv."""

    read: Fill
    read_blocks: BlockSource | None
    hidden: int
    dim: int

    def order(self) -> torch.Tensor:
        """Which stored row of Wqkv comes where; values stay as they are."""
        pairs = torch.arange(2 * self.hidden).view(-1, self.dim // 2, 2).transpose(1, 2).reshape(-1)
        return torch.cat((pairs, torch.arange(2 * self.hidden, 3 * self.hidden)))

    def fill(self, name: str, out: torch.Tensor) -> None:
        if name.endswith("attn.Wqkv.bias"):
            both = torch.zeros(3 * self.hidden, dtype=out.dtype, device=out.device)
            heads = self.hidden // self.dim
            qk = both[: 2 * self.hidden].view(2, 1, heads, self.dim)
            self.read(f"{name.removesuffix('Wqkv.bias')}qk_bias", qk)
            out.copy_(both[self.order().to(out.device)])
        else:
            self.read(name, out)
            if name.endswith("attn.Wqkv.weight"):
                out.copy_(out[self.order().to(out.device)])

    def blocks(self, name: str) -> Blocks | None:
        found = None if self.read_blocks is None else self.read_blocks(name)
        return found.rows(self.order()) if found and name.endswith("attn.Wqkv.weight") else found


def _groups(config: LoopedConfig) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Name prefixes of the layers of prelude, core and coda."""

    def prefixes(group: str, count: int) -> tuple[str, ...]:
        return tuple(f"transformer.{group}.{index}." for index in range(count))

    return (
        prefixes("prelude", config.prelude_layers),
        prefixes("core_block", config.num_layers),
        prefixes("coda", config.coda_layers),
    )


def _embed_scale(config: ConfigReader, hidden: int) -> float:
    """What the embedding is multiplied with; sqrt(n_embd) where the config does not say."""
    values = config.raw.get("init_values")
    if values is None:
        return math.sqrt(hidden)
    if not isinstance(values, Mapping):
        config.wrong(f"init_values must be an object, found {values!r}")
        return 1.0
    return config.number(values, "embed_scale", math.sqrt(hidden))


FAMILY = LoopedFamily(read_config, tensor_shapes, HEAD, build)
