"""All draft steps of multi-token prediction as one call of the native library (base.FusedSteps).

The other side of csrc/api_mtp.cpp.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from xspec.kernels.base import StepParts
from xspec.kernels.native import CLinear, Team, check, declare
from xspec.kernels.native_attention import pages_fit
from xspec.kernels.native_carry import CCarry, carry_struct
from xspec.kernels.native_layers import NativeLayers
from xspec.kernels.native_linear import BF16, NativeLinear
from xspec.kernels.native_rows import CPassRows, CRowTable, NativeDraftRows
from xspec.kernels.rounds import Carried, DraftRows

_I32, _I64, _F32, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class CMtpParts(ctypes.Structure):
    _fields_ = [
        ("embedding", _PTR),
        ("vocab", _I64),
        ("pair_norm", _PTR),
        ("eps", _F32),
        ("join", CLinear),
        ("head", CLinear),
        ("ids", _PTR),
        ("of_normed", _I32),
    ]


class CMtpDraft(ctypes.Structure):
    _fields_ = [
        ("rows", CPassRows),
        ("pages", _I64),
        ("boundary", _PTR),
        ("slab", _PTR),
        ("slab_pages", _I64),
        ("block", _I64),
        ("steps", _I64),
        ("tokens", _PTR),
        ("signals", _PTR),
    ]


class CMtpPublish(ctypes.Structure):
    _fields_ = [
        ("carry", CCarry),
        ("tokens", _PTR),
        ("slab", _PTR),
        ("slab_pages", _I64),
        ("block", _I64),
    ]


_STRUCTS = (CMtpParts, CMtpDraft, CMtpPublish)
_PROTOTYPES: dict[str, Sequence[type]] = {
    "xs_mtp_create": (ctypes.POINTER(CMtpParts), _PTR, ctypes.POINTER(_PTR)),
    "xs_mtp_draft": (_PTR, _PTR, ctypes.POINTER(CRowTable), ctypes.POINTER(CMtpDraft)),
    "xs_mtp_publish": (_PTR, _PTR, ctypes.POINTER(CMtpPublish)),
}


def steps_fit(parts: StepParts) -> bool:
    """Whether `NativeSteps` can run them."""
    linears = (parts.join, parts.head)
    dense = (parts.embedding, parts.pair_norm.weight)
    return (
        isinstance(parts.layers, NativeLayers)
        and all(isinstance(linear, NativeLinear) for linear in linears)
        and all(tensor.dtype is BF16 and tensor.is_contiguous() for tensor in dense)
    )


class NativeSteps:
    """Implements `base.FusedSteps`."""

    def __init__(self, team: Team, parts: StepParts) -> None:
        join, head = parts.join, parts.head
        assert isinstance(join, NativeLinear) and isinstance(head, NativeLinear)
        assert isinstance(parts.layers, NativeLayers)
        self._team, self._c = team, declare(team.library, "xs_mtp", _STRUCTS, _PROTOTYPES)
        self._parts, self._hidden = parts, parts.embedding.shape[1]  # native code has addresses of the parts
        own = CMtpParts(
            embedding=parts.embedding.data_ptr(),
            vocab=len(parts.embedding),
            pair_norm=parts.pair_norm.weight.data_ptr(),
            eps=parts.pair_norm.eps,
            join=join.struct,
            head=head.struct,
            ids=None if parts.ids is None else parts.ids.data_ptr(),
            of_normed=parts.of_normed,
        )
        handle = ctypes.c_void_p()
        status = self._c.xs_mtp_create(ctypes.byref(own), parts.layers.handle, ctypes.byref(handle))
        check(status, "xs_mtp_create")
        self._handle = handle.value
        weakref.finalize(self, self._c.xs_mtp_destroy, self._handle).atexit = False

    def takes(self, slab: torch.Tensor) -> bool:
        return pages_fit(slab.shape[2], slab.shape[3], slab.dtype)

    def knows(self, rows: DraftRows) -> bool:
        return isinstance(rows, NativeDraftRows)

    def __call__(
        self, rows: DraftRows, pages: int, boundary: torch.Tensor, slab: torch.Tensor, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(rows, NativeDraftRows):
            raise TypeError(f"{type(rows).__name__} are not the rows of these kernels")
        if boundary.shape[1] != self._hidden or boundary.dtype is not BF16:
            raise ValueError(f"states {list(boundary.shape)} {boundary.dtype} do not fit the drafter")
        table, one = rows.table, rows.one_a_lane()
        tokens = torch.empty(one.lanes, steps, dtype=torch.int64)
        signals = torch.empty(one.lanes, steps)
        draft = CMtpDraft(
            rows=one,
            pages=pages,
            boundary=boundary.data_ptr(),
            slab=slab.data_ptr(),
            slab_pages=slab.shape[1],
            block=slab.shape[2],
            steps=steps,
            tokens=tokens.data_ptr(),
            signals=signals.data_ptr(),
        )
        status = self._c.xs_mtp_draft(
            self._team.handle, self._handle, ctypes.byref(table), ctypes.byref(draft)
        )
        check(status, "xs_mtp_draft")
        return tokens, signals

    def publish(self, tokens: torch.Tensor, carried: Carried, slab: torch.Tensor) -> None:
        if carried.states.dtype is not BF16 or carried.states.shape != (len(tokens), self._hidden):
            raise ValueError(
                f"states {list(carried.states.shape)} of {len(tokens)} tokens do not fit the drafter"
            )
        tokens = tokens.contiguous()
        with carry_struct(carried) as carry:
            step = CMtpPublish(
                carry=carry,
                tokens=tokens.data_ptr(),
                slab=slab.data_ptr(),
                slab_pages=slab.shape[1],
                block=slab.shape[2],
            )
            status = self._c.xs_mtp_publish(self._team.handle, self._handle, ctypes.byref(step))
        check(status, "xs_mtp_publish")
