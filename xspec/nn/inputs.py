"""What a forward pass needs besides tokens. Handed down through every layer, never global."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring sequences of the flat row axis that attention may treat as one dense block.

    Sequences [first, first + count) of the page table, each with `rows` consecutive query rows, read
    at most `pages` pages. Host-side sizes: device-driven kernels may ignore them. `first_row` is the
    flat index of the segment's first row.
    """

    first: int
    count: int
    rows: int
    pages: int
    first_row: int


@dataclass(frozen=True, slots=True)
class Ragged:
    """Sequences with unequal numbers of rows, laid out densely for attention: W slots a sequence.

    `dense` [S * W]: the flat row in each dense slot (any row of the pass where there is none);
    `flat` [N]: the dense slot of each flat row. Segments then count dense slots, not flat rows.
    """

    dense: torch.Tensor
    flat: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """N flat rows over S sequences. Rows of one sequence are consecutive and ascending in position."""

    positions: torch.Tensor  # [N] int64: rotary position of each row
    slots: torch.Tensor  # [N] int64: flat KV slot (page * block_size + offset) each row writes
    kv_lens: torch.Tensor  # [N] int64: keys each row may see, itself included (causal by construction)
    page_table: torch.Tensor  # [S, P] int64
    segments: tuple[Segment, ...]  # cover all rows, in order
    ragged: Ragged | None = None  # None: every sequence of a segment has exactly `rows` flat rows
    guesses: bool = False  # some rows may turn out wrong: what they store is made finite
    sequences: torch.Tensor | None = None  # [N] int64: page-table row of each flat row; None: by segments

    def owners(self) -> torch.Tensor:
        """[N] int64: which row of the page table each flat row reads."""
        if self.sequences is not None:
            return self.sequences
        rows = self.positions if self.ragged is None else self.ragged.dense
        sequences = torch.zeros_like(rows)
        for segment in self.segments:
            rows_of_each = torch.arange(segment.first, segment.first + segment.count, device=rows.device)
            end = segment.first_row + segment.count * segment.rows
            sequences[segment.first_row : end] = rows_of_each.repeat_interleave(segment.rows)
        return sequences if self.ragged is None else sequences[self.ragged.flat]
