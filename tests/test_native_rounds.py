"""Rows of a round in native code against torch: inputs, commit, what a drafter carries on, exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xspec.core.request import SamplingParams
from xspec.core.round import PageGrant, RowBind
from xspec.draft.base import DraftMemory, Published
from xspec.draft.mtp import carry_states
from xspec.errors import EngineError
from xspec.exec.budget import admit_drafts
from xspec.exec.calls import DrawRows, VerifyPass
from xspec.exec.flat_rows import TorchDraftRows, TorchVerifyRows, draft_rows, verify_rows
from xspec.exec.rows import DeviceRows
from xspec.exec.settle import settle
from xspec.kernels.native import NativeLibrary
from xspec.kernels.native_rows import NativeCarry, NativeRows
from xspec.kernels.rounds import Carried, FlatRows, RowTable, Settled, Told
from xspec.models.base import Hidden
from xspec.nn.inputs import ForwardInputs, Segment
from xspec.verify.sampler import Drawn

CPU = torch.device("cpu")
BLOCK, ENTRIES, SINK = 4, 6, 90
EXAMPLES = settings(max_examples=60, deadline=None)
SEEDS = st.integers(0, 2**31)


def table_of(rows: DeviceRows) -> RowTable:
    return RowTable(
        rows.last_token, rows.length, rows.max_len, rows.page_table, rows.block_size, rows.sink_page
    )


def random_rows(generator: torch.Generator, count: int = 5) -> DeviceRows:
    """Rows of 1 to 16 tokens, some near their end, some with pages for no more than they have."""
    rows = DeviceRows(count, ENTRIES, BLOCK, CPU, sink_page=SINK)
    page = 1
    for row in range(1, count + 1):
        tokens = pick(generator, 1, 16)
        room = pick(generator, 0, 8)
        rows.bind(
            RowBind(row, row, SamplingParams(), 0, 0, tokens, tuple(range(tokens)), (), max_len=tokens + room)
        )
        granted = -(-(tokens + pick(generator, 0, room)) // BLOCK)
        rows.grant(PageGrant(row, 0, tuple(range(page, page + granted))))
        rows.last_token[row] = pick(generator, 0, 50)
        page += granted
    return rows


def pick(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def twins(library: NativeLibrary, seed: int) -> tuple[DeviceRows, DeviceRows, torch.Generator]:
    """Equal rows: the first in torch, the second in native code."""
    plain, fused = (random_rows(torch.Generator().manual_seed(seed)) for _ in range(2))
    fused.fused = NativeRows(library, table_of(fused))
    return plain, fused, torch.Generator().manual_seed(seed + 1)


def same_inputs(a: ForwardInputs, b: ForwardInputs, pages: int) -> None:
    for name in ("positions", "slots", "kv_lens", "sequences"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.page_table[:, :pages], b.page_table[:, :pages])
    assert a.segments == b.segments and a.guesses == b.guesses
    assert (a.ragged is None) == (b.ragged is None)
    if a.ragged is not None and b.ragged is not None:
        assert torch.equal(a.ragged.dense, b.ragged.dense) and torch.equal(a.ragged.flat, b.ragged.flat)


def look_up_their_own_pages(inputs: ForwardInputs, rows: DeviceRows, row_ids: torch.Tensor) -> None:
    """Also past the pages of the pass: never what an earlier one left there."""
    for lane, row in enumerate(row_ids.tolist()):
        seen = inputs.kv_lens[inputs.sequences == lane]
        count = min(ENTRIES, -(-int(seen.max()) // BLOCK)) if len(seen) else 0
        assert torch.equal(inputs.page_table[lane, :count], rows.page_table[row, :count])


def same_flat_rows(a: FlatRows, b: FlatRows, pages: int) -> None:
    for name in ("row_ids", "tokens", "lanes", "owners", "offsets", "first", "counts"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    same_inputs(a.inputs, b.inputs, pages)


def random_pass(generator: torch.Generator) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, int]:
    """(row ids with padding, live lanes, drafts, rows of each lane, rows in all)."""
    lives, padding, width = (pick(generator, *span) for span in ((1, 5), (0, 2), (0, 4)))
    row_ids = torch.cat(
        (torch.randperm(5, generator=generator)[:lives] + 1, torch.zeros(padding, dtype=torch.int64))
    )
    drafts = torch.randint(0, 4, (lives + padding, width), generator=generator)
    counts = torch.zeros(lives + padding, dtype=torch.int64)
    counts[:lives] = torch.randint(1, width + 2, (lives,), generator=generator)
    return row_ids, lives, drafts, counts, int(counts.sum()) + pick(generator, 0, 3)


@EXAMPLES
@given(seed=SEEDS, pages=st.integers(1, ENTRIES))
def test_verify_rows(library: NativeLibrary, seed: int, pages: int) -> None:
    plain, fused, generator = twins(library, seed)
    row_ids, _, drafts, counts, total = random_pass(generator)
    segments = (Segment(0, len(row_ids), drafts.shape[1] + 1, pages, 0),)
    full = drafts.shape[1] + 1
    for uniform, rows in ((True, len(row_ids) * full), (False, total), (False, len(row_ids) * full)):
        bound = [verify_rows(each, row_ids, drafts, counts, rows) for each in (plain, fused)]
        assert isinstance(bound[0], TorchVerifyRows) and not isinstance(bound[1], TorchVerifyRows)
        for _ in range(2):  # the second call writes over the first one's buffers
            found = [call(uniform, pages, segments) for call in bound]
            same_flat_rows(*found, pages)
            look_up_their_own_pages(found[1].inputs, fused, row_ids)
            counts[:1] = 1
            drafts.add_(1)
            for each in (plain, fused):
                each.length[1:] += 1


@EXAMPLES
@given(
    seed=SEEDS,
    pages=st.integers(1, ENTRIES),
    passes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), min_size=1, max_size=4),
)
def test_draft_rows(
    library: NativeLibrary, seed: int, pages: int, passes: list[tuple[int, int, bool]]
) -> None:
    plain, fused, generator = twins(library, seed)
    row_ids = random_pass(generator)[0]
    bound = [draft_rows(each, row_ids) for each in (plain, fused)]
    assert isinstance(bound[0], TorchDraftRows) and not isinstance(bound[1], TorchDraftRows)
    for offset, width, causal in passes:
        segments = (Segment(0, len(row_ids), width, pages, 0),)
        found = [call(offset, width, causal, pages, segments) for call in bound]
        same_inputs(*found, pages)
        look_up_their_own_pages(found[1], fused, row_ids)


SIGNALS = {
    "any": [index / 97 for index in range(98)],
    "near ties": [0.1, 0.3, 0.7, 0.9],  # in another order their products differ by one rounding, or by none
    "ties": [0.0, 0.5, 1.0],
    "odd": [float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 0.5, 1.0, 2.0],
    "tiny": [1e-30, 1e-20, 1e-10, 1.0],  # products below what float32 holds
}


@pytest.mark.parametrize("kind", SIGNALS)
@EXAMPLES
@given(seed=SEEDS)
def test_admit(library: NativeLibrary, kind: str, seed: int) -> None:
    """Of every budget, from less than the lanes to more than all drafts."""
    generator = torch.Generator().manual_seed(seed)
    rows = random_rows(generator, 12)
    native = NativeRows(library, table_of(rows))
    lanes, width, extra = (pick(generator, *span) for span in ((1, 12), (1, 8), (0, 2)))
    row_ids = (torch.randperm(12, generator=generator)[:lanes] + 1).tolist()
    verify = torch.randint(0, width + 1, (lanes,), generator=generator).tolist()
    if pick(generator, 0, 1):
        verify = [width] * lanes
        rows.max_len.fill_(99)
    pool = torch.tensor(SIGNALS[kind])
    chosen = torch.randint(0, len(pool), (lanes + extra, width + 2 * extra), generator=generator)
    signals = pool[chosen][:, extra : extra + width]
    if pick(generator, 0, 1):
        signals = signals.t().contiguous().t()  # a block drafter's are slot by slot
    found = []
    for target_rows in range(lanes - 1, lanes * (width + 1) + 3):
        expected = admit_drafts(rows, row_ids, verify, signals, target_rows, True)
        found.append(native.admit(row_ids, verify, signals, target_rows))
        assert found[-1] == expected
    room = [max(0, int(rows.max_len[row] - rows.length[row]) - 1) for row in row_ids]
    assert sum(found[0]) == 0 and found[-1] == [min(pair) for pair in zip(verify, room, strict=True)]


def test_admit_in_one_call(library: NativeLibrary) -> None:
    """Where reading the device waits for nothing; and what does not fit is refused."""
    plain, fused, _ = twins(library, 0)
    for each in (plain, fused):
        each.max_len.fill_(99)
    signals = torch.tensor([[0.9, 0.8], [0.5, 0.9]])
    wide = signals.double()
    assert admit_drafts(plain, [3, 1], [2, 2], wide, 4, True) == [2, 0]
    assert admit_drafts(fused, [3, 1], [2, 2], signals, 4, True) == [2, 0]
    with pytest.raises(ValueError, match="float32"):
        admit_drafts(fused, [3, 1], [2, 2], wide, 4, True)
    told = admit_drafts(fused, [3, 1], [2, 2], wide, 4, False)
    assert isinstance(told, torch.Tensor) and told.tolist() == [2, 0]
    native = NativeRows(library, table_of(fused))
    with pytest.raises(ValueError, match="2 lanes"):
        native.admit([3, 1], [2, 2], signals[:1], 4)
    with pytest.raises(ValueError):
        native.admit([3, 1], [2], signals, 4)
    with pytest.raises(ValueError):
        native.admit([1] * 7, [2] * 7, torch.zeros(7, 2), 8)
    for row_ids, verify in (([3, 6], [2, 2]), ([3, 1], [2, 3]), ([3, 1], [-1, 2])):
        with pytest.raises(EngineError, match="xs_admit"):
            native.admit(row_ids, verify, signals, 4)


def settled_by(
    rows: DeviceRows, seed: int
) -> tuple[Settled, FlatRows, Told, torch.Tensor | None, ForwardInputs]:
    """A pass with random draws, about half of which agree with the drafts, and some of which are bad."""
    generator = torch.Generator().manual_seed(seed)
    row_ids, lives, drafts, counts, total = random_pass(generator)
    width = drafts.shape[1]
    flat = verify_rows(rows, row_ids, drafts, counts, total)(False, ENTRIES, ())
    drawn = int(counts.sum())
    tokens = torch.randint(0, 2, (drawn,), generator=generator)
    bad = torch.rand(drawn, generator=generator) < 0.2
    told = Told(torch.full((8, width + 3), 7), torch.full((8,), 7), torch.zeros(8, dtype=torch.bool))
    hidden = Hidden(torch.zeros(0), torch.zeros(0))
    drawing = VerifyPass(flat, hidden, torch.zeros(total, 1)).flat(drawn)
    assert isinstance(drawing, DrawRows) and drawing.live is None
    given_drafts = drafts if width else None
    settled = settle(rows, flat, lives, drawing, Drawn(tokens, bad), given_drafts, width, told)
    return settled, flat, told, settled.fact_slots, flat.inputs


@EXAMPLES
@given(seed=SEEDS)
def test_settle(library: NativeLibrary, seed: int) -> None:
    plain, fused, _ = twins(library, seed)
    (a, flat, told_a, _, inputs), (b, _, told_b, fact_slots, _) = (
        settled_by(rows, seed + 2) for rows in (plain, fused)
    )
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.counts, b.counts)
    for name in ("tokens", "counts", "bad"):
        assert torch.equal(getattr(told_a, name), getattr(told_b, name)), name
    for name in ("last_token", "length", "max_len", "page_table"):
        assert torch.equal(getattr(plain, name), getattr(fused, name)), name
    published = Published(
        flat.tokens,
        Hidden(torch.zeros(0), torch.zeros(0)),
        inputs,
        flat.row_ids,
        flat.lanes,
        flat.first,
        a.counts,
    )
    assert fact_slots is not None and torch.equal(published.slots_or(SINK * BLOCK), fact_slots)


@EXAMPLES
@given(seed=SEEDS, dtype=st.sampled_from([torch.bfloat16, torch.float64]))
def test_carry(library: NativeLibrary, seed: int, dtype: torch.dtype) -> None:
    rows, _, generator = twins(library, seed)
    settled, flat, _, _, inputs = settled_by(rows, seed + 2)
    hidden = pick(generator, 1, 40)

    def states(count: int) -> torch.Tensor:
        return torch.randn(count, hidden, generator=generator).to(dtype)

    given_states, boundary, pages = states(len(flat.tokens)), states(6), states(SINK + 1)
    found = []
    for carry in (None, NativeCarry(library)):
        kept, page_state = boundary.clone(), pages.clone()
        published = Published(
            flat.tokens,
            Hidden(given_states, given_states),
            inputs,
            flat.row_ids,
            flat.lanes,
            flat.first,
            settled.counts,
        )
        memory = DraftMemory(6, (), page_state, SINK, BLOCK)
        if carry is None:
            before, slots = carry_states(published, given_states, kept, memory)
        else:
            before, slots = carry(
                Carried(
                    given_states,
                    kept,
                    page_state,
                    flat.row_ids,
                    flat.first,
                    settled.counts,
                    inputs,
                    BLOCK,
                    memory.sink_slot,
                )
            )
        page_state[SINK] = 0  # may be written at will
        found.append((before, slots, kept, page_state))
    for plain, native in zip(*found, strict=True):
        assert torch.equal(plain, native)


def test_what_does_not_fit_is_refused(library: NativeLibrary) -> None:
    rows = random_rows(torch.Generator().manual_seed(0))
    native = NativeRows(library, table_of(rows))
    row_ids, counts = torch.tensor([1, 2]), torch.tensor([3, 3])
    bound = native.verify_rows(row_ids, torch.zeros(2, 2, dtype=torch.int64), counts, 5)
    with pytest.raises(EngineError, match="xs_verify_rows"):
        bound(False, 2, ())  # six rows in five
    counts[1] = 4  # a lane has three rows at most
    counts[0] = 1
    with pytest.raises(EngineError, match="xs_verify_rows"):
        bound(False, 2, ())
    counts[1] = 2
    assert bound(False, 2, ()).counts.tolist() == [1, 2]
    row_ids[0] = 6
    with pytest.raises(EngineError, match="xs_verify_rows"):
        bound(False, 2, ())
    with pytest.raises(EngineError, match="xs_decode_rows"):
        native.draft_rows(row_ids)(0, 1, True, 2, ())
    with pytest.raises(ValueError, match="contiguous int64"):
        NativeRows(library, replace(table_of(rows), last_token=rows.last_token.int()))
