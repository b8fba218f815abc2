"""Forward passes over a paged cache for model tests: pages are handed out in shuffled order.

`PagedRunner` is the smallest stand-in for the engine: it knows lengths and pages, nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from xspec.kernels.base import Kernels
from xspec.kv.layout import KVLayout
from xspec.kv.pool import RESERVED_PAGES, KVPool
from xspec.models.base import Target
from xspec.nn.inputs import ForwardInputs, Segment


class PagedRunner:
    def __init__(
        self,
        target: Target,
        kernels: Kernels,
        dtype: torch.dtype,
        *,
        sequences: int,
        max_tokens: int,
        block_size: int = 4,
        seed: int = 0,
    ) -> None:
        self.target = target
        self.block_size = block_size
        layout = KVLayout(target.spec.planes, block_size, dtype)
        per_sequence = layout.pages_of(max_tokens)
        pool = KVPool(layout, RESERVED_PAGES + sequences * per_sequence, kernels, torch.device("cpu"))
        self.kv = pool.slabs
        pages = list(range(1, pool.sink_page))
        random.Random(seed).shuffle(pages)
        self.table = torch.tensor(pages).view(sequences, per_sequence)
        self.lengths = [0] * sequences

    def forward(self, work: Sequence[tuple[int, Sequence[int]]], *, uniform: bool = False) -> torch.Tensor:
        """Append each (sequence, tokens) and return logits [N, vocab] of all rows, in order.

        `uniform`: all have the same number of rows and run as one segment, else one segment each.
        """
        positions, slots, segments = [], [], []
        for index, (sequence, tokens) in enumerate(work):
            start = self.lengths[sequence]
            for position in range(start, start + len(tokens)):
                page = int(self.table[sequence, position // self.block_size])
                positions.append(position)
                slots.append(page * self.block_size + position % self.block_size)
            self.lengths[sequence] = start + len(tokens)
            pages = -(-self.lengths[sequence] // self.block_size)
            first_row = len(positions) - len(tokens)
            segments.append(Segment(index, 1, len(tokens), pages, first_row))
        if uniform:
            widest = max(segment.pages for segment in segments)
            segments = [Segment(0, len(work), segments[0].rows, widest, 0)]
        table = self.table[[sequence for sequence, _ in work]].clone()
        for index, (sequence, _) in enumerate(work):  # entries past the length are scratch, as in the engine
            table[index, -(-self.lengths[sequence] // self.block_size) :] = 0
        inputs = ForwardInputs(
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            kv_lens=torch.tensor(positions) + 1,
            page_table=table,
            segments=tuple(segments),
        )
        tokens = torch.tensor([token for _, tokens in work for token in tokens])
        return self.target.logits(self.target.forward(tokens, inputs, self.kv).last)
