"""A decoder and DSpark in plain torch, for tests: one sequence, whole matrices, no pages, no batching.

Written from the models' definitions alone; it shares no code with xspec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


class DenseLayers:
    """Llama-shaped decoder layers in fp64. `weights` by name, layers under `prefix`0. and so on."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.config, self.prefix = config, prefix
        self.w = {name: weight.double() for name, weight in weights.items()}
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.w[name]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, heads, D]; angles in fp32, as everywhere."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        angles = positions.float()[:, None] * (1.0 / self.config["rope_theta"] ** exponents)
        cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
        first, second = heads.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def project(self, x: torch.Tensor, layer: int, kind: str, positions: torch.Tensor) -> torch.Tensor:
        """x [T, H], already normed -> query, key or value heads [T, heads, D]."""
        name = f"{self.prefix}{layer}.self_attn.{kind}"
        heads = self.linear(x, f"{name}_proj").unflatten(-1, (-1, self.dim))
        if f"{name}_norm.weight" in self.w:
            heads = self.norm(heads, f"{name}_norm.weight")
        return heads if kind == "v" else self.rotate(heads, positions)

    def layer(
        self,
        x: torch.Tensor,
        index: int,
        positions: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """x [T, H]. With `context` (keys, values) before the rows' own, all are seen; else causal."""
        name = f"{self.prefix}{index}"
        normal = self.norm(x, f"{name}.input_layernorm.weight")
        q, k, v = (self.project(normal, index, kind, positions) for kind in "qkv")
        if context is not None:
            k, v = torch.cat((context[0], k)), torch.cat((context[1], v))
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.dim**0.5
        if context is None:
            scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + self.linear(mixed, f"{name}.self_attn.o_proj")
        normal = self.norm(x, f"{name}.post_attention_layernorm.weight")
        gated = F.silu(self.linear(normal, f"{name}.mlp.gate_proj")) * self.linear(
            normal, f"{name}.mlp.up_proj"
        )
        return x + self.linear(gated, f"{name}.mlp.down_proj")


class DenseTarget(DenseLayers):
    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(config, weights, "model.layers.")
        self.embedding = self.w["model.embed_tokens.weight"]
        self.head = self.w.get("lm_head.weight", self.embedding)

    def layer_outputs(self, tokens: Sequence[int]) -> dict[int, torch.Tensor]:
        """What each layer returns, raw, by its index; -1: the embedding."""
        positions = torch.arange(len(tokens))
        outputs = {-1: self.embedding[torch.tensor(tokens, dtype=torch.int64)]}
        for index in range(self.config["num_hidden_layers"]):
            outputs[index] = self.layer(outputs[index - 1], index, positions)
        return outputs


@dataclass(frozen=True)
class DenseDraft:
    tokens: list[int]
    base: torch.Tensor  # [B, D]
    logits: torch.Tensor  # [B, D], Markov bias included
    signals: torch.Tensor  # [B]


class DenseDSpark(DenseLayers):
    """`weights` under the published bare names. `ids` [D]: a reduced draft vocabulary."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        target: DenseTarget,
        ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__(config, weights, "layers.")
        self.target, self.ids = target, ids
        self.head = target.head if ids is None else target.head[torch.tensor(ids)]

    def context(self, tokens: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per draft layer, keys and values [T, groups, D] of tokens the target has seen."""
        outputs = self.target.layer_outputs(tokens)
        features = torch.cat([outputs[index] for index in self.config["target_layer_ids"]], -1)
        c = self.norm(self.linear(features, "fc"), "hidden_norm.weight")
        positions = torch.arange(len(tokens))
        layers = range(self.config["num_hidden_layers"])
        return [(self.project(c, i, "k", positions), self.project(c, i, "v", positions)) for i in layers]

    def draft(self, tokens: Sequence[int], rank: int = 0) -> DenseDraft:
        """`tokens` x_0 .. x_p, of which the target has seen all but the last, the anchor.

        `rank`: pick the token of that rank in every slot (0: the best).
        """
        width = self.config["block_size"]
        mask = self.w.get("mask_embedding")
        mask = self.target.embedding[self.config["mask_token_id"]] if mask is None else mask
        x = torch.stack([self.target.embedding[tokens[-1]]] + [mask] * (width - 1))
        positions = torch.arange(len(tokens) - 1, len(tokens) - 1 + width)
        for index, context in enumerate(self.context(tokens[:-1])):
            x = self.layer(x, index, positions, context)
        hidden = self.norm(x, "norm.weight")
        base = hidden @ self.head.T
        previous, logits, signals, picked = tokens[-1], [], [], []
        for slot in range(width):
            bias, embedded = self._markov(previous, hidden[slot])
            logits.append(base[slot] + bias)
            column = int(logits[-1].argsort(descending=True)[rank])
            signals.append(self._signal(hidden[slot], embedded, logits[-1], column))
            previous = column if self.ids is None else self.ids[column]
            picked.append(previous)
        return DenseDraft(picked, base, torch.stack(logits), torch.stack(signals))

    def _markov(self, previous: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.config["markov_rank"]:
            return torch.zeros(()), torch.zeros(0, dtype=torch.float64)
        embedded = self.w["markov_head.markov_w1.weight"][previous]
        z = embedded
        if "markov_head.gate_proj.weight" in self.w:
            z = torch.sigmoid(self.linear(torch.cat((hidden, embedded)), "markov_head.gate_proj")) * embedded
        return self.w["markov_head.markov_w2.weight"] @ z, embedded

    def _signal(
        self, hidden: torch.Tensor, embedded: torch.Tensor, logits: torch.Tensor, column: int
    ) -> torch.Tensor:
        if "confidence_head.proj.weight" not in self.w:
            return torch.softmax(logits, 0)[column]
        with_markov = self.config["confidence_head_with_markov"]
        features = torch.cat((hidden, embedded)) if with_markov else hidden
        return torch.sigmoid(self.linear(features, "confidence_head.proj")[0])
