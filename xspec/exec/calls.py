"""The bodies of the two passes of a decode round: drafting, and verification by the target.

A call maps a buffer of row ids (and drafts) to results; everything else it reads is persistent device
state, so that it can be captured once and replayed. Knows nothing of buckets, slots or sampling rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from xspec.core.round import PADDING_ROW
from xspec.draft.base import NO_LOOPS, Draft, DraftContext, Drafter, GreedyRows, LoopWork
from xspec.exec.flat_rows import draft_rows, verify_rows
from xspec.exec.passes import TargetPasses
from xspec.exec.rows import DeviceRows
from xspec.exec.segments import decode_segments
from xspec.kernels.rounds import Chain, FlatRows
from xspec.models.base import Hidden
from xspec.nn.inputs import ForwardInputs, Segment


class Pick(Protocol):
    """How tokens are picked from a drafter's logits (`exec.pick.Picker`)."""

    @property
    def greedy(self) -> bool:
        """Whether it is always the likeliest token."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """logits [R, D], device rows [R], positions [R], token ids [D] or None -> column index [R]."""

    def sampled(self, rows: torch.Tensor) -> torch.Tensor:
        """Device rows [R] -> [R] bool: whether their target draws with a temperature."""

    def probability(self, logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """logits [R, D], columns [R] -> [R] float32: softmax probability of what was picked."""


class DraftCall:
    """A draft pass over `lanes` rows, `steps` tokens each."""

    def __init__(
        self,
        drafter: Drafter,
        rows: DeviceRows,
        pick: Pick,
        *,
        lanes: int,
        steps: int,
        loops: LoopWork = NO_LOOPS,
    ) -> None:
        self._drafter, self._rows, self._pick, self._steps = drafter, rows, pick, steps
        self._loops = loops
        self._row_ids = RowIds(lanes, rows)
        self._inputs_of = draft_rows(rows, self._row_ids.tensor)
        self._pages: Sequence[int] = ()
        self._segments: dict[int, tuple[Segment, ...]] = {}  # by width, of these pages

    def aim(self, row_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Point the call at live rows; `pages` bounds the page tables they read and write, descending."""
        self._row_ids.aim(row_ids)
        if pages != self._pages:
            self._pages, self._segments = pages, {}

    def run(self) -> Draft:
        rows, row_ids = self._rows, self._row_ids.tensor
        context = DraftContext(
            rows=row_ids,
            last_tokens=rows.last_token[row_ids],
            positions=rows.length[row_ids] - 1,
            inputs=self._inputs,
            pick=lambda logits, positions, ids: self._pick(logits, row_ids, positions, ids),
            probability=self._pick.probability,
            sampled=self._pick.sampled(row_ids),
            loops=self._loops,
            greedy=GreedyRows(self._inputs_of, _widest(self._segments_of(1))) if self._pick.greedy else None,
        )
        return self._drafter.draft(context, self._steps)

    def _inputs(self, offset: int, width: int, causal: bool) -> ForwardInputs:
        segments = self._segments_of(width)
        return self._inputs_of(offset, width, causal, _widest(segments), segments)

    def _segments_of(self, width: int) -> tuple[Segment, ...]:
        if width not in self._segments:
            lanes = len(self._row_ids.tensor)
            self._segments[width] = decode_segments(self._pages, lanes, width, self._rows.block_size)
        return self._segments[width]


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Rows of a pass that tokens are drawn for: N of them, lane by lane."""

    logits: torch.Tensor  # [N, vocab]
    lanes: torch.Tensor  # [N]
    owners: torch.Tensor  # [N] device rows
    offsets: torch.Tensor  # [N]
    positions: torch.Tensor  # [N] of the tokens drawn
    fed: torch.Tensor  # [N] what each row was fed: of offsets above 0 a draft
    live: torch.Tensor | None = None  # [N] bool, where there are lanes * width + some that nobody owns

    def head(self, count: int) -> DrawRows:
        """The first `count` of them."""
        return DrawRows(
            self.logits[:count],
            self.lanes[:count],
            self.owners[:count],
            self.offsets[:count],
            self.positions[:count],
            self.fed[:count],
            None if self.live is None else self.live[:count],
        )

    def chain(self) -> Chain:
        return Chain(self.fed, self.offsets)

    def rectangle(self, values: torch.Tensor, lanes: int, width: int, fill: int) -> torch.Tensor:
        """values [N] of the rows -> [lanes, width + 1], `fill` where a lane has no row."""
        if self.live is not None:
            return values.masked_fill(~self.live, fill).view(lanes, width + 1)
        if len(values) == lanes * (width + 1):
            return values.view(lanes, width + 1)
        dense = values.new_full((lanes, width + 1), fill)
        dense[self.lanes, self.offsets] = values
        return dense


@dataclass(frozen=True, slots=True)
class VerifyPass:
    """Results of a target pass over L lanes and G flat rows. They live until the same call's next replay."""

    rows: FlatRows
    hidden: Hidden
    logits: torch.Tensor  # [G, vocab]
    picks: torch.Tensor | None = None  # [G, depths]: of a shadow round (`draft.looped.Resumed`)

    def flat(self, count: int) -> DrawRows:
        """The first `count` flat rows, where the host knows whose they are."""
        rows = self.rows
        # A token is drawn for the position after its row's: that is the row's number of keys.
        positions = rows.inputs.kv_lens
        every = DrawRows(self.logits, rows.lanes, rows.owners, rows.offsets, positions, rows.tokens)
        return every if count == len(rows.tokens) else every.head(count)

    def dense(self, lanes: int, width: int) -> DrawRows:
        """width + 1 rows of each of the first `lanes` lanes, where only the device knows which exist."""
        rows = self.rows
        offset = torch.arange(width + 1, device=rows.first.device)
        index = (rows.first[:lanes, None] + offset).clamp_(max=len(rows.tokens) - 1).view(-1)
        live = (offset < rows.counts[:lanes, None]).view(-1)
        lane = torch.arange(lanes, device=offset.device).repeat_interleave(width + 1)
        return DrawRows(
            self.logits[index],
            lane,
            rows.row_ids[lane],
            offset.repeat(lanes),
            rows.inputs.kv_lens[index],
            rows.tokens[index],
            live,
        )


class VerifyCall:
    """A target pass over `lanes` rows with up to `width` drafts each, on `target_rows` flat rows."""

    def __init__(
        self,
        passes: TargetPasses,
        rows: DeviceRows,
        *,
        lanes: int,
        width: int,
        target_rows: int,
        loops: LoopWork = NO_LOOPS,
    ) -> None:
        self._passes, self._rows, self._loops = passes, rows, loops
        self._width, self._target_rows = width, target_rows
        device = rows.length.device
        self._row_ids = RowIds(lanes, rows)
        self._drafts = torch.zeros((lanes, width), dtype=torch.int64, device=device)
        self._counts = torch.zeros(lanes, dtype=torch.int64, device=device)  # flat rows of each lane
        self._flat_rows = verify_rows(rows, self._row_ids.tensor, self._drafts, self._counts, target_rows)
        self._uniform = True
        self._pages: Sequence[int] | None = None
        self._segments: tuple[Segment, ...] = ()

    def aim(
        self,
        row_ids: Sequence[int],
        pages: Sequence[int],
        verify: Sequence[int] | torch.Tensor,
        drafts: torch.Tensor | None,
    ) -> None:
        """Point the call at live rows: row i verifies `verify[i]` of its drafts [rows or more, >= width].

        A tensor (as many entries as rows or lanes) says so on the device; its sum with the rows must fit.
        """
        self._row_ids.aim(row_ids)
        if drafts is not None and self._width:
            self._drafts[: len(row_ids)].copy_(drafts[: len(row_ids), : self._width])
        lanes = len(self._counts)
        if pages != self._pages:
            self._pages = pages
            self._segments = decode_segments(pages, lanes, self._width + 1, self._rows.block_size)
        if isinstance(verify, torch.Tensor):
            self._uniform = False
            self._counts.zero_()
            self._counts[: len(row_ids)] = verify[: len(row_ids)] + 1
            return
        full = self._target_rows == lanes * (self._width + 1)
        self._uniform = full and all(count == self._width for count in verify)
        if not self._uniform:
            counts = [*(count + 1 for count in verify), *([0] * (lanes - len(verify)))]
            if sum(counts) > self._target_rows:
                raise ValueError(f"{sum(counts)} rows do not fit a call of {self._target_rows}")
            self._counts.copy_(torch.tensor(counts, dtype=torch.int64), non_blocking=True)

    def run(self) -> VerifyPass:
        rows = self._flat_rows(self._uniform, _widest(self._segments), self._segments)
        passed = self._passes(rows, self._loops)
        return VerifyPass(rows, passed.hidden, self._passes.logits(passed.hidden.last), passed.picks)


class RowIds:
    """A call's buffer of device rows: the live ones it is aimed at, then padding."""

    def __init__(self, lanes: int, rows: DeviceRows) -> None:
        self.tensor = torch.full((lanes,), PADDING_ROW, dtype=torch.int64, device=rows.length.device)
        self._aimed: Sequence[int] = ()

    def aim(self, row_ids: Sequence[int]) -> None:
        if row_ids != self._aimed:  # mostly it is the batch of the round before
            padded = [*row_ids, *([PADDING_ROW] * (len(self.tensor) - len(row_ids)))]
            self.tensor.copy_(torch.tensor(padded, dtype=torch.int64), non_blocking=True)
            self._aimed = row_ids


def _widest(segments: Sequence[Segment]) -> int:
    return max(segment.pages for segment in segments)
