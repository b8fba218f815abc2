"""The kernels in plain torch: any dtype, any device, one loop per row, meant to be read.

Every other platform is tested for parity with this file. Speed is nobody's concern here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from xspec.kernels.base import (
    AttentionShape,
    BlockParts,
    LayerWeights,
    LoopParts,
    NormWeights,
    Rotary,
    StepParts,
)
from xspec.kernels.quantised import Blocks, ReferenceBlocks

if TYPE_CHECKING:
    from xspec.kernels.rounds import RowTable
    from xspec.nn.inputs import ForwardInputs


class ReferenceLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y if add is None else y + add


class ReferenceGated:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._linear = ReferenceLinear(weight, bias)

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self._linear(x).chunk(2, dim=-1)
        y = F.silu(gate) * up
        return y if add is None else y + add


class ReferenceAttention:
    def __init__(self, inputs: ForwardInputs, shape: AttentionShape) -> None:
        self._inputs, self._shape = inputs, shape
        self._sequences = inputs.owners()  # [N]: which row of the page table each query row reads

    def store(self, slab: torch.Tensor, kv: torch.Tensor) -> None:
        _store(slab, kv.nan_to_num(0.0, 0.0, 0.0) if self._inputs.guesses else kv, self._inputs.slots)

    def attend(self, q: torch.Tensor, slab: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(q)
        accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
        group = self._shape.heads // self._shape.kv_heads
        for row, (sequence, length) in enumerate(
            zip(self._sequences.tolist(), self._inputs.kv_lens.tolist(), strict=True)
        ):
            pages = slab[:, self._inputs.page_table[sequence]]  # [2 * G, P, block, D]
            first = max(0, min(self._shape.first_key, length - 1))
            keys, values = pages.flatten(1, 2)[:, first:length].to(accumulate).chunk(2)  # [G, seen, D] each
            for head in range(self._shape.heads):
                scores = keys[head // group] @ q[row, head].to(accumulate) * self._shape.scale
                out[row, head] = (torch.softmax(scores, 0) @ values[head // group]).to(q.dtype)
        return out.flatten(1)


class ReferenceKernels:
    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ReferenceLinear:
        return ReferenceLinear(weight, bias)

    def pack_gated(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ReferenceGated:
        return ReferenceGated(weight, bias)

    def pack_blocks(
        self, blocks: Blocks, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> ReferenceBlocks:
        return ReferenceBlocks(blocks, bias, gated=gated)

    def fuse(
        self,
        layers: Sequence[LayerWeights],
        shape: AttentionShape,
        rotary: Rotary,
        norm: NormWeights | None,
    ) -> None:
        return None

    def fuse_rows(self, table: RowTable) -> None:
        return None

    def fuse_draws(self, dtype: torch.dtype) -> None:
        return None

    def fuse_carry(self) -> None:
        return None

    def fuse_steps(self, parts: StepParts) -> None:
        return None

    def fuse_block(self, parts: BlockParts) -> None:
        return None

    def fuse_loops(self, parts: LoopParts) -> None:
        return None

    def row_dependence(self, block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[str, ...]:
        return ("the reference kernels promise nothing",)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return normal.to(x.dtype) * weight

    def rope_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        first, second = heads.chunk(2, dim=-1)
        heads.copy_(heads * cos + torch.cat((second, first), dim=-1) * sin)

    def kv_slab(
        self, pages: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.zeros(2 * kv_heads, pages, block_size, head_dim, dtype=dtype, device=self._device)

    def store_kv(self, slab: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        _store(slab, kv, slots)

    def zero_pages(self, slab: torch.Tensor, pages: torch.Tensor) -> None:
        slab.index_fill_(1, pages, 0.0)

    def paged_attention(
        self, inputs: ForwardInputs, shape: AttentionShape, slab: torch.Tensor
    ) -> ReferenceAttention:
        return ReferenceAttention(inputs, shape)


def _store(slab: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    for row, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, slab.shape[2])
        slab[:, page, offset] = kv[row]
