"""Token embedding: a plain row lookup."""

from __future__ import annotations

import torch


class Embedding:
    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight  # [vocab, hidden]

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> a new [N, hidden]; an id past the vocabulary raises."""
        return self._weight.index_select(0, tokens)
