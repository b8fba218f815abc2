"""Rounds of a drafter over a paged pool for tests: prefill, draft, verify with an acceptance of one's choice.

`DraftRounds` is the smallest stand-in for the engine: it knows pages, lengths and which rows are facts.
The texts are given in advance, so a round may accept whatever the test wants.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from xspec.draft.base import Draft, DraftContext, Drafter, DraftMemory, Published
from xspec.kernels.base import Kernels
from xspec.kv.layout import KVLayout
from xspec.kv.pool import KVPool
from xspec.models.base import Target
from xspec.nn.inputs import ForwardInputs, Segment


@dataclass(frozen=True)
class Drafted:
    draft: Draft
    logits: torch.Tensor  # [K, R, D] as they were shown to pick
    positions: torch.Tensor  # [K, R]


class DraftRounds:
    """Sequence s sits in device row s + 1. `texts`: all tokens each sequence will ever have."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        kernels: Kernels,
        texts: Sequence[Sequence[int]],
        *,
        block_size: int = 4,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.target, self.drafter, self.kernels = target, drafter, kernels
        self.block_size = block_size
        self.texts = [list(text) for text in texts]
        layout = KVLayout(target.spec.planes, block_size, dtype, drafter.spec.planes)
        pages = layout.pages_of(max(map(len, texts)))
        self.pool = KVPool(layout, 2 + len(texts) * pages, kernels, torch.device("cpu"))
        ids = list(range(1, self.pool.sink_page))
        random.Random(seed).shuffle(ids)
        self.tables = torch.tensor(ids).view(len(texts), pages)
        self.lengths = [0] * len(texts)  # positions whose K/V are facts
        pool = self.pool
        drafter.attach(DraftMemory(len(texts) + 1, pool.draft, pool.page_state, pool.sink_page, block_size))
        for sequence in range(len(texts)):
            drafter.bind(sequence + 1, None)

    def prefill(self, work: Sequence[tuple[int, int]]) -> None:
        """The next `count` tokens of each (sequence, count), all in one pass."""
        rows = [
            (sequence, self.texts[sequence][self.lengths[sequence] :][:count]) for sequence, count in work
        ]
        self._pass(rows, [count for _, count in work])

    def share(self, source: int, sequence: int, pages: int) -> None:
        """A prefix-cache hit: `sequence` starts after the first `pages` full pages of `source`."""
        self.tables[sequence, :pages] = self.tables[source, :pages]
        self.lengths[sequence] = pages * self.block_size
        self.drafter.bind(sequence + 1, int(self.tables[source, pages - 1]))

    def draft(
        self,
        sequences: Sequence[int],
        steps: int,
        *,
        padding: int = 0,
        pick: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Drafted:
        """`pick`: column of each row of logits, the best by default."""
        logits: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []

        def show(found: torch.Tensor, at: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
            assert ids is None or ids.shape == (found.shape[1],)
            logits.append(found.clone())
            positions.append(at.clone())
            return found.argmax(1) if pick is None else pick(found)

        lasts = [self.lengths[sequence] for sequence in sequences] + [0] * padding

        def inputs(offset: int, width: int, causal: bool) -> ForwardInputs:
            tables = [self.tables[sequence] for sequence in sequences]
            starts = [last + offset for last in lasts]
            return self._inputs(tables, starts, [width] * len(starts), causal)

        context = DraftContext(
            rows=torch.tensor([sequence + 1 for sequence in sequences] + [0] * padding),
            last_tokens=torch.tensor([self._last_token(sequence) for sequence in sequences] + [0] * padding),
            positions=torch.tensor(lasts),
            inputs=inputs,
            pick=show,
        )
        draft = self.drafter.draft(context, steps)
        real = len(sequences)
        assert draft.tokens.shape == draft.signals.shape == (real + padding, steps)
        draft = Draft(draft.tokens[:real], draft.signals[:real])
        return Drafted(draft, torch.stack(logits)[:, :real], torch.stack(positions)[:, :real])

    def verify(
        self,
        sequences: Sequence[int],
        width: int,
        committed: Sequence[int],
        *,
        padding: int = 0,
        seed: int = 0,
        spoil: bool = False,
        fail: bool = False,
    ) -> None:
        """A round of `width` rows a sequence, of which committed[i] from 1 to `width` turn out to be facts.

        The drafts accepted are the text's own tokens, the others random; `spoil` turns the states of the
        rejected rows, and of padded lanes, into NaN before they are published, `fail` those of the facts.
        """
        draw = random.Random(seed)
        work = []
        for sequence, count in zip(sequences, committed, strict=True):
            start = self.lengths[sequence]
            facts = self.texts[sequence][start : start + count]
            wrong = [draw.randrange(self.target.spec.vocab_size) for _ in range(width - len(facts))]
            work.append((sequence, facts + wrong))
        self._pass(work, committed, padding=padding, spoil=spoil, fail=fail)

    def planes(self, sequence: int) -> torch.Tensor:
        """Draft K/V of the positions that are facts, the first left out: [planes, 2 * G, length - 1, D]."""
        slots = self._slots(self.tables[sequence], list(range(1, self.lengths[sequence])))
        return torch.stack([slab.flatten(1, 2)[:, slots] for slab in self.pool.draft])

    def page_states(self, sequence: int) -> torch.Tensor:
        """Of the full pages, in order."""
        return self.pool.page_state[self.tables[sequence, : self.lengths[sequence] // self.block_size]]

    def _last_token(self, sequence: int) -> int:
        return self.texts[sequence][self.lengths[sequence]]

    def _pass(
        self,
        work: Sequence[tuple[int, Sequence[int]]],
        committed: Sequence[int],
        *,
        padding: int = 0,
        spoil: bool = False,
        fail: bool = False,
    ) -> None:
        counts = [len(tokens) for _, tokens in work]
        width = max(counts)
        starts = [self.lengths[sequence] for sequence, _ in work] + [0] * padding
        tables = [self.tables[sequence] for sequence, _ in work]
        inputs = self._inputs(tables, starts, counts + [width] * padding, True)
        tokens = torch.tensor([token for _, tokens in work for token in tokens] + [5] * (padding * width))
        hidden = self.target.forward(tokens, inputs, self.pool.target, self.drafter.spec.taps)
        counts += [width] * padding
        published = Published(
            tokens=tokens,
            hidden=hidden,
            inputs=inputs,
            rows=torch.tensor([sequence + 1 for sequence, _ in work] + [0] * padding),
            lanes=torch.tensor([lane for lane, count in enumerate(counts) for _ in range(count)]),
            first=torch.tensor([sum(counts[:lane]) for lane in range(len(counts))]),
            committed=torch.tensor([*committed, *[0] * padding]),
        )
        facts = published.facts
        for state in (hidden.last, hidden.residual, *hidden.taps):
            state[facts & fail | ~facts & spoil] = float("nan")
        self.drafter.publish(published)
        for (sequence, _), count in zip(work, committed, strict=True):
            self.lengths[sequence] += count

    def _slots(self, table: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Positions past the table go to the sink page."""
        size = self.block_size
        pages = [int(table[p // size]) if p // size < len(table) else self.pool.sink_page for p in positions]
        return torch.tensor([page * size + p % size for page, p in zip(pages, positions, strict=True)])

    def _inputs(
        self, tables: Sequence[torch.Tensor], starts: Sequence[int], counts: Sequence[int], causal: bool
    ) -> ForwardInputs:
        """Lanes past the tables are padding: they write to the sink and read the scratch page."""
        entries = self.tables.shape[1]
        page_table = torch.zeros(len(starts), entries, dtype=torch.int64)
        positions: list[int] = []
        slots: list[torch.Tensor] = []
        ends: list[int] = []
        segments = []
        for lane, (start, count) in enumerate(zip(starts, counts, strict=True)):
            row = list(range(start, start + count))
            used = min(entries, -(-(start + count) // self.block_size))
            if lane < len(tables):
                page_table[lane, :used] = tables[lane][:used]
                slots.append(self._slots(tables[lane], row))
            else:
                slots.append(torch.full((count,), self.pool.sink_page * self.block_size))
            segments.append(Segment(lane, 1, count, used, len(positions)))
            positions += row
            ends += [position + 1 for position in row] if causal else [start + count] * count
        if len(set(counts)) == 1:  # the same number of rows each: one segment, as in decoding
            segments = [Segment(0, len(starts), counts[0], max(segment.pages for segment in segments), 0)]
        return ForwardInputs(
            torch.tensor(positions),
            torch.cat(slots),
            torch.tensor(ends).clamp(max=entries * self.block_size),
            page_table,
            tuple(segments),
        )
