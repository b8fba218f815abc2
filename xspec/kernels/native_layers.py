"""Decoder layers as one call of the native library: no Python between their ops."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from xspec.kernels.base import AttentionShape, LayerWeights, NormWeights, PackedLinear, Rotary, RotaryTable
from xspec.kernels.native import CLayer, CPass, CStackShape, Team, check
from xspec.kernels.native_attention import PAGE_UNIT, pages_fit
from xspec.kernels.native_linear import BF16, NativeLinear

if TYPE_CHECKING:
    from xspec.nn.inputs import ForwardInputs


def layers_fit(layers: Sequence[LayerWeights], shape: AttentionShape) -> bool:
    """Whether `NativeLayers` can run them."""
    return pages_fit(PAGE_UNIT, shape.head_dim, shape.dtype) and all(
        all(isinstance(part, NativeLinear) for part in (layer.qkv, layer.output, layer.gate_up, layer.down))
        and len({norm.eps for norm in _norms(layer)}) == 1
        for layer in layers
    )


def _norms(layer: LayerWeights) -> list[NormWeights]:
    norms = [layer.input_norm, layer.mlp_norm]
    if layer.head_norm is not None:
        norms.append(layer.head_norm)
    if layer.output_norms is not None:
        norms += [layer.output_norms.attention, layer.output_norms.mlp]
    return norms


class NativeLayers:
    """Decoder layers and their final norm, if they have one, in one native call."""

    def __init__(
        self,
        team: Team,
        layers: Sequence[LayerWeights],
        shape: AttentionShape,
        rotary: Rotary,
        norm: NormWeights | None,
    ) -> None:
        self._team, self._count, self._normed = team, len(layers), norm is not None
        self._hidden = layers[0].input_norm.weight.shape[0]
        self._alive: list[object] = [layers]  # whatever the native side has addresses of
        c = team.library.c
        own = CStackShape(
            hidden=self._hidden,
            inner=_native(layers[0].gate_up).columns,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            dim=shape.head_dim,
            first_key=shape.first_key,
            scale=shape.scale,
        )
        if norm is not None:
            own.norm_eps, own.final_norm = norm.eps, self._keep(norm.weight)
        if isinstance(rotary, RotaryTable):
            own.cos, own.sin = self._keep(rotary.cos.float()), self._keep(rotary.sin.float())
            own.positions = len(rotary.cos)
        else:
            own.frequencies = self._keep(rotary.float())
        each = (CLayer * len(layers))(*(self._layer(layer) for layer in layers))
        handle = ctypes.c_void_p()
        check(
            c.xs_stack_create(ctypes.byref(own), each, len(layers), ctypes.byref(handle)), "xs_stack_create"
        )
        self.handle = handle.value
        weakref.finalize(self, c.xs_stack_destroy, self.handle).atexit = False
        self._slabs: tuple[tuple[int, ...], ctypes.Array[ctypes.c_void_p]] | None = None

    def __len__(self) -> int:
        return self._count

    def takes(self, slab: torch.Tensor) -> bool:
        return pages_fit(slab.shape[2], slab.shape[3], slab.dtype)

    def forward(
        self,
        residual: torch.Tensor,
        inputs: ForwardInputs,
        slabs: Sequence[torch.Tensor],
        kept: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        self._check(residual, slabs, 1)
        streams = {at: torch.empty(residual.shape, dtype=BF16) for at in {*kept, self._count} if at}
        normed = torch.empty(residual.shape, dtype=BF16) if self._normed else None
        self._run(residual, inputs, slabs, streams, normed)
        return streams[self._count] if normed is None else normed, streams

    def loop(
        self, residual: torch.Tensor, inputs: ForwardInputs, slabs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        loops = len(slabs) // self._count
        self._check(residual, slabs, loops)
        if not self._normed:
            raise ValueError("layers without a final norm do not loop")
        normed = torch.empty(loops, *residual.shape, dtype=BF16)
        if loops:
            self._run(residual, inputs, slabs, {}, normed)
        return normed.unbind()

    def _check(self, residual: torch.Tensor, slabs: Sequence[torch.Tensor], loops: int) -> None:
        count = self._count
        if residual.shape[1] != self._hidden or residual.dtype is not BF16 or len(slabs) != loops * count:
            raise ValueError(
                f"residual {list(residual.shape)} {residual.dtype} and {len(slabs)} slabs do not fit "
                f"{count} layers of [N, {self._hidden}] bfloat16"
            )

    def _run(
        self,
        residual: torch.Tensor,
        inputs: ForwardInputs,
        slabs: Sequence[torch.Tensor],
        streams: dict[int, torch.Tensor],
        normed: torch.Tensor | None,
    ) -> None:
        """`streams`: where the residual stream after so many layers goes; normed [N, hidden], or by loops."""
        residual = residual.contiguous()
        outputs = (ctypes.c_void_p * self._count)()
        for at, stream in streams.items():
            outputs[at - 1] = stream.data_ptr()
        owners, kv_lens = inputs.owners().contiguous(), inputs.kv_lens.contiguous()
        table, slots = inputs.page_table.contiguous(), inputs.slots.contiguous()
        positions = inputs.positions.contiguous()
        step = CPass(
            rows=residual.shape[0],
            loops=len(slabs) // self._count,
            residual=residual.data_ptr(),
            outputs=ctypes.addressof(outputs),
            normed=None if normed is None else normed.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            sequences=owners.data_ptr(),
            kv_lens=kv_lens.data_ptr(),
            page_table=table.data_ptr(),
            table_stride=table.shape[1],
            slabs=self._addresses(slabs),
            pages=slabs[0].shape[1],
            block=slabs[0].shape[2],
            finite=inputs.guesses,
        )
        c = self._team.library.c
        check(c.xs_stack_forward(self._team.handle, self.handle, ctypes.byref(step)), "xs_stack_forward")

    def publish(
        self, residual: torch.Tensor, positions: torch.Tensor, slab: torch.Tensor, slots: torch.Tensor
    ) -> None:
        residual, positions, slots = residual.contiguous(), positions.contiguous(), slots.contiguous()
        step = CPass(
            rows=residual.shape[0],
            residual=residual.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            slabs=self._addresses((slab,)),
            pages=slab.shape[1],
            block=slab.shape[2],
        )
        c = self._team.library.c
        check(c.xs_stack_publish(self._team.handle, self.handle, ctypes.byref(step)), "xs_stack_publish")

    def _layer(self, layer: LayerWeights) -> CLayer:
        head_norm, behind = layer.head_norm, layer.output_norms
        return CLayer(
            qkv=_native(layer.qkv).struct,
            output=_native(layer.output).struct,
            gate_up=_native(layer.gate_up).struct,
            down=_native(layer.down).struct,
            input_norm=self._keep(layer.input_norm.weight),
            mlp_norm=self._keep(layer.mlp_norm.weight),
            head_norm=None if head_norm is None else self._keep(head_norm.weight),
            attention_out_norm=None if behind is None else self._keep(behind.attention.weight),
            mlp_out_norm=None if behind is None else self._keep(behind.mlp.weight),
            of_sums=behind is not None and behind.of_sums,
            eps=layer.input_norm.eps,
        )

    def _keep(self, tensor: torch.Tensor) -> int:
        tensor = tensor.contiguous()
        self._alive.append(tensor)
        return tensor.data_ptr()

    def _addresses(self, slabs: Sequence[torch.Tensor]) -> int:
        """Of an array of the slabs' addresses, which are the same in nearly every call."""
        found = tuple(slab.data_ptr() for slab in slabs)
        if self._slabs is None or self._slabs[0] != found:
            self._slabs = (found, (ctypes.c_void_p * len(found))(*found))
        return ctypes.addressof(self._slabs[1])


def _native(linear: PackedLinear) -> NativeLinear:
    if not isinstance(linear, NativeLinear):
        raise TypeError(f"a {type(linear).__name__} cannot be fused")
    return linear
