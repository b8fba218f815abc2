"""Whose the flat rows of a pass are, and what the model is told of them, from the persistent device rows.

Bound to a call's buffers once and computed anew at every call: by the platform's kernels where they offer
it, else here in torch.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from xspec.exec.rows import DeviceRows
from xspec.kernels.rounds import DraftRows, FlatRows, VerifyRows
from xspec.nn.inputs import ForwardInputs, Ragged, Segment


def draft_rows(rows: DeviceRows, row_ids: torch.Tensor) -> DraftRows:
    """Inputs of draft passes over row_ids [L]."""
    return TorchDraftRows(rows, row_ids) if rows.fused is None else rows.fused.draft_rows(row_ids)


def verify_rows(
    rows: DeviceRows, row_ids: torch.Tensor, drafts: torch.Tensor, counts: torch.Tensor, target_rows: int
) -> VerifyRows:
    """Inputs of verify passes over row_ids [L], drafts [L, K], counts [L] of up to K + 1 rows a lane."""
    if rows.fused is not None:
        return rows.fused.verify_rows(row_ids, drafts, counts, target_rows)
    return TorchVerifyRows(rows, row_ids, drafts, counts, target_rows)


class TorchDraftRows:
    def __init__(self, rows: DeviceRows, row_ids: torch.Tensor) -> None:
        self._rows, self._row_ids = rows, row_ids

    def __call__(
        self, offset: int, width: int, causal: bool, pages: int, segments: tuple[Segment, ...]
    ) -> ForwardInputs:
        inputs = self._rows.decode_inputs(self._row_ids, width, pages, segments, offset=offset, causal=causal)
        return replace(inputs, guesses=True)


class TorchVerifyRows:
    """Where every lane has all its rows, they form a rectangle; otherwise the rows of the lanes follow one
    another without a gap, and the flat axis is padded at its end.
    """

    def __init__(
        self,
        rows: DeviceRows,
        row_ids: torch.Tensor,
        drafts: torch.Tensor,
        counts: torch.Tensor,
        target_rows: int,
    ) -> None:
        self._rows, self._row_ids, self._drafts, self._counts = rows, row_ids, drafts, counts
        self._target_rows = target_rows
        device, (lanes, width) = drafts.device, drafts.shape
        self._width = width + 1
        self._lane = torch.arange(lanes, device=device)
        self._offset = torch.arange(width + 1, device=device)
        self._flat = torch.arange(target_rows, device=device)

    def __call__(self, uniform: bool, pages: int, segments: tuple[Segment, ...]) -> FlatRows:
        return self._uniform(pages, segments) if uniform else self._ragged(pages, segments)

    def _uniform(self, pages: int, segments: tuple[Segment, ...]) -> FlatRows:
        width = self._width
        inputs = self._rows.decode_inputs(self._row_ids, width, pages, segments)
        lanes = self._lane.repeat_interleave(width) if width > 1 else self._lane
        return FlatRows(
            row_ids=self._row_ids,
            tokens=self._fed().view(-1),
            lanes=lanes,
            owners=self._row_ids[lanes],
            offsets=self._offset.repeat(len(self._lane)),
            first=self._lane * width,
            counts=torch.full_like(self._lane, width),
            inputs=replace(inputs, guesses=width > 1),
        )

    def _ragged(self, pages: int, segments: tuple[Segment, ...]) -> FlatRows:
        ends = self._counts.cumsum(0)
        first = ends - self._counts
        lane = torch.searchsorted(ends, self._flat, right=True)
        live = lane < len(self._lane)
        lane.clamp_(max=len(self._lane) - 1)
        offset = torch.where(live, self._flat - first[lane], 0)
        # A dense slot without a row of its own shows some row of the pass; nobody reads what it yields.
        dense = (first[:, None] + self._offset).clamp_(max=self._target_rows - 1).view(-1)
        ragged = Ragged(dense=dense, flat=lane * self._width + offset)
        owners = torch.where(live, lane, -1)
        inputs = self._rows.ragged_inputs(self._row_ids, owners, offset, ragged, pages, segments)
        return FlatRows(
            row_ids=self._row_ids,
            tokens=torch.where(live, self._fed()[lane, offset], 0),
            lanes=lane,
            owners=self._row_ids[lane],
            offsets=torch.where(live, offset, self._width),
            first=first,
            counts=self._counts.clone(),
            inputs=replace(inputs, guesses=self._width > 1, sequences=lane),
        )

    def _fed(self) -> torch.Tensor:
        """[L, K + 1]: each lane's last token, then its drafts."""
        return torch.cat((self._rows.last_token[self._row_ids, None], self._drafts), dim=1)
