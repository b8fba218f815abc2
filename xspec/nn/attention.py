"""Grouped-query attention of one layer: fused projection, rotation in place, paged cache, output.

Query, key and value heads lie side by side in one buffer, so rotation and the cache write take one
call each. How the cache is read is the kernels' business.
"""

from __future__ import annotations

import torch

from xspec.kernels.base import AttentionShape, Kernels, PackedLinear, PagedAttention
from xspec.nn.norm import RMSNorm
from xspec.nn.rope import CosSin


class GroupedAttention:
    """`head_norm` (qk-norm) acts on query and key heads together: its weight is [H + G, D]."""

    def __init__(
        self,
        kernels: Kernels,
        shape: AttentionShape,
        qkv: PackedLinear,
        output: PackedLinear,
        head_norm: RMSNorm | None,
    ) -> None:
        self._kernels, self._shape = kernels, shape
        self.qkv, self.output, self.head_norm = qkv, output, head_norm
        self._rotated = shape.heads + shape.kv_heads

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: CosSin,
        paged: PagedAttention,
        slab: torch.Tensor,
    ) -> torch.Tensor:
        """x, residual [N, hidden] -> attention(x), plus residual if any; the rows' K/V enter `slab`."""
        qkv = self._project(x, cos_sin)
        paged.store(slab, qkv[:, self._shape.heads :])
        return self.output(paged.attend(qkv[:, : self._shape.heads], slab), residual)

    def publish(self, x: torch.Tensor, cos_sin: CosSin, slab: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the keys and values of x [N, hidden] at `slots` [N], attending to nothing.

        The queries are projected too: splitting the fused weight would cost more memory than it saves time.
        """
        self._kernels.store_kv(slab, self._project(x, cos_sin)[:, self._shape.heads :], slots)

    def _project(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        """[N, H + 2 * G, D]: query, key and value heads, the first two normalised and rotated."""
        qkv = self.qkv(x).view(x.shape[0], -1, self._shape.head_dim)
        rotated = qkv[:, : self._rotated]
        if self.head_norm is not None:
            rotated.copy_(self.head_norm(rotated))
        self._kernels.rope_(rotated, *cos_sin)
        return qkv
