"""Decoder layers one above the other, as one call of the device where its kernels offer that.

Targets and drafters run their layers through this. Knows nothing of tokens, embeddings or heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from xspec.kernels.base import AttentionShape, FusedLayers, Kernels, LayerWeights, OutputNorms, PagedAttention
from xspec.nn.attention import GroupedAttention
from xspec.nn.inputs import ForwardInputs
from xspec.nn.mlp import SwiGLU
from xspec.nn.norm import RMSNorm
from xspec.nn.rope import CosSin, Rotation


class DecoderLayer(Protocol):
    def __call__(
        self, residual: torch.Tensor, cos_sin: CosSin, paged: PagedAttention, slab: torch.Tensor
    ) -> torch.Tensor:
        """residual [N, hidden], not modified -> the stream behind the layer; writes the rows' K/V."""

    def weights(self) -> LayerWeights:
        """For a device that fuses layers."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Pre-norm, as llama has it."""

    input_norm: RMSNorm
    attention: GroupedAttention
    mlp_norm: RMSNorm
    mlp: SwiGLU

    def __call__(
        self, residual: torch.Tensor, cos_sin: CosSin, paged: PagedAttention, slab: torch.Tensor
    ) -> torch.Tensor:
        residual = self.attention(self.input_norm(residual), residual, cos_sin, paged, slab)
        return self.mlp(self.mlp_norm(residual), residual)

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
class SandwichLayer:
    """What a sublayer adds is normalised before and after it; the residual stream is not."""

    inner: Layer
    attention_out_norm: RMSNorm
    mlp_out_norm: RMSNorm

    def __call__(
        self, residual: torch.Tensor, cos_sin: CosSin, paged: PagedAttention, slab: torch.Tensor
    ) -> torch.Tensor:
        inner = self.inner
        added = inner.attention(inner.input_norm(residual), None, cos_sin, paged, slab)
        residual = residual + self.attention_out_norm(added)
        added = inner.mlp(inner.mlp_norm(residual), None)
        return residual + self.mlp_out_norm(added)

    def weights(self) -> LayerWeights:
        norms = OutputNorms(self.attention_out_norm.weights, self.mlp_out_norm.weights, of_sums=False)
        return replace(self.inner.weights(), output_norms=norms)


@dataclass(frozen=True, slots=True)
class NormedSumLayer:
    """The residual stream itself is normalised, after each sublayer was added to it."""

    inner: Layer
    attention_sum_norm: RMSNorm
    mlp_sum_norm: RMSNorm

    def __call__(
        self, residual: torch.Tensor, cos_sin: CosSin, paged: PagedAttention, slab: torch.Tensor
    ) -> torch.Tensor:
        inner = self.inner
        residual = inner.attention(inner.input_norm(residual), residual, cos_sin, paged, slab)
        residual = self.attention_sum_norm(residual)
        return self.mlp_sum_norm(inner.mlp(inner.mlp_norm(residual), residual))

    def weights(self) -> LayerWeights:
        norms = OutputNorms(self.attention_sum_norm.weights, self.mlp_sum_norm.weights, of_sums=True)
        return replace(self.inner.weights(), output_norms=norms)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What every layer shares in passes over the same rows, op by op."""

    paged: PagedAttention
    cos_sin: CosSin


@dataclass(frozen=True, slots=True)
class Streams:
    """What a pass through the layers yields. `taps` in the order they were asked for."""

    last: torch.Tensor  # [N, hidden], after the final norm
    residual: torch.Tensor  # [N, hidden], before it
    taps: tuple[torch.Tensor, ...] = ()


class LayerStack:
    """`norm` None: the stream behind the last layer is what the stack yields."""

    def __init__(
        self,
        kernels: Kernels,
        shape: AttentionShape,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm | None,
        rope: Rotation,
    ) -> None:
        self._kernels, self._shape = kernels, shape
        self._layers, self._norm, self._rope = tuple(layers), norm, rope
        weights = [layer.weights() for layer in self._layers]
        self._fused = kernels.fuse(weights, shape, rope.source, None if norm is None else norm.weights)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def fused(self) -> FusedLayers | None:
        """The layers as the device runs them in one call, for those who put more into it."""
        return self._fused

    @property
    def normed(self) -> bool:
        """Whether a norm stands behind the last layer."""
        return self._norm is not None

    def prepare(self, inputs: ForwardInputs, slab: torch.Tensor) -> Prepared | None:
        """Once for all runs over these rows; `slab` is any plane. None: a run is one call of the device."""
        if self._fused is not None and self._fused.takes(slab) and not torch.compiler.is_compiling():
            return None
        return self._prepare(inputs, slab)

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
        return self.run(residual, inputs, slabs, self.prepare(inputs, slabs[0]), taps)

    def run(
        self,
        residual: torch.Tensor,
        inputs: ForwardInputs,
        slabs: Sequence[torch.Tensor],
        prepared: Prepared | None,
        taps: Sequence[int] = (),
    ) -> Streams:
        """As `__call__`, with what `prepare` returned for these inputs."""
        if prepared is not None:
            last, streams = self._forward(residual, slabs, taps, prepared)
        elif self._fused is not None:
            last, streams = self._fused.forward(residual, inputs, slabs, taps)
        else:
            raise ValueError("layers that no device fuses need what `prepare` returns")
        streams[0] = residual
        return Streams(last, streams[len(self._layers)], tuple(streams[tap] for tap in taps))

    def loop(
        self,
        state: torch.Tensor,
        inputs: ForwardInputs,
        slabs: Sequence[torch.Tensor],
        prepared: Prepared | None,
    ) -> Iterator[torch.Tensor]:
        """Over and over, each time reading what it yielded last: `slabs` are one per layer and run."""
        if prepared is None and self._fused is not None and self._norm is not None:
            yield from self._fused.loop(state, inputs, slabs)
            return
        for first in range(0, len(slabs), len(self)):
            state = self.run(state, inputs, slabs[first : first + len(self)], prepared).last
            yield state

    def publish(
        self, residual: torch.Tensor, positions: torch.Tensor, slab: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write the first layer's keys and values of residual [N, hidden] at `slots` [N], and no more."""
        if self._fused is not None and self._fused.takes(slab):
            self._fused.publish(residual, positions, slab, slots)
        else:
            layer = self._layers[0]
            if not isinstance(layer, Layer):
                raise TypeError(f"a {type(layer).__name__} cannot publish keys and values alone")
            layer.attention.publish(layer.input_norm(residual), self._rope(positions), slab, slots)

    def _prepare(self, inputs: ForwardInputs, slab: torch.Tensor) -> Prepared:
        paged = self._kernels.paged_attention(inputs, self._shape, slab)
        return Prepared(paged, self._rope(inputs.positions))

    def _forward(
        self,
        residual: torch.Tensor,
        slabs: Sequence[torch.Tensor],
        taps: Sequence[int],
        prepared: Prepared,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        streams = {}
        for index, (layer, slab) in enumerate(zip(self._layers, slabs, strict=True), start=1):
            residual = layer(residual, prepared.cos_sin, prepared.paged, slab)
            if index in taps or index == len(self._layers):
                streams[index] = residual
        return residual if self._norm is None else self._norm(residual), streams
