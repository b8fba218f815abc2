"""Attention of the native library over paged keys and values, op by op: where layers are not fused.

A page's elements are permuted (csrc/attention.h); a slab's shape is the same as elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from xspec.kernels.base import AttentionShape
from xspec.kernels.native import Team
from xspec.kernels.native_calls import BF16, attend, store_kv
from xspec.kernels.native_linear import UNIT

if TYPE_CHECKING:
    from xspec.nn.inputs import ForwardInputs

PAGE_UNIT = 16
"""Tokens of a page come in multiples of it."""

MAX_HEAD_DIM = 256


def pages_fit(block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether K/V pages are laid out for, and read by, the native attention."""
    return (
        dtype is BF16
        and block_size % PAGE_UNIT == 0
        and head_dim % UNIT == 0
        and 0 < head_dim <= MAX_HEAD_DIM
    )


class NativeAttention:
    """A PagedAttention."""

    def __init__(self, team: Team, inputs: ForwardInputs, shape: AttentionShape) -> None:
        self._team, self._inputs, self._shape = team, inputs, shape
        self._owners = inputs.owners()

    def store(self, slab: torch.Tensor, kv: torch.Tensor) -> None:
        finite = self._inputs.guesses
        if torch.compiler.is_compiling():
            torch.ops.xspec.store_kv(slab, kv, self._inputs.slots, finite)
        else:
            store_kv(self._team, slab, kv, self._inputs.slots, finite=finite)

    def attend(self, q: torch.Tensor, slab: torch.Tensor) -> torch.Tensor:
        inputs, shape = self._inputs, self._shape
        seen = (self._owners, inputs.kv_lens, inputs.page_table, shape.first_key, shape.scale)
        if torch.compiler.is_compiling():
            out: torch.Tensor = torch.ops.xspec.paged_attention(q, slab, *seen)
            return out
        return attend(self._team, q, slab, *seen)
