"""Scheduling against a fake device with real paging: no token lost, repeated or reordered."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_fake import FakeDevice, InlineLauncher, oracle, sequence

from xspec.core.request import FinishReason, Output
from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.core.sequence import Sequence, Status
from xspec.core.shapes import BucketGrid
from xspec.exec.driver import Driver
from xspec.exec.pipeline import Pipeline
from xspec.policy.base import Policy, PolicyView
from xspec.policy.fixed import FixedPolicy
from xspec.sched.pages import PageAllocator
from xspec.sched.scheduler import Limits, Scheduler


class ChangingPolicy:
    """Another K every round, 0 included, and sometimes fewer verified than drafted."""

    name = "changing"

    def __init__(self, seed: int, block: int = 0, most: int = 7) -> None:
        self._rng, self._block, self._most = random.Random(seed), block, most

    def plan(self, view: PolicyView) -> SpeculationPlan:
        steps = self._block or self._rng.randint(0, self._most)
        verify = self._rng.choice([None, self._rng.randint(0, steps)])
        return SpeculationPlan(view.plan_id, self.name, steps if verify != 0 else 0, verify)

    def observe(self, feedback: RoundFeedback) -> None:
        for row in feedback.rows:
            assert 0 <= row.verified <= row.proposed <= feedback.plan.draft_steps
            assert row.committed <= row.verified + 1


class Rig:
    """A driver over a fake device, stepped by hand."""

    def __init__(
        self,
        *,
        pages: int = 64,
        block_size: int = 4,
        slots: int = 2,
        prefix_cache: bool = True,
        policy: Policy | None = None,
        draft_block: int = 0,
        **limits,
    ) -> None:
        values = {"max_tokens_per_batch": 64, "max_seqs_per_batch": 8, "max_tokens_per_chunk": 64, **limits}
        self.allocator = PageAllocator(pages, block_size, prefix_cache=prefix_cache)
        self.scheduler = Scheduler(
            self.allocator,
            Limits(**values),
            BucketGrid.graph(values["max_seqs_per_batch"]),
            draft_block=draft_block,
        )
        self.device = FakeDevice(block_size, draft_block=draft_block)
        pipeline = Pipeline(self.device, InlineLauncher(), slots)
        self.driver = Driver(self.scheduler, policy or FixedPolicy(), pipeline, clock_s=lambda: 0.0)
        self.outputs: dict[str, list[Output]] = {}

    def turn(self) -> bool:
        """One turn of the engine loop; False when there is nothing left to do."""
        pipeline = self.driver.pipeline
        if not pipeline.full and self.driver.step():
            return True
        if pipeline.empty:
            return False
        for output in self.driver.retire().outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self.allocator.check_integrity([s.pages for s in self.scheduler.live.values()])
        order = [s.id for s in (*self.scheduler.running, *self.scheduler.waiting)]
        assert order == sorted(order), "a later arrival overtook an earlier one"
        return True

    def run(self) -> None:
        for _ in range(5000):
            if not self.turn():
                break
        else:
            raise AssertionError("no end in sight")
        assert self.scheduler.idle
        self.allocator.check_integrity()
        self.allocator.check_idle()

    def tokens(self, s: Sequence) -> list[int]:
        return [t for output in self.outputs.get(s.request.id, []) for t in output.token_ids]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("steps,verify,block", [(3, None, 0), (7, 2, 7), (5, 5, 5), (16, None, 0)])
def test_rounds_that_commit_several_tokens(slots: int, steps: int, verify: int | None, block: int) -> None:
    rig = Rig(slots=slots, policy=FixedPolicy(steps, verify), draft_block=block)
    seqs = [sequence(i, [i] * (1 + 3 * i), max_tokens=9 + i) for i in range(6)]
    for s in seqs:
        rig.scheduler.add(s)
    rig.run()
    for s in seqs:
        assert rig.tokens(s) == oracle([s.id] * (1 + 3 * s.id), 0, 9 + s.id, set())
    several = [o for outputs in rig.outputs.values() for o in outputs if len(o.token_ids) > 1]
    assert several, "no draft was ever accepted"


def test_the_end_of_a_budget_costs_no_pause() -> None:
    """6 tokens left and 7 drafts a round: the next round is planned before this one has retired."""
    rig = Rig(slots=2, policy=FixedPolicy(7))
    rig.scheduler.add(sequence(1, [1], max_tokens=6))
    assert [rig.turn() for _ in range(2)] == [True, True]
    assert len(rig.device.rounds) == 2  # prefill, then a decode round that may end it
    rig.run()
    assert len(rig.tokens(rig_sequence := sequence(1, [1], max_tokens=6))) == 6, rig_sequence


def test_drafts_leave_prompts_half_of_a_batch() -> None:
    rig = Rig(policy=FixedPolicy(7), max_tokens_per_batch=16, max_tokens_per_chunk=16)
    for i in range(8):
        rig.scheduler.add(sequence(i, [i] * 8, max_tokens=20))
    rig.run()
    mixed = [p for p in rig.device.rounds if p.batch.chunks and len(p.batch.rows) > 1]
    assert mixed and all(p.shape.prefill_tokens <= 8 for p in mixed)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("mix", [True, False])
def test_text_is_that_of_plain_decoding(slots: int, chunked: bool, mix: bool) -> None:
    rig = Rig(slots=slots, chunked_prefill=chunked, mix_batch=mix, max_tokens_per_chunk=5 if chunked else 64)
    seqs = [sequence(i, [i] * (1 + 3 * i), max_tokens=3 + i) for i in range(6)]
    for s in seqs:
        rig.scheduler.add(s)
    rig.run()
    for s in seqs:
        assert rig.tokens(s) == oracle([s.id] * (1 + 3 * s.id), 0, 3 + s.id, set())
        assert s.finish_reason is FinishReason.LENGTH


def test_chunks_respect_chunk_and_batch_budgets() -> None:
    rig = Rig(max_tokens_per_chunk=5, max_tokens_per_batch=8)
    for i in range(3):
        rig.scheduler.add(sequence(i, [i] * 12, max_tokens=2))
    rig.run()
    for plan in rig.device.rounds:
        assert all(len(c.token_ids) <= 5 for c in plan.batch.chunks)
        assert plan.shape.prefill_tokens + len(plan.batch.rows) <= 8
    assert any(plan.batch.chunks and plan.batch.rows for plan in rig.device.rounds), "nothing was ever mixed"


def test_without_mixing_no_round_holds_both() -> None:
    rig = Rig(mix_batch=False, max_tokens_per_chunk=4)
    for i in range(3):
        rig.scheduler.add(sequence(i, [i] * 10, max_tokens=4))
    rig.run()
    assert not any(plan.batch.chunks and plan.batch.rows for plan in rig.device.rounds)


def test_stop_in_flight_leaves_no_trace() -> None:
    """With two slots a round past the stop is already under way; its token must vanish."""
    prompt = [1, 2, 3]
    text = oracle(prompt, 0, 8, set())
    rig = Rig(slots=2)
    s = sequence(1, prompt, max_tokens=8, stop_ids={text[2]})
    rig.scheduler.add(s)
    rig.run()
    assert rig.tokens(s) == oracle(prompt, 0, 8, {text[2]})
    assert rig.outputs["r1"][-1].finish_reason is FinishReason.STOP
    assert rig.outputs["r1"][-1].stop_token == text[2]


def test_a_prompt_seen_before_is_served_from_the_cache_and_answers_extend_it() -> None:
    rig = Rig()
    first = sequence(1, list(range(9)), max_tokens=8)
    rig.scheduler.add(first)
    rig.run()
    assert first.cached_tokens == 0
    conversation = [*range(9), *rig.tokens(first), 5, 6]  # 9 + 8 + 2 tokens, 16 of them with known KV
    second = sequence(2, conversation, max_tokens=3)
    rig.scheduler.add(second)
    rig.run()
    assert second.cached_tokens == 16
    assert rig.tokens(second) == oracle(conversation, 0, 3, set())


def test_preemption_recomputes_and_loses_nothing() -> None:
    rig = Rig(pages=7, block_size=2, admission_memory_threshold=1.0)
    seqs = [sequence(i, [i, i], max_tokens=9) for i in range(3)]
    for s in seqs:
        rig.scheduler.add(s)
    rig.run()
    assert rig.scheduler.counters.preemptions > 0
    assert seqs[0].preemptions == 0, "the most senior sequence must not be preempted"
    for s in seqs:
        assert rig.tokens(s) == oracle([s.id, s.id], 0, 9, set())


def test_admission_is_first_come_first_served_within_rows() -> None:
    rig = Rig(max_seqs_per_batch=2)
    seqs = [sequence(i, [i, 1], max_tokens=3) for i in range(5)]
    for s in seqs:
        rig.scheduler.add(s)
    order: list[int] = []
    while rig.turn():
        order += [s.id for s in rig.scheduler.running if s.id not in order]
    assert order == [0, 1, 2, 3, 4]
    assert max(len(plan.batch.rows) for plan in rig.device.rounds) == 2


def test_cancel_waiting_prefilling_and_running() -> None:
    rig = Rig(max_seqs_per_batch=1, max_tokens_per_chunk=2)
    running, waiting = sequence(1, [1] * 8, max_tokens=20), sequence(2, [2], max_tokens=2)
    rig.scheduler.add(running)
    rig.scheduler.add(waiting)
    rig.turn()
    rig.scheduler.cancel(waiting, FinishReason.ABORT)
    assert waiting.status is Status.FINISHED
    rig.scheduler.cancel(running, FinishReason.ABORT)
    assert running.status is Status.DRAINING, "a chunk of it is in flight"
    rig.run()
    assert running.status is Status.FINISHED
    assert rig.tokens(running) == []


def test_a_lost_round_ends_its_sequences_and_spares_the_others() -> None:
    rig = Rig(slots=2)
    hit = sequence(1, [1, 2], max_tokens=9)
    rig.scheduler.add(hit)
    rig.turn()
    rig.device.fail_rounds = {1}
    rig.turn()
    rig.turn()  # retires round 0
    spared = sequence(2, [3, 4], max_tokens=5)
    rig.scheduler.add(spared)
    retirement = rig.driver.retire()
    assert retirement.failed_requests == {"r1"}
    assert isinstance(retirement.error, RuntimeError)
    rig.run()
    assert hit.finish_reason is FinishReason.ERROR
    assert rig.tokens(spared) == oracle([3, 4], 0, 5, set())


def test_without_chunking_a_chunk_size_holds_nobody_up() -> None:
    """A prompt longer than a chunk may be: it must neither wait for ever nor be cut."""
    rig = Rig(chunked_prefill=False, max_tokens_per_chunk=5)
    s = sequence(1, [1] * 12, max_tokens=3)
    rig.scheduler.add(s)
    rig.run()
    assert rig.tokens(s) == oracle([1] * 12, 0, 3, set())
    assert [len(c.token_ids) for plan in rig.device.rounds for c in plan.batch.chunks] == [12]


def test_preempted_sequences_queue_in_order_of_arrival() -> None:
    rig = Rig(slots=1)
    seqs = [sequence(i, [i] * 4, max_tokens=6) for i in range(5)]
    for s in seqs:
        rig.scheduler.add(s)
    rig.turn()
    rig.turn()
    for s in (seqs[2], seqs[4], seqs[3]):  # whatever the order in which their rounds retire
        rig.scheduler._preempt(s)
    assert [s.id for s in rig.scheduler.waiting] == [2, 3, 4]
    rig.run()
    assert all(rig.tokens(s) == oracle([s.id] * 4, 0, 6, set()) for s in seqs)


@pytest.mark.parametrize("slots", [1, 2])
def test_choices_compute_their_prompt_once(slots: int) -> None:
    rig = Rig(slots=slots, max_tokens_per_chunk=8)
    prompt = [1, 2, 3] * 7
    leader = sequence(1, prompt, max_tokens=3, n=3)
    others = [sequence(i, prompt, max_tokens=3, seed=i) for i in (2, 3)]
    for choice, s in enumerate(others, start=1):
        s.request, s.choice = leader.request, choice
    for s in (leader, *others):
        rig.scheduler.add(s)
    rig.run()
    assert sum(plan.shape.prefill_tokens for plan in rig.device.rounds) == 21 + 1 + 1
    starts = {
        c.sequence_id: plan.round_id for plan in rig.device.rounds for c in plan.batch.chunks if c.samples
    }
    assert starts[2] == starts[3], "one wait for all of them"
    assert [s.cached_tokens for s in (leader, *others)] == [0, 0, 0], "nothing was there when they came"
    found = sorted(tuple(o.token_ids) for o in rig.outputs["r1"])
    assert found == sorted((t,) for s in (leader, *others) for t in oracle(prompt, s.seed, 3, set()))


def test_choices_follow_when_the_first_one_leaves() -> None:
    rig = Rig(max_tokens_per_chunk=4)
    leader, other = sequence(1, [7] * 20, max_tokens=2, n=2), sequence(2, [7] * 20, max_tokens=2)
    other.request, other.choice = leader.request, 1
    rig.scheduler.add(leader)
    rig.scheduler.add(other)
    rig.turn()
    rig.scheduler.cancel(leader, FinishReason.ABORT)
    rig.run()
    assert other.finish_reason is FinishReason.LENGTH


def scrubbed(rig: Rig) -> list[int]:
    return sorted(page for plan in rig.device.rounds for page in plan.scrubs)


def test_pages_spoiled_after_a_stop_are_scrubbed_before_reuse() -> None:
    """The round past a stop is nobody's business, but what it wrote stays in the pages."""
    text = oracle([1, 2, 3], 0, 8, set())
    rig = Rig(slots=2)
    s = sequence(1, [1, 2, 3], max_tokens=8, stop_ids={text[1]})
    rig.scheduler.add(s)
    rig.device.bad_rounds = {2}  # rounds 0 and 1 give the two tokens of the answer
    rig.run()
    assert s.finish_reason is FinishReason.STOP
    assert rig.tokens(s) == text[:2]
    assert len(rig.device.rounds) == 3
    rig.scheduler.add(sequence(2, [4], max_tokens=1))
    rig.run()
    assert len(scrubbed(rig)) == 2


def test_a_bad_middle_chunk_is_not_published() -> None:
    rig = Rig(slots=1, max_tokens_per_chunk=4)
    s = sequence(1, list(range(20)), max_tokens=2)
    rig.scheduler.add(s)
    rig.device.bad_rounds = {1}
    rig.run()
    assert s.finish_reason is FinishReason.ERROR
    assert len(rig.device.rounds) == 2, "the rest of the prompt is not computed"
    again = sequence(2, list(range(20)), max_tokens=2)
    rig.scheduler.add(again)
    rig.run()
    assert again.cached_tokens == 0
    assert len(scrubbed(rig)) == 5
    assert rig.tokens(again) == oracle(list(range(20)), 0, 2, set())


def test_a_lost_round_does_not_fail_who_was_finished_before() -> None:
    text = oracle([1, 2], 0, 4, set())
    rig = Rig(slots=2)
    rig.scheduler.add(sequence(1, [1, 2], max_tokens=8, stop_ids={text[0]}))
    rig.device.fail_rounds = {1}
    assert rig.turn() and rig.turn() and rig.turn()  # rounds 0 and 1 under way, round 0 retired: it stops
    retirement = rig.driver.retire()
    assert isinstance(retirement.error, RuntimeError)
    assert retirement.failed_requests == frozenset()


def test_a_waiting_prompt_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(pages=8, block_size=4, slots=1)
    prompt = list(range(17))
    rig.scheduler.add(sequence(1, prompt, max_tokens=8))
    for _ in range(4):
        rig.turn()
    hashed: list[tuple[int, ...]] = []
    block_hash = rig.allocator.block_hash

    def counted(parent: bytes, tokens: list[int]) -> bytes:
        hashed.append(tuple(tokens))
        return block_hash(parent, tokens)

    monkeypatch.setattr(rig.allocator, "block_hash", counted)
    waiting = sequence(2, [*prompt, *range(30, 45)], max_tokens=1)
    rig.scheduler.add(waiting)
    for _ in range(6):
        rig.turn()
    assert waiting.status is Status.WAITING
    assert hashed.count((0, 1, 2, 3)) == 1


def test_overlap_lag_is_two_rounds_with_two_slots() -> None:
    """Round n is planned knowing rounds up to n-2, never n-1, however fast the device is."""
    rig = Rig(slots=2)
    rig.scheduler.add(sequence(1, [1], max_tokens=10))
    known: list[int] = []
    pipeline = rig.driver.pipeline
    while True:
        before = len(rig.device.rounds)
        retired = before - (0 if pipeline.empty else len(pipeline._ring))
        if not rig.turn():
            break
        if len(rig.device.rounds) > before:
            known.append(before - retired)
    assert known[0] == 0
    assert set(known[1:]) == {1}, "exactly one unretired round before each submission in steady state"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_load_on_any_pool_keeps_the_text(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5), label="block_size")
    longest = 24
    rig = Rig(
        pages=data.draw(st.integers(-(-longest // block_size), 40), label="pages"),
        block_size=block_size,
        slots=data.draw(st.integers(1, 3), label="slots"),
        prefix_cache=data.draw(st.booleans(), label="prefix_cache"),
        max_tokens_per_batch=data.draw(st.integers(9, 40), label="batch"),
        max_tokens_per_chunk=data.draw(st.integers(1, 40), label="chunk"),
        max_seqs_per_batch=data.draw(st.integers(1, 8), label="rows"),
        mix_batch=data.draw(st.booleans(), label="mix"),
        admission_memory_threshold=data.draw(st.sampled_from([0.5, 0.95, 1.0]), label="threshold"),
        draft_block=(block := data.draw(st.sampled_from([0, 0, 5]), label="draft block")),
        policy=ChangingPolicy(data.draw(st.integers(0, 99), label="policy"), block)
        if data.draw(st.booleans(), label="speculates")
        else None,
    )
    rng = random.Random(data.draw(st.integers(0, 2**16), label="load"))
    seqs: list[tuple[Sequence, list[int], int, set[int]]] = []
    cancelled: set[int] = set()
    for i in range(rng.randint(1, 10)):
        prompt = [rng.randint(0, 1)] * rng.randint(1, 12)
        stops = {rng.randint(0, 49) for _ in range(rng.randint(0, 2))}
        answer = rng.randint(1, longest - len(prompt))
        s = sequence(i, prompt, max_tokens=answer, stop_ids=stops, seed=rng.randint(0, 2))
        if rng.random() < 0.2:
            s.request = replace(s.request, params=replace(s.request.params, speculative=False))
        seqs.append((s, prompt, answer, stops))
    late = list(seqs)
    for _ in range(3000):
        if late and rng.random() < 0.3:
            rig.scheduler.add(late.pop(0)[0])
        if rng.random() < 0.03:
            victim = rng.choice(seqs)[0]
            if victim.tokens and victim.status is not Status.FINISHED and victim.finish_reason is None:
                rig.scheduler.cancel(victim, FinishReason.ABORT)
                cancelled.add(victim.id)
        if not rig.turn() and not late:
            break
    assert rig.scheduler.idle
    rig.allocator.check_integrity()
    for s, prompt, answer, stops in seqs:
        expected = oracle(prompt, s.seed, answer, stops)
        if s.id in cancelled:
            assert rig.tokens(s) == expected[: len(rig.tokens(s))]
        else:
            assert rig.tokens(s) == expected
