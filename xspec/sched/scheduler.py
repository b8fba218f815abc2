"""Who runs next round: admission, chunked prefill, page grants, preemption. Plain ints, no tensors.

The scheduler plans on bounds (the device is up to two rounds ahead) and commits on facts. It knows
nothing about text, policies' reasons or devices. Retirement lives in `commit.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from xspec.core.request import FinishReason
from xspec.core.round import Batch, DecodeRow, PageGrant, PrefillChunk, RoundPlan, RowBind, SpeculationPlan
from xspec.core.sequence import AfterDrain, Sequence, Status
from xspec.core.shapes import BucketGrid, RoundShape, TargetTiers
from xspec.policy.base import PolicyView
from xspec.sched.pages import PageAllocator


@dataclass(frozen=True, slots=True)
class Limits:
    """Scheduler settings, resolved (no -1 or 0 placeholders)."""

    max_tokens_per_batch: int
    max_seqs_per_batch: int
    max_tokens_per_chunk: int
    chunked_prefill: bool = True
    mix_batch: bool = True
    admission_memory_threshold: float = 0.95


@dataclass(slots=True)
class Counters:
    """Totals since start, read by the metrics."""

    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    """Sequences come in by `add`, leave by stop, limit or `cancel`; every row and page returns."""

    def __init__(
        self,
        pages: PageAllocator,
        limits: Limits,
        grid: BucketGrid,
        *,
        draft_block: int = 0,
        tiers: TargetTiers | None = None,
    ) -> None:
        """`draft_block`: positions from the last token on that drafting writes to, whatever is verified.
        `tiers`: sizes that verification may be padded to (default: full width only)."""
        if grid.max_rows < limits.max_seqs_per_batch:
            raise ValueError(
                f"a grid of {grid.max_rows} rows cannot hold {limits.max_seqs_per_batch} sequences"
            )
        self.pages = pages
        self.limits = limits
        self.grid = grid
        self._draft_block = draft_block
        self._tiers = tiers or TargetTiers()
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of seniority
        self.live: dict[int, Sequence] = {}  # every sequence that is not finished and settled
        self._free_rows = list(range(limits.max_seqs_per_batch, 0, -1))
        self._preempted = False  # in the plan being made
        self._returning: set[int] = set()  # preempted, with rounds in flight: they wait next
        self._due_pages: int | None = None  # see _draining_pages; of the plan being made
        # Whole prompts run at once when they may not be cut, whatever the size of a chunk.
        whole = limits.max_tokens_per_batch
        self._chunk_tokens = min(limits.max_tokens_per_chunk, whole) if limits.chunked_prefill else whole
        self._dirty: list[int] = []  # free pages to zero before anybody reads them

    # -- arrival and departure ----------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        sequence.tokens = list(sequence.request.prompt_ids)
        self.live[sequence.id] = sequence
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence, reason: FinishReason) -> None:
        """Plan it no more. Its row and pages return once nothing of it is in flight."""
        if sequence.status is Status.FINISHED or sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self.drain(sequence, AfterDrain.FINISH)

    def drain(self, sequence: Sequence, then: AfterDrain) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        sequence.status = Status.DRAINING
        sequence.after_drain = then
        if then is AfterDrain.REQUEUE:
            self._returning.add(sequence.id)
        else:
            self._returning.discard(sequence.id)
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Give back what a draining sequence holds, as soon as no round in flight may touch it."""
        if sequence.status is not Status.DRAINING or sequence.in_flight:
            return
        if sequence.tainted or sequence.finish_reason is FinishReason.ERROR:
            self._dirty.extend(self.pages.discard(sequence.pages))
        else:
            self.pages.release(sequence.pages)
        sequence.pages = []
        if sequence.row is not None:
            self._free_rows.append(sequence.row)
            sequence.row = None
        if sequence.after_drain is AfterDrain.REQUEUE:
            sequence.status = Status.WAITING
            self._returning.discard(sequence.id)
            self._requeue(sequence)
        else:
            sequence.status = Status.FINISHED
            del self.live[sequence.id]

    def _requeue(self, sequence: Sequence) -> None:
        """Back to its place in the queue, which is in order of arrival, like the seniority of who runs."""
        place = 0
        while place < len(self.waiting) and self.waiting[place].id < sequence.id:
            place += 1
        self.waiting.insert(place, sequence)

    # -- planning -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self.live

    def view(self, plan_id: int) -> PolicyView | None:
        """What a policy may see of the coming round, or None when there is surely nothing to plan."""
        rows = self._decodable()
        if not rows and not self.waiting and not any(s.prefilling for s in self.running):
            return None
        return PolicyView(
            plan_id=plan_id,
            sequence_ids=tuple(s.id for s in rows),
            kv_bounds=tuple(s.reserved for s in rows),
            waiting=len(self.waiting),
            prefill_tokens=sum(s.prefill_end - s.submitted for s in self.running),
            rooms=tuple(s.max_len - len(s.tokens) - s.sure for s in rows),
            speculative=tuple(s.request.params.speculative for s in rows),
        )

    def plan(self, spec: SpeculationPlan, round_id: int) -> RoundPlan | None:
        """The coming round, or None when pages or rows must come back first."""
        binds: list[RowBind] = []
        grants: list[PageGrant] = []
        self._preempted, self._due_pages = False, None
        if self.limits.mix_batch:
            rows = self._plan_rows(spec, grants)
            chunks = self._plan_chunks(self._decode_tokens(rows, spec), binds, grants)
        else:
            chunks = self._plan_chunks(0, binds, grants)
            rows = [] if chunks else self._plan_rows(spec, grants)
        if not rows and not chunks:
            # Whoever was preempted with nothing in flight may start over in an empty pool.
            alone = self._preempted and not any(s.in_flight for s in self.live.values())
            return self.plan(spec, round_id) if alone else None
        scrubs, self._dirty = tuple(self._dirty), []
        batch = Batch(chunks=tuple(chunks), rows=tuple(sorted(rows, key=lambda r: -r.kv_bound)))
        return RoundPlan(
            round_id=round_id,
            spec=spec,
            batch=batch,
            shape=self._shape(batch, spec),
            scrubs=scrubs,
            binds=tuple(binds),
            grants=tuple(grants),
        )

    def _shape(self, batch: Batch, spec: SpeculationPlan) -> RoundShape:
        count = len(batch.rows)
        padded = self.grid.fit(count).rows if count else 0
        width = batch.verify
        return RoundShape(
            draft_rows=padded if width else 0,
            target_rows=self._tiers.fit(padded, width, spec.target_rows if width else None),
            prefill_tokens=sum(len(chunk.token_ids) for chunk in batch.chunks),
            kv_pages=self.pages.pages_for(batch.rows[0].kv_bound) if batch.rows else 0,  # has most
        )

    def _decodable(self) -> list[Sequence]:
        return [s for s in self.running if not s.prefilling and not s.at_limit]

    def _decode_tokens(self, rows: list[DecodeRow], spec: SpeculationPlan) -> int:
        """What decode rows take of the token budget. Drafts never take so much that prompts would starve."""
        with_drafts = sum(row.verify + 1 for row in rows)
        if spec.target_rows is not None:
            with_drafts = min(with_drafts, spec.target_rows)
        return max(len(rows), min(with_drafts, self.limits.max_tokens_per_batch // 2))

    def _plan_rows(self, spec: SpeculationPlan, grants: list[PageGrant]) -> list[DecodeRow]:
        rows: list[DecodeRow] = []
        for sequence in self._decodable():
            if sequence.status is not Status.RUNNING:  # preempted for a senior one, just above
                continue
            verify = spec.width if sequence.request.params.speculative else 0
            # The last token sits at reserved - 1 at most; verification and drafting write from there on.
            # Where nothing is verified, what drafting beside others writes goes to the sink page.
            written = max(verify + 1, spec.draft_steps, self._draft_block) if verify else 1
            kv_bound = min(sequence.reserved - 1 + written, sequence.max_len)
            if not self._grant(sequence, kv_bound, grants):
                continue
            assert sequence.row is not None
            rows.append(
                DecodeRow(row=sequence.row, sequence_id=sequence.id, kv_bound=kv_bound, verify=verify)
            )
            sequence.in_flight += 1
            sequence.unseen += verify + 1
            sequence.sure += 1
        return rows

    def _grant(self, sequence: Sequence, kv_bound: int, grants: list[PageGrant]) -> bool:
        """Pages up to `kv_bound`, taken from the most junior sequences if need be."""
        missing = self.pages.pages_for(kv_bound) - len(sequence.pages)
        if missing <= 0:
            return True
        while (pages := self.pages.allocate(missing)) is None:
            if self._draining_pages() + self.pages.available >= missing:
                return False  # they come back by themselves
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        assert sequence.row is not None
        grants.append(PageGrant(row=sequence.row, first=len(sequence.pages), pages=tuple(pages)))
        sequence.pages.extend(pages)
        return True

    def _draining_pages(self) -> int:
        """Pages that rounds in flight will set free (fewer come where pages are shared: then ask again)."""
        if self._due_pages is None:
            draining = (s for s in self.live.values() if s.status is Status.DRAINING)
            self._due_pages = sum(len(s.pages) for s in draining)
        return self._due_pages

    def _preempt(self, victim: Sequence) -> None:
        self._preempted = True
        victim.preemptions += 1
        self.counters.preemptions += 1
        self._due_pages = None
        self.drain(victim, AfterDrain.REQUEUE)

    def _plan_chunks(
        self, decode_rows: int, binds: list[RowBind], grants: list[PageGrant]
    ) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        budget = self.limits.max_tokens_per_batch - decode_rows
        for sequence in self.running:
            if sequence.prefilling:
                budget -= self._chunk(sequence, budget, chunks)
        # Who was just preempted must not come back in the same breath and be preempted again, nor may
        # later arrivals take the pages it had to give while its rounds in flight retire.
        while not self._preempted and not self._returning and budget > 0 and self.waiting and self._free_rows:
            sequence = self.waiting[0]
            if self._sibling_computes(sequence) or not self._admit(sequence, budget, binds, grants):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            budget -= self._chunk(sequence, budget, chunks)
        return chunks

    def _sibling_computes(self, sequence: Sequence) -> bool:
        """Whether another choice is at the prompt: a round or two later it is served from the cache."""
        if sequence.choice == 0 or not self.pages.prefix_cache:
            return False
        size = self.pages.block_size
        usable = (sequence.prompt_len - 1) // size * size
        return any(s.request is sequence.request and s.computed < usable for s in self.running)

    def _chunk(self, sequence: Sequence, budget: int, chunks: list[PrefillChunk]) -> int:
        """Append the next chunk of `sequence`; returns the tokens it takes from the budget."""
        remaining = sequence.prefill_end - sequence.submitted
        count = min(remaining, budget, self._chunk_tokens)
        if count <= 0 or (count < remaining and not self.limits.chunked_prefill):
            return 0
        start, end = sequence.submitted, sequence.submitted + count
        scored_top = sequence.scored_top
        scored = None
        if scored_top is not None and start < sequence.prompt_len:
            scored = tuple(sequence.tokens[start + 1 : min(end + 1, sequence.prompt_len)])
        assert sequence.row is not None
        samples = end == sequence.prefill_end
        chunks.append(
            PrefillChunk(
                row=sequence.row,
                sequence_id=sequence.id,
                start=start,
                token_ids=tuple(sequence.tokens[start:end]),
                samples=samples,
                scored_ids=scored,
                scored_top=scored_top or 0,
            )
        )
        sequence.submitted = end
        sequence.in_flight += 1
        sequence.unseen += 1 if samples else 0
        sequence.sure += 1 if samples else 0
        return count

    def _admit(self, sequence: Sequence, budget: int, binds: list[RowBind], grants: list[PageGrant]) -> bool:
        """Give a waiting sequence a row and the pages of all it must prefill, or change nothing."""
        tokens = sequence.tokens
        scores = sequence.scored_top is not None
        pages, hashes = ([], []) if scores else self.pages.match(tokens, sequence.known_hashes)
        hit = len(pages) * self.pages.block_size
        missing = self.pages.pages_for(len(tokens)) - len(pages)
        whole = self.limits.chunked_prefill or min(budget, self._chunk_tokens) >= len(tokens) - hit
        fresh = self.pages.allocate(missing) if whole and self._room_for(missing) else None
        if fresh is None:
            self.pages.release(pages)
            return False
        row = self._free_rows.pop()
        pages.extend(fresh)
        if sequence.preemptions == 0:
            # What later choices find was computed for this very request: it saved nothing of its prompt.
            sequence.cached_tokens = hit if sequence.choice == 0 else 0
            self.counters.prefix_queried_tokens += len(tokens)
            self.counters.prefix_hit_tokens += hit
        sequence.row, sequence.pages, sequence.block_hashes = row, pages, hashes
        sequence.status = Status.RUNNING
        sequence.computed = sequence.submitted = hit
        sequence.prefill_end = len(tokens)
        grants.append(PageGrant(row=row, first=0, pages=tuple(pages)))
        binds.append(
            RowBind(
                row=row,
                sequence_id=sequence.id,
                params=sequence.request.params,
                seed=sequence.seed,
                choice=sequence.choice,
                prompt_len=sequence.prompt_len,
                token_ids=tuple(tokens),
                stop_ids=tuple(sorted(sequence.stop_ids)),
                max_len=sequence.max_len,
                hit_page=pages[hit // self.pages.block_size - 1] if hit else None,
            )
        )
        return True

    def _room_for(self, missing: int) -> bool:
        """Keep head-room for the growth of running answers, unless nothing runs."""
        left = self.pages.available - missing
        if left < 0:
            return False
        return not self.running or left >= (1.0 - self.limits.admission_memory_threshold) * self.pages.pages
