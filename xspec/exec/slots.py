"""Result buffers of one round in flight: pinned host memory that device copies land in.

One read-back per round: everything the host learns of a round comes through here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch

from xspec.core.request import TokenLogprob
from xspec.core.round import PrefillChunk, RoundPlan, RoundResult, RowTokens
from xspec.kernels.rounds import Told
from xspec.platform.base import Platform
from xspec.verify.logprobs import Logprobs


@dataclass(slots=True)
class _Lane:
    """Tokens of one pass: [rows, width] with counts, and the logprobs of its flat rows that asked."""

    told: Told
    logprobs: Logprobs | None = None
    verify: Sequence[int] = ()  # drafts of each row: flat rows are verify + 1 a row, one after another
    views: tuple[np.ndarray, np.ndarray, np.ndarray] = field(init=False)  # of `told`: read in less time

    def __post_init__(self) -> None:
        self.views = (self.told.tokens.numpy(), self.told.counts.numpy(), self.told.bad.numpy())

    def keep(
        self,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        bad: torch.Tensor,
        logprobs: Logprobs | None,
        verify: Sequence[int],
    ) -> None:
        self.told.put(tokens, counts, bad)
        self.note(logprobs, verify)

    def note(self, logprobs: Logprobs | None, verify: Sequence[int]) -> None:
        """What belongs to tokens that `told` has been told of."""
        self.logprobs, self.verify = logprobs, verify

    def read(self, sequence_ids: list[int], admitted: Sequence[int] | None = None) -> list[RowTokens]:
        count = len(sequence_ids)
        let_in: Sequence[int | None] = admitted or [None] * count
        tokens, counts, bad = (view[:count].tolist() for view in self.views)
        committed = [tuple(row[:kept]) for row, kept in zip(tokens, counts, strict=True)]
        logprobs = self._logprobs(committed)
        return [
            RowTokens(sequence_id, token_ids, logprobs.get(i, ()), (), bad[i], let_in[i])
            for i, (sequence_id, token_ids) in enumerate(zip(sequence_ids, committed, strict=True))
        ]

    def _logprobs(self, committed: list[tuple[int, ...]]) -> dict[int, tuple[TokenLogprob, ...]]:
        """By row. Flat rows that were not committed are unpacked too, and dropped."""
        if self.logprobs is None:
            return {}
        first = list(accumulate((count + 1 for count in self.verify), initial=0))
        chosen: list[int] = []
        owners: list[int | None] = []
        for flat in self.logprobs.rows:
            row = bisect_right(first, flat) - 1
            kept = flat - first[row] < len(committed[row])
            owners.append(row if kept else None)
            chosen.append(committed[row][flat - first[row]] if kept else 0)
        found: dict[int, tuple[TokenLogprob, ...]] = {}
        for owner, logprob in zip(owners, self.logprobs.unpack(chosen), strict=True):
            if owner is not None:
                found[owner] = (*found.get(owner, ()), logprob)
        return found


class Slot:
    """Buffers for `rows` sequences that commit up to `width` tokens each."""

    def __init__(self, index: int, platform: Platform, rows: int, width: int, depths: int = 0) -> None:
        self.index = index
        self.decoded = _lane(platform, rows, width)
        self.prefilled = _lane(platform, rows, 1)
        self._signals = platform.pinned((rows, width - 1), torch.float32)
        self._signals_view = self._signals.numpy()
        self._admitted = platform.pinned((rows,), torch.int64)
        self._matches = platform.pinned((rows, width, depths), torch.bool)
        self._let_in: Sequence[int] | torch.Tensor | None = None  # drafts a row of a round with a budget
        self._shadowed = 0  # rows a sequence of a shadow round
        self.bad_chunks = platform.pinned((rows,), torch.bool)
        self.scores: dict[int, list[TokenLogprob]] = {}  # by chunk index

    def begin(self) -> None:
        """Forget the round that was here."""
        self.decoded.logprobs = self.prefilled.logprobs = None
        self._let_in, self._shadowed = None, 0
        self.scores = {}

    def keep_signals(self, signals: torch.Tensor) -> None:
        """signals [R, K] of the round's drafts."""
        rows, steps = signals.shape
        self._signals[:rows, :steps].copy_(signals, non_blocking=True)

    def keep_admitted(self, admitted: Sequence[int] | torch.Tensor) -> None:
        """admitted [R]: drafts that a row budget let into verification, on the device or read already."""
        if isinstance(admitted, torch.Tensor):
            admitted = self._admitted[: len(admitted)].copy_(admitted, non_blocking=True)
        self._let_in = admitted

    def keep_matches(self, matches: torch.Tensor) -> None:
        """matches [R, W, depths] of a shadow round (`RoundFeedback.matches`)."""
        rows, self._shadowed, _ = matches.shape
        self._matches[:rows, : self._shadowed].copy_(matches, non_blocking=True)

    def read(self, plan: RoundPlan) -> RoundResult:
        """The completed round as plain values. Only after its event."""
        sampled = [chunk.sequence_id for chunk in plan.batch.chunks if chunk.samples]
        drawn = iter(self.prefilled.read(sampled) if sampled else ())
        bad = self.bad_chunks[: len(plan.batch.chunks)].tolist() if plan.batch.chunks else ()
        chunks = [
            self._chunk(index, chunk, next(drawn) if chunk.samples else None, bad[index])
            for index, chunk in enumerate(plan.batch.chunks)
        ]
        ids = [row.sequence_id for row in plan.batch.rows]
        admitted = self._let_in
        if isinstance(admitted, torch.Tensor):
            admitted = admitted.tolist()
        rows = self.decoded.read(ids, admitted) if ids else []
        signals = matches = None
        if plan.batch.verify:
            signals = self._signals_view[: len(ids), : plan.spec.draft_steps].copy()
        if self._shadowed:
            matches = self._matches[: len(ids), : self._shadowed].numpy().copy()
        return RoundResult(plan, tuple(chunks), tuple(rows), signals, matches)

    def _chunk(self, index: int, chunk: PrefillChunk, drawn: RowTokens | None, bad: bool) -> RowTokens:
        return RowTokens(
            sequence_id=chunk.sequence_id,
            token_ids=drawn.token_ids if drawn and not bad else (),
            logprobs=drawn.logprobs if drawn and not bad else (),
            scored=tuple(self.scores.get(index, ())),
            bad=bad or (drawn is not None and drawn.bad),
        )


def _lane(platform: Platform, rows: int, width: int) -> _Lane:
    return _Lane(
        Told(
            tokens=platform.pinned((rows, width), torch.int64),
            counts=platform.pinned((rows,), torch.int64),
            bad=platform.pinned((rows,), torch.bool),
        )
    )
