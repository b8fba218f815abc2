"""Result buffers of one round in flight: pinned host memory that device copies land in.

One read-back per round: everything the host learns of a round comes through here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xspec.core.request import TokenLogprob
from xspec.core.round import PrefillChunk, RoundPlan, RoundResult, RowTokens
from xspec.platform.base import Platform
from xspec.verify.logprobs import Logprobs
from xspec.verify.sampler import Drawn


@dataclass(slots=True)
class _Lane:
    """Tokens of one pass: [rows, width] with counts, and the logprobs of its flat rows that asked."""

    tokens: torch.Tensor
    counts: torch.Tensor
    bad: torch.Tensor
    logprobs: Logprobs | None = None

    def keep(self, tokens: torch.Tensor, counts: torch.Tensor, drawn: Drawn) -> None:
        rows, width = tokens.shape
        self.tokens[:rows, :width].copy_(tokens, non_blocking=True)
        self.counts[:rows].copy_(counts, non_blocking=True)
        self.bad[:rows].copy_(drawn.bad.view(rows, width).any(1), non_blocking=True)
        self.logprobs = drawn.logprobs

    def read(self, sequence_ids: list[int], width: int) -> list[RowTokens]:
        count = len(sequence_ids)
        tokens, counts = self.tokens[:count].tolist(), self.counts[:count].tolist()
        bad = self.bad[:count].tolist()
        logprobs = self._logprobs(tokens, width)
        return [
            RowTokens(
                sequence_id=sequence_id,
                token_ids=tuple(tokens[i][: counts[i]]),
                logprobs=tuple(
                    logprobs[i * width + j] for j in range(counts[i]) if i * width + j in logprobs
                ),
                bad=bad[i],
            )
            for i, sequence_id in enumerate(sequence_ids)
        ]

    def _logprobs(self, tokens: list[list[int]], width: int) -> dict[int, TokenLogprob]:
        if self.logprobs is None:
            return {}
        flat = self.logprobs.rows
        chosen = [tokens[row // width][row % width] for row in flat]
        return dict(zip(flat, self.logprobs.unpack(chosen), strict=True))


class Slot:
    """Buffers for `rows` sequences that commit up to `width` tokens each."""

    def __init__(self, index: int, platform: Platform, rows: int, width: int) -> None:
        self.index = index
        self.decoded = _lane(platform, rows, width)
        self.prefilled = _lane(platform, rows, 1)
        self.bad_chunks = platform.pinned((rows,), torch.bool)
        self.scores: dict[int, list[TokenLogprob]] = {}  # by chunk index

    def begin(self) -> None:
        """Forget the round that was here."""
        self.decoded.logprobs = self.prefilled.logprobs = None
        self.scores = {}

    def read(self, plan: RoundPlan) -> RoundResult:
        """The completed round as plain values. Only after its event."""
        sampled = [chunk.sequence_id for chunk in plan.batch.chunks if chunk.samples]
        drawn = iter(self.prefilled.read(sampled, 1) if sampled else ())
        bad = self.bad_chunks[: len(plan.batch.chunks)].tolist()
        chunks = [
            self._chunk(index, chunk, next(drawn) if chunk.samples else None, bad[index])
            for index, chunk in enumerate(plan.batch.chunks)
        ]
        ids = [row.sequence_id for row in plan.batch.rows]
        rows = self.decoded.read(ids, plan.spec.draft_steps + 1) if ids else []
        return RoundResult(plan=plan, chunks=tuple(chunks), rows=tuple(rows))

    def _chunk(self, index: int, chunk: PrefillChunk, drawn: RowTokens | None, bad: bool) -> RowTokens:
        return RowTokens(
            sequence_id=chunk.sequence_id,
            token_ids=drawn.token_ids if drawn else (),
            logprobs=drawn.logprobs if drawn else (),
            scored=tuple(self.scores.get(index, ())),
            bad=bad or (drawn is not None and drawn.bad),
        )


def _lane(platform: Platform, rows: int, width: int) -> _Lane:
    return _Lane(
        tokens=platform.pinned((rows, width), torch.int64),
        counts=platform.pinned((rows,), torch.int64),
        bad=platform.pinned((rows,), torch.bool),
    )
