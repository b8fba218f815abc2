"""The device side of a round: bind, grant, prefill, draft, verify, accept, advance, copy back.

Sees only protocols (Target, Drafter, Platform). Runs on the launch thread; reads nothing back but the
scores of prompt tokens, whose logits would not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from xspec.core.request import SamplingParams
from xspec.core.round import DecodeRow, PrefillChunk, RoundPlan
from xspec.draft.base import Drafter
from xspec.exec.graphs import DecodeGraphs
from xspec.exec.rows import DeviceRows
from xspec.exec.segments import chunk_segments
from xspec.exec.slots import Slot
from xspec.models.base import Hidden, Target
from xspec.platform.base import Event, Platform
from xspec.verify.accept import accept
from xspec.verify.logprobs import score
from xspec.verify.sampler import SampleNeeds, draw, needs_of
from xspec.verify.state import SamplingState

SCORE_ROWS = 64
"""Prompt tokens scored at a time: their logits over a large vocabulary would not fit otherwise."""


class Runner:
    """Implements `pipeline.Executor`. All tensors it owns or creates live on one device."""

    def __init__(
        self,
        *,
        platform: Platform,
        target: Target,
        drafter: Drafter,
        rows: DeviceRows,
        sampling: SamplingState,
        kv: tuple[torch.Tensor, ...],
        graphs: DecodeGraphs,
    ) -> None:
        self._platform = platform
        self._kernels = platform.kernels()
        self._target = target
        self._drafter = drafter
        self._rows = rows
        self._sampling = sampling
        self._kv = kv
        self._graphs = graphs
        self._device = rows.length.device
        self._params: dict[int, SamplingParams] = {}
        self._binds = 0
        self._needs_cache: tuple[tuple[object, ...], SampleNeeds] | None = None

    def make_slots(self, count: int) -> list[Slot]:
        width = self._drafter.spec.max_steps + 1
        return [Slot(index, self._platform, self._rows.rows, width) for index in range(count)]

    @torch.inference_mode()
    def execute(self, plan: RoundPlan, slot: Slot) -> Event:
        slot.begin()
        if plan.scrubs:
            pages = self._tensor(plan.scrubs)
            for slab in self._kv:
                self._kernels.zero_pages(slab, pages)
        for bind in plan.binds:
            self._rows.bind(bind)
            self._sampling.bind(bind.row, bind)
            self._params[bind.row] = bind.params
        self._binds += len(plan.binds)
        for grant in plan.grants:
            self._rows.grant(grant)
        if plan.batch.chunks:
            self._prefill(plan.batch.chunks, slot)
        if plan.batch.rows:
            self._decode(plan.batch.rows, plan.spec.draft_steps, slot)
        return self._platform.event()

    # -- prefill -------------------------------------------------------------------------------

    def _prefill(self, chunks: Sequence[PrefillChunk], slot: Slot) -> None:
        for chunk in chunks:
            self._rows.check_owner(chunk.row, chunk.sequence_id)
        counts = [len(chunk.token_ids) for chunk in chunks]
        pages = [-(-chunk.end // self._rows.block_size) for chunk in chunks]
        row_ids = self._tensor([chunk.row for chunk in chunks])
        tokens = self._tensor([token for chunk in chunks for token in chunk.token_ids])
        inputs = self._rows.chunk_inputs(
            row_ids, [chunk.start for chunk in chunks], counts, chunk_segments(counts, pages)
        )
        hidden = self._target.forward(tokens, inputs, self._kv, self._drafter.spec.taps)
        self._drafter.publish(hidden, tokens, inputs, self._tensor(counts))
        ends = list(accumulate(counts))
        # Keys and values that are not finite spoil every later state, so the last one of a chunk tells
        # whether its pages may be published.
        lasts = hidden.last[self._tensor([end - 1 for end in ends])]
        slot.bad_chunks[: len(chunks)].copy_(~lasts.isfinite().all(1), non_blocking=True)
        self._score(chunks, ends, hidden, slot)
        self._sample_prompts(chunks, ends, hidden, slot)

    def _sample_prompts(
        self, chunks: Sequence[PrefillChunk], ends: list[int], hidden: Hidden, slot: Slot
    ) -> None:
        done = [(chunk, end - 1) for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
        if not done:
            return
        logits = self._target.logits(hidden.last[self._tensor([last for _, last in done])])
        ids = [chunk.row for chunk, _ in done]
        row_ids = self._tensor(ids)
        positions = self._rows.length[row_ids]
        drawn = draw(logits, row_ids, positions, self._sampling, self._needs(ids, 1))
        self._commit(row_ids, drawn.tokens[:, None], drawn.tokens, torch.ones_like(row_ids))
        slot.prefilled.keep(drawn.tokens[:, None], torch.ones_like(row_ids), drawn)

    def _score(self, chunks: Sequence[PrefillChunk], ends: list[int], hidden: Hidden, slot: Slot) -> None:
        """Prompt logprobs: each prompt token under the logits of the row before it."""
        for index, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
            if not chunk.scored_ids:
                continue
            first = end - len(chunk.token_ids)
            scores = []
            for at in range(0, len(chunk.scored_ids), SCORE_ROWS):
                ids = chunk.scored_ids[at : at + SCORE_ROWS]
                logits = self._target.logits(hidden.last[first + at : first + at + len(ids)])
                scores.extend(score(logits, self._tensor(ids), chunk.scored_top).unpack(ids))
            slot.scores[index] = scores

    # -- decode --------------------------------------------------------------------------------

    def _decode(self, rows: Sequence[DecodeRow], draft_steps: int, slot: Slot) -> None:
        for row in rows:
            self._rows.check_owner(row.row, row.sequence_id)
        ids = [row.row for row in rows]
        pages = [-(-row.kv_bound // self._rows.block_size) for row in rows]
        count, width = len(rows), draft_steps + 1
        drafts = torch.empty((count, 0), dtype=torch.int64, device=self._device)
        if draft_steps:
            drafts = self._drafter.draft(self._tensor(ids), draft_steps).tokens
        call = self._graphs.run(slot.index, ids, pages, drafts)
        row_ids = call.row_ids[:count]
        positions = self._rows.length[row_ids][:, None] + torch.arange(width, device=self._device)
        drawn = draw(
            call.logits[: count * width],
            row_ids.repeat_interleave(width) if draft_steps else row_ids,
            positions.view(-1),
            self._sampling,
            self._needs(ids, width),
        )
        limits = torch.full((count,), width, dtype=torch.int64, device=self._device)
        accepted = accept(drawn.tokens.view(count, width), drafts, limits)
        self._commit(row_ids, accepted.tokens, accepted.last, accepted.counts)
        self._drafter.publish(call.hidden, accepted.tokens, call.inputs, accepted.counts)
        slot.decoded.keep(accepted.tokens, accepted.counts, drawn)

    def _commit(
        self, row_ids: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor, counts: torch.Tensor
    ) -> None:
        self._rows.advance(row_ids, last, counts)
        self._sampling.advance(row_ids, tokens, counts)

    def _needs(self, row_ids: Sequence[int], width: int) -> SampleNeeds:
        """What sampling these rows takes; the same batch usually comes again next round."""
        key = (self._binds, width, *row_ids)
        if self._needs_cache is None or self._needs_cache[0] != key:
            params = [self._params[row] for row in row_ids for _ in range(width)]
            self._needs_cache = (key, needs_of(params))
        return self._needs_cache[1]

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
