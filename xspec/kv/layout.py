"""Sizes of the paged K/V cache: bytes of a page over all planes, pages that fit a budget.

Knows nothing about who owns a page: that is the scheduler's accounting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Planes:
    """`count` K/V slabs of one geometry, plus `page_state` elements a page that belong to no layer."""

    count: int
    kv_heads: int
    head_dim: int
    page_state: int = 0  # e.g. the hidden state of a page's last token

    @property
    def token_elements(self) -> int:
        return 2 * self.count * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One K/V plane per layer (and loop) of the target, then the drafter's, all with the same pages.

    Page 0 is what unfilled page-table entries point at; the last page of the slabs is the sink, which
    is written by rows whose results nobody may ever read and stands in no page table of a live row.
    """

    target: Planes
    block_size: int
    dtype: torch.dtype
    draft: Planes | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"--block_size={self.block_size} must be at least 1")

    @property
    def token_bytes(self) -> int:
        """K/V bytes of a token over all planes."""
        draft = 0 if self.draft is None else self.draft.token_elements
        return (self.target.token_elements + draft) * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        state = 0 if self.draft is None else self.draft.page_state * self.dtype.itemsize
        return self.token_bytes * self.block_size + state

    def pages_for(self, budget_bytes: int) -> int:
        """Pages, scratch and sink included, that fit the budget."""
        return max(0, budget_bytes) // self.page_bytes

    def pages_of(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one sequence."""
        return -(-tokens // self.block_size)
