"""A packed quantised linear of the native library: int8 activations, integer products in groups of 32."""

from __future__ import annotations

import torch

from xspec.kernels.native import CLinear, Format, Team, check
from xspec.kernels.native_linear import NativeLinear, address
from xspec.kernels.quantised import Blocks


class NativeBlocks(NativeLinear):
    """`gated` as in NativeLinear."""

    def __init__(self, team: Team, blocks: Blocks, bias: torch.Tensor | None, *, gated: bool) -> None:
        outs, ins = blocks.q.shape
        c = team.library.c
        kind, scale, minimum = _layout(blocks)
        weights = team.memory.take(c.xs_packed_bytes(kind, outs, ins, gated))
        scales = team.memory.take(c.xs_scale_bytes(kind, outs, ins, gated))
        wide = None if bias is None else bias.float().contiguous()
        packed_bias = None if wide is None else torch.empty_like(wide)
        q = blocks.q.contiguous()
        check(
            c.xs_pack_int(
                kind,
                address(q),
                address(scale),
                address(minimum),
                address(wide),
                outs,
                ins,
                gated,
                address(weights),
                address(scales),
                address(packed_bias),
            ),
            "xs_pack_int",
        )
        struct = CLinear(
            format=kind,
            gated=gated,
            outs=outs,
            ins=ins,
            weights=address(weights),
            scales=address(scales),
            bias=address(packed_bias),
        )
        self._bind(team, struct, (weights, scales, packed_bias))


def _layout(blocks: Blocks) -> tuple[Format, torch.Tensor, torch.Tensor | None]:
    """The format that holds the blocks exactly, with its scales and minima (None: implied)."""
    scale, minimum = blocks.scale.contiguous(), blocks.minimum
    if scale.dtype == torch.float16:
        if blocks.bits == 8 and minimum is None:
            return Format.INT8, scale, None
        narrow = (blocks.minima() if minimum is None else minimum).to(torch.float16)
        if blocks.bits == 4 and (minimum is not None or torch.equal(narrow.float(), blocks.minima())):
            return Format.INT4, scale, narrow.contiguous()
    wide = Format.INT4_WIDE if blocks.bits == 4 else Format.INT8_WIDE
    return wide, scale.float(), blocks.minima().float().contiguous()
