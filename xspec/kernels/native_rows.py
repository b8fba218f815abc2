"""A round's rows in native code (rounds.py): one call for a pass's inputs, its commit, what it carries on.

The other side of csrc/sequences.h. Inputs are bound to buffers that are made once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from xspec.errors import EngineError
from xspec.kernels.native import NativeLibrary, check
from xspec.kernels.native_admit import CAdmit, NativeAdmit
from xspec.kernels.native_carry import CCarry, carry_struct
from xspec.kernels.native_draws import CDraw
from xspec.kernels.rounds import Carried, FlatRows, RowTable, Settled, Told
from xspec.nn.inputs import ForwardInputs, Ragged, Segment

_I32, _I64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class CRowTable(ctypes.Structure):
    _fields_ = [
        ("rows", _I64),
        ("last_token", _PTR),
        ("length", _PTR),
        ("max_len", _PTR),
        ("page_table", _PTR),
        ("table_stride", _I64),
        ("block", _I64),
        ("sink_page", _I64),
    ]


class CPassRows(ctypes.Structure):
    _fields_ = [
        ("row_ids", _PTR),
        ("lanes", _I64),
        ("width", _I64),
        ("rows", _I64),
        ("positions", _PTR),
        ("slots", _PTR),
        ("kv_lens", _PTR),
        ("sequences", _PTR),
        ("page_table", _PTR),
    ]


class CVerifyRows(ctypes.Structure):
    _fields_ = [
        ("rows", CPassRows),
        ("drafts", _PTR),
        ("tokens", _PTR),
        ("owners", _PTR),
        ("offsets", _PTR),
        ("first", _PTR),
        ("counts", _PTR),
        ("dense", _PTR),
        ("flat", _PTR),
    ]


class CSettle(ctypes.Structure):
    _fields_ = [
        ("row_ids", _PTR),
        ("first", _PTR),
        ("counts", _PTR),
        ("lives", _I64),
        ("lanes", _I64),
        ("draws", _PTR),
        ("bad", _PTR),
        ("drafts", _PTR),
        ("draft_stride", _I64),
        ("width", _I64),
        ("tokens", _PTR),
        ("committed", _PTR),
        ("slots", _PTR),
        ("sequences", _PTR),
        ("rows", _I64),
        ("fact_slots", _PTR),
        ("told_tokens", _PTR),
        ("told_stride", _I64),
        ("told_counts", _PTR),
        ("told_bad", _PTR),
    ]


STRUCTS = (CRowTable, CPassRows, CVerifyRows, CSettle, CCarry, CDraw, CAdmit)
"""In the order in which xs_round_struct_sizes reports them."""

_TABLE = ctypes.POINTER(CRowTable)
_PROTOTYPES: dict[str, Sequence[type]] = {
    "xs_decode_rows": (_TABLE, ctypes.POINTER(CPassRows), _I64, _I64, _I32),
    "xs_verify_rows": (_TABLE, ctypes.POINTER(CVerifyRows), _PTR, _I64),
    "xs_admit": (_TABLE, ctypes.POINTER(CAdmit)),
    "xs_settle": (_TABLE, ctypes.POINTER(CSettle)),
    "xs_carry": (ctypes.POINTER(CCarry),),
}


def _declare(library: NativeLibrary) -> ctypes.CDLL:
    """The library with the prototypes of these calls. EngineError if it was built from other sources."""
    c = library.c
    sizes = (_I64 * len(STRUCTS))()
    c.xs_round_struct_sizes(sizes)
    if list(sizes) != [ctypes.sizeof(struct) for struct in STRUCTS]:
        raise EngineError(f"{library.path} was built from other sources than this xspec: install it again")
    for name, arguments in _PROTOTYPES.items():
        getattr(c, name).restype, getattr(c, name).argtypes = _I32, list(arguments)
    return c


class NativeRows:
    """Implements `rounds.FusedRows`."""

    def __init__(self, library: NativeLibrary, table: RowTable) -> None:
        tensors = (table.last_token, table.length, table.max_len, table.page_table)
        if not all(tensor.is_contiguous() and tensor.dtype is torch.int64 for tensor in tensors):
            raise ValueError("device rows are contiguous int64 tensors")
        self._c, self._table = _declare(library), table
        self._struct = CRowTable(
            rows=table.length.shape[0],
            last_token=table.last_token.data_ptr(),
            length=table.length.data_ptr(),
            max_len=table.max_len.data_ptr(),
            page_table=table.page_table.data_ptr(),
            table_stride=table.page_table.shape[1],
            block=table.block_size,
            sink_page=table.sink_page,
        )
        self.admit = NativeAdmit(self._c, self._struct, table.length.shape[0])

    def draft_rows(self, row_ids: torch.Tensor) -> NativeDraftRows:
        return NativeDraftRows(self._c, self._struct, self._table, row_ids)

    def verify_rows(
        self, row_ids: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor, target_rows: int
    ) -> NativeVerifyRows:
        return NativeVerifyRows(self._c, self._struct, self._table, row_ids, drafts, counts, target_rows)

    def settle(
        self,
        rows: FlatRows,
        lives: int,
        draws: torch.Tensor,
        bad: torch.Tensor,
        drafts: torch.Tensor | None,
        width: int,
        told: Told,
    ) -> Settled:
        lanes, flat = len(rows.row_ids), len(rows.tokens)
        if lives > len(told.counts) or width >= told.tokens.shape[1]:
            raise ValueError(f"{lives} rows of {width + 1} tokens do not fit {list(told.tokens.shape)}")
        if width and (drafts is None or drafts.stride(1) != 1 or drafts.shape[1] < width):
            raise ValueError(f"there are no {width} drafts of each row")
        tokens = torch.empty(lives, width + 1, dtype=torch.int64)
        counts, fact_slots = torch.empty(lanes, dtype=torch.int64), torch.empty(flat, dtype=torch.int64)
        step = CSettle(
            row_ids=rows.row_ids.data_ptr(),
            first=rows.first.data_ptr(),
            counts=rows.counts.data_ptr(),
            lives=lives,
            lanes=lanes,
            draws=draws.data_ptr(),
            bad=bad.data_ptr(),
            drafts=None if drafts is None else drafts.data_ptr(),
            draft_stride=0 if drafts is None else drafts.stride(0),
            width=width + 1,
            tokens=tokens.data_ptr(),
            committed=counts.data_ptr(),
            slots=rows.inputs.slots.data_ptr(),
            sequences=rows.lanes.data_ptr(),
            rows=flat,
            fact_slots=fact_slots.data_ptr(),
            told_tokens=told.tokens.data_ptr(),
            told_stride=told.tokens.stride(0),
            told_counts=told.counts.data_ptr(),
            told_bad=told.bad.data_ptr(),
        )
        check(self._c.xs_settle(self._struct, step), "xs_settle")
        return Settled(tokens, counts, fact_slots)


class _Buffers:
    """int64 memory in one piece, handed out in parts."""

    def __init__(self, size: int) -> None:
        self._memory, self._used = torch.zeros(size, dtype=torch.int64), 0

    def take(self, size: int) -> torch.Tensor:
        self._used += size
        return self._memory[self._used - size : self._used]


class NativeDraftRows:
    """Implements `rounds.DraftRows`: buffers for every kind of pass that was asked for once."""

    def __init__(self, c: ctypes.CDLL, table: CRowTable, tensors: RowTable, row_ids: torch.Tensor) -> None:
        self._c, self._tensors, self._row_ids = c, tensors, row_ids
        self.table = table
        self._kinds: dict[tuple[int, int, bool], tuple[CPassRows, ForwardInputs]] = {}

    def __call__(
        self, offset: int, width: int, causal: bool, pages: int, segments: tuple[Segment, ...]
    ) -> ForwardInputs:
        kind = (offset, width, causal)
        step, inputs = self._buffers(kind)
        check(self._c.xs_decode_rows(self.table, step, pages, offset, causal), "xs_decode_rows")
        if segments != inputs.segments:
            inputs = _with(inputs, segments, None, True)
            self._kinds[kind] = (step, inputs)
        return inputs

    def one_a_lane(self) -> CPassRows:
        """Buffers of a pass over one row of each lane, for native code to fill; until the next call."""
        return self._buffers((0, 1, True))[0]

    def block_a_lane(self, width: int) -> CPassRows:
        """Likewise of a pass over `width` rows of each lane that see each other."""
        return self._buffers((0, width, False))[0]

    def _buffers(self, kind: tuple[int, int, bool]) -> tuple[CPassRows, ForwardInputs]:
        if kind not in self._kinds:
            width = kind[1]
            self._kinds[kind] = _pass_rows(self._tensors, self._row_ids, width, len(self._row_ids) * width)
        return self._kinds[kind]


class NativeVerifyRows:
    """Implements `rounds.VerifyRows`."""

    def __init__(
        self,
        c: ctypes.CDLL,
        table: CRowTable,
        tensors: RowTable,
        row_ids: torch.Tensor,
        drafts: torch.Tensor,
        counts: torch.Tensor,
        target_rows: int,
    ) -> None:
        if not (row_ids.is_contiguous() and drafts.is_contiguous() and counts.is_contiguous()):
            raise ValueError("the buffers of a verify pass are contiguous")
        lanes, width = drafts.shape[0], drafts.shape[1] + 1
        step, inputs = _pass_rows(tensors, row_ids, width, target_rows)
        parts = _Buffers(4 * target_rows + 2 * lanes + lanes * width)
        tokens, owners, offsets, flat = (parts.take(target_rows) for _ in range(4))
        first, made = parts.take(lanes), parts.take(lanes)
        self._ragged = Ragged(dense=parts.take(lanes * width), flat=flat)
        self._c, self._table, self._counts = c, table, counts
        self._alive = (tensors, drafts)
        self._struct = CVerifyRows(
            rows=step,
            drafts=drafts.data_ptr(),
            tokens=tokens.data_ptr(),
            owners=owners.data_ptr(),
            offsets=offsets.data_ptr(),
            first=first.data_ptr(),
            counts=made.data_ptr(),
            flat=flat.data_ptr(),
        )
        self._guesses = width > 1
        self._uniform = True
        assert inputs.sequences is not None
        self._rows = FlatRows(row_ids, tokens, inputs.sequences, owners, offsets, first, made, inputs)

    def __call__(self, uniform: bool, pages: int, segments: tuple[Segment, ...]) -> FlatRows:
        step = self._struct
        step.dense = None if uniform else self._ragged.dense.data_ptr()
        counts = None if uniform else self._counts.data_ptr()
        check(self._c.xs_verify_rows(self._table, step, counts, pages), "xs_verify_rows")
        rows = self._rows
        if segments != rows.inputs.segments or uniform != self._uniform:
            inputs = _with(rows.inputs, segments, None if uniform else self._ragged, self._guesses)
            self._rows = FlatRows(
                rows.row_ids,
                rows.tokens,
                rows.lanes,
                rows.owners,
                rows.offsets,
                rows.first,
                rows.counts,
                inputs,
            )
            self._uniform = uniform
        return self._rows


def _pass_rows(
    tensors: RowTable, row_ids: torch.Tensor, width: int, rows: int
) -> tuple[CPassRows, ForwardInputs]:
    """Buffers of a pass over row_ids [L] with `rows` flat rows, as native code and as a model sees them."""
    lanes, entries = len(row_ids), tensors.page_table.shape[1]
    parts = _Buffers(4 * rows + lanes * entries)
    positions, slots, kv_lens, sequences = (parts.take(rows) for _ in range(4))
    table = parts.take(lanes * entries).view(lanes, entries)
    step = CPassRows(
        row_ids=row_ids.data_ptr(),
        lanes=lanes,
        width=width,
        rows=rows,
        positions=positions.data_ptr(),
        slots=slots.data_ptr(),
        kv_lens=kv_lens.data_ptr(),
        sequences=sequences.data_ptr(),
        page_table=table.data_ptr(),
    )
    return step, ForwardInputs(positions, slots, kv_lens, table, (), sequences=sequences)


def _with(
    inputs: ForwardInputs, segments: tuple[Segment, ...], ragged: Ragged | None, guesses: bool
) -> ForwardInputs:
    return ForwardInputs(
        inputs.positions,
        inputs.slots,
        inputs.kv_lens,
        inputs.page_table,
        segments,
        ragged,
        guesses,
        inputs.sequences,
    )


class NativeCarry:
    """Implements `rounds.FusedCarry`: rows of states are copied as they are, in any dtype."""

    def __init__(self, library: NativeLibrary) -> None:
        self._c = _declare(library)

    def __call__(self, carried: Carried) -> tuple[torch.Tensor, torch.Tensor]:
        before, kept = torch.empty_like(carried.states), torch.empty_like(carried.inputs.slots)
        with carry_struct(carried) as step:
            step.before, step.kept_slots = before.data_ptr(), kept.data_ptr()
            check(self._c.xs_carry(step), "xs_carry")
        return before, kept
