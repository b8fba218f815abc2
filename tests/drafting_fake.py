"""A fake device that drafts: the paged hash model of `paged_fake`, with an acceptance of one's choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paged_fake import FakeDevice

from xspec.core.request import TokenLogprob
from xspec.core.round import DecodeRow, RoundPlan, RowTokens


@dataclass
class DraftingDevice(FakeDevice):
    """`agree(sequence id, round id)`: drafts that equal the target's draws, if so many are verified."""

    agree: Callable[[int, int], int] = lambda sequence_id, round_id: 99

    def _row(self, row: DecodeRow, plan: RoundPlan) -> RowTokens:
        assert self.owners[row.row] == row.sequence_id
        room = self.limits[row.row] - self.lengths[row.row]
        agreed = self.agree(row.sequence_id, plan.round_id)
        tokens: list[int] = []
        for _ in range(min(agreed, row.verify, room - 1) + 1):
            self._write(row.row, self.lengths[row.row] - 1, self.last[row.row])
            assert self.lengths[row.row] <= row.kv_bound
            tokens.append(self._draw(row.row))
        logprobs = tuple(TokenLogprob(token, -float(token)) for token in tokens)
        return RowTokens(row.sequence_id, tuple(tokens), logprobs)
