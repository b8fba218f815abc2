"""The small heads of a block drafter: the Markov bias between drafted tokens, and confidence in them.

Owns what is added to the base logits of a slot and what becomes of its outcome; knows nothing of attention,
caches or checkpoint dialects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from xspec.kernels.base import ConfidenceParts, PackedLinear
from xspec.nn.embed import Embedding


class Markov(Protocol):
    """First-order dependence inside a block: what slot k adds to its logits, knowing token k - 1."""

    def parts(self) -> tuple[torch.Tensor, PackedLinear] | None:
        """(W1 [V, r], W2) where it is linear in W1[previous], for a device that drafts in one call."""

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """Target ids [R] -> [R, r]."""

    def bias(self, base: torch.Tensor, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """base [R, D], hidden [R, H] of the slot, embedded [R, r] -> logits [R, D]; `base` is kept."""


class NoMarkov:
    """Slots that do not know each other's tokens (DFlash)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def parts(self) -> tuple[torch.Tensor, PackedLinear] | None:
        return None

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        return torch.empty(previous.shape[0], 0, dtype=self._dtype, device=previous.device)

    def bias(self, base: torch.Tensor, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return base


class VanillaMarkov:
    """Logits + W2 W1[previous] (DSpark, arXiv 2607.05147, section 3.1). W1 [V, r], W2 [D, r]."""

    def __init__(self, table: Embedding, output: PackedLinear) -> None:
        self._table, self._output = table, output

    def parts(self) -> tuple[torch.Tensor, PackedLinear] | None:
        table = self._table.table
        return None if table is None else (table, self._output)

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        return self._table(previous)

    def bias(self, base: torch.Tensor, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return self._output(embedded, base)


class GatedMarkov:
    """Logits + W2 (sigmoid(G [h ; e]) * e) with e = W1[previous]; G [r, H + r] has a bias."""

    def __init__(self, table: Embedding, output: PackedLinear, gate: PackedLinear) -> None:
        self._table, self._output, self._gate = table, output, gate

    def parts(self) -> tuple[torch.Tensor, PackedLinear] | None:
        return None

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        return self._table(previous)

    def bias(self, base: torch.Tensor, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self._gate(torch.cat((hidden, embedded), -1)))
        return self._output(gate * embedded, base)


def selected_probability(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """[N, D], [N] -> [N] float32: the drafter's own probability of what it picked."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide.gather(1, columns[:, None])[:, 0] - wide.logsumexp(1)).exp().float()


@dataclass(frozen=True, slots=True)
class Block:
    """B drafted slots of R lanes, slot-major."""

    hidden: torch.Tensor  # [B, R, H] after the drafter's norm
    embedded: Sequence[torch.Tensor]  # B times [R, r]: of the token before each slot's
    logits: Sequence[torch.Tensor]  # B times [R, D], Markov bias included
    columns: Sequence[torch.Tensor]  # B times [R]: which were picked
    sampled: torch.Tensor | None = None  # [R] bool: lanes whose target draws with a temperature; None: none
    probability: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = selected_probability


class Signals(Protocol):
    """How likely each drafted token is accepted if those before it are."""

    def __call__(self, block: Block) -> torch.Tensor:
        """-> [R, B] float32."""


class ConfidenceHead:
    """sigmoid((w . [h ; e] + b) / T_k + o_k), in fp32 at least: half types round it to exactly 1.

    It reads the slot's hidden state and the token before it, so it never sees the draw it judges.
    """

    def __init__(self, parts: ConfidenceParts) -> None:
        self.parts = parts

    def __call__(self, block: Block) -> torch.Tensor:
        parts, features = self.parts, block.hidden
        if parts.with_markov:
            features = torch.cat((features, torch.stack(tuple(block.embedded))), -1)
        logits = features.to(parts.weight.dtype) @ parts.weight + parts.bias  # [B, R]
        if block.sampled is None:
            temperatures, offsets = parts.temperatures[:1], parts.offsets[:1]
        else:
            regime = block.sampled.to(torch.int64)
            temperatures, offsets = parts.temperatures[regime], parts.offsets[regime]
        return torch.sigmoid(logits.T / temperatures + offsets).float()


class SelectedProbability:
    """For checkpoints without a confidence head: the softmax probability of the token picked."""

    def __call__(self, block: Block) -> torch.Tensor:
        slots = zip(block.logits, block.columns, strict=True)
        return torch.stack([block.probability(logits, columns) for logits, columns in slots], 1)
