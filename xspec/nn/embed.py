"""Token embedding: a row lookup, scaled where the family scales it."""

from __future__ import annotations

import torch


class Embedding:
    def __init__(self, weight: torch.Tensor, scale: float = 1.0) -> None:
        self._weight, self._scale = weight, scale  # [vocab, hidden]

    @property
    def table(self) -> torch.Tensor | None:
        """The weight, where that is all there is to it."""
        return self._weight if self._scale == 1.0 else None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> a new [N, hidden]; an id past the vocabulary raises."""
        rows = self._weight.index_select(0, tokens)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)
