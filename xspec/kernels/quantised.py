"""Weights in groups of 32 inputs, w = scale * q + minimum: the value, how it is made, what a product means.

Kernels that take such weights quantise the activations too, row by row and group by group; the functions
here say exactly how, so that every platform can be tested against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

GROUP = 32
"""Inputs that share a scale."""

LEAST = 2.0**-100
"""A group of activations that stays below it is all zero."""

_SHRINKS = (0.0, 1.0)
"""By how many steps of 15 the range of a group is overfilled when its scale is sought: outliers are cut."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [rows, columns] of `bits` (4 or 8) a value, columns a multiple of 32.

    Scales (and minima) are fp16 where that holds them exactly, else fp32.
    """

    bits: int
    q: torch.Tensor  # [rows, columns] uint8, below 2 ** bits
    scale: torch.Tensor  # [rows, columns / 32]
    minimum: torch.Tensor | None = None  # like scale; None: -2 ** (bits - 1) * scale

    def minima(self) -> torch.Tensor:
        """[rows, columns / 32], in fp32 where it had to be computed."""
        return self.scale.float() * -(2.0 ** (self.bits - 1)) if self.minimum is None else self.minimum

    def rows(self, order: torch.Tensor) -> Blocks:
        """The rows that `order` [N] names, in its order."""
        minimum = None if self.minimum is None else self.minimum[order]
        return Blocks(self.bits, self.q[order], self.scale[order], minimum)

    def dequantised(self) -> torch.Tensor:
        """[rows, columns] fp32. Products of scale and q are exact there, so each value is rounded once."""
        groups = self.q.view(*self.scale.shape, GROUP).float()
        groups.mul_(self.scale.float()[..., None]).add_(self.minima().float()[..., None])
        return groups.view(self.q.shape)


def stack(parts: Sequence[Blocks]) -> Blocks:
    """Parts of as many columns below one another, exactly; unlike ones meet in the wider form."""
    bits = max(part.bits for part in parts)
    implied = all(part.minimum is None and part.bits == bits for part in parts)
    given = all(part.minimum is not None for part in parts)
    narrow = (implied or given) and all(part.scale.dtype == torch.float16 for part in parts)
    dtype = torch.float16 if narrow else torch.float32
    return Blocks(
        bits,
        torch.cat([part.q for part in parts]),
        torch.cat([part.scale.to(dtype) for part in parts]),
        None if implied else torch.cat([part.minima().to(dtype) for part in parts]),
    )


def quantise(weight: torch.Tensor, bits: int) -> Blocks:
    """weight [rows, columns] -> its nearest blocks with fp16 scales; deterministic.

    8 bits are symmetric about 0. 4 bits have a minimum, fitted with the scale by least squares.
    """
    groups = weight.float().view(weight.shape[0], -1, GROUP)
    q, scale, minimum = _symmetric(groups) if bits == 8 else _affine(groups)
    return Blocks(bits, q.view(weight.shape), scale, minimum)


def _symmetric(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    scale = (groups.abs().amax(-1) / 127).half()
    steps = scale.float()[..., None]
    q = torch.where(steps > 0, groups / steps, 0.0).round_().clamp_(-127, 127).add_(128)
    return q.to(torch.uint8), scale, None


def _affine(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = groups.aminmax(dim=-1)
    mean = groups.mean(-1)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for shrink in _SHRINKS:
        q = _nearest(groups, (high - low) / (15 + shrink), low + (high - low) * (shrink / 2 / (15 + shrink)))
        q_mean = q.mean(-1)
        spread = (q * q).mean(-1) - q_mean * q_mean
        covariance = (q * groups).mean(-1) - q_mean * mean
        scale = torch.where(spread > 0, covariance / spread, 0.0).half()
        minimum = (mean - scale.float() * q_mean).half()
        fitted = q.mul_(scale.float()[..., None]).add_(minimum.float()[..., None])
        error = fitted.sub_(groups).square_().sum(-1)
        if best is None:
            best = error, scale, minimum
        else:
            better = error < best[0]
            best = (
                torch.where(better, error, best[0]),
                torch.where(better, scale, best[1]),
                torch.where(better, minimum, best[2]),
            )
    assert best is not None
    _, scale, minimum = best
    return _nearest(groups, scale.float(), minimum.float()).to(torch.uint8), scale, minimum


def _nearest(groups: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """The q in 0 .. 15, as floats, that come nearest; 0 where a scale is not positive."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (groups - minimum[..., None]).mul_(inverse[..., None]).round_().clamp_(0, 15)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations x [N, in] -> q int8 [N, in], scale [N, in / 32] = max|x| / 127, sum = scale * sum of q."""
    groups = x.float().view(x.shape[0], -1, GROUP)
    most = groups.abs().amax(-1)
    nothing, full = most < LEAST, torch.full_like(most, 127)
    scale = torch.where(nothing, 0.0, most / full)
    q = (groups * torch.where(nothing, 0.0, full / most)[..., None]).round_()
    return q.view(x.shape).to(torch.int8), scale, scale * q.sum(-1)


class ReferenceBlocks:
    """A PackedLinear over blocks: exact integer products in a group, groups summed in fp64, rounded once."""

    def __init__(self, blocks: Blocks, bias: torch.Tensor | None = None, *, gated: bool = False) -> None:
        self._blocks, self._bias, self._gated = blocks, bias, gated

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        q, scale, total = quantise_rows(x)
        blocks = self._blocks
        zero = 2 ** (blocks.bits - 1) if blocks.minimum is None else 0
        weights = blocks.q.double().sub_(zero).view(blocks.q.shape[0], -1, GROUP)
        dots = torch.einsum("ngi,ogi->nog", q.double().view(len(x), -1, GROUP), weights)
        y = torch.einsum("nog,og,ng->no", dots, blocks.scale.double(), scale.double())
        if blocks.minimum is not None:
            y += total.double() @ blocks.minimum.double().T
        if self._bias is not None:
            y += self._bias.double()
        if self._gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        return (y if add is None else y + add.double()).to(x.dtype)
