"""Device rows, attention segments and slots on their own, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from xspec.core.request import SamplingParams, TokenLogprob
from xspec.core.round import (
    Batch,
    DecodeRow,
    PageGrant,
    PrefillChunk,
    RoundPlan,
    RowBind,
    SpeculationPlan,
)
from xspec.core.shapes import RoundShape
from xspec.errors import EngineError
from xspec.exec.rows import DeviceRows
from xspec.exec.segments import chunk_segments, decode_segments
from xspec.exec.slots import Slot
from xspec.nn.inputs import Ragged, Segment
from xspec.platform.cpu import CpuPlatform
from xspec.verify.logprobs import Logprobs

CPU = torch.device("cpu")


def bind(row: int, sequence_id: int, tokens: int) -> RowBind:
    return RowBind(row, sequence_id, SamplingParams(), 0, 0, tokens, tuple(range(tokens)), (), max_len=16)


@pytest.fixture
def rows() -> DeviceRows:
    """Row 1: 5 tokens on pages 7, 3. Row 2: 9 tokens on pages 4, 2, 9."""
    rows = DeviceRows(3, 4, 4, CPU, sink_page=20)
    rows.bind(bind(1, 11, 5))
    rows.grant(PageGrant(1, 0, (7, 3)))
    rows.bind(bind(2, 12, 9))
    rows.grant(PageGrant(2, 0, (4, 2)))
    rows.grant(PageGrant(2, 2, (9,)))
    return rows


def test_decode_inputs_write_where_the_last_token_stands(rows: DeviceRows) -> None:
    inputs = rows.decode_inputs(torch.tensor([2, 1, 0]), 1, 3, ())
    assert inputs.positions.tolist() == [8, 4, 0]
    assert inputs.slots.tolist() == [9 * 4 + 0, 3 * 4 + 0, 20 * 4]
    assert inputs.kv_lens.tolist() == [9, 5, 1]
    assert inputs.page_table.tolist() == [[4, 2, 9], [7, 3, 0], [0, 0, 0]]


def test_verify_rows_past_the_granted_pages_write_to_the_sink(rows: DeviceRows) -> None:
    inputs = rows.decode_inputs(torch.tensor([2, 1]), 5, 3, ())
    assert inputs.positions.tolist() == [8, 9, 10, 11, 12, 4, 5, 6, 7, 8]
    assert inputs.slots.tolist() == [36, 37, 38, 39, 80, 12, 13, 14, 15, 80]
    assert inputs.kv_lens.tolist() == [9, 10, 11, 12, 13, 5, 6, 7, 8, 9]


def test_rows_of_a_block_all_see_its_end(rows: DeviceRows) -> None:
    inputs = rows.decode_inputs(torch.tensor([2, 1]), 3, 3, (), offset=1, causal=False)
    assert inputs.positions.tolist() == [9, 10, 11, 5, 6, 7]
    assert inputs.kv_lens.tolist() == [12, 12, 12, 8, 8, 8]


def test_ragged_rows_and_the_padding_behind_them(rows: DeviceRows) -> None:
    """Lane 0 (row 2) has three rows, lane 1 (row 1) one, and two rows of the flat axis are padding."""
    lanes, offsets = torch.tensor([0, 0, 0, 1, -1, -1]), torch.tensor([0, 1, 2, 0, 0, 0])
    ragged = Ragged(dense=torch.zeros(6, dtype=torch.int64), flat=torch.zeros(6, dtype=torch.int64))
    inputs = rows.ragged_inputs(torch.tensor([2, 1]), lanes, offsets, ragged, 3, ())
    assert inputs.positions.tolist() == [8, 9, 10, 4, 0, 0]
    assert inputs.slots.tolist() == [36, 37, 38, 12, 80, 80]
    assert inputs.kv_lens.tolist() == [9, 10, 11, 5, 1, 1]


def test_rooms_end_at_the_longest_a_row_may_get(rows: DeviceRows) -> None:
    assert rows.room(torch.tensor([1, 2, 0])).tolist() == [11, 7, 0]
    rows.advance(torch.tensor([2]), torch.tensor([5]), torch.tensor([7]))
    assert rows.room(torch.tensor([2])).tolist() == [0]


def test_chunk_inputs_are_ragged(rows: DeviceRows) -> None:
    segments = chunk_segments([2, 3], [1, 3])
    inputs = rows.chunk_inputs(torch.tensor([1, 2]), [2, 6], [2, 3], segments)
    assert inputs.positions.tolist() == [2, 3, 6, 7, 8]
    assert inputs.slots.tolist() == [7 * 4 + 2, 7 * 4 + 3, 2 * 4 + 2, 2 * 4 + 3, 9 * 4]
    assert inputs.kv_lens.tolist() == [3, 4, 7, 8, 9]
    assert segments == (Segment(0, 1, 2, 1, 0), Segment(1, 1, 3, 3, 2))


def test_advance_moves_committed_rows_only(rows: DeviceRows) -> None:
    rows.last_token[1] = 50
    rows.advance(torch.tensor([1, 2]), torch.tensor([61, 62]), torch.tensor([0, 3]))
    assert rows.last_token.tolist() == [0, 50, 62, 0]
    assert rows.length.tolist() == [1, 5, 12, 1]


def test_a_new_tenant_finds_nothing_of_the_old_one(rows: DeviceRows) -> None:
    rows.bind(bind(2, 13, 1))
    assert rows.page_table[2].tolist() == [0, 0, 0, 0]
    assert int(rows.length[2]) == 1
    rows.check_owner(2, 13)
    with pytest.raises(EngineError, match="row 2 belongs to sequence 13, not 12"):
        rows.check_owner(2, 12)
    with pytest.raises(EngineError, match="row 3 belongs to sequence None"):
        rows.check_owner(3, 14)


def test_rows_of_like_length_are_one_segment() -> None:
    assert decode_segments([8, 7, 5], lanes=4, width=1, block_size=16) == (Segment(0, 4, 1, 8, 0),)


def test_a_long_row_does_not_make_short_ones_read_its_pages() -> None:
    segments = decode_segments([200, 4, 3], lanes=4, width=3, block_size=16)
    assert segments == (Segment(0, 1, 3, 200, 0), Segment(1, 3, 3, 4, 3))


def test_a_split_must_be_worth_its_calls() -> None:
    assert len(decode_segments([20, 2], lanes=2, width=1, block_size=16)) == 1  # saves 288 keys
    assert len(decode_segments([130, 2], lanes=2, width=1, block_size=16)) == 2  # saves exactly 2048


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_padding_alone_reads_one_page(lanes: int) -> None:
    assert decode_segments([], lanes, 2, 16) == (Segment(0, lanes, 2, 1, 0),)


def test_segments_cover_all_rows_in_order() -> None:
    pages = sorted((1 + 37 * i % 400 for i in range(30)), reverse=True)
    segments = decode_segments(pages, lanes=32, width=2, block_size=16)
    assert len(segments) > 2
    first = row = 0
    for segment in segments:
        assert (segment.first, segment.first_row) == (first, row)
        assert segment.pages >= max([*pages, 1, 1][first : first + segment.count])
        first, row = first + segment.count, row + segment.count * segment.rows
    assert (first, row) == (32, 64)


def plan_of(
    chunks: tuple[PrefillChunk, ...] = (), rows: tuple[DecodeRow, ...] = (), steps: int = 0
) -> RoundPlan:
    return RoundPlan(0, SpeculationPlan(0, "test", steps), Batch(chunks, rows), RoundShape(0, 0, 0, 0))


def test_a_slot_yields_the_committed_tokens_of_each_row() -> None:
    slot = Slot(0, CpuPlatform(), rows=4, width=3)
    slot.begin()
    logprobs = Logprobs(
        rows=(3, 4, 5), tops=(1, 1, 1), chosen=torch.tensor([-0.5, -1.0, -9.0]),
        top_ids=torch.tensor([[7], [8], [9]]), top=torch.tensor([[-0.5], [-0.25], [-9.0]]),
    )  # fmt: skip
    tokens = torch.tensor([[5, -1, -1], [7, 8, -1]])
    slot.decoded.keep(tokens, torch.tensor([1, 2]), torch.tensor([False, True]), logprobs, [2, 2])
    slot.keep_signals(torch.tensor([[0.5, 0.25], [0.75, 1.0]]))
    result = slot.read(plan_of(rows=(DecodeRow(1, 21, 9, 2), DecodeRow(2, 22, 9, 2)), steps=2))
    assert result.signals is not None and result.signals.tolist() == [[0.5, 0.25], [0.75, 1.0]]
    first, second = result.rows
    assert (first.sequence_id, first.token_ids, first.logprobs, first.bad) == (21, (5,), (), False)
    assert (second.sequence_id, second.token_ids, second.bad) == (22, (7, 8), True)
    assert second.logprobs == (TokenLogprob(7, -0.5, ((7, -0.5),)), TokenLogprob(8, -1.0, ((8, -0.25),)))


def test_logprobs_of_ragged_rows_find_their_owners() -> None:
    """Rows verify 0, 2 and 1 drafts: flat rows 0, 1-3, 4-5."""
    slot = Slot(0, CpuPlatform(), rows=4, width=3)
    slot.begin()
    logprobs = Logprobs(
        rows=(0, 1, 2, 3, 5), tops=(0,) * 5, chosen=torch.tensor([-0.5, -1.0, -2.0, -3.0, -4.0]),
        top_ids=torch.zeros(5, 0, dtype=torch.int64), top=torch.zeros(5, 0),
    )  # fmt: skip
    tokens = torch.tensor([[5, -1, -1], [7, 8, -1], [9, 6, -1]])
    slot.decoded.keep(tokens, torch.tensor([1, 2, 2]), torch.tensor([False] * 3), logprobs, [0, 2, 1])
    slot.keep_signals(torch.zeros(3, 2))
    rows = (DecodeRow(1, 21, 9, 0), DecodeRow(2, 22, 9, 2), DecodeRow(3, 23, 9, 1))
    found = [row.logprobs for row in slot.read(plan_of(rows=rows, steps=2)).rows]
    assert found == [
        (TokenLogprob(5, -0.5),),
        (TokenLogprob(7, -1.0), TokenLogprob(8, -2.0)),
        (TokenLogprob(6, -4.0),),
    ]


def test_chunks_that_sample_take_the_drawn_tokens_in_order() -> None:
    slot = Slot(0, CpuPlatform(), rows=4, width=1)
    slot.begin()
    chunks = tuple(PrefillChunk(i, 30 + i, 0, (1, 2), samples=i != 2) for i in (1, 2, 3))
    slot.prefilled.keep(
        torch.tensor([[41], [43]]), torch.tensor([1, 1]), torch.tensor([False, False]), None, [0, 0]
    )
    slot.bad_chunks[:3] = torch.tensor([False, True, False])
    slot.scores[1] = [TokenLogprob(2, -1.5)]
    first, middle, last = slot.read(plan_of(chunks)).chunks
    assert [c.token_ids for c in (first, middle, last)] == [(41,), (), (43,)]
    assert [c.bad for c in (first, middle, last)] == [False, True, False]
    assert middle.scored == (TokenLogprob(2, -1.5),)
    slot.begin()
    slot.bad_chunks[:3] = False
    assert all(c.scored == () for c in slot.read(plan_of(chunks)).chunks)


def test_every_row_knows_whose_pages_it_reads(rows: DeviceRows) -> None:
    """What the inputs say is what their segments mean, for whoever is given no `sequences`."""
    decoded = rows.decode_inputs(torch.tensor([2, 1]), 3, 3, (Segment(0, 2, 3, 3, 0),))
    chunks = rows.chunk_inputs(torch.tensor([1, 2]), [1, 0], [4, 2], chunk_segments([4, 2], [2, 1]))
    lanes, offsets = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 2])
    ragged = Ragged(dense=torch.tensor([0, 1, 2, 1, 2, 3]), flat=torch.tensor([0, 3, 4, 5]))
    verified = rows.ragged_inputs(torch.tensor([2, 1]), lanes, offsets, ragged, 3, (Segment(0, 2, 3, 3, 0),))
    expected = ([0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 1, 1, 1])
    for inputs, owners in zip((decoded, chunks, verified), expected, strict=True):
        assert inputs.sequences is not None and inputs.sequences.tolist() == owners
        assert replace(inputs, sequences=None).owners().tolist() == owners
