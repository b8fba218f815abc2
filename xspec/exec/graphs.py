"""One captured call per bucket, width, padded size, loop work and slot, for drafting and for verifying.

Serving replays; it never captures, except with warm-up switched off. Without graphs every pass is eager
on its exact shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.draft.base import NO_LOOPS, Draft, Drafter, LoopWork
from xspec.exec.calls import DraftCall, Pick, VerifyCall, VerifyPass
from xspec.exec.passes import TargetPasses
from xspec.exec.rows import DeviceRows
from xspec.platform.base import Captured, Platform
from xspec.progress import Progress

DraftKey = tuple[int, int, int, LoopWork]
"""(slot, lanes, draft steps, loop work)"""

VerifyKey = tuple[int, int, int, int, LoopWork]
"""(slot, lanes, verify width, target rows, loop work)"""


@dataclass(frozen=True, slots=True)
class Parts:
    """What every call is made of."""

    platform: Platform
    passes: TargetPasses
    drafter: Drafter
    rows: DeviceRows
    pick: Pick


class RoundGraphs:
    """Every call a plan may name. `steps` and `widths`: what policies may draft and verify, 0 excluded;
    `tiers`: the row counts that verification may be padded to; `pairs`: the (K, d) a looped target may draft
    with, every one also in shadow if `shadows`."""

    def __init__(
        self,
        parts: Parts,
        *,
        grid: BucketGrid,
        slots: int,
        steps: Sequence[int] = (),
        widths: Sequence[int] = (),
        tiers: TargetTiers | None = None,
        pairs: Sequence[tuple[int, int]] = (),
        shadows: bool = False,
        enabled: bool = True,
    ) -> None:
        self._parts = parts
        self._grid = grid
        self._slots = slots if parts.platform.abilities.graphs_per_slot else 1
        self._steps, self._widths = tuple(steps), (0, *widths)
        self._tiers = tiers or TargetTiers()
        self._pairs, self._shadows = tuple(pairs), (False, True) if shadows else (False,)
        self._enabled = enabled
        self._drafts: dict[DraftKey, tuple[DraftCall, Captured[Draft]]] = {}
        self._verifies: dict[VerifyKey, tuple[VerifyCall, Captured[VerifyPass]]] = {}

    def capture_all(self, progress: Progress) -> None:
        """Largest first, so that no later capture has to grow shared scratch memory."""
        if not self._enabled:
            return
        lanes = [bucket.rows for bucket in reversed(self._grid.buckets)]
        slots = range(self._slots)
        drafts = [
            (slot, n, steps, loops)
            for steps in self._steps
            for loops in self._works(steps)
            for n in lanes
            for slot in slots
        ]
        shapes = [(n, w, rows) for w in self._widths for n in lanes for rows in self._tiers.prepared(n, w)]
        shapes.sort(key=lambda shape: (-shape[2], shape))
        verifies = [
            (slot, *shape, loops) for shape in shapes for loops in self._works(shape[1]) for slot in slots
        ]
        total = len(drafts) + len(verifies)
        for done, verify in enumerate(verifies):
            progress("warming", done, total)
            self._verify_call(verify)
        for done, draft in enumerate(drafts, len(verifies)):
            progress("warming", done, total)
            self._draft_call(draft)
        progress("warming", total, total)

    def _works(self, steps: int) -> list[LoopWork]:
        """What the loops may be asked to do in a round of `steps` drafts."""
        if not self._pairs:
            return [NO_LOOPS]
        depths = [depth for k, depth in self._pairs if k == steps] if steps else [0]
        return [LoopWork(depth, shadow) for depth in depths for shadow in self._shadows]

    def draft(
        self,
        slot: int,
        row_ids: Sequence[int],
        pages: Sequence[int],
        steps: int,
        loops: LoopWork = NO_LOOPS,
    ) -> Draft:
        """Propose `steps` tokens for `row_ids`, padded up to their bucket."""
        if not self._enabled:
            exact = self._new_draft(len(row_ids), steps, loops)
            exact.aim(row_ids, pages)
            return exact.run()
        call, captured = self._draft_call((slot % self._slots, self.lanes(row_ids), steps, loops))
        call.aim(row_ids, pages)
        return captured.replay()

    def verify(
        self,
        slot: int,
        row_ids: Sequence[int],
        pages: Sequence[int],
        verify: Sequence[int] | torch.Tensor,
        drafts: torch.Tensor | None,
        width: int,
        target_rows: int,
        loops: LoopWork = NO_LOOPS,
    ) -> VerifyPass:
        """Run `row_ids` through the target, row i with `verify[i]` (at most `width`) of its drafts; padded up
        to a bucket and to `target_rows` (of `TargetTiers.prepared`)."""
        if not self._enabled:
            rows = min(target_rows, len(row_ids) * (width + 1))
            exact = self._new_verify(len(row_ids), width, rows, loops)
            exact.aim(row_ids, pages, verify, drafts)
            return exact.run()
        key = (slot % self._slots, self.lanes(row_ids), width, target_rows, loops)
        call, captured = self._verify_call(key)
        call.aim(row_ids, pages, verify, drafts)
        return captured.replay()

    def lanes(self, row_ids: Sequence[int]) -> int:
        """What so many rows are padded to."""
        return self._grid.fit(len(row_ids)).rows

    # A call that is missing here is made at its first use: that is what disable_graph_warmup asks for.

    def _draft_call(self, key: DraftKey) -> tuple[DraftCall, Captured[Draft]]:
        if key not in self._drafts:
            call = self._new_draft(lanes=key[1], steps=key[2], loops=key[3])
            call.aim((), ())
            self._drafts[key] = (call, self._parts.platform.capture(call.run, rows=key[1]))
        return self._drafts[key]

    def _verify_call(self, key: VerifyKey) -> tuple[VerifyCall, Captured[VerifyPass]]:
        if key not in self._verifies:
            call = self._new_verify(lanes=key[1], width=key[2], target_rows=key[3], loops=key[4])
            call.aim((), (), (), None)
            self._verifies[key] = (call, self._parts.platform.capture(call.run, rows=key[3]))
        return self._verifies[key]

    def _new_draft(self, lanes: int, steps: int, loops: LoopWork) -> DraftCall:
        parts = self._parts
        return DraftCall(parts.drafter, parts.rows, parts.pick, lanes=lanes, steps=steps, loops=loops)

    def _new_verify(self, lanes: int, width: int, target_rows: int, loops: LoopWork) -> VerifyCall:
        parts = self._parts
        return VerifyCall(
            parts.passes, parts.rows, lanes=lanes, width=width, target_rows=target_rows, loops=loops
        )
