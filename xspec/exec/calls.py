"""The bodies of the two passes of a decode round: drafting, and verification by the target.

A call maps a buffer of row ids (and drafts) to results; everything else it reads is persistent device
state, so that it can be captured once and replayed. Knows nothing of buckets, slots or sampling rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from xspec.core.round import PADDING_ROW
from xspec.draft.base import Draft, DraftContext, Drafter
from xspec.exec.rows import DeviceRows
from xspec.exec.segments import decode_segments
from xspec.models.base import Hidden, Target
from xspec.nn.inputs import ForwardInputs, Ragged, Segment


class Pick(Protocol):
    """How tokens are picked from a drafter's logits (`exec.pick.Picker`)."""

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


class DraftCall:
    """A draft pass over `lanes` rows, `steps` tokens each."""

    def __init__(self, drafter: Drafter, rows: DeviceRows, pick: Pick, *, lanes: int, steps: int) -> None:
        self._drafter, self._rows, self._pick, self._steps = drafter, rows, pick, steps
        self._row_ids = _padding(lanes, rows)
        self._pages: Sequence[int] = ()

    def aim(self, row_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Point the call at live rows; `pages` bounds the page tables they read and write, descending."""
        _aim(self._row_ids, row_ids)
        self._pages = pages

    def run(self) -> Draft:
        rows, row_ids = self._rows, self._row_ids
        context = DraftContext(
            rows=row_ids,
            last_tokens=rows.last_token[row_ids],
            positions=rows.length[row_ids] - 1,
            inputs=self._inputs,
            pick=lambda logits, positions, ids: self._pick(logits, row_ids, positions, ids),
            sampled=self._pick.sampled(row_ids),
        )
        return self._drafter.draft(context, self._steps)

    def _inputs(self, offset: int, width: int, causal: bool) -> ForwardInputs:
        segments = decode_segments(self._pages, len(self._row_ids), width, self._rows.block_size)
        inputs = self._rows.decode_inputs(
            self._row_ids, width, _widest(segments), segments, offset=offset, causal=causal
        )
        return replace(inputs, guesses=True)


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Rows of a pass that tokens are drawn for: N of them, lane by lane."""

    logits: torch.Tensor  # [N, vocab]
    lanes: torch.Tensor  # [N]
    offsets: torch.Tensor  # [N] position past the lane's last token
    live: torch.Tensor | None = None  # [N] bool: whether there is such a row; None: all are

    def rectangle(self, values: torch.Tensor, lanes: int, width: int, fill: int | bool) -> torch.Tensor:
        """Values [N] as [lanes, width + 1], `fill` where a lane has no such row."""
        if self.live is not None:
            values = torch.where(self.live, values, fill)
        if len(values) == lanes * (width + 1):
            return values.view(lanes, width + 1)
        dense = values.new_full((lanes, width + 1), fill)
        dense[self.lanes, self.offsets] = values
        return dense


@dataclass(frozen=True, slots=True)
class VerifyPass:
    """Results of a target pass over L lanes and G flat rows. They live until the same call's next replay."""

    row_ids: torch.Tensor  # [L], padding last
    tokens: torch.Tensor  # [G]
    lanes: torch.Tensor  # [G] lane of each flat row
    offsets: torch.Tensor  # [G] its position past the lane's last token
    first: torch.Tensor  # [L] first flat row of each lane
    counts: torch.Tensor  # [L] flat rows of each lane
    inputs: ForwardInputs
    hidden: Hidden
    logits: torch.Tensor  # [G, vocab]

    def flat(self, rows: int) -> DrawRows:
        """The first `rows` flat rows, where the host knows whose they are."""
        return DrawRows(self.logits[:rows], self.lanes[:rows], self.offsets[:rows])

    def dense(self, lanes: int, width: int) -> DrawRows:
        """width + 1 rows of each of the first `lanes` lanes, where only the device knows which exist."""
        offset = torch.arange(width + 1, device=self.first.device)
        index = (self.first[:lanes, None] + offset).clamp_(max=len(self.tokens) - 1).view(-1)
        live = (offset < self.counts[:lanes, None]).view(-1)
        lane = torch.arange(lanes, device=offset.device).repeat_interleave(width + 1)
        return DrawRows(self.logits[index], lane, offset.repeat(lanes), live)


class VerifyCall:
    """A target pass over `lanes` rows with up to `width` drafts each, on `target_rows` flat rows.

    Flat rows are request-major. Where every lane has all its rows, they form a rectangle; otherwise the
    rows of the lanes follow one another without a gap, and the flat axis is padded at its end.
    """

    def __init__(
        self,
        target: Target,
        rows: DeviceRows,
        kv: tuple[torch.Tensor, ...],
        taps: tuple[int, ...],
        *,
        lanes: int,
        width: int,
        target_rows: int,
    ) -> None:
        self._target, self._rows, self._kv, self._taps = target, rows, kv, taps
        self._width, self._target_rows = width, target_rows
        device = rows.length.device
        self._row_ids = _padding(lanes, rows)
        self._drafts = torch.zeros((lanes, width), dtype=torch.int64, device=device)
        self._counts = torch.zeros(lanes, dtype=torch.int64, device=device)  # flat rows of each lane
        self._uniform = True
        self._segments: tuple[Segment, ...] = ()
        self._lane = torch.arange(lanes, device=device)
        self._offset = torch.arange(width + 1, device=device)
        self._flat = torch.arange(target_rows, device=device)

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
        _aim(self._row_ids, row_ids)
        if drafts is not None and self._width:
            self._drafts[: len(row_ids)].copy_(drafts[: len(row_ids), : self._width])
        lanes = len(self._row_ids)
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
        return self._run_uniform() if self._uniform else self._run_ragged()

    def _run_uniform(self) -> VerifyPass:
        rows, width = self._rows, self._width + 1
        inputs = rows.decode_inputs(self._row_ids, width, _widest(self._segments), self._segments)
        tokens = torch.cat((rows.last_token[self._row_ids, None], self._drafts), dim=1).view(-1)
        lanes = self._lane.repeat_interleave(width) if width > 1 else self._lane
        counts = torch.full_like(self._lane, width)
        offsets = self._offset.repeat(len(self._lane))
        return self._forward(tokens, inputs, lanes, offsets, self._lane * width, counts)

    def _run_ragged(self) -> VerifyPass:
        ends = self._counts.cumsum(0)
        first = ends - self._counts
        lane = torch.searchsorted(ends, self._flat, right=True)
        live = lane < len(self._lane)
        lane.clamp_(max=len(self._lane) - 1)
        offset = torch.where(live, self._flat - first[lane], 0)
        # A dense slot without a row of its own shows some row of the pass; nobody reads what it yields.
        dense = (first[:, None] + self._offset).clamp_(max=self._target_rows - 1).view(-1)
        ragged = Ragged(dense=dense, flat=lane * (self._width + 1) + offset)
        owners, pages = torch.where(live, lane, -1), _widest(self._segments)
        inputs = self._rows.ragged_inputs(self._row_ids, owners, offset, ragged, pages, self._segments)
        fed = torch.cat((self._rows.last_token[self._row_ids, None], self._drafts), dim=1)
        tokens = torch.where(live, fed[lane, offset], 0)
        offsets = torch.where(live, offset, self._width + 1)
        return self._forward(tokens, inputs, lane, offsets, first, self._counts.clone())

    def _forward(
        self,
        tokens: torch.Tensor,
        inputs: ForwardInputs,
        lanes: torch.Tensor,
        offsets: torch.Tensor,
        first: torch.Tensor,
        counts: torch.Tensor,
    ) -> VerifyPass:
        inputs = replace(inputs, guesses=self._width > 0)
        hidden = self._target.forward(tokens, inputs, self._kv, self._taps)
        logits = self._target.logits(hidden.last)
        return VerifyPass(self._row_ids, tokens, lanes, offsets, first, counts, inputs, hidden, logits)


def _padding(lanes: int, rows: DeviceRows) -> torch.Tensor:
    return torch.full((lanes,), PADDING_ROW, dtype=torch.int64, device=rows.length.device)


def _aim(buffer: torch.Tensor, row_ids: Sequence[int]) -> None:
    padded = [*row_ids, *([PADDING_ROW] * (len(buffer) - len(row_ids)))]
    buffer.copy_(torch.tensor(padded, dtype=torch.int64), non_blocking=True)


def _widest(segments: Sequence[Segment]) -> int:
    return max(segment.pages for segment in segments)
