"""The kernels on a CPU: eager torch, few ops a layer, weights prepacked for oneDNN.

Attention gathers a segment's pages into one dense block and runs batched matrix products over it, with
the query heads of a KV group (and a sequence's rows) folded into one row axis. Work is cut into tiles
so that neither the gathered block nor the scores outgrow the cache by much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from xspec.kernels.base import AttentionShape, PackedLinear

if TYPE_CHECKING:
    from xspec.nn.inputs import ForwardInputs, Segment

TILE_ROWS = 64
"""Query rows of one sequence per tile: 64 to 128 were the fastest, smaller wastes the matrix units."""

TILE_KV_BYTES = 8 << 20
"""Gathered keys and values per tile of several sequences (about a share of the last-level cache)."""

KEPT_MASK_BYTES = 16 << 20
"""Masks up to this size are built once per forward pass; larger ones once per layer, to bound memory."""


class DenseLinear:
    """A weight as it is, for dtypes that oneDNN does not pack."""

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


@dataclass(frozen=True, slots=True)
class _Tile:
    """`count` sequences of `rows` query rows each, over `keys` leading keys of their gathered pages."""

    first_row: int
    count: int
    rows: int
    keys: int
    mask: torch.Tensor | None  # [1 or G * count, rows * H / G, keys], 0 or -inf; None: not kept


@dataclass(frozen=True, slots=True)
class _Gather:
    """Pages that are read together, and the tiles that use them."""

    page_ids: torch.Tensor  # [count * pages], sequence-major
    count: int
    pages: int
    tiles: tuple[_Tile, ...]


class CpuAttention:
    def __init__(self, inputs: ForwardInputs, shape: AttentionShape, block_size: int) -> None:
        self._slots = inputs.slots
        # A padded row may claim no keys at all; one key keeps its softmax finite.
        self._kv_lens = inputs.kv_lens.clamp(min=1)
        self._shape = shape
        self._group = shape.heads // shape.kv_heads
        self._gathers = tuple(
            gather for segment in inputs.segments for gather in self._plan(segment, inputs.page_table, block_size)
        )
        self._rows = inputs.positions.shape[0]
        widest = max((g.page_ids.shape[0] for g in self._gathers), default=0)
        size = 2 * shape.kv_heads * widest * block_size * shape.head_dim
        self._scratch = torch.empty(size, dtype=shape.dtype)

    def store(self, slab: torch.Tensor, kv: torch.Tensor) -> None:
        planes = slab.view(2 * self._shape.kv_heads, -1, self._shape.head_dim)
        planes.index_copy_(1, self._slots, kv.transpose(0, 1))

    def attend(self, q: torch.Tensor, slab: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        planes = slab.flatten(0, 1)  # [2 * G, pages, block, D]
        block = planes.shape[2]
        out = torch.empty(self._rows, shape.kv_heads, self._group, shape.head_dim, dtype=shape.dtype)
        for gather in self._gathers:
            size = (planes.shape[0], gather.page_ids.shape[0], block, shape.head_dim)
            dense = self._scratch[: size[0] * size[1] * size[2] * size[3]].view(size)
            torch.index_select(planes, 1, gather.page_ids, out=dense)
            keys, values = dense.view(2, shape.kv_heads * gather.count, gather.pages * block, shape.head_dim)
            for tile in gather.tiles:
                self._attend_tile(tile, q, keys, values, out)
        return out.view(self._rows, shape.heads * shape.head_dim)

    def _attend_tile(
        self, tile: _Tile, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        shape, group = self._shape, self._group
        batch, folded = shape.kv_heads * tile.count, tile.rows * group
        last_row = tile.first_row + tile.count * tile.rows
        split = (tile.count, tile.rows, shape.kv_heads, group, shape.head_dim)
        queries = q[tile.first_row : last_row].unflatten(1, (shape.kv_heads, group)).view(split)
        queries = queries.permute(2, 0, 1, 3, 4).reshape(batch, folded, shape.head_dim)
        mask = self._mask(tile.first_row, tile.count, tile.rows, tile.keys) if tile.mask is None else tile.mask
        mask = mask.expand(batch, folded, tile.keys)
        scores = torch.baddbmm(mask, queries, keys[:, : tile.keys].transpose(1, 2), alpha=shape.scale)
        weights = torch.softmax(scores, -1)
        mixed = torch.bmm(weights, values[:, : tile.keys])
        mixed = mixed.view(shape.kv_heads, tile.count, tile.rows, group, shape.head_dim)
        out[tile.first_row : last_row].view(split).copy_(mixed.permute(1, 2, 0, 3, 4))

    def _plan(self, segment: Segment, page_table: torch.Tensor, block_size: int) -> list[_Gather]:
        """Several sequences share a gather while it stays small; a long run of rows becomes row tiles."""
        shape = self._shape
        page_bytes = 2 * shape.kv_heads * block_size * shape.head_dim * shape.dtype.itemsize
        together = max(1, min(segment.count, TILE_KV_BYTES // (segment.pages * page_bytes)))
        if segment.rows > TILE_ROWS:
            together = 1
        gathers = []
        for first in range(0, segment.count, together):
            count = min(together, segment.count - first)
            sequence = segment.first + first
            page_ids = page_table[sequence : sequence + count, : segment.pages].reshape(-1)
            first_row = segment.first_row + first * segment.rows
            if segment.rows > TILE_ROWS:
                tiles = self._row_tiles(first_row, segment.rows, segment.pages * block_size)
            else:
                tiles = [self._tile(first_row, count, segment.rows, segment.pages * block_size)]
            gathers.append(_Gather(page_ids, count, segment.pages, tuple(tiles)))
        return gathers

    def _row_tiles(self, first_row: int, rows: int, keys: int) -> list[_Tile]:
        """Tiles of one sequence; each reads no further than its own rows can see."""
        tiles = []
        for start in range(first_row, first_row + rows, TILE_ROWS):
            count = min(TILE_ROWS, first_row + rows - start)
            seen = int(self._kv_lens[start : start + count].max())
            tiles.append(self._tile(start, 1, count, min(seen, keys)))
        return tiles

    def _tile(self, first_row: int, count: int, rows: int, keys: int) -> _Tile:
        kept = count * rows * self._group * keys * self._shape.dtype.itemsize * self._shape.kv_heads
        mask = self._mask(first_row, count, rows, keys) if kept <= KEPT_MASK_BYTES else None
        return _Tile(first_row, count, rows, keys, mask)

    def _mask(self, first_row: int, count: int, rows: int, keys: int) -> torch.Tensor:
        lens = self._kv_lens[first_row : first_row + count * rows]
        hidden = torch.arange(keys) >= lens.unsqueeze(1)  # [count * rows, keys]
        mask = torch.zeros(hidden.shape, dtype=self._shape.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask.view(count, rows, 1, keys).expand(count, rows, self._group, keys)
        mask = mask.reshape(count, rows * self._group, keys)
        return mask if count == 1 else mask.repeat(self._shape.kv_heads, 1, 1)


class CpuKernels:
    def __init__(self) -> None:
        packed = {torch.float32}
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            packed.add(torch.bfloat16)
        if torch.ops.mkldnn._is_mkldnn_fp16_supported():
            packed.add(torch.float16)
        self._packed = frozenset(packed)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        if weight.dtype in self._packed:
            return OneDnnLinear(weight, bias)
        return DenseLinear(weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)

    def rope_(self, heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
        rolled = heads.roll(heads.shape[-1] // 2, -1)
        heads.mul_(cos_sin[:, :1]).addcmul_(rolled, cos_sin[:, 1:])

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def kv_slab(self, pages: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(2, kv_heads, pages, block_size, head_dim, dtype=dtype)

    def paged_attention(self, inputs: ForwardInputs, shape: AttentionShape, slab: torch.Tensor) -> CpuAttention:
        return CpuAttention(inputs, shape, slab.shape[3])
