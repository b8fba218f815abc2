"""Drafting by the first loops of a looped target as one call of the native library (base.FusedLoops).

The other side of csrc/api_loops.cpp.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence

import torch

from xspec.kernels.base import LoopParts
from xspec.kernels.native import CLinear, Team, addresses, check, declare
from xspec.kernels.native_attention import pages_fit
from xspec.kernels.native_layers import NativeLayers
from xspec.kernels.native_linear import BF16, NativeLinear
from xspec.kernels.native_rows import CPassRows, CRowTable, NativeDraftRows
from xspec.kernels.rounds import DraftRows

_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class CLoopParts(ctypes.Structure):
    _fields_ = [("embedding", _PTR), ("vocab", _I64), ("head", CLinear)]


class CLoopDraft(ctypes.Structure):
    _fields_ = [
        ("rows", CPassRows),
        ("pages", _I64),
        ("slabs", _PTR),
        ("slab_pages", _I64),
        ("block", _I64),
        ("loops", _I64),
        ("steps", _I64),
        ("depths", _PTR),
        ("states", _PTR),
        ("kept", _I64),
        ("state_row", _I64),
        ("tokens", _PTR),
        ("signals", _PTR),
    ]


_STRUCTS = (CLoopParts, CLoopDraft)
_PROTOTYPES: dict[str, Sequence[type]] = {
    "xs_loops_create": (ctypes.POINTER(CLoopParts), _PTR, ctypes.POINTER(_PTR)),
    "xs_loops_draft": (_PTR, _PTR, ctypes.POINTER(CRowTable), ctypes.POINTER(CLoopDraft)),
}


def loops_fit(parts: LoopParts) -> bool:
    """Whether `NativeLoops` can run them."""
    table = parts.embedding
    return (
        isinstance(parts.layers, NativeLayers)
        and isinstance(parts.head, NativeLinear)
        and table.dtype is BF16
        and table.is_contiguous()
    )


class NativeLoops:
    """Implements `base.FusedLoops`."""

    def __init__(self, team: Team, parts: LoopParts) -> None:
        assert isinstance(parts.layers, NativeLayers) and isinstance(parts.head, NativeLinear)
        self._team, self._c = team, declare(team.library, "xs_loops", _STRUCTS, _PROTOTYPES)
        self._parts, self._layers = parts, parts.layers  # native code has addresses of the parts
        self._hidden = parts.embedding.shape[1]
        self._places: tuple[Sequence[torch.Tensor], ctypes.Array[ctypes.c_void_p]] | None = None
        own = CLoopParts(
            embedding=parts.embedding.data_ptr(), vocab=len(parts.embedding), head=parts.head.struct
        )
        handle = ctypes.c_void_p()
        status = self._c.xs_loops_create(ctypes.byref(own), parts.layers.handle, ctypes.byref(handle))
        check(status, "xs_loops_create")
        self._handle = handle.value
        weakref.finalize(self, self._c.xs_loops_destroy, self._handle).atexit = False

    def takes(self, slab: torch.Tensor) -> bool:
        return pages_fit(slab.shape[2], slab.shape[3], slab.dtype)

    def knows(self, rows: DraftRows) -> bool:
        return isinstance(rows, NativeDraftRows)

    def __call__(
        self,
        rows: DraftRows,
        pages: int,
        slabs: Sequence[torch.Tensor],
        steps: int,
        depth: int,
        kept: Mapping[int, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(rows, NativeDraftRows):
            raise TypeError(f"{type(rows).__name__} are not the rows of these kernels")
        states, row = tuple(kept.values()), (steps + 1) * self._hidden
        for state in states:
            if state.dtype is not BF16 or state.shape[2] != self._hidden or not state.is_contiguous():
                raise ValueError(f"states {list(state.shape)} {state.dtype} do not fit the drafter")
            row = state.stride(0)
        table, one = rows.table, rows.one_a_lane()
        tokens = torch.empty(one.lanes, steps, dtype=torch.int64)
        signals = torch.empty(one.lanes, steps)
        depths = (ctypes.c_int64 * len(states))(*kept)
        places = addresses(states)
        draft = CLoopDraft(
            rows=one,
            pages=pages,
            slabs=self._addresses(slabs, depth),
            slab_pages=slabs[0].shape[1],
            block=slabs[0].shape[2],
            loops=depth,
            steps=steps,
            depths=ctypes.addressof(depths),
            states=ctypes.addressof(places),
            kept=len(states),
            state_row=row,
            tokens=tokens.data_ptr(),
            signals=signals.data_ptr(),
        )
        status = self._c.xs_loops_draft(
            self._team.handle, self._handle, ctypes.byref(table), ctypes.byref(draft)
        )
        check(status, "xs_loops_draft")
        return tokens, signals

    def _addresses(self, slabs: Sequence[torch.Tensor], depth: int) -> int:
        """Of an array of the slabs' addresses; they are the same object in every call."""
        if len(slabs) < depth * len(self._layers):
            raise ValueError(f"{len(slabs)} slabs do not hold {depth} loops of {len(self._layers)} layers")
        if self._places is None or self._places[0] is not slabs:
            self._places = (slabs, addresses(slabs))
        return ctypes.addressof(self._places[1])
