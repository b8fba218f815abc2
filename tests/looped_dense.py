"""The looped families in plain torch, for tests: one whole text at a time, no pages, no batches, no cache.

Written from the published definitions over the published tensor names; it shares no code with xspec.
`trap` steps into one of the mistakes that are easy to make, so that a test can show it would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Place = tuple[str, int, int]
"""("core", loop, layer), ("prelude", 0, layer) or ("coda", loops run, layer)."""

KeyValue = tuple[torch.Tensor, torch.Tensor]  # [N, G, dim] each
Attend = Callable[[Place, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DensePass:
    logits: torch.Tensor  # [D, N, V]: what the head says after each loop
    stops: torch.Tensor  # [D, N]: lambda of the exit gate; [D, 0] without one
    planes: Mapping[Place, KeyValue]

    def exits(self, threshold: float) -> list[int]:
        """The loop each row exits after (0-based), by the published Q-exit rule."""
        found = []
        for stops in self.stops.T.tolist():
            left, total, chosen = 1.0, 0.0, len(stops) - 1
            for loop, stop in enumerate(stops):
                share = left if loop == len(stops) - 1 else stop * left
                left -= share
                total += share
                if total >= threshold:
                    chosen = loop
                    break
            found.append(chosen)
        return found


class Dense:
    """Subclasses say what happens between embedding and head."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        trap: str = "",
    ) -> None:
        self.config, self.trap, self.dtype = config, trap, dtype
        self.w = {name: weight.to(dtype) for name, weight in weights.items()}

    def run(
        self, ids: Sequence[int], positions: torch.Tensor, attend: Attend
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Logits [N, V] and gates [N] (or nothing) after every loop."""
        raise NotImplementedError

    def __call__(self, ids: Sequence[int]) -> DensePass:
        planes: dict[Place, KeyValue] = {}

        def attend(place: Place, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            planes[place] = (k, v)
            return attention(q, k, v)

        if self.trap == "one plane":
            logits, stops = self.one_plane(ids)
        else:
            logits, stops = self.run(ids, torch.arange(len(ids)), attend)
        return DensePass(torch.stack(logits), torch.stack(stops) if stops else torch.empty(0), planes)

    def one_plane(self, ids: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Token by token, with one plane a layer that every loop overwrites."""
        past: dict[tuple[str, int], list[KeyValue]] = {}
        rows = []
        for position, token in enumerate(ids):

            def attend(
                place: Place, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int = position
            ) -> torch.Tensor:
                seen = past.setdefault((place[0], place[2]), [])
                seen[position:] = [(k, v)]
                keys, values = (torch.cat(side) for side in zip(*seen, strict=True))
                return attention(q, keys, values)

            rows.append(self.run([token], torch.tensor([position]), attend))
        logits = [torch.cat(parts) for parts in zip(*(row[0] for row in rows), strict=True)]
        stops = [torch.cat(parts) for parts in zip(*(row[1] for row in rows), strict=True)]
        return logits, stops

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        text = list(ids)
        for _ in range(count):
            text.append(int(self(text).logits[-1, -1].argmax()))
        return text[len(ids) :]

    def norm(self, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.w[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))


class DenseLlama(Dense):
    """Ouro and Nanbeige: llama's names and attention."""

    loops_key = ""

    def run(
        self, ids: Sequence[int], positions: torch.Tensor, attend: Attend
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        embedding = self.w["model.embed_tokens.weight"][list(ids)]
        x, logits, stops = embedding, [], []
        for loop in range(self.config[self.loops_key]):
            if self.trap == "embedding again" and loop:
                x = x + embedding
            for layer in range(self.config["num_hidden_layers"]):
                x = self.layer(x, loop, layer, positions, attend)
            normed = self.rms(x, "model.norm")
            if self.trap != "norm after the loops":
                x = normed
            read = self.rms(normed, "model.norm") if self.trap == "norm twice" else normed
            logits.append(F.linear(read, self.w["lm_head.weight" if "lm_head.weight" in self.w else TABLE]))
            if "model.early_exit_gate.weight" in self.w:
                stops.append(torch.sigmoid(self.linear(normed, "model.early_exit_gate"))[:, 0])
        return logits, stops

    def layer(
        self, x: torch.Tensor, loop: int, layer: int, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        prefix = f"model.layers.{layer}."
        normed = self.rms(x, f"{prefix}input_layernorm")
        q, k, v = (
            self.linear(normed, f"{prefix}self_attn.{kind}_proj").view(len(x), -1, self.config["head_dim"])
            for kind in "qkv"
        )
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        added = self.linear(attend(("core", loop, layer), q, k, v), f"{prefix}self_attn.o_proj")
        x = x + self.after(added, f"{prefix}input_layernorm_2")
        normed = self.rms(x, f"{prefix}post_attention_layernorm")
        gate, up = (self.linear(normed, f"{prefix}mlp.{kind}_proj") for kind in ("gate", "up"))
        added = self.linear(F.silu(gate) * up, f"{prefix}mlp.down_proj")
        return x + self.after(added, f"{prefix}post_attention_layernorm_2")

    def after(self, added: torch.Tensor, name: str) -> torch.Tensor:
        there = f"{name}.weight" in self.w and self.trap != "no norm behind sublayers"
        return self.rms(added, name) if there else added

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.norm(x, name, self.config["rms_norm_eps"])

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        dim = heads.shape[-1]
        inverse = 1.0 / self.config["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = positions.float()[:, None] * inverse
        turn = turn_pairs if self.trap == "adjacent pairs" else turn_halves
        return turn(heads, angles.cos().to(self.dtype), angles.sin().to(self.dtype))


class DenseOuro(DenseLlama):
    loops_key = "total_ut_steps"


class DenseNanbeige(DenseLlama):
    loops_key = "num_loops"


class DenseHuginn(Dense):
    def run(
        self, ids: Sequence[int], positions: torch.Tensor, attend: Attend
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        config, hidden = self.config, self.config["n_embd"]
        entry = self.w["transformer.wte.weight"][list(ids)]
        if self.trap != "no embedding scale":
            entry = entry * hidden**0.5
        for layer in range(config["n_layers_in_prelude"]):
            entry = self.block(entry, ("prelude", 0, layer), positions, attend)
        state, logits = torch.zeros_like(entry), []
        for loop in range(config["mean_recurrence"]):
            injected = torch.zeros_like(entry) if self.trap == "injected once" and loop else entry
            both = (injected, state) if self.trap == "e before s" else (state, injected)
            state = F.linear(torch.cat(both, -1), self.w["transformer.adapter.weight"])
            for layer in range(config["n_layers_in_recurrent_block"]):
                state = self.block(state, ("core", loop, layer), positions, attend)
            logits.append(self.head(state, loop, positions, attend))
        return logits, []

    def head(self, state: torch.Tensor, loop: int, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Of one depth: the coda reads keys of the same depth at every position."""
        x = state if self.trap == "one final norm" else self.rms(state, "transformer.ln_f")
        for layer in range(self.config["n_layers_in_coda"]):
            x = self.block(x, ("coda", loop + 1, layer), positions, attend)
        own = "lm_head.weight" if "lm_head.weight" in self.w else "transformer.wte.weight"
        return F.linear(self.rms(x, "transformer.ln_f"), self.w[own])

    def block(self, x: torch.Tensor, place: Place, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        group = {"core": "core_block"}.get(place[0], place[0])
        prefix = f"transformer.{group}.{place[2]}."
        heads = self.config["n_heads"]
        fused = F.linear(self.rms(x, f"{prefix}norm_1"), self.w[f"{prefix}attn.Wqkv.weight"])
        q, k, v = (part.view(len(x), heads, -1) for part in fused.chunk(3, -1))
        if f"{prefix}attn.qk_bias" in self.w and self.trap != "no bias":
            bias = self.w[f"{prefix}attn.qk_bias"]
            q, k = q + bias[0], k + bias[1]
        table = self.w["freqs_cis"][0, :, 0][positions]  # [N, dim / 2, 2]
        turn = turn_halves if self.trap == "rotate half" else turn_pairs
        q, k = (turn(part, table[..., 0], table[..., 1]) for part in (q, k))
        added = F.linear(attend(place, q, k, v), self.w[f"{prefix}attn.proj.weight"])
        if self.trap == "norm before the sum":
            x = x + self.rms(added, f"{prefix}norm_2")
        else:
            x = self.rms(x + added, f"{prefix}norm_2")
        gate, up = F.linear(self.rms(x, f"{prefix}norm_3"), self.w[f"{prefix}mlp.fc.weight"]).chunk(2, -1)
        if self.trap == "gate second":
            gate, up = up, gate
        added = F.linear(F.silu(gate) * up, self.w[f"{prefix}mlp.proj.weight"])
        return self.rms(x + added, f"{prefix}norm_4")

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.norm(x, name, self.config["norm_eps"])


TABLE = "model.embed_tokens.weight"
DENSE: dict[str, type[Dense]] = {
    "ouro": DenseOuro,
    "huginn_raven": DenseHuginn,
    "nanbeige": DenseNanbeige,
}


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [N, H, dim] are the last N positions of k, v [M, G, dim] -> [N, H * dim]; causal."""
    share = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, keys) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
    return torch.einsum("hnm,mhd->nhd", weights, values).flatten(1)


def turn_halves(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [N, *, dim], cos and sin [N, dim / 2]: element i turns with element i + dim / 2."""
    first, second = heads.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def turn_pairs(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Element 2i turns with element 2i + 1."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
