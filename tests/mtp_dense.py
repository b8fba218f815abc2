"""MTP in plain torch, for tests: one sequence, no pages, no batching, one position at a time.

Written from the model's definition alone; it shares no code with xspec but the target's own states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class DenseDraft:
    tokens: list[int]
    logits: torch.Tensor  # [K, D]
    signals: torch.Tensor  # [K]


class DenseMtp:
    """`weights` under the neutral names of tests/tiny_drafters.py, all turned to fp64."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,  # [V, H]
        head: torch.Tensor,  # [D, H]
        ids: torch.Tensor | None = None,  # [D]
    ) -> None:
        self.config, self.ids = config, ids
        self.w = {name: weight.double() for name, weight in weights.items()}
        self.embedding, self.head = embedding.double(), head.double()
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.step_normed = config.get("step_hidden") == "normed"

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.w[name]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def rotate(self, head: torch.Tensor, position: int) -> torch.Tensor:
        half = self.dim // 2
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        angles = position * (1.0 / self.config["rope_theta"] ** exponents)  # fp32, as everywhere
        cos, sin = angles.cos().double(), angles.sin().double()
        first, second = head[:half], head[half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin))

    def project(self, x: torch.Tensor, kind: str, heads: int, position: int) -> list[torch.Tensor]:
        """Query, key or value heads of the layer for its input x [H]."""
        normal = self.norm(x, "layer.input_layernorm.weight")
        found = []
        for head in self.linear(normal, f"layer.self_attn.{kind}_proj").view(heads, self.dim):
            if kind != "v":
                if f"layer.self_attn.{kind}_norm.weight" in self.w:
                    head = self.norm(head, f"layer.self_attn.{kind}_norm.weight")
                head = self.rotate(head, position)
            found.append(head)
        return found

    def pair(self, token: int, hidden: torch.Tensor) -> torch.Tensor:
        embedding = self.norm(self.embedding[token], "enorm.weight")
        return self.linear(torch.cat((embedding, self.norm(hidden, "hnorm.weight"))), "eh_proj")

    def layer(self, inputs: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """(position, x) of all positions so far -> the residual stream of the last one."""
        keys = [self.project(x, "k", self.groups, position) for position, x in inputs]
        values = [self.project(x, "v", self.groups, position) for position, x in inputs]
        position, x = inputs[-1]
        mixed = []
        for index, query in enumerate(self.project(x, "q", self.heads, position)):
            group = index * self.groups // self.heads
            scores = torch.stack([query @ key[group] for key in keys]) / self.dim**0.5
            mixed.append(torch.softmax(scores, 0) @ torch.stack([value[group] for value in values]))
        x = x + self.linear(torch.cat(mixed), "layer.self_attn.o_proj")
        normal = self.norm(x, "layer.post_attention_layernorm.weight")
        gated = F.silu(self.linear(normal, "layer.mlp.gate_proj")) * self.linear(normal, "layer.mlp.up_proj")
        return x + self.linear(gated, "layer.mlp.down_proj")

    def draft(self, tokens: Sequence[int], states: torch.Tensor, steps: int, rank: int = 0) -> DenseDraft:
        """`tokens` x_0 .. x_p, of which the target has seen all but the last: `states` [p, H].

        `rank`: pick the token of that rank at every step (0: the best).
        """
        last = len(tokens) - 1
        inputs = [(t, self.pair(tokens[t], states[t - 1])) for t in range(1, last)]
        token, hidden = tokens[last], states[last - 1]
        picked: list[int] = []
        logits, signals = [], []
        for step in range(steps):
            inputs.append((last + step, self.pair(token, hidden)))
            residual = self.layer(inputs)
            normed = self.norm(residual, "norm.weight")
            hidden = normed if self.step_normed else residual
            logits.append(self.head @ normed)
            column = int(logits[-1].argsort(descending=True)[rank])
            signals.append(torch.softmax(logits[-1], 0)[column])
            token = column if self.ids is None else int(self.ids[column])
            picked.append(token)
        return DenseDraft(picked, torch.stack(logits), torch.stack(signals))
