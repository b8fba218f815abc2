"""How the rows of a verify pass run through the target: from their tokens, or on from what drafting left."""

from __future__ import annotations

from typing import Protocol

import torch

from xspec.draft.base import LoopWork
from xspec.draft.looped import LoopedDrafter, PickRows, Resumed
from xspec.kernels.rounds import FlatRows
from xspec.models.base import Target


class TargetPasses(Protocol):
    def __call__(self, rows: FlatRows, loops: LoopWork) -> Resumed:
        """G flat rows -> their hidden states; writes their K/V."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] after the final norm -> [N, vocab]."""


class WholePasses:
    """Every row through every layer."""

    def __init__(self, target: Target, kv: tuple[torch.Tensor, ...], taps: tuple[int, ...]) -> None:
        self._target, self._kv, self._taps = target, kv, taps
        self.logits = target.logits

    def __call__(self, rows: FlatRows, loops: LoopWork) -> Resumed:
        return Resumed(self._target.forward(rows.tokens, rows.inputs, self._kv, self._taps))


class LoopedPasses:
    """Rows that a looped drafter has begun: what it computed is not computed again."""

    def __init__(self, target: Target, drafter: LoopedDrafter, pick: PickRows) -> None:
        self._drafter, self._pick = drafter, pick
        self.logits = target.logits

    def __call__(self, rows: FlatRows, loops: LoopWork) -> Resumed:
        return self._drafter.resume(rows, loops, self._pick)
