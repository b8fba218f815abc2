"""The target contract: what the engine and the drafters may ask of a model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from xspec.kernels.base import LoopParts, PackedLinear
from xspec.kv.layout import Planes
from xspec.nn.inputs import ForwardInputs


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Sizes the rest of the engine plans with."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    max_position: int
    loops: int = 1  # D of a looped transformer; 1 elsewhere
    outer_layers: int = 0  # layers outside the loops (prelude and coda), not in `num_layers`
    exit_threshold: float = 1.0  # below 1 a row's head may read after an earlier loop
    state_size: int = 0  # elements a row carries from one loop to the next; 0: not looped

    @property
    def planes(self) -> Planes:
        """KV slabs the model writes: one per layer and loop, then one per layer outside the loops."""
        return Planes(self.num_layers * self.loops + self.outer_layers, self.kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class Hidden:
    """Result of a forward pass. `taps` are the residual streams a drafter asked for, in its order."""

    last: torch.Tensor  # [N, hidden], after the final norm
    residual: torch.Tensor  # [N, hidden], before it
    taps: tuple[torch.Tensor, ...] = ()


class Target(Protocol):
    spec: TargetSpec

    def forward(
        self,
        tokens: torch.Tensor,
        inputs: ForwardInputs,
        kv: tuple[torch.Tensor, ...],
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """tokens [N] int64 -> hidden states; writes the rows' K/V into `kv` (one slab per plane).

        Tap i is the residual stream after i layers (0: the embedding).
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] after the final norm -> [N, vocab] in the model's dtype."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, hidden], for drafters that share the embedding."""

    def embedding(self) -> torch.Tensor | None:
        """[vocab, hidden] of which `embed` looks up rows and no more; None where it does something else."""

    def head(self) -> PackedLinear | None:
        """What `logits` multiplies by and does no more; None where it does something else."""

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Head weights [D, hidden] of token ids [D], for drafters that share (part of) the head."""


class LoopedTarget(Target, Protocol):
    """A target whose layers run `spec.loops` times, loop l reading only what loops up to l wrote.

    forward = begin, loops 0 to D, finish. What stands between two loops is a state [N, state_size] a row:
    whoever keeps it can run on from there, for any of the rows, without computing anything again.
    """

    def begin(
        self, tokens: torch.Tensor, inputs: ForwardInputs, kv: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """tokens [N] -> the state before loop 0; writes the K/V of layers before the loops."""

    def run_loops(
        self,
        state: torch.Tensor,
        inputs: ForwardInputs,
        kv: tuple[torch.Tensor, ...],
        first: int,
        last: int,
    ) -> torch.Tensor:
        """Loops first to last - 1 over the state; writes only their K/V planes."""

    def loop_parts(self) -> LoopParts | None:
        """For a device that drafts by loops in one call; None where there is more to them than layers."""

    def finish(self, state: torch.Tensor, inputs: ForwardInputs, kv: tuple[torch.Tensor, ...]) -> Hidden:
        """What `logits` reads if the loops end here. The K/V of layers after the loops is written again each
        time, so the last call for a row must be the one after loop D."""
