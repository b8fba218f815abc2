"""RMSNorm over the last axis."""

from __future__ import annotations

import torch

from xspec.kernels.base import Kernels, NormWeights


class RMSNorm:
    """`weight` broadcasts against x, so one call may carry a different weight per head."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, eps: float) -> None:
        self._kernels, self._weight, self._eps = kernels, weight, eps

    @property
    def weights(self) -> NormWeights:
        return NormWeights(self._weight, self._eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, self._weight, self._eps)
