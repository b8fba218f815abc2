"""The kernels on a CPU, in native code: bf16 models whose sizes fit; everything else is torch's (cpu.py).

A row's result never depends on the rows beside it, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from xspec.kernels.base import (
    AttentionShape,
    BlockParts,
    FusedLayers,
    LayerWeights,
    LoopParts,
    NormWeights,
    PackedLinear,
    PagedAttention,
    Rotary,
    StepParts,
)
from xspec.kernels.cpu import CpuKernels
from xspec.kernels.native import Team
from xspec.kernels.native_attention import MAX_HEAD_DIM, PAGE_UNIT, NativeAttention, pages_fit
from xspec.kernels.native_blocks import NativeBlocks
from xspec.kernels.native_calls import rms_norm, store_kv
from xspec.kernels.native_draws import NativeDraws
from xspec.kernels.native_dspark import NativeBlock, block_fits
from xspec.kernels.native_layers import NativeLayers, layers_fit
from xspec.kernels.native_linear import BF16, UNIT, NativeLinear
from xspec.kernels.native_loops import NativeLoops, loops_fit
from xspec.kernels.native_mtp import NativeSteps, steps_fit
from xspec.kernels.native_ops import register_ops
from xspec.kernels.native_rows import NativeCarry, NativeRows

if TYPE_CHECKING:
    from xspec.kernels.quantised import Blocks
    from xspec.kernels.rounds import RowTable
    from xspec.nn.inputs import ForwardInputs

log = logging.getLogger(__name__)


class NativeKernels:
    """Delegates what does not fit to torch's kernels, and says so once for each kind of part."""

    def __init__(self, team: Team) -> None:
        self._team, self._torch = team, CpuKernels()
        self._gaps: dict[str, None] = {}  # in the order they came up
        register_ops(team.library)

    @property
    def name(self) -> str:
        return f"native {self._team.isa}"

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        if self._fits(weight):
            return NativeLinear(self._team, weight, bias, gated=False)
        return self._torch.pack_linear(weight, bias)

    def pack_gated(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        if self._fits(weight):
            return NativeLinear(self._team, weight, bias, gated=True)
        return self._torch.pack_gated(weight, bias)

    def pack_blocks(
        self, blocks: Blocks, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> PackedLinear:
        return NativeBlocks(self._team, blocks, bias, gated=gated)

    def fuse(
        self,
        layers: Sequence[LayerWeights],
        shape: AttentionShape,
        rotary: Rotary,
        norm: NormWeights | None,
    ) -> FusedLayers | None:
        if not layers_fit(layers, shape):
            return None
        return NativeLayers(self._team, layers, shape, rotary, norm)

    def fuse_rows(self, table: RowTable) -> NativeRows:
        return NativeRows(self._team.library, table)

    def fuse_draws(self, dtype: torch.dtype) -> NativeDraws | None:
        return NativeDraws(self._team) if dtype is BF16 else None

    def fuse_carry(self) -> NativeCarry:
        return NativeCarry(self._team.library)

    def fuse_steps(self, parts: StepParts) -> NativeSteps | None:
        return NativeSteps(self._team, parts) if steps_fit(parts) else None

    def fuse_block(self, parts: BlockParts) -> NativeBlock | None:
        return NativeBlock(self._team, parts) if block_fits(parts) else None

    def fuse_loops(self, parts: LoopParts) -> NativeLoops | None:
        return NativeLoops(self._team, parts) if loops_fit(parts) else None

    def row_dependence(self, block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[str, ...]:
        reasons = list(self._gaps)
        if dtype is BF16 and not pages_fit(block_size, head_dim, dtype):
            reasons.append(_pages_gap(block_size, head_dim))
        return tuple(dict.fromkeys(reasons))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype is not BF16 or weight.dtype is not BF16:
            return self._torch.rms_norm(x, weight, eps)
        if torch.compiler.is_compiling():
            y: torch.Tensor = torch.ops.xspec.rms_norm(x, weight, eps)
            return y
        return rms_norm(self._team, x, weight, eps)

    def rope_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._torch.rope_(heads, cos, sin)

    def kv_slab(
        self, pages: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return self._team.memory.zeros((2 * kv_heads, pages, block_size, head_dim), dtype)

    def store_kv(self, slab: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        if pages_fit(slab.shape[2], slab.shape[3], slab.dtype):
            store_kv(self._team, slab, kv, slots, finite=False)
        else:
            self._torch.store_kv(slab, kv, slots)

    def zero_pages(self, slab: torch.Tensor, pages: torch.Tensor) -> None:
        self._torch.zero_pages(slab, pages)

    def paged_attention(
        self, inputs: ForwardInputs, shape: AttentionShape, slab: torch.Tensor
    ) -> PagedAttention:
        if pages_fit(slab.shape[2], slab.shape[3], slab.dtype):
            return NativeAttention(self._team, inputs, shape)
        if slab.dtype is BF16:
            self._gap(_pages_gap(*slab.shape[2:]))
        return self._torch.paged_attention(inputs, shape, slab)

    def _fits(self, weight: torch.Tensor) -> bool:
        outs, ins = weight.shape
        if weight.dtype is not BF16:
            self._gap(f"{_name(weight.dtype)} is computed by torch: the native kernels take bfloat16")
        elif ins % UNIT:
            self._gap(f"a linear of {ins} inputs is torch's: the native kernels take multiples of {UNIT}")
        else:
            return True
        return False

    def _gap(self, reason: str) -> None:
        if reason not in self._gaps:
            self._gaps[reason] = None
            log.info("%s", reason)


def _pages_gap(block_size: int, head_dim: int) -> str:
    return (
        f"attention over pages of {block_size} tokens and heads of {head_dim} is torch's: native takes "
        f"--block_size in multiples of {PAGE_UNIT} and heads in multiples of {UNIT} up to {MAX_HEAD_DIM}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
