"""Linears: weights that share an input are fused into one packed matrix as they are read.

Knows how to lay rows side by side, not where they come from: a `Fill` writes one weight into a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from xspec.kernels.base import Kernels, PackedLinear

Fill = Callable[[str, torch.Tensor], None]
"""Writes the named tensor into the buffer given, converting its dtype."""


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
) -> PackedLinear:
    """Read `parts` below one another, pack, and keep only the packed form."""
    rows = sum(part.rows for part in parts)
    weight = torch.empty(rows, columns, dtype=dtype, device=device)
    bias = torch.zeros(rows, dtype=dtype, device=device) if any(part.bias for part in parts) else None
    start = 0
    for part in parts:
        fill(f"{part.name}.weight", weight[start : start + part.rows])
        if part.bias and bias is not None:
            fill(f"{part.name}.bias", bias[start : start + part.rows])
        start += part.rows
    return kernels.pack_linear(weight, bias)
