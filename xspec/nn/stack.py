"""Decoder layers one above the other, as one call of the device where its kernels offer that.

Targets and drafters run their layers through this. Knows nothing of tokens, embeddings or heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xspec.kernels.base import AttentionShape, Kernels, LayerWeights
from xspec.nn.attention import GroupedAttention
from xspec.nn.inputs import ForwardInputs
from xspec.nn.mlp import SwiGLU
from xspec.nn.norm import RMSNorm
from xspec.nn.rope import Rope


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: RMSNorm
    attention: GroupedAttention
    mlp_norm: RMSNorm
    mlp: SwiGLU

    def weights(self) -> LayerWeights:
        attention, mlp = self.attention, self.mlp
        return LayerWeights(
            input_norm=self.input_norm.weights,
            qkv=attention.qkv,
            head_norm=None if attention.head_norm is None else attention.head_norm.weights,
            output=attention.output,
            mlp_norm=self.mlp_norm.weights,
            gate_up=mlp.gate_up,
            down=mlp.down,
        )


@dataclass(frozen=True, slots=True)
class Streams:
    """What a pass through the layers yields. `taps` in the order they were asked for."""

    last: torch.Tensor  # [N, hidden], after the final norm
    residual: torch.Tensor  # [N, hidden], before it
    taps: tuple[torch.Tensor, ...] = ()


class LayerStack:
    def __init__(
        self, kernels: Kernels, shape: AttentionShape, layers: Sequence[Layer], norm: RMSNorm, rope: Rope
    ) -> None:
        self._kernels, self._shape = kernels, shape
        self._layers, self._norm, self._rope = tuple(layers), norm, rope
        self._fused = kernels.fuse(
            [layer.weights() for layer in self._layers], shape, rope.frequencies, norm.weights
        )

    def __len__(self) -> int:
        return len(self._layers)

    def __call__(
        self,
        residual: torch.Tensor,
        inputs: ForwardInputs,
        slabs: Sequence[torch.Tensor],
        taps: Sequence[int] = (),
    ) -> Streams:
        """residual [N, hidden] -> the streams; writes the rows' K/V into `slabs`, one per layer.

        Tap i is the residual stream after i layers (0: what was given).
        """
        if self._fused is not None and self._fused.takes(slabs[0]) and not torch.compiler.is_compiling():
            last, streams = self._fused.forward(residual, inputs, slabs, taps)
        else:
            last, streams = self._forward(residual, inputs, slabs, taps)
        streams[0] = residual
        return Streams(last, streams[len(self._layers)], tuple(streams[tap] for tap in taps))

    def publish(
        self, residual: torch.Tensor, positions: torch.Tensor, slab: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write the first layer's keys and values of residual [N, hidden] at `slots` [N], and no more."""
        if self._fused is not None and self._fused.takes(slab):
            self._fused.publish(residual, positions, slab, slots)
        else:
            layer = self._layers[0]
            layer.attention.publish(layer.input_norm(residual), self._rope(positions), slab, slots)

    def _forward(
        self,
        residual: torch.Tensor,
        inputs: ForwardInputs,
        slabs: Sequence[torch.Tensor],
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        paged = self._kernels.paged_attention(inputs, self._shape, slabs[0])
        cos_sin = self._rope(inputs.positions)
        streams = {}
        for index, (layer, slab) in enumerate(zip(self._layers, slabs, strict=True), start=1):
            residual = layer.attention(layer.input_norm(residual), residual, cos_sin, paged, slab)
            residual = layer.mlp(layer.mlp_norm(residual), residual)
            if index in taps or index == len(self._layers):
                streams[index] = residual
        return self._norm(residual), streams
