"""The kernels on a CPU: eager torch, few ops a layer, weights prepacked for oneDNN.

Attention gathers a segment's pages into one dense block and runs batched matrix products over it, with
the query heads of a KV group (and a sequence's rows) folded into one row axis. Work is cut into tiles
so that neither the gathered block nor the scores outgrow the cache by much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from xspec.errors import UnsupportedError
from xspec.kernels.base import (
    AttentionShape,
    BlockParts,
    LayerWeights,
    LoopParts,
    NormWeights,
    PackedLinear,
    Rotary,
    StepParts,
)

if TYPE_CHECKING:
    from xspec.kernels.quantised import Blocks
    from xspec.kernels.rounds import RowTable
    from xspec.nn.inputs import ForwardInputs, Segment

TILE_ROWS = 64
"""Query rows of one sequence per tile: 64 to 128 were the fastest, smaller wastes the matrix units."""

TILE_KV_BYTES = 4 << 20
"""Gathered keys and values per tile of several sequences (about a share of the last-level cache)."""

KEPT_MASK_BYTES = 16 << 20
"""Masks up to this size are built once per forward pass; larger ones once per layer, to bound memory."""


class DenseLinear:
    """A weight as it is: fp64, which oneDNN does not know, and fp32, which stands for exactness.

    oneDNN's packed fp32 product is up to 1.8 times faster (4 to 16 rows) but sums a row in one run:
    1.6 times the rounding error, enough to leave 1e-4 of reference logits on a 30-layer model.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        return y if add is None else y.add_(add)


class OneDnnLinear:
    """A weight in oneDNN's blocked layout; a residual is added inside the product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias
        self._plain = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor
        if add is None:
            y = self._plain(x, self._weight, self._bias, "none", [], "")
        else:
            y = self._binary(x, add, self._weight, self._bias, "add")
        return y


class GatedLinear:
    """silu(gate) * up behind the fused linear of both."""

    def __init__(self, linear: PackedLinear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = self._linear(x).chunk(2, dim=-1)
        y = F.silu(gate).mul_(up)
        return y if add is None else y.add_(add)


@dataclass(frozen=True, slots=True)
class _Tile:
    """`count` sequences of `rows` query rows each, over `keys` leading keys of their gathered pages."""

    first_row: int
    count: int
    rows: int
    mask: torch.Tensor | None  # [1 or G * count, rows * H / G, keys], 0 or -inf; None: not kept
    keys: torch.Tensor  # [G * count, D, keys], a view of the scratch block
    values: torch.Tensor  # [G * count, keys, D], another


@dataclass(frozen=True, slots=True)
class _Gather:
    """Pages that are read together into `block`, and the tiles that use them."""

    chunks: torch.Tensor  # [2 * G * count * pages] indices of (head, page) chunks of the slab
    block: torch.Tensor  # [2 * G * count * pages, block_size * D], in the scratch memory all gathers share
    tiles: tuple[_Tile, ...]


class CpuAttention:
    def __init__(self, inputs: ForwardInputs, shape: AttentionShape, pages: int, block_size: int) -> None:
        self._slots, self._guesses = inputs.slots, inputs.guesses
        self._ragged = inputs.ragged
        # A padded row may claim no keys at all; one key keeps its softmax finite.
        self._kv_lens = inputs.kv_lens.clamp(min=1)
        if self._ragged is not None:
            self._kv_lens = self._kv_lens.index_select(0, self._ragged.dense)
        self._shape = shape
        self._group = shape.heads // shape.kv_heads
        self._chunk_elements = block_size * shape.head_dim
        self._page_elements = 2 * shape.kv_heads * self._chunk_elements
        self._head_starts = torch.arange(2 * shape.kv_heads).unsqueeze(1) * pages
        widest = max((self._together(segment) * segment.pages for segment in inputs.segments), default=0)
        self._scratch = torch.empty(widest * self._page_elements, dtype=shape.dtype)
        self._gathers = tuple(
            gather for segment in inputs.segments for gather in self._plan(segment, inputs.page_table)
        )

    def store(self, slab: torch.Tensor, kv: torch.Tensor) -> None:
        _store(slab, kv.nan_to_num(0.0, 0.0, 0.0) if self._guesses else kv, self._slots)

    def attend(self, q: torch.Tensor, slab: torch.Tensor) -> torch.Tensor:
        if self._ragged is None:
            return self._attend(q, slab)
        return self._attend(q.index_select(0, self._ragged.dense), slab).index_select(0, self._ragged.flat)

    def _attend(self, q: torch.Tensor, slab: torch.Tensor) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        # On the first axis of a flat view, because only that selection runs on all threads.
        chunks = slab.view(-1, self._chunk_elements)
        for gather in self._gathers:
            torch.index_select(chunks, 0, gather.chunks, out=gather.block)
            parts.extend(self._attend_tile(tile, q) for tile in gather.tiles)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_tile(self, tile: _Tile, q: torch.Tensor) -> torch.Tensor:
        shape, group = self._shape, self._group
        rows = tile.count * tile.rows
        if rows < q.shape[0]:
            q = q[tile.first_row : tile.first_row + rows]
        batch, keys = shape.kv_heads * tile.count, tile.keys.shape[2]
        queries = q.view(tile.count, tile.rows, shape.kv_heads, group, shape.head_dim).permute(2, 0, 1, 3, 4)
        queries = queries.reshape(batch, tile.rows * group, shape.head_dim)
        mask = self._mask(tile.first_row, tile.count, tile.rows, keys) if tile.mask is None else tile.mask
        if mask.shape[0] != batch:
            mask = mask.expand(batch, -1, -1)
        weights = torch.softmax(torch.baddbmm(mask, queries, tile.keys, alpha=shape.scale), -1)
        mixed = torch.bmm(weights, tile.values).view(
            shape.kv_heads, tile.count, tile.rows, group, shape.head_dim
        )
        return mixed.permute(1, 2, 0, 3, 4).reshape(rows, shape.heads * shape.head_dim)

    def _together(self, segment: Segment) -> int:
        """Sequences of a segment whose pages are gathered at once; a long run of rows goes alone."""
        if segment.rows > TILE_ROWS:
            return 1
        page_bytes = self._page_elements * self._shape.dtype.itemsize
        return max(1, min(segment.count, TILE_KV_BYTES // (segment.pages * page_bytes)))

    def _plan(self, segment: Segment, page_table: torch.Tensor) -> list[_Gather]:
        together = self._together(segment)
        gathers = []
        for first in range(0, segment.count, together):
            count = min(together, segment.count - first)
            sequence = segment.first + first
            page_ids = page_table[sequence : sequence + count, : segment.pages].reshape(-1)
            chunks = (self._head_starts + page_ids).view(-1)
            block = self._scratch[: page_ids.shape[0] * self._page_elements].view(-1, self._chunk_elements)
            first_row = segment.first_row + first * segment.rows
            gathers.append(_Gather(chunks, block, tuple(self._tiles(block, first_row, count, segment.rows))))
        return gathers

    def _tiles(self, block: torch.Tensor, first_row: int, count: int, rows: int) -> list[_Tile]:
        """Row tiles of one gather; a tile of one sequence reads no further than its own rows can see."""
        shape = self._shape
        keys, values = block.view(2, shape.kv_heads * count, -1, shape.head_dim)
        if rows <= TILE_ROWS:
            return [self._tile(keys, values, first_row, count, rows)]
        tiles = []
        for start in range(first_row, first_row + rows, TILE_ROWS):
            size = min(TILE_ROWS, first_row + rows - start)
            seen = min(int(self._kv_lens[start : start + size].max()), keys.shape[1])
            tiles.append(self._tile(keys[:, :seen], values[:, :seen], start, 1, size))
        return tiles

    def _tile(self, keys: torch.Tensor, values: torch.Tensor, first_row: int, count: int, rows: int) -> _Tile:
        seen = keys.shape[1]
        mask_bytes = keys.shape[0] * rows * self._group * seen * self._shape.dtype.itemsize
        mask = self._mask(first_row, count, rows, seen) if mask_bytes <= KEPT_MASK_BYTES else None
        return _Tile(first_row, count, rows, mask, keys.transpose(1, 2), values)

    def _mask(self, first_row: int, count: int, rows: int, keys: int) -> torch.Tensor:
        lens = self._kv_lens[first_row : first_row + count * rows]
        key = torch.arange(keys)
        hidden = key >= lens.unsqueeze(1)  # [count * rows, keys]
        if self._shape.first_key:
            hidden |= key < (lens - 1).clamp(max=self._shape.first_key).unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=self._shape.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask.view(count, rows, 1, keys).expand(count, rows, self._group, keys)
        mask = mask.reshape(count, rows * self._group, keys)
        return mask if count == 1 else mask.repeat(self._shape.kv_heads, 1, 1)


class CpuKernels:
    def __init__(self) -> None:
        packed = set()
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            packed.add(torch.bfloat16)
        if torch.ops.mkldnn._is_mkldnn_fp16_supported():
            packed.add(torch.float16)
        self._packed = frozenset(packed)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        if weight.dtype in self._packed:
            return OneDnnLinear(weight, bias)
        return DenseLinear(weight, bias)

    def pack_gated(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return GatedLinear(self.pack_linear(weight, bias))

    def pack_blocks(
        self, blocks: Blocks, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> PackedLinear:
        raise UnsupportedError(
            "quantised weights cannot be used", ["their products need the native kernels (cpu_native.py)"]
        )

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
        return ("torch's products sum in an order that depends on the number of rows",)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)

    def rope_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        rolled = heads.roll(heads.shape[-1] // 2, -1)
        heads.mul_(cos).addcmul_(rolled, sin)

    def kv_slab(
        self, pages: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.zeros(2 * kv_heads, pages, block_size, head_dim, dtype=dtype)

    def store_kv(self, slab: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        _store(slab, kv, slots)

    def zero_pages(self, slab: torch.Tensor, pages: torch.Tensor) -> None:
        slab.index_fill_(1, pages, 0.0)

    def paged_attention(
        self, inputs: ForwardInputs, shape: AttentionShape, slab: torch.Tensor
    ) -> CpuAttention:
        return CpuAttention(inputs, shape, *slab.shape[1:3])


def _store(slab: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    slab.view(slab.shape[0], -1, slab.shape[3]).index_copy_(1, slots, kv.transpose(0, 1))
