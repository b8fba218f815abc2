"""The drafter contract. Drafters propose; the target alone decides the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from xspec.models.base import Hidden
from xspec.nn.inputs import ForwardInputs


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    name: str
    max_steps: int  # largest K; 0 for the null drafter
    taps: tuple[int, ...] = ()  # target layers whose residual stream it wants
    kv_planes: int = 0  # slabs it needs beside the target's


@dataclass(frozen=True, slots=True)
class Draft:
    """K proposals per decode row; columns beyond a row's limit are dead weight, never wrong."""

    tokens: torch.Tensor  # [R, K] int64
    signals: torch.Tensor | None = None  # [R, K] float32 acceptance signals


class Drafter(Protocol):
    spec: DrafterSpec

    def draft(self, rows: torch.Tensor, steps: int) -> Draft:
        """Propose `steps` tokens for each device row in `rows` [R]. Never called with steps = 0."""

    def publish(
        self, hidden: Hidden, tokens: torch.Tensor, inputs: ForwardInputs, committed: torch.Tensor
    ) -> None:
        """Refresh draft context from the target states of committed rows, in every round, plain or not."""
