"""One captured decode call per bucket, width and slot. Serving replays; it never captures.

The call maps a buffer of row ids to logits: everything else it reads is persistent device state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from xspec.core.round import PADDING_ROW
from xspec.core.shapes import BucketGrid
from xspec.exec.rows import DeviceRows
from xspec.exec.segments import decode_segments
from xspec.models.base import Hidden, Target
from xspec.nn.inputs import ForwardInputs, Segment
from xspec.platform.base import Captured, Platform
from xspec.progress import Progress


@dataclass(frozen=True, slots=True)
class DecodePass:
    """Results of a pass over `lanes` rows. They live until the next replay of the same call."""

    row_ids: torch.Tensor  # [lanes], padding last
    inputs: ForwardInputs
    hidden: Hidden
    logits: torch.Tensor  # [lanes * width, vocab]


class DecodeCall:
    """The body of a decode (or verify) pass of `lanes` rows, `width` positions each."""

    def __init__(
        self,
        target: Target,
        rows: DeviceRows,
        kv: tuple[torch.Tensor, ...],
        taps: tuple[int, ...],
        lanes: int,
        width: int,
    ) -> None:
        self._target, self._rows, self._kv, self._taps = target, rows, kv, taps
        self._lanes = lanes
        self._width = width
        self._row_ids = torch.full((lanes,), PADDING_ROW, dtype=torch.int64, device=rows.length.device)
        self._drafts = torch.zeros((lanes, width - 1), dtype=torch.int64, device=rows.length.device)
        self._segments: tuple[Segment, ...] = ()

    def aim(self, row_ids: Sequence[int], pages: Sequence[int], drafts: torch.Tensor | None = None) -> None:
        """Point the call at live rows and their drafts [rows, width - 1]; other lanes are padding."""
        if drafts is not None:
            self._drafts[: len(row_ids)].copy_(drafts)
        padded = [*row_ids, *([PADDING_ROW] * (self._lanes - len(row_ids)))]
        self._row_ids.copy_(torch.tensor(padded, dtype=torch.int64), non_blocking=True)
        self._segments = decode_segments(pages, self._lanes, self._width, self._rows.block_size)

    def run(self) -> DecodePass:
        rows = self._rows
        pages = max(segment.pages for segment in self._segments)
        inputs = rows.decode_inputs(self._row_ids, self._width, pages, self._segments)
        tokens = torch.cat((rows.last_token[self._row_ids, None], self._drafts), dim=1).view(-1)
        hidden = self._target.forward(tokens, inputs, self._kv, self._taps)
        return DecodePass(self._row_ids, inputs, hidden, self._target.logits(hidden.last))


class DecodeGraphs:
    """Every (slot, lanes, width) a plan may name, prepared before ready; eager exact shapes when off."""

    def __init__(
        self,
        platform: Platform,
        target: Target,
        rows: DeviceRows,
        kv: tuple[torch.Tensor, ...],
        *,
        grid: BucketGrid,
        slots: int,
        taps: tuple[int, ...] = (),
        widths: Iterable[int] = (1,),
        enabled: bool = True,
    ) -> None:
        self._platform, self._target, self._rows, self._kv, self._taps = platform, target, rows, kv, taps
        self.grid = grid
        self.slots = slots
        self.enabled = enabled
        self._widths = tuple(widths)
        self._calls: dict[tuple[int, int, int], tuple[DecodeCall, Captured[DecodePass]]] = {}

    def capture_all(self, progress: Progress) -> None:
        """Largest first, so that no later capture has to grow shared scratch memory."""
        if not self.enabled:
            return
        wanted = [
            (slot, bucket.rows, width)
            for width in sorted(self._widths, reverse=True)
            for bucket in reversed(self.grid.buckets)
            for slot in (range(self.slots) if self._platform.abilities.graphs_per_slot else (0,))
        ]
        for done, key in enumerate(wanted):
            progress("warming", done, len(wanted))
            self._capture(key)
        progress("warming", len(wanted), len(wanted))

    def run(
        self, slot: int, row_ids: Sequence[int], pages: Sequence[int], drafts: torch.Tensor
    ) -> DecodePass:
        """Execute a pass over `row_ids` and their drafts [rows, K], padded up to its bucket."""
        width = drafts.shape[1] + 1
        if not self.enabled:
            exact = self._call(len(row_ids), width)
            exact.aim(row_ids, pages, drafts)
            return exact.run()
        key = (
            slot if self._platform.abilities.graphs_per_slot else 0,
            self.grid.fit(len(row_ids)).rows,
            width,
        )
        if key not in self._calls:  # disable_graph_warmup: prepared at first use
            self._capture(key)
        call, captured = self._calls[key]
        call.aim(row_ids, pages, drafts)
        return captured.replay()

    def _capture(self, key: tuple[int, int, int]) -> None:
        call = self._call(lanes=key[1], width=key[2])
        call.aim((), ())
        self._calls[key] = (call, self._platform.capture(call.run))

    def _call(self, lanes: int, width: int) -> DecodeCall:
        return DecodeCall(self._target, self._rows, self._kv, self._taps, lanes, width)
