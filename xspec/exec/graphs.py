"""One captured decode call per bucket, width and slot. Serving replays; it never captures.

The call maps a buffer of row ids to logits: everything else it reads is persistent device state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from xspec.core.round import PADDING_ROW
from xspec.core.shapes import BucketGrid
from xspec.exec.rows import DeviceRows
from xspec.exec.segments import decode_segments
from xspec.models.base import Hidden, Target
from xspec.nn.inputs import ForwardInputs, Segment
from xspec.platform.base import Captured, Platform
from xspec.progress import Progress


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
        self.lanes = lanes
        self.width = width
        self.row_ids = torch.full((lanes,), PADDING_ROW, dtype=torch.int64, device=rows.length.device)
        self.drafts: torch.Tensor | None = None  # [lanes, width - 1]
        self.segments: tuple[Segment, ...] = ()
        self.inputs: ForwardInputs
        self.hidden: Hidden
        self.logits: torch.Tensor  # [lanes * width, vocab]

    def aim(self, row_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Point the call at live rows; the remaining lanes are padding."""
        padded = [*row_ids, *([PADDING_ROW] * (self.lanes - len(row_ids)))]
        self.row_ids.copy_(torch.tensor(padded, dtype=torch.int64), non_blocking=True)
        self.segments = decode_segments(pages, self.lanes, self.width, self._rows.block_size)

    def run(self) -> None:
        rows = self._rows
        pages = max(segment.pages for segment in self.segments)
        self.inputs = rows.decode_inputs(self.row_ids, self.width, pages, self.segments)
        tokens = rows.last_token[self.row_ids]
        if self.drafts is not None:
            tokens = torch.cat((tokens[:, None], self.drafts), dim=1).view(-1)
        self.hidden = self._target.forward(tokens, self.inputs, self._kv, self._taps)
        self.logits = self._target.logits(self.hidden.last)


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
        self._calls: dict[tuple[int, int, int], tuple[DecodeCall, Captured]] = {}

    def capture_all(self, progress: Progress) -> None:
        """Largest first, so that no later capture has to grow shared scratch memory."""
        if not self.enabled:
            return
        wanted = [
            (slot, bucket.rows, width)
            for width in sorted(self._widths, reverse=True)
            for bucket in reversed(self.grid.buckets)
            for slot in range(self.slots)
        ]
        for done, key in enumerate(wanted):
            progress("warming", done, len(wanted))
            call = self._call(key[1], key[2])
            call.aim((), ())
            self._calls[key] = (call, self._platform.capture(call.run))
        progress("warming", len(wanted), len(wanted))

    def run(self, slot: int, row_ids: Sequence[int], pages: Sequence[int], width: int) -> DecodeCall:
        """Execute a pass over `row_ids`, padded up to its bucket. The result lives until the next replay."""
        if not self.enabled:
            call = self._call(len(row_ids), width)
            call.aim(row_ids, pages)
            call.run()
            return call
        key = (slot, self.grid.fit(len(row_ids)).rows, width)
        if key not in self._calls:  # disable_graph_warmup: prepared at first use
            call = self._call(key[1], width)
            call.aim((), ())
            self._calls[key] = (call, self._platform.capture(call.run))
        call, captured = self._calls[key]
        call.aim(row_ids, pages)
        captured.replay()
        return call

    def _call(self, lanes: int, width: int) -> DecodeCall:
        return DecodeCall(self._target, self._rows, self._kv, self._taps, lanes, width)
