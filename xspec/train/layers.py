"""A llama-shaped decoder layer that can be trained, equal to the inference one (xspec/nn).

Attention's parts are apart, since a drafter's keys come from elsewhere than its queries. Knows no drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class LayerSizes:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    norm_eps: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What drafters share with their target, frozen, in the type logits are computed in."""

    embedding: torch.Tensor  # [V, H]
    head: torch.Tensor  # [V, H]
    norm: torch.Tensor  # [H] the final norm's weight
    sizes: LayerSizes  # of the target's own layers
    max_position: int

    def to(self, device: torch.device) -> TargetWeights:
        embedding, head, norm = (part.to(device) for part in (self.embedding, self.head, self.norm))
        return TargetWeights(embedding, head, norm, self.sizes, self.max_position)


class RMSNorm(nn.Module):
    """Normalised in fp32, rounded to the input's type, then weighted: as the kernels do."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normal.to(x.dtype) * self.weight.to(x.dtype)


def rotate(heads: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Half-split rotary: heads [..., N, heads, D] at positions [..., N]. Angles in fp32."""
    size = heads.shape[-1]
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=heads.device) / size
    angles = positions.float()[..., None, None] / theta**steps
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention. Names of the weights are the checkpoint's."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.sizes = sizes
        q_rows, kv_rows = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, q_rows, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, kv_rows, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, kv_rows, bias=False)
        self.o_proj = nn.Linear(q_rows, sizes.hidden, bias=False)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., N, hidden] at positions [..., N] -> [..., N, heads, D], rotated."""
        heads = self.q_proj(x).unflatten(-1, (self.sizes.heads, self.sizes.head_dim))
        return rotate(heads, positions, self.sizes.rope_theta)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., N, hidden] at positions [..., N] -> keys (rotated), values [..., N, kv_heads, D] each."""
        shape = (self.sizes.kv_heads, self.sizes.head_dim)
        keys = rotate(self.k_proj(x).unflatten(-1, shape), positions, self.sizes.rope_theta)
        return keys, self.v_proj(x).unflatten(-1, shape)

    def mix(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend and project: queries [..., Q, heads, D], keys and values [..., K, kv_heads, D].

        `mask` [..., Q, K] bool: True where a query sees a key; every query must see one. `own`: keys and
        values [..., Q, n, kv_heads, D] that only their own query sees. Returns [..., Q, hidden].
        """
        # Query heads of a group are extra rows of one product: on a CPU faster than widening the keys.
        group = self.sizes.heads // self.sizes.kv_heads
        rows = queries.unflatten(-2, (self.sizes.kv_heads, group)).movedim(-4, -2)  # [..., G, R, Q, D]
        count, width = rows.shape[-2], keys.shape[-3]
        folded = (rows * self.sizes.head_dim**-0.5).flatten(-3, -2)  # [..., G, R * Q, D]
        scores = (folded @ keys.movedim(-3, -1)).unflatten(-2, (group, count))
        scores = scores.masked_fill(~mask[..., None, None, :, :], float("-inf"))
        if own is not None:
            narrow = folded.unflatten(-2, (group, count))[..., None, :]  # [..., G, R, Q, 1, D]
            own_keys, own_values = (part.movedim(-2, -4)[..., None, :, :, :] for part in own)
            scores = torch.cat((scores, (narrow * own_keys).sum(-1)), dim=-1)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        shared = weights[..., :width].flatten(-3, -2) @ values.movedim(-3, -2)
        mixed = shared.unflatten(-2, (group, count))
        if own is not None:
            mixed = mixed + (weights[..., width:, None] * own_values).sum(-2)
        return self.o_proj(mixed.movedim(-2, -4).flatten(-3))


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """The parts of a layer under the checkpoint's names; `finish` is what follows attention."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(sizes.hidden, sizes.norm_eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.norm_eps)
        self.mlp = SwiGLU(sizes.hidden, sizes.inner)

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The residual stream after the layer, from the one before it and the attention's output."""
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


def initialise(module: nn.Module, generator: torch.Generator, std: float = 0.02) -> None:
    """Normal matrices, unit norms, zero biases, in the order of the module's parameters."""
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
