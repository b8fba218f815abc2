"""Sizes of the paged K/V cache: bytes of a page over all planes, pages that fit a budget.

Knows nothing about who owns a page: that is the scheduler's accounting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One K/V plane per layer (and loop), all with the same pages; page 0 is scratch."""

    planes: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"--block_size={self.block_size} must be at least 1")

    @property
    def token_bytes(self) -> int:
        return 2 * self.planes * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def pages_for(self, budget_bytes: int) -> int:
        """Pages, scratch included, that fit the budget."""
        return max(0, budget_bytes) // self.page_bytes

    def pages_of(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.block_size)
