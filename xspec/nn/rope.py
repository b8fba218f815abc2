"""Rotary positions: inverse frequencies with their scalings, cosines and sines of a forward pass.

Angles are computed in fp32 whatever the model's dtype, as the reference implementations do.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Protocol

import torch

from xspec.kernels.base import Rotary, RotaryTable


class RopeScaling(enum.Enum):
    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    FACTORS = "factors"  # one divisor per frequency, stored in the checkpoint


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def inverse_frequencies(
    config: RopeConfig, head_dim: int, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """[D / 2] fp32. `factors` [D / 2] is required by, and only by, RopeScaling.FACTORS."""
    frequencies = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    match config.scaling:
        case RopeScaling.NONE:
            return frequencies
        case RopeScaling.LINEAR:
            return frequencies / config.factor
        case RopeScaling.LLAMA3:
            return _llama3(config, frequencies)
        case RopeScaling.FACTORS:
            if factors is None:
                raise ValueError("RopeScaling.FACTORS needs the checkpoint's factors")
            return frequencies / factors.float()


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended by how often they turn."""
    turns = config.original_max_position / (2 * math.pi / frequencies)
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / config.factor + smooth * frequencies


CosSin = tuple[torch.Tensor, torch.Tensor]
"""Of N rows: cosines and sines, [N, 1, D] each, the sines of the first half negated."""


class Rotation(Protocol):
    @property
    def source(self) -> Rotary:
        """What devices that fuse layers turn by."""

    def __call__(self, positions: torch.Tensor) -> CosSin:
        """positions [N] int64 -> their cosines and sines."""


class Rope:
    """Cosines and sines of a forward pass's positions, computed once and handed to all layers.

    No table: a few small operations a pass cost nothing beside the layers, a table of a long context
    would take hundreds of megabytes.
    """

    def __init__(self, frequencies: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        self.source: Rotary = frequencies.to(device)
        # Both halves of a head turn by the same angle; the first takes the sine negated.
        self._frequencies = torch.cat((frequencies, frequencies)).to(device)
        signs = torch.ones_like(frequencies)
        self._signs = torch.cat((-signs, signs)).to(device)
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> CosSin:
        angles = positions.float().view(-1, 1, 1) * self._frequencies
        return angles.cos().to(self._dtype), angles.sin().mul_(self._signs).to(self._dtype)


class TableRope:
    """Cosines and sines [positions, D / 2] as a checkpoint stores them: fp32 whatever the model's dtype."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> None:
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        turns = RotaryTable(torch.cat((cos, cos), -1).to(kind), torch.cat((-sin, sin), -1).to(kind))
        self.source: Rotary = turns
        self._cos, self._sin = turns.cos.unsqueeze(1), turns.sin.unsqueeze(1)  # [positions, 1, D]

    def __call__(self, positions: torch.Tensor) -> CosSin:
        # A draft may stand past the last position; nobody reads what comes of it.
        inside = positions.clamp(max=self._cos.shape[0] - 1)
        return self._cos.index_select(0, inside), self._sin.index_select(0, inside)
