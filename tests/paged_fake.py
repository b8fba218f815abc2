"""A fake device for scheduler and loop tests: real paging, a hash for a model, no tensors.

KV slots hold token ids. The next token of a row is a hash of the whole prefix as read back through
its page table, so a wrong grant, a stale page or a lost token changes the text.
"""

from __future__ import annotations

import hashlib
from array import array
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from xspec.core.request import Request, SamplingParams
from xspec.core.round import PADDING_ROW, SCRATCH_PAGE, RoundPlan, RoundResult, RowTokens
from xspec.core.sequence import Sequence

VOCAB = 50


def next_token(prefix: list[int], seed: int) -> int:
    data = array("q", [seed, *prefix]).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % VOCAB


def oracle(prompt: list[int], seed: int, max_tokens: int, stop_ids: set[int]) -> list[int]:
    """What plain decoding gives: the contract every schedule must keep."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


def sequence(
    id: int,
    prompt: list[int],
    *,
    max_tokens: int = 8,
    stop_ids: set[int] | None = None,
    seed: int = 0,
    n: int = 1,
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, n=n)
    return Sequence(
        id=id,
        request=Request(f"r{id}", tuple(prompt), params),
        choice=0,
        seed=seed,
        max_len=len(prompt) + max_tokens,
        stop_ids=frozenset(stop_ids or ()),
    )


class DoneEvent:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class FakeSlot:
    result: RoundResult

    def read(self, plan: RoundPlan) -> RoundResult:
        assert self.result.plan is plan
        return self.result


@dataclass
class FakeDevice:
    """Implements pipeline.Executor."""

    block_size: int
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)
    limits: dict[int, int] = field(default_factory=dict)
    fail_rounds: set[int] = field(default_factory=set)
    bad_rounds: set[int] = field(default_factory=set)  # whose logits are not finite
    rounds: list[RoundPlan] = field(default_factory=list)
    draft_block: int = 0  # positions that drafting writes rubbish to

    def make_slots(self, count: int) -> list[FakeSlot]:
        return [FakeSlot() for _ in range(count)]

    def execute(self, plan: RoundPlan, slot: FakeSlot) -> DoneEvent:
        self.rounds.append(plan)
        for bind in plan.binds:
            assert bind.row != PADDING_ROW
            self.owners[bind.row] = bind.sequence_id
            self.tables[bind.row] = []
            self.lengths[bind.row] = len(bind.token_ids)
            self.seeds[bind.row] = bind.seed
            self.limits[bind.row] = bind.max_len
        for grant in plan.grants:
            assert SCRATCH_PAGE not in grant.pages
            assert grant.first == len(self.tables[grant.row]), "grants must be appended without a gap"
            self.tables[grant.row].extend(grant.pages)
        if plan.round_id in self.fail_rounds:
            raise RuntimeError(f"round {plan.round_id} is lost")
        chunks = tuple(self._chunk(chunk) for chunk in plan.batch.chunks)
        rows = tuple(self._row(row, plan) for row in plan.batch.rows)
        if plan.round_id in self.bad_rounds:
            chunks = tuple(replace(tokens, token_ids=(), bad=True) for tokens in chunks)
            rows = tuple(replace(tokens, token_ids=(), bad=True) for tokens in rows)
        slot.result = RoundResult(plan, chunks, rows)
        return DoneEvent()

    def _write(self, row: int, position: int, token: int) -> None:
        page = self.tables[row][position // self.block_size]
        self.kv[page, position % self.block_size] = token

    def _read(self, row: int, length: int) -> list[int]:
        table, size = self.tables[row], self.block_size
        return [self.kv[table[i // size], i % size] for i in range(length)]

    def _chunk(self, chunk) -> RowTokens:
        assert self.owners[chunk.row] == chunk.sequence_id
        for offset, token in enumerate(chunk.token_ids):
            self._write(chunk.row, chunk.start + offset, token)
        if not chunk.samples:
            return RowTokens(chunk.sequence_id, ())
        assert chunk.end == self.lengths[chunk.row]
        return RowTokens(chunk.sequence_id, (self._draw(chunk.row),))

    def _row(self, row, plan: RoundPlan) -> RowTokens:
        """Drafts are right about every other time; the rows of wrong ones write rubbish, as on a device."""
        assert self.owners[row.row] == row.sequence_id
        start, limit = self.lengths[row.row] - 1, self.limits[row.row]
        if plan.batch.verify:
            granted = (
                len(self.tables[row.row]) * self.block_size
            )  # the rest of who drafts for nothing is lost
            end = min(start + self.draft_block, limit if row.verify else min(limit, granted))
            for position in range(start, end):
                self._write(row.row, position, -1)
        self._write(row.row, start, self.last[row.row])
        tokens: list[int] = []
        agreed = True
        for offset in range(row.verify + 1):
            if start + offset >= limit:
                break
            assert start + offset < row.kv_bound
            if agreed and self.lengths[row.row] < limit:
                tokens.append(self._draw(row.row))
                agreed = (tokens[-1] + start) % 3 > 0
            if offset < row.verify and start + offset + 1 < limit:
                self._write(row.row, start + offset + 1, tokens[-1] if agreed else -1)
        return RowTokens(row.sequence_id, tuple(tokens))

    def _draw(self, row: int) -> int:
        token = next_token(self._read(row, self.lengths[row]), self.seeds[row])
        self.last[row] = token
        self.lengths[row] += 1
        return token


class InlineLauncher:
    """Runs a call at once, like a launch thread that is always ahead."""

    def submit(self, fn) -> Future:
        future: Future = Future()
        try:
            future.set_result(fn())
        except Exception as error:
            future.set_exception(error)
        return future
