"""What a drafter carries over the border of a pass, as native code reads it. See csrc/sequences.h."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from xspec.kernels.rounds import Carried

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


class CCarry(ctypes.Structure):
    _fields_ = [
        ("states", _PTR),
        ("bytes", _I64),
        ("rows", _I64),
        ("lanes", _I64),
        ("positions", _PTR),
        ("slots", _PTR),
        ("sequences", _PTR),
        ("row_ids", _PTR),
        ("first", _PTR),
        ("committed", _PTR),
        ("block", _I64),
        ("sink_slot", _I64),
        ("boundary", _PTR),
        ("page_states", _PTR),
        ("before", _PTR),
        ("kept_slots", _PTR),
    ]


@contextlib.contextmanager
def carry_struct(carried: Carried) -> Iterator[CCarry]:
    """What native code reads and moves on; where its results go is left out."""
    states, inputs = carried.states.contiguous(), carried.inputs
    sequences = inputs.owners().contiguous()
    if not carried.boundary.dtype == carried.page_state.dtype == states.dtype:
        raise ValueError("states of one pass have one dtype")
    if carried.boundary.shape[1:] != states.shape[1:]:
        raise ValueError("states of one pass have one width")
    yield CCarry(
        states=states.data_ptr(),
        bytes=states.stride(0) * states.itemsize,
        rows=len(states),
        lanes=len(carried.rows),
        positions=inputs.positions.data_ptr(),
        slots=inputs.slots.data_ptr(),
        sequences=sequences.data_ptr(),
        row_ids=carried.rows.data_ptr(),
        first=carried.first.data_ptr(),
        committed=carried.committed.data_ptr(),
        block=carried.block_size,
        sink_slot=carried.sink_slot,
        boundary=carried.boundary.data_ptr(),
        page_states=carried.page_state.data_ptr(),
    )
