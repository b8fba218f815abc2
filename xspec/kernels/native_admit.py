"""Which drafts a row budget lets into verification, in one native call (rounds.py).

The other side of `Admit` in csrc/sequences.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from xspec.kernels.native import check

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class CAdmit(ctypes.Structure):
    _fields_ = [
        ("row_ids", _PTR),
        ("verify", _PTR),
        ("lanes", _I64),
        ("signals", _PTR),
        ("lane_stride", _I64),
        ("draft_stride", _I64),
        ("width", _I64),
        ("target_rows", _I64),
        ("products", _PTR),
        ("waiting", _PTR),
        ("admitted", _PTR),
    ]


class NativeAdmit:
    """`rounds.FusedRows.admit` over a table of so many rows, in buffers that are made once."""

    def __init__(self, c: ctypes.CDLL, table: ctypes.Structure, rows: int) -> None:
        self._c, self._table = c, table
        self._row_ids, self._verify, self._waiting, self._admitted = ((_I64 * rows)() for _ in range(4))
        self._products = (ctypes.c_double * rows)()
        self._struct = CAdmit(
            row_ids=ctypes.addressof(self._row_ids),
            verify=ctypes.addressof(self._verify),
            products=ctypes.addressof(self._products),
            waiting=ctypes.addressof(self._waiting),
            admitted=ctypes.addressof(self._admitted),
        )

    def __call__(
        self, row_ids: Sequence[int], verify: Sequence[int], signals: torch.Tensor, target_rows: int
    ) -> list[int]:
        lanes, width = len(row_ids), signals.shape[1]
        if signals.dtype is not torch.float32 or len(signals) < lanes:
            raise ValueError(f"{lanes} lanes have as many rows of float32 signals, or more")
        self._row_ids[:lanes] = [*row_ids]  # a ValueError if there are more of them, or fewer to verify
        self._verify[:lanes] = [*verify]
        step = self._struct
        step.lanes, step.width, step.target_rows = lanes, width, target_rows
        step.signals, (step.lane_stride, step.draft_stride) = signals.data_ptr(), signals.stride()
        check(self._c.xs_admit(self._table, step), "xs_admit")
        return self._admitted[:lanes]
