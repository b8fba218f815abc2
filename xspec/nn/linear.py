"""Linears: weights that share an input are fused into one packed matrix as they are read.

Knows how to lay rows side by side, not where they come from: a `Fill` writes one weight into a buffer, a
`BlockSource` has it in quantised form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from xspec.kernels.base import Kernels, PackedLinear
from xspec.kernels.quantised import Blocks, stack

Fill = Callable[[str, torch.Tensor], None]
"""Writes the named tensor into the buffer given, converting its dtype."""

BlockSource = Callable[[str], Blocks | None]
"""The named weight in quantised form; None: it stays dense."""


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One linear of the checkpoint: `name`.weight [rows, in] and, if it has one, `name`.bias."""

    name: str
    rows: int
    bias: bool


def fused_linear(
    kernels: Kernels,
    fill: Fill,
    parts: Sequence[LinearPart],
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    gated: bool = False,
    blocks: BlockSource | None = None,
) -> PackedLinear:
    """Read `parts` below one another, pack, and keep only the packed form. `gated`: they are gate and up.

    Quantised where `blocks` has all of them, dense otherwise.
    """
    rows = sum(part.rows for part in parts)
    bias = torch.zeros(rows, dtype=dtype, device=device) if any(part.bias for part in parts) else None
    for part, to in zip(parts, _row_ranges(parts), strict=True):
        if part.bias and bias is not None:
            fill(f"{part.name}.bias", bias[to])
    found = [None if blocks is None else blocks(f"{part.name}.weight") for part in parts]
    quantised = [part for part in found if part is not None]
    if len(quantised) == len(parts):
        return kernels.pack_blocks(stack(quantised), bias, gated=gated)
    weight = torch.empty(rows, columns, dtype=dtype, device=device)
    for part, to in zip(parts, _row_ranges(parts), strict=True):
        fill(f"{part.name}.weight", weight[to])
    return kernels.pack_gated(weight, bias) if gated else kernels.pack_linear(weight, bias)


def _row_ranges(parts: Sequence[LinearPart]) -> list[slice]:
    ends = list(itertools.accumulate(part.rows for part in parts))
    return [slice(end - part.rows, end) for part, end in zip(parts, ends, strict=True)]
