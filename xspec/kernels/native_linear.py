"""A packed linear of the native library, in bf16. native_blocks.py has the quantised ones."""

from __future__ import annotations

import torch

from xspec.kernels.native import CLinear, Format, Team, check
from xspec.kernels.native_calls import BF16, address, linear, linear_struct

__all__ = ["BF16", "UNIT", "NativeLinear", "address"]

UNIT = 32
"""Inputs of linears and head sizes come in multiples of it."""


class NativeLinear:
    """A weight [out, in]; gated, it is gate above up and yields silu(gate) * up [N, out / 2]."""

    columns: int
    struct: CLinear

    def __init__(self, team: Team, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> None:
        """weight [out, in] bfloat16, bias [out]."""
        outs, ins = weight.shape
        c = team.library.c
        weight, wide = weight.contiguous(), None if bias is None else bias.float().contiguous()
        weights = team.memory.take(c.xs_packed_bytes(Format.BF16, outs, ins, gated))
        packed_bias = None if wide is None else torch.empty_like(wide)
        status = c.xs_pack_bf16(
            weight.data_ptr(), address(wide), outs, ins, gated, address(weights), address(packed_bias)
        )
        check(status, "xs_pack_bf16")
        struct = linear_struct(Format.BF16, gated, outs, ins, weights, None, packed_bias)
        self._bind(team, struct, (weights, None, packed_bias))

    def _bind(
        self,
        team: Team,
        struct: CLinear,
        packed: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    ) -> None:
        """`packed`: the weights, scales and bias that `struct` has addresses of."""
        self.struct, self._team, self._packed = struct, team, packed
        self.columns = struct.outs // 2 if struct.gated else struct.outs

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            own = self.struct
            y: torch.Tensor = torch.ops.xspec.linear(x, *self._packed, add, own.format, own.gated, own.outs)
            return y
        return linear(self._team, self.struct, x, add)
