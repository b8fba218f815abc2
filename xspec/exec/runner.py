"""The device side of a round: bind, grant, prefill, draft, verify, accept, advance, publish, copy back.

Sees only protocols (Target, Drafter, Platform). Runs on the launch thread; reads nothing back but the
scores of prompt tokens, whose logits would not fit otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from xspec.core.request import SamplingParams
from xspec.core.round import DecodeRow, PrefillChunk, RoundPlan
from xspec.draft.base import Draft, Drafter, LoopWork, Published
from xspec.exec.budget import admit_drafts
from xspec.exec.calls import DrawRows, VerifyPass
from xspec.exec.graphs import RoundGraphs
from xspec.exec.rows import DeviceRows
from xspec.exec.segments import chunk_segments
from xspec.exec.settle import settle
from xspec.exec.slots import Slot
from xspec.kernels.rounds import NO_TOKEN, Settled
from xspec.models.base import Hidden, Target
from xspec.nn.inputs import ForwardInputs
from xspec.platform.base import Event, Platform
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
        slabs: tuple[torch.Tensor, ...],
        graphs: RoundGraphs,
    ) -> None:
        """`kv`: the target's slabs; `slabs`: all of them, the drafter's included."""
        self._platform = platform
        self._kernels = platform.kernels()
        self._target = target
        self._drafter = drafter
        self._rows = rows
        self._sampling = sampling
        self._kv = kv
        self._slabs = slabs
        self._graphs = graphs
        self._device = rows.length.device
        self._params: dict[int, SamplingParams] = {}
        self._binds = 0
        self._needs_cache: tuple[tuple[object, ...], SampleNeeds] | None = None

    def make_slots(self, count: int) -> list[Slot]:
        spec = self._drafter.spec
        rows, width, depths = self._rows.rows, spec.max_steps + 1, len(spec.depths)
        return [Slot(index, self._platform, rows, width, depths) for index in range(count)]

    @torch.inference_mode()
    def execute(self, plan: RoundPlan, slot: Slot) -> Event:
        slot.begin()
        if plan.scrubs:
            pages = self._tensor(plan.scrubs)
            for slab in self._slabs:
                self._kernels.zero_pages(slab, pages)
        for bind in plan.binds:
            self._rows.bind(bind)
            self._sampling.bind(bind.row, bind)
            self._drafter.bind(bind.row, bind.hit_page)
            self._params[bind.row] = bind.params
        self._binds += len(plan.binds)
        for grant in plan.grants:
            self._rows.grant(grant)
        if plan.batch.chunks:
            self._prefill(plan.batch.chunks, slot)
        if plan.batch.rows:
            self._decode(plan, slot)
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
        ends = list(accumulate(counts))
        self._publish_prompts(tokens, hidden, inputs, row_ids, counts, ends)
        # Keys and values that are not finite spoil every later state, so the last one of a chunk tells
        # whether its pages may be published.
        lasts = hidden.last[self._tensor([end - 1 for end in ends])]
        slot.bad_chunks[: len(chunks)].copy_(~lasts.isfinite().all(1), non_blocking=True)
        self._score(chunks, ends, hidden, slot)
        self._sample_prompts(chunks, ends, hidden, slot)

    def _publish_prompts(
        self,
        tokens: torch.Tensor,
        hidden: Hidden,
        inputs: ForwardInputs,
        row_ids: torch.Tensor,
        counts: list[int],
        ends: list[int],
    ) -> None:
        committed = self._tensor(counts)
        lanes = torch.arange(len(counts), device=self._device).repeat_interleave(committed)
        self._drafter.publish(
            Published(tokens, hidden, inputs, row_ids, lanes, self._tensor(ends) - committed, committed)
        )

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
        drawn = draw(logits, row_ids, positions, self._sampling, self._needs(ids, [0] * len(ids)))
        self._commit(row_ids, drawn.tokens[:, None], drawn.tokens, torch.ones_like(row_ids))
        kept = (~drawn.bad).to(torch.int64)
        slot.prefilled.keep(drawn.tokens[:, None], kept, drawn.bad, drawn.logprobs, [0] * len(ids))

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

    def _decode(self, plan: RoundPlan, slot: Slot) -> None:
        rows = plan.batch.rows
        for row in rows:
            self._rows.check_owner(row.row, row.sequence_id)
        ids = [row.row for row in rows]
        pages = [-(-row.kv_bound // self._rows.block_size) for row in rows]
        verify = [row.verify for row in rows]
        drafts = None
        verified: list[int] | torch.Tensor = verify
        loops = LoopWork((plan.spec.depth or 0) if plan.batch.verify else 0, plan.spec.shadow)
        if plan.batch.verify:
            draft = self._graphs.draft(slot.index, ids, pages, plan.spec.draft_steps, loops)
            drafts = draft.tokens
            slot.keep_signals(draft.signals[: len(ids)])
            if plan.shape.target_rows < self._graphs.lanes(ids) * (max(verify) + 1):
                verified = self._admit(ids, verify, draft, plan.shape.target_rows, slot)
        width, target_rows = max(verify), plan.shape.target_rows
        passed = self._graphs.verify(slot.index, ids, pages, verified, drafts, width, target_rows, loops)
        self._accept(rows, width, verified, drafts, passed, slot)

    def _admit(
        self, ids: list[int], verify: list[int], draft: Draft, target_rows: int, slot: Slot
    ) -> list[int] | torch.Tensor:
        """Drafts verified of each row where there are fewer rows than drafts, decided on the device."""
        synchronous = self._platform.abilities.synchronous
        admitted = admit_drafts(self._rows, ids, verify, draft.signals, target_rows, synchronous)
        slot.keep_admitted(admitted)
        return admitted

    def _accept(
        self,
        rows: Sequence[DecodeRow],
        width: int,
        verify: list[int] | torch.Tensor,
        drafts: torch.Tensor | None,
        passed: VerifyPass,
        slot: Slot,
    ) -> None:
        count = len(rows)
        if isinstance(verify, torch.Tensor):  # whose the flat rows are is the device's secret
            verify = [width] * count
            drawing = passed.dense(count, width)
        else:
            drawing = passed.flat(sum(verify) + count)
        needs = self._needs([row.row for row in rows], verify)
        prefix = None
        if drafts is not None and needs.penalised:
            prefix = self._prefix(drafts[:count, :width], drawing.lanes, drawing.offsets)
        # Where reading the device costs nothing, rows past a wrong draft are left out.
        chain = drawing.chain() if width and self._platform.abilities.synchronous else None
        state = self._sampling
        drawn = draw(drawing.logits, drawing.owners, drawing.positions, state, needs, prefix, chain)
        if passed.picks is not None:
            slot.keep_matches(_matches(passed.picks, drawn.tokens, drawing, count, width))
        settled = settle(self._rows, passed.rows, count, drawing, drawn, drafts, width, slot.decoded.told)
        self._sampling.advance(passed.rows.row_ids[:count], settled.tokens, settled.counts[:count])
        slot.decoded.note(drawn.logprobs, verify)
        self._publish(passed, settled)

    def _publish(self, passed: VerifyPass, settled: Settled) -> None:
        rows = passed.rows
        self._drafter.publish(
            Published(
                rows.tokens,
                passed.hidden,
                rows.inputs,
                rows.row_ids,
                rows.lanes,
                rows.first,
                settled.counts,
                settled.fact_slots,
            )
        )

    @staticmethod
    def _prefix(drafts: torch.Tensor, lanes: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The drafts that stand before each flat row's draw, [N, W], -1 padded."""
        column = torch.arange(drafts.shape[1], device=drafts.device)
        return drafts[lanes].masked_fill(column >= offsets.unsqueeze(1), NO_TOKEN)

    def _commit(
        self, row_ids: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor, counts: torch.Tensor
    ) -> None:
        self._rows.advance(row_ids, last, counts)
        self._sampling.advance(row_ids, tokens, counts)

    def _needs(self, row_ids: Sequence[int], verify: Sequence[int]) -> SampleNeeds:
        """What sampling these rows takes; the same batch usually comes again next round."""
        key = (self._binds, *row_ids, *verify)
        if self._needs_cache is None or self._needs_cache[0] != key:
            params = [
                self._params[row]
                for row, drafts in zip(row_ids, verify, strict=True)
                for _ in range(drafts + 1)
            ]
            self._needs_cache = (key, needs_of(params))
        return self._needs_cache[1]

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _matches(
    picks: torch.Tensor, drawn: torch.Tensor, drawing: DrawRows, lanes: int, width: int
) -> torch.Tensor:
    """picks [G, depths], drawn [N] -> [lanes, width + 1, depths] bool: which depths picked what was drawn."""
    agree = (picks[: len(drawn)] == drawn[:, None]).to(torch.int64)
    return torch.stack([drawing.rectangle(each, lanes, width, 0) for each in agree.unbind(1)], 2) > 0
