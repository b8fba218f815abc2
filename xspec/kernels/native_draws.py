"""Draws from rows of bfloat16 logits in native code (rounds.py): argmax, Gumbel noise, what was picked.

The other side of csrc/sample.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from xspec.kernels.native import Team, check
from xspec.kernels.rounds import Chain, RowFilters

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class CDraw(ctypes.Structure):
    """Draw of csrc/sample.h, the structs in it laid out one after another."""

    _fields_ = [
        ("keys", _PTR),
        ("owners", _PTR),
        ("positions", _PTR),
        ("ids", _PTR),
        ("id_stride", _I64),
        ("rows", _I64),
        ("cols", _I64),
        ("temperature", _PTR),
        ("top_p", _PTR),
        ("min_p", _PTR),
        ("real_stride", _I64),
        ("top_k", _PTR),
        ("top_k_stride", _I64),
        ("fed", _PTR),
        ("offsets", _PTR),
        ("logits", _PTR),
        ("logit_stride", _I64),
        ("columns", _PTR),
        ("bad", _PTR),
    ]


_PROTOTYPES: dict[str, Sequence[type]] = {
    "xs_draw": (_PTR, ctypes.POINTER(CDraw)),
    "xs_selected_probability": (_PTR, _PTR, _I64, _I64, _I64, _PTR, _PTR),
    "xs_gumbel": (_PTR, _PTR, _PTR, _PTR, _I64, _I64, _I64, _PTR),
}


class NativeDraws:
    """Implements `rounds.FusedDraws` for bfloat16."""

    def __init__(self, team: Team) -> None:
        self._team, self._c = team, team.library.c
        for name, arguments in _PROTOTYPES.items():
            call = getattr(self._c, name)
            call.restype, call.argtypes = ctypes.c_int32, list(arguments)

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._draw(logits, CDraw())

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        keys: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None = None,
        filters: RowFilters | None = None,
        chain: Chain | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not (keys.is_contiguous() and rows.is_contiguous() and positions.is_contiguous()):
            raise ValueError("keys, rows and positions are contiguous")
        step = CDraw(
            keys=keys.data_ptr(),
            owners=rows.data_ptr(),
            positions=positions.data_ptr(),
            temperature=temperatures.data_ptr(),
            real_stride=temperatures.stride(0),
        )
        if ids is not None:
            if ids.shape != logits.shape[1:] or not ids.is_contiguous():
                raise ValueError(f"ids {list(ids.shape)} do not name the columns of {list(logits.shape)}")
            step.ids = ids.data_ptr()
        if filters is not None:
            _put_filters(step, filters)
        if chain is not None:
            _put_chain(step, chain, len(logits))
        return self._draw(logits, step)

    def _draw(self, logits: torch.Tensor, step: CDraw) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _dense(logits)
        step.rows, step.cols = logits.shape
        columns = torch.empty(step.rows, dtype=torch.int64)
        bad = torch.empty(step.rows, dtype=torch.bool)
        step.logits, step.logit_stride = logits.data_ptr(), logits.stride(0)
        step.columns, step.bad = columns.data_ptr(), bad.data_ptr()
        check(self._c.xs_draw(self._team.handle, step), "xs_draw")
        return columns, bad

    def gumbel(
        self,
        keys: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None,
        columns: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        keys, positions = keys.contiguous(), positions.contiguous()
        if ids is not None:
            ids, columns = ids.contiguous(), ids.shape[1]
        if out is None:
            out = torch.empty(len(keys), columns)
        if out.shape != (len(keys), columns) or not out.is_contiguous() or out.dtype is not torch.float32:
            raise ValueError(f"out {list(out.shape)} {out.dtype}: allowed: {[len(keys), columns]} float32")
        status = self._c.xs_gumbel(
            self._team.handle,
            keys.data_ptr(),
            positions.data_ptr(),
            None if ids is None else ids.data_ptr(),
            columns,
            len(keys),
            columns,
            out.data_ptr(),
        )
        check(status, "xs_gumbel")
        return out

    def selected_probability(self, logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        logits, columns = _dense(logits), columns.contiguous()
        out = torch.empty(logits.shape[0])
        status = self._c.xs_selected_probability(
            self._team.handle,
            logits.data_ptr(),
            logits.stride(0),
            *logits.shape,
            columns.data_ptr(),
            out.data_ptr(),
        )
        check(status, "xs_selected_probability")
        return out


def _dense(logits: torch.Tensor) -> torch.Tensor:
    if logits.dtype is not torch.bfloat16:
        raise ValueError(f"logits are {logits.dtype}; allowed: bfloat16")
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _put_filters(step: CDraw, filters: RowFilters) -> None:
    if not filters.top_p.stride(0) == filters.min_p.stride(0) == step.real_stride:
        raise ValueError("temperatures, top_p and min_p have one stride")
    step.top_p, step.min_p = filters.top_p.data_ptr(), filters.min_p.data_ptr()
    step.top_k, step.top_k_stride = filters.top_k.data_ptr(), filters.top_k.stride(0)


def _put_chain(step: CDraw, chain: Chain, rows: int) -> None:
    if step.ids is not None:
        raise ValueError("the columns of a chain are its tokens")
    for tensor in (chain.fed, chain.offsets):
        if tensor.shape != (rows,) or not tensor.is_contiguous():
            raise ValueError(f"a chain of {list(tensor.shape)} entries does not fit {rows} rows")
    step.fed, step.offsets = chain.fed.data_ptr(), chain.offsets.data_ptr()
