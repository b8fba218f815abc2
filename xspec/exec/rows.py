"""Persistent device rows: what a sequence's next token depends on, advanced at accept, never a host copy.

Row 0 is padding. A row is bound to a sequence id; whoever names a row also names its owner, and a
mismatch raises, so that stale work can never touch a new tenant.
"""

from __future__ import annotations

import torch

from xspec.core.round import PADDING_ROW, SCRATCH_PAGE, PageGrant, RowBind
from xspec.errors import EngineError
from xspec.kernels.base import Kernels
from xspec.kernels.rounds import RowTable
from xspec.nn.inputs import ForwardInputs, Ragged, Segment


class DeviceRows:
    """`rows` usable rows plus padding, each with a page table of `max_pages` entries.

    `sink_page` takes what may never be read: writes of padding, and past the pages a row was granted.
    `fused` is the bookkeeping that `kernels` do in fewer calls, where they do.
    """

    def __init__(
        self,
        rows: int,
        max_pages: int,
        block_size: int,
        device: torch.device,
        *,
        sink_page: int,
        kernels: Kernels | None = None,
    ) -> None:
        self.rows = rows
        self.block_size = block_size
        self.sink_page = sink_page
        self.last_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.length = torch.ones(rows + 1, dtype=torch.int64, device=device)  # tokens, last_token included
        self.max_len = torch.ones(rows + 1, dtype=torch.int64, device=device)
        self.page_table = torch.full((rows + 1, max_pages), SCRATCH_PAGE, dtype=torch.int64, device=device)
        self._owner: list[int | None] = [None] * (rows + 1)
        table = RowTable(self.last_token, self.length, self.max_len, self.page_table, block_size, sink_page)
        self.fused = None if kernels is None else kernels.fuse_rows(table)

    def bind(self, bind: RowBind) -> None:
        self._owner[bind.row] = bind.sequence_id
        self.last_token[bind.row] = 0
        self.length[bind.row] = len(bind.token_ids)
        self.max_len[bind.row] = bind.max_len
        self.page_table[bind.row].fill_(SCRATCH_PAGE)

    def grant(self, grant: PageGrant) -> None:
        pages = torch.tensor(grant.pages, dtype=torch.int64)
        self.page_table[grant.row, grant.first : grant.first + len(grant.pages)] = pages

    def check_owner(self, row: int, sequence_id: int) -> None:
        if self._owner[row] != sequence_id or row == PADDING_ROW:
            raise EngineError(f"row {row} belongs to sequence {self._owner[row]}, not {sequence_id}")

    def room(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Tokens that each row may still commit [R]; 0 for padding."""
        return (self.max_len[row_ids] - self.length[row_ids]).clamp_(min=0)

    def decode_inputs(
        self,
        row_ids: torch.Tensor,
        width: int,
        pages: int,
        segments: tuple[Segment, ...],
        *,
        offset: int = 0,
        causal: bool = True,
    ) -> ForwardInputs:
        """Inputs of a pass over `width` consecutive positions of each row, `offset` past its last token.

        row_ids [R]; `pages` bounds the page tables read. Flat rows are request-major: [R * width]. Not
        causal: every row sees its sequence's keys up to the last of these positions, or to the last that
        the sequence can have: what lies behind has no page of its own.
        """
        first = self.length[row_ids] - 1 + offset
        lanes = first[:, None] + torch.arange(width, device=first.device)
        table = self.page_table[row_ids, :pages]
        slots = self._slots(table.gather(1, self._page_index(lanes, pages)), lanes, pages)
        seen = lanes + 1
        if not causal:
            seen = torch.minimum(first + width, self.max_len[row_ids])[:, None].expand(-1, width)
        sequences = torch.arange(len(row_ids), device=first.device)[:, None].expand(-1, width).reshape(-1)
        return ForwardInputs(
            lanes.view(-1), slots.view(-1), seen.reshape(-1), table, segments, sequences=sequences
        )

    def ragged_inputs(
        self,
        row_ids: torch.Tensor,
        lanes: torch.Tensor,
        offsets: torch.Tensor,
        ragged: Ragged,
        pages: int,
        segments: tuple[Segment, ...],
    ) -> ForwardInputs:
        """Inputs of a verify pass: flat row n is position `offsets[n]` past the last token of lane
        `lanes[n]`. A lane of -1 is padding of the flat axis."""
        table = self.page_table[row_ids, :pages]
        live = lanes >= 0
        lane = lanes.clamp(min=0)
        positions = torch.where(live, self.length[row_ids][lane] - 1 + offsets, 0)
        page = table[lane, self._page_index(positions, pages)]
        slots = self._slots(torch.where(live, page, SCRATCH_PAGE), positions, pages)
        return ForwardInputs(positions, slots, positions + 1, table, segments, ragged, sequences=lane)

    def chunk_inputs(
        self, row_ids: torch.Tensor, starts: list[int], counts: list[int], segments: tuple[Segment, ...]
    ) -> ForwardInputs:
        """Inputs of a prefill pass over ragged chunks: tokens [start, start + count) of each row."""
        device = row_ids.device
        positions = torch.cat(
            [torch.arange(s, s + n, device=device) for s, n in zip(starts, counts, strict=True)]
        )
        pages = max(segment.pages for segment in segments)
        table = self.page_table[row_ids, :pages]
        owner = torch.repeat_interleave(
            torch.arange(len(counts), device=device), torch.tensor(counts, device=device)
        )
        page = table[owner, positions // self.block_size]
        slots = page * self.block_size + positions % self.block_size
        return ForwardInputs(positions, slots, positions + 1, table, segments, sequences=owner)

    def _page_index(self, positions: torch.Tensor, pages: int) -> torch.Tensor:
        return (positions // self.block_size).clamp_(max=pages - 1)

    def _slots(self, page: torch.Tensor, positions: torch.Tensor, pages: int) -> torch.Tensor:
        granted = (page != SCRATCH_PAGE) & (positions < pages * self.block_size)
        return torch.where(granted, page, self.sink_page) * self.block_size + positions % self.block_size

    def advance(self, row_ids: torch.Tensor, last_token: torch.Tensor, counts: torch.Tensor) -> None:
        """Commit `counts` [R] tokens to rows [R]; padding lanes carry count 0 and leave row 0 alone."""
        self.last_token[row_ids] = torch.where(counts > 0, last_token, self.last_token[row_ids])
        self.length[row_ids] += counts
