"""The gated feed-forward block (SwiGLU) over a fused gate-and-up linear."""

from __future__ import annotations

import torch

from xspec.kernels.base import Kernels, PackedLinear


class SwiGLU:
    def __init__(self, kernels: Kernels, gate_up: PackedLinear, down: PackedLinear) -> None:
        self._kernels, self._gate_up, self._down = kernels, gate_up, down

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual [N, hidden] -> residual + down(silu(gate(x)) * up(x))."""
        return self._down(self._kernels.silu_mul(self._gate_up(x)), residual)
