"""Decoder layers as one call of the native library: no Python between their ops."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from xspec.kernels.base import AttentionShape, LayerWeights, NormWeights, PackedLinear
from xspec.kernels.native import CLayer, CPass, CStackShape, Team, check
from xspec.kernels.native_attention import PAGE_UNIT, pages_fit
from xspec.kernels.native_linear import BF16, NativeLinear

if TYPE_CHECKING:
    from xspec.nn.inputs import ForwardInputs


def layers_fit(layers: Sequence[LayerWeights], shape: AttentionShape) -> bool:
    """Whether `NativeLayers` can run them."""
    return pages_fit(PAGE_UNIT, shape.head_dim, shape.dtype) and all(
        all(isinstance(part, NativeLinear) for part in (layer.qkv, layer.output, layer.gate_up, layer.down))
        and layer.input_norm.eps == layer.mlp_norm.eps
        and (layer.head_norm is None or layer.head_norm.eps == layer.mlp_norm.eps)
        for layer in layers
    )


class NativeLayers:
    """Decoder layers and their final norm in one native call."""

    def __init__(
        self,
        team: Team,
        layers: Sequence[LayerWeights],
        shape: AttentionShape,
        frequencies: torch.Tensor,
        norm: NormWeights,
    ) -> None:
        self._team, self._shape, self._count = team, shape, len(layers)
        self._hidden = norm.weight.shape[0]
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
            norm_eps=norm.eps,
            final_norm=self._keep(norm.weight),
            frequencies=self._keep(frequencies.float()),
        )
        each = (CLayer * len(layers))(*(self._layer(layer) for layer in layers))
        handle = ctypes.c_void_p()
        check(
            c.xs_stack_create(ctypes.byref(own), each, len(layers), ctypes.byref(handle)), "xs_stack_create"
        )
        self._handle = handle.value
        weakref.finalize(self, c.xs_stack_destroy, self._handle).atexit = False
        self._slabs: tuple[tuple[int, ...], ctypes.Array[ctypes.c_void_p]] | None = None

    def takes(self, slab: torch.Tensor) -> bool:
        return pages_fit(slab.shape[2], slab.shape[3], slab.dtype)

    def forward(
        self,
        residual: torch.Tensor,
        inputs: ForwardInputs,
        slabs: Sequence[torch.Tensor],
        kept: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        rows, count = residual.shape[0], self._count
        if residual.shape[1] != self._hidden or residual.dtype is not BF16 or len(slabs) != count:
            raise ValueError(
                f"residual {list(residual.shape)} {residual.dtype} and {len(slabs)} slabs do not fit "
                f"{count} layers of [N, {self._hidden}] bfloat16"
            )
        residual = residual.contiguous()
        streams = {at: torch.empty_like(residual) for at in {*kept, count} if at}
        last = torch.empty_like(residual)
        outputs = (ctypes.c_void_p * count)()
        for at, stream in streams.items():
            outputs[at - 1] = stream.data_ptr()
        owners, kv_lens = inputs.owners().contiguous(), inputs.kv_lens.contiguous()
        table, slots = inputs.page_table.contiguous(), inputs.slots.contiguous()
        positions = inputs.positions.contiguous()
        step = CPass(
            rows=rows,
            residual=residual.data_ptr(),
            outputs=ctypes.addressof(outputs),
            normed=last.data_ptr(),
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
        check(c.xs_stack_forward(self._team.handle, self._handle, ctypes.byref(step)), "xs_stack_forward")
        return last, streams

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
        check(c.xs_stack_publish(self._team.handle, self._handle, ctypes.byref(step)), "xs_stack_publish")

    def _layer(self, layer: LayerWeights) -> CLayer:
        head_norm = layer.head_norm
        return CLayer(
            qkv=_native(layer.qkv).struct,
            output=_native(layer.output).struct,
            gate_up=_native(layer.gate_up).struct,
            down=_native(layer.down).struct,
            input_norm=self._keep(layer.input_norm.weight),
            mlp_norm=self._keep(layer.mlp_norm.weight),
            head_norm=None if head_norm is None else self._keep(head_norm.weight),
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
