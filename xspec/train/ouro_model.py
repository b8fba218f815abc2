"""An Ouro that can be trained: one stack of layers run D times, a head and an exit gate after each loop.

Weights bear the published names: its state dict is the checkpoint. Knows no objective, no data and no engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from xspec.errors import ConfigError
from xspec.train.layers import RMSNorm, SwiGLU

EMBEDDING_STD = 1.0
MATRIX_STD = 0.02
BRANCH_GAIN = 0.3  # of the norms after a sublayer: with 1 the first hundred steps learn several times less

Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines [T, head_dim / 2] of rotary positions."""


@dataclass(frozen=True, slots=True)
class OuroSizes:
    """The shape of a model. Heads are not grouped: as many keys and values as queries."""

    vocab: int
    hidden: int = 192
    layers: int = 3
    heads: int = 6
    inner: int = 512
    loops: int = 4
    rope_theta: float = 1e4
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "layers", "heads", "inner", "loops"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, allowed: 1 or more")
        if self.hidden % (2 * self.heads):
            raise ConfigError(
                f"hidden is {self.hidden}, allowed: multiples of twice the heads ({2 * self.heads})"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Cache:
    """Keys and values [B, heads, room, head_dim] of every loop and layer, for answers made token by token."""

    def __init__(self, sizes: OuroSizes, lanes: int, room: int) -> None:
        shape = (sizes.loops * sizes.layers, lanes, sizes.heads, room, sizes.head_dim)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        self.length = 0

    def extend(
        self, plane: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a plane has with these T new rows behind it. `length` grows when all planes have them."""
        end = self.length + keys.shape[2]
        self._keys[plane, :, :, self.length : end] = keys
        self._values[plane, :, :, self.length : end] = values
        return self._keys[plane, :, :, :end], self._values[plane, :, :, :end]


Recall = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""New keys and values -> all those to attend to."""


class Attention(nn.Module):
    def __init__(self, sizes: OuroSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.q_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.o_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor, turns: Turns, recall: Recall | None = None) -> torch.Tensor:
        """x [B, T, hidden], causal. With `recall`, rows are the first ones at all or a single one."""
        queries, keys, values = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = turn(queries, turns), turn(keys, turns)
        if recall is not None:
            keys, values = recall(keys, values)
        alone = queries.shape[2] < keys.shape[2]
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=not alone)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


def turn(heads: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Rotary positions on [..., T, head_dim]: element i is paired with i + head_dim / 2."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = (part.to(heads.dtype) for part in turns)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Layer(nn.Module):
    """Norms before and after each sublayer; what is added up is not normed."""

    def __init__(self, sizes: OuroSizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden, sizes.norm_eps)
        self.self_attn = Attention(sizes)
        self.input_layernorm_2 = RMSNorm(sizes.hidden, sizes.norm_eps)
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.norm_eps)
        self.mlp = SwiGLU(sizes.hidden, sizes.inner)
        self.post_attention_layernorm_2 = RMSNorm(sizes.hidden, sizes.norm_eps)

    def forward(self, x: torch.Tensor, turns: Turns, recall: Recall | None = None) -> torch.Tensor:
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), turns, recall))
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class Loops(nn.Module):
    """The part of the checkpoint under `model.`: everything but the head."""

    def __init__(self, sizes: OuroSizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden, sizes.norm_eps)
        self.early_exit_gate = nn.Linear(sizes.hidden, 1)


class OuroModel(nn.Module):
    """Initialised from `generator` alone: equal sizes and seeds make equal models."""

    def __init__(self, sizes: OuroSizes, generator: torch.Generator) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = Loops(sizes)
        self.lm_head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        initialise(self, generator)

    def states(self, tokens: torch.Tensor, cache: Cache | None = None) -> list[torch.Tensor]:
        """tokens [B, T] -> D states [B, T, hidden], the one after each loop.

        A state has been through the final norm: it is the next loop's input, the gate's and the head's.
        With a cache, tokens follow what is in it, which they join.
        """
        begin = cache.length if cache is not None else 0
        turns = angles(begin, tokens.shape[1], self.sizes, tokens.device)
        x, found = self.model.embed_tokens(tokens), []
        for loop in range(self.sizes.loops):
            for index, layer in enumerate(self.model.layers):
                plane = loop * self.sizes.layers + index
                x = layer(x, turns, functools.partial(cache.extend, plane) if cache is not None else None)
            x = self.model.norm(x)
            found.append(x)
        if cache is not None:
            cache.length += tokens.shape[1]
        return found

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        return self.lm_head(state)

    def exits(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gate logits [B, T, D - 1]: sigmoid is the probability to stop after that loop, once there."""
        gates = [self.model.early_exit_gate(state) for state in states[:-1]]
        return torch.cat(gates, dim=-1).float()


def angles(begin: int, length: int, sizes: OuroSizes, device: torch.device) -> Turns:
    """Of positions from `begin` on, in fp32; they are the same in every loop."""
    steps = torch.arange(0, sizes.head_dim, 2, dtype=torch.float32, device=device) / sizes.head_dim
    positions = torch.arange(begin, begin + length, dtype=torch.float32, device=device)
    turned = positions[:, None] / sizes.rope_theta**steps
    return turned.cos(), turned.sin()


def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Unit embeddings, small matrices, and branches that add little at first."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if "embed_tokens" in name:
                parameter.normal_(0.0, EMBEDDING_STD, generator=generator)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, MATRIX_STD, generator=generator)
            else:
                gain = BRANCH_GAIN if "layernorm_2" in name else 1.0
                parameter.fill_(0.0 if name.endswith("bias") else gain)
