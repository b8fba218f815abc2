"""Draws from rows of bfloat16 logits in native code (rounds.py): argmax, Gumbel noise, what was picked.

The other side of csrc/sample.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from xspec.kernels.native import Team, check

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p

_PROTOTYPES: dict[str, Sequence[type]] = {
    "xs_draw": (_PTR, _PTR, _I64, _I64, _I64, _PTR, _PTR, _PTR, _PTR, _PTR, _I64, _PTR, _PTR),
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
        return self._draw(logits, None, None, None, None, None, 0)

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        keys: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not (keys.is_contiguous() and rows.is_contiguous() and positions.is_contiguous()):
            raise ValueError("keys, rows and positions are contiguous")
        if ids is not None and (ids.shape != logits.shape[1:] or not ids.is_contiguous()):
            raise ValueError(f"ids {list(ids.shape)} do not name the columns of {list(logits.shape)}")
        return self._draw(
            logits,
            keys.data_ptr(),
            rows.data_ptr(),
            positions.data_ptr(),
            None if ids is None else ids.data_ptr(),
            temperatures.data_ptr(),
            temperatures.stride(0),
        )

    def _draw(
        self,
        logits: torch.Tensor,
        keys: int | None,
        rows: int | None,
        positions: int | None,
        ids: int | None,
        temperatures: int | None,
        stride: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _dense(logits)
        count, width = logits.shape
        columns = torch.empty(count, dtype=torch.int64)
        bad = torch.empty(count, dtype=torch.bool)
        status = self._c.xs_draw(
            self._team.handle,
            logits.data_ptr(),
            logits.stride(0),
            count,
            width,
            keys,
            rows,
            positions,
            ids,
            temperatures,
            stride,
            columns.data_ptr(),
            bad.data_ptr(),
        )
        check(status, "xs_draw")
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
