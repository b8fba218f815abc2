"""A DSpark block as one call of the native library (base.FusedBlock).

The other side of csrc/api_dspark.cpp.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from xspec.kernels.base import BlockParts, ConfidenceParts
from xspec.kernels.native import CLinear, Team, addresses, check, declare
from xspec.kernels.native_attention import pages_fit
from xspec.kernels.native_layers import NativeLayers
from xspec.kernels.native_linear import BF16, NativeLinear
from xspec.kernels.native_rows import CPassRows, CRowTable, NativeDraftRows
from xspec.kernels.rounds import DraftRows

_I32, _I64, _F32, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class CBlockParts(ctypes.Structure):
    _fields_ = [
        ("embedding", _PTR),
        ("vocab", _I64),
        ("mask", _PTR),
        ("slots", _I64),
        ("head", CLinear),
        ("ids", _PTR),
        ("markov_table", _PTR),
        ("rank", _I64),
        ("markov", CLinear),
        ("confidence", _PTR),
        ("confidence_bias", _F32),
        ("with_markov", _I32),
        ("temperatures", _PTR),
        ("offsets", _PTR),
        ("taps", _I64),
        ("context", CLinear),
        ("context_norm", _PTR),
        ("eps", _F32),
        ("kv", CLinear),
    ]


class CBlockDraft(ctypes.Structure):
    _fields_ = [
        ("rows", CPassRows),
        ("pages", _I64),
        ("slabs", _PTR),
        ("slab_pages", _I64),
        ("block", _I64),
        ("sampled", _PTR),
        ("tokens", _PTR),
        ("signals", _PTR),
    ]


class CBlockPublish(ctypes.Structure):
    _fields_ = [
        ("rows", _I64),
        ("taps", _PTR),
        ("positions", _PTR),
        ("slots", _PTR),
        ("slabs", _PTR),
        ("slab_pages", _I64),
        ("block", _I64),
    ]


_STRUCTS = (CBlockParts, CBlockDraft, CBlockPublish)
_PROTOTYPES: dict[str, Sequence[type]] = {
    "xs_dspark_create": (ctypes.POINTER(CBlockParts), _PTR, ctypes.POINTER(_PTR)),
    "xs_dspark_draft": (_PTR, _PTR, ctypes.POINTER(CRowTable), ctypes.POINTER(CBlockDraft)),
    "xs_dspark_publish": (_PTR, _PTR, ctypes.POINTER(CBlockPublish)),
}


def block_fits(parts: BlockParts) -> bool:
    """Whether `NativeBlock` can run them."""
    linears = [parts.head, parts.context, parts.kv]
    dense = [parts.embedding, parts.mask, parts.context_norm.weight]
    if parts.markov_table is not None and parts.markov is not None:
        linears.append(parts.markov)
        dense.append(parts.markov_table)
    wide = [] if parts.confidence is None else _tables(parts.confidence)
    return (
        isinstance(parts.layers, NativeLayers)
        and all(isinstance(linear, NativeLinear) for linear in linears)
        and all(tensor.dtype is BF16 and tensor.is_contiguous() for tensor in dense)
        and all(tensor.dtype is torch.float32 and tensor.is_contiguous() for tensor in wide)
    )


class NativeBlock:
    """Implements `base.FusedBlock`."""

    def __init__(self, team: Team, parts: BlockParts) -> None:
        assert isinstance(parts.layers, NativeLayers)
        self._team, self._c = team, declare(team.library, "xs_dspark", _STRUCTS, _PROTOTYPES)
        self._parts, self._hidden = parts, len(parts.mask)  # native code has addresses of the parts
        handle = ctypes.c_void_p()
        own = _struct(parts)
        status = self._c.xs_dspark_create(ctypes.byref(own), parts.layers.handle, ctypes.byref(handle))
        check(status, "xs_dspark_create")
        self._handle = handle.value
        weakref.finalize(self, self._c.xs_dspark_destroy, self._handle).atexit = False

    def takes(self, slab: torch.Tensor) -> bool:
        return pages_fit(slab.shape[2], slab.shape[3], slab.dtype)

    def knows(self, rows: DraftRows) -> bool:
        return isinstance(rows, NativeDraftRows)

    def __call__(
        self, rows: DraftRows, pages: int, slabs: Sequence[torch.Tensor], sampled: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(rows, NativeDraftRows):
            raise TypeError(f"{type(rows).__name__} are not the rows of these kernels")
        slots = self._parts.slots
        table, flat = rows.table, rows.block_a_lane(slots)
        if sampled is not None and (sampled.dtype is not torch.bool or sampled.shape != (flat.lanes,)):
            raise ValueError(f"sampled {list(sampled.shape)} {sampled.dtype} is not a bool for each lane")
        tokens = torch.empty(flat.lanes, slots, dtype=torch.int64)
        signals = torch.empty(flat.lanes, slots)
        places = addresses(slabs)
        draft = CBlockDraft(
            rows=flat,
            pages=pages,
            slabs=ctypes.addressof(places),
            slab_pages=slabs[0].shape[1],
            block=slabs[0].shape[2],
            sampled=None if sampled is None else sampled.data_ptr(),
            tokens=tokens.data_ptr(),
            signals=signals.data_ptr(),
        )
        status = self._c.xs_dspark_draft(
            self._team.handle, self._handle, ctypes.byref(table), ctypes.byref(draft)
        )
        check(status, "xs_dspark_draft")
        return tokens, signals

    def publish(
        self,
        taps: Sequence[torch.Tensor],
        positions: torch.Tensor,
        slots: torch.Tensor,
        slabs: Sequence[torch.Tensor],
    ) -> None:
        rows, parts = len(slots), self._parts
        if any(tap.shape != (rows, self._hidden) or tap.dtype is not BF16 for tap in taps):
            raise ValueError(f"taps of {rows} rows are [{rows}, {self._hidden}] bfloat16")
        if len(taps) != parts.taps:
            raise ValueError(f"{len(taps)} taps were given, the drafter has {parts.taps}")
        given = [tap.contiguous() for tap in taps]
        positions, slots = positions.contiguous(), slots.contiguous()
        places, states = addresses(slabs), addresses(given)
        step = CBlockPublish(
            rows=rows,
            taps=ctypes.addressof(states),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            slabs=ctypes.addressof(places),
            slab_pages=slabs[0].shape[1],
            block=slabs[0].shape[2],
        )
        status = self._c.xs_dspark_publish(self._team.handle, self._handle, ctypes.byref(step))
        check(status, "xs_dspark_publish")


def _struct(parts: BlockParts) -> CBlockParts:
    own = CBlockParts(
        embedding=parts.embedding.data_ptr(),
        vocab=len(parts.embedding),
        mask=parts.mask.data_ptr(),
        slots=parts.slots,
        head=_linear(parts.head),
        ids=None if parts.ids is None else parts.ids.data_ptr(),
        taps=parts.taps,
        context=_linear(parts.context),
        context_norm=parts.context_norm.weight.data_ptr(),
        eps=parts.context_norm.eps,
        kv=_linear(parts.kv),
    )
    if parts.markov_table is not None and parts.markov is not None:
        own.markov_table, own.rank = parts.markov_table.data_ptr(), parts.markov_table.shape[1]
        own.markov = _linear(parts.markov)
    if parts.confidence is not None:
        weight, temperatures, offsets = _tables(parts.confidence)
        own.confidence, own.confidence_bias = weight.data_ptr(), float(parts.confidence.bias)
        own.with_markov = parts.confidence.with_markov
        own.temperatures, own.offsets = temperatures.data_ptr(), offsets.data_ptr()
    return own


def _tables(confidence: ConfidenceParts) -> list[torch.Tensor]:
    return [confidence.weight, confidence.temperatures, confidence.offsets]


def _linear(linear: object) -> CLinear:
    assert isinstance(linear, NativeLinear)
    return linear.struct
