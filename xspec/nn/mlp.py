"""The gated feed-forward block (SwiGLU) over a fused gate-and-up linear."""

from __future__ import annotations

import torch

from xspec.kernels.base import PackedLinear


class SwiGLU:
    """`gate_up` comes from Kernels.pack_gated and yields silu(gate) * up."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """x, residual [N, hidden] -> down(silu(gate(x)) * up(x)), plus residual if any."""
        return self.down(self.gate_up(x), residual)
