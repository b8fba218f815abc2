"""Persistent device rows: what a sequence's next token depends on, advanced at accept, never a host copy.

Row 0 is padding. A row is bound to a sequence id; whoever names a row also names its owner, and a
mismatch raises, so that stale work can never touch a new tenant.
"""

from __future__ import annotations

import torch

from xspec.core.round import PADDING_ROW, SCRATCH_PAGE, PageGrant, RowBind
from xspec.errors import EngineError
from xspec.nn.inputs import ForwardInputs, Segment


class DeviceRows:
    """`rows` usable rows plus padding, each with a page table of `max_pages` entries."""

    def __init__(self, rows: int, max_pages: int, block_size: int, device: torch.device) -> None:
        self.rows = rows
        self.block_size = block_size
        self.last_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.length = torch.ones(rows + 1, dtype=torch.int64, device=device)  # tokens, last_token included
        self.page_table = torch.full((rows + 1, max_pages), SCRATCH_PAGE, dtype=torch.int64, device=device)
        self._owner: list[int | None] = [None] * (rows + 1)

    def bind(self, bind: RowBind) -> None:
        self._owner[bind.row] = bind.sequence_id
        self.last_token[bind.row] = 0
        self.length[bind.row] = len(bind.token_ids)
        self.page_table[bind.row].fill_(SCRATCH_PAGE)

    def grant(self, grant: PageGrant) -> None:
        pages = torch.tensor(grant.pages, dtype=torch.int64)
        self.page_table[grant.row, grant.first : grant.first + len(grant.pages)] = pages

    def check_owner(self, row: int, sequence_id: int) -> None:
        if self._owner[row] != sequence_id or row == PADDING_ROW:
            raise EngineError(f"row {row} belongs to sequence {self._owner[row]}, not {sequence_id}")

    def decode_inputs(
        self, row_ids: torch.Tensor, width: int, pages: int, segments: tuple[Segment, ...]
    ) -> ForwardInputs:
        """Inputs of a decode or verify pass: `width` consecutive positions from each row's last token on.

        row_ids [R]; `pages` bounds the page tables read. Flat rows are request-major: [R * width].
        """
        last = self.length[row_ids] - 1
        positions = (last[:, None] + torch.arange(width, device=last.device)).reshape(-1)
        table = self.page_table[row_ids, :pages]
        return self._inputs(positions, table, width, segments)

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
        return ForwardInputs(positions, slots, positions + 1, table, segments)

    def _inputs(
        self, positions: torch.Tensor, table: torch.Tensor, width: int, segments: tuple[Segment, ...]
    ) -> ForwardInputs:
        index = (positions // self.block_size).view(-1, width)
        limit = table.shape[1]
        page = table.gather(1, index.clamp(max=limit - 1))
        if width > 1:  # positions past the granted pages write to scratch, never into the last page
            page = torch.where(index < limit, page, SCRATCH_PAGE)
        slots = page.view(-1) * self.block_size + positions % self.block_size
        return ForwardInputs(positions, slots, positions + 1, table, segments)

    def advance(self, row_ids: torch.Tensor, last_token: torch.Tensor, counts: torch.Tensor) -> None:
        """Commit `counts` [R] tokens to rows [R]; padding lanes carry count 0 and leave row 0 alone."""
        self.last_token[row_ids] = torch.where(counts > 0, last_token, self.last_token[row_ids])
        self.length[row_ids] += counts
