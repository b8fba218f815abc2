"""What counts of a draft: token by token at retirement, behind stop strings in the engine, in sums."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from drafting_fake import DraftingDevice
from paged_fake import VOCAB, InlineLauncher, oracle, sequence
from test_loop import collect, letters, text_of, tokens_of
from test_metrics import value

from xspec.core.drafts import DraftCounts, DraftTally, DraftTotals
from xspec.core.request import FinishReason, Output, SamplingParams
from xspec.core.round import RowFeedback
from xspec.core.shapes import BucketGrid
from xspec.engine.api import TextOutput
from xspec.engine.engine import Admission, AsyncEngine
from xspec.engine.threads import Threads
from xspec.exec.driver import Driver, Retirement
from xspec.exec.pipeline import Pipeline
from xspec.metrics import Metrics
from xspec.policy.fixed import FixedPolicy
from xspec.sched.pages import PageAllocator
from xspec.sched.scheduler import Limits, Scheduler

PROMPT = [1, 2, 13]
TEXT = oracle(PROMPT, 0, 40, set())
assert len(set(TEXT[:8])) == 8, "stops of these tests must come once"

LIMITS = Limits(max_tokens_per_batch=64, max_seqs_per_batch=8, max_tokens_per_chunk=64)


def always(agreed: int) -> Callable[[int, int], int]:
    return lambda sequence_id, round_id: agreed


EVERY_DRAFT = always(99)


# -- one row of one round -----------------------------------------------------------------------


@dataclass
class Case:
    """A decode round whose prompt round gave TEXT[0], so that it returns TEXT[1:]."""

    agree: int
    draft: int = 4
    verify: int | None = None
    room: int = 30
    stop: int | None = None  # this token of the round, counted from 1
    speculative: bool = True

    def retired(self) -> Retirement:
        device = DraftingDevice(4, agree=always(self.agree))
        policy = FixedPolicy(self.draft, self.verify)
        scheduler = Scheduler(PageAllocator(64, 4), LIMITS, BucketGrid.graph(8))
        driver = Driver(scheduler, policy, Pipeline(device, InlineLauncher(), 1), clock_s=lambda: 0.0)
        stops = set() if self.stop is None else {TEXT[self.stop]}
        row = sequence(1, PROMPT, max_tokens=1 + self.room, stop_ids=stops)
        row.request = type(row.request)("r1", tuple(PROMPT), SamplingParams(speculative=self.speculative))
        scheduler.add(row)
        assert driver.step()
        driver.retire()
        assert driver.step()
        return driver.retire()


CASES = {
    # proposed, admitted, verified, committed, censored; accepted
    "some accepted": (Case(agree=2),                            (4, 4, 4, 3, False), 2),
    "none accepted": (Case(agree=0),                            (4, 4, 4, 1, False), 0),
    "all accepted": (Case(agree=4),                             (4, 4, 4, 5, False), 4),
    "stop at the bonus token": (Case(agree=4, stop=5),          (4, 4, 4, 5, False), 4),
    "stop at the correction": (Case(agree=2, stop=3),           (3, 4, 3, 3, False), 2),
    "stop at the first token, rejected": (Case(0, stop=1),      (1, 4, 1, 1, False), 0),
    "stop at an accepted draft": (Case(agree=4, stop=2),        (2, 4, 2, 2, True), 2),
    "stop at the first accepted draft": (Case(agree=1, stop=1), (1, 4, 1, 1, True), 1),
    "stop at the last accepted draft": (Case(agree=4, stop=4),  (4, 4, 4, 4, True), 4),
    "the budget ends the run": (Case(agree=4, room=3),          (2, 2, 2, 3, False), 2),
    "the budget is one more than drafts": (Case(4, room=5),     (4, 4, 4, 5, False), 4),
    "a rejection before the budget": (Case(agree=1, room=3),    (2, 2, 2, 2, False), 1),
    "room for the target's own only": (Case(agree=4, room=1),   (0, 0, 0, 1, False), 0),
    "a stop before the budget": (Case(agree=4, room=3, stop=2), (2, 2, 2, 2, True), 2),
    "a stop on the budget": (Case(agree=4, room=3, stop=3),     (2, 2, 2, 3, False), 2),
    "half verified": (Case(agree=4, verify=2),                  (4, 2, 2, 3, False), 2),
    "half verified, stop inside": (Case(4, verify=2, stop=2),   (2, 2, 2, 2, True), 2),
    "half verified, stop at once": (Case(4, verify=2, stop=1),  (1, 2, 1, 1, True), 1),
    "half verified, stop at the end": (Case(4, verify=2, stop=3), (3, 2, 2, 3, False), 2),
    "half verified, little room": (Case(4, verify=2, room=2),   (1, 1, 1, 2, False), 1),
    "nothing verified": (Case(agree=4, verify=0),               (0, 0, 0, 1, False), 0),
    "speculation off": (Case(agree=4, speculative=False),       (0, 0, 0, 1, False), 0),
    "a plain round": (Case(agree=4, draft=0),                   (0, 0, 0, 1, False), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_row_counts_what_the_sequence_can_still_have(name: str) -> None:
    case, counts, accepted = CASES[name]
    retired = case.retired()
    assert retired.feedback is not None
    assert retired.feedback.rows == (RowFeedback(1, *counts),)
    assert retired.feedback.rows[0].accepted == accepted
    committed = counts[3]
    assert retired.feedback.committed_tokens == committed
    (output,) = retired.outputs
    assert list(output.token_ids) == TEXT[1 : 1 + committed]
    assert [entry.token_id for entry in output.logprobs] == TEXT[1 : 1 + committed]
    proposed, verified = counts[0], counts[2]
    expected = DraftCounts(proposed, verified, accepted) if proposed else None
    assert output.drafts == expected
    ended = case.stop == committed, case.room == committed
    assert output.finish_reason == (
        FinishReason.STOP if ended[0] else FinishReason.LENGTH if ended[1] else None
    )


def test_a_prompt_round_has_no_drafts_and_a_failed_row_no_feedback() -> None:
    device = DraftingDevice(4, bad_rounds={1})
    scheduler = Scheduler(PageAllocator(64, 4), LIMITS, BucketGrid.graph(8))
    driver = Driver(scheduler, FixedPolicy(4), Pipeline(device, InlineLauncher(), 1), clock_s=lambda: 0.0)
    scheduler.add(sequence(1, PROMPT))
    assert driver.step()
    prompt = driver.retire()
    assert prompt.feedback is not None and prompt.feedback.rows == ()
    assert [output.drafts for output in prompt.outputs] == [None]
    assert driver.step()
    failed = driver.retire()
    assert failed.feedback is not None
    assert (failed.feedback.rows, failed.feedback.committed_tokens) == ((), 0)
    (output,) = failed.outputs
    assert (output.token_ids, output.finish_reason, output.drafts) == ((), FinishReason.ERROR, None)


def test_impossible_counts_are_refused() -> None:
    for counts in ((1, 2, 0), (2, 1, 2), (3, 3, -1)):
        with pytest.raises(ValueError, match="drafts accepted of"):
            DraftCounts(*counts)
    with pytest.raises(ValueError, match="5 tokens were proposed where 4 are the most"):
        DraftTally(4).add(DraftCounts(5, 5, 0), 1)


def test_an_earlier_end_only_takes_away() -> None:
    full = DraftCounts(5, 4, 3)
    ends = [full.until(tokens) for tokens in range(6)]
    assert ends == [
        DraftCounts(0, 0, 0), DraftCounts(1, 1, 1), DraftCounts(2, 2, 2), DraftCounts(3, 3, 3),
        DraftCounts(4, 4, 3), DraftCounts(5, 4, 3),
    ]  # fmt: skip
    assert full.until(4).until(2) == full.until(2)


# -- sums and rates -----------------------------------------------------------------------------


def test_a_tally_by_hand() -> None:
    tally = DraftTally(3)
    for counts, committed in (
        (DraftCounts(3, 3, 3), 4), (DraftCounts(3, 2, 1), 2), (DraftCounts(3, 3, 0), 1),
        (DraftCounts(1, 1, 1), 2), (DraftCounts(3, 3, 1), 2),
    ):  # fmt: skip
        tally.add(counts, committed)
    assert tally.histogram == [1, 3, 0, 1]
    assert dict(tally.by_length) == {1: [0, 1], 3: [1, 2, 0, 1]}
    assert (tally.verified_tokens, tally.committed_tokens) == (12, 11)
    totals = tally.totals()
    assert totals == DraftTotals(5, 13, 6, (4, 1, 1))
    assert (totals.mean_acceptance_length, totals.acceptance_rate) == (2.2, 6 / 13)
    assert totals.position_rates == (0.8, 0.2, 0.2)
    assert totals.conditional_rates == (0.8, 0.25, 1.0)
    assert totals.since(DraftTotals(4, 10, 3, (3,))) == DraftTotals(1, 3, 3, (1, 1, 1))


def test_without_drafts_there_are_no_rates() -> None:
    empty = DraftTally(2).totals()
    assert empty == DraftTotals(0, 0, 0, (0, 0))
    assert (empty.mean_acceptance_length, empty.acceptance_rate, empty.position_rates) == (None, None, ())
    assert empty.conditional_rates == (None, None)
    assert DraftTotals(4, 8, 0, (0, 0)).conditional_rates == (0.0, None)


# -- the engine: stop strings -------------------------------------------------------------------


@asynccontextmanager
async def drafting(
    draft: int = 4, agree: Callable[[int, int], int] = EVERY_DRAFT, *, slots: int = 2, block_size: int = 4
) -> AsyncIterator[AsyncEngine]:
    allocator = PageAllocator(256, block_size)
    scheduler = Scheduler(allocator, LIMITS, BucketGrid.graph(8))
    threads = Threads()
    device = DraftingDevice(block_size, agree=agree)
    driver = Driver(scheduler, FixedPolicy(draft), Pipeline(device, threads, slots), clock_s=time.monotonic)
    engine = AsyncEngine(
        model_id="m",
        text=letters(),
        driver=driver,
        threads=threads,
        metrics=Metrics("m", draft_width=draft),
        admission=Admission(max_model_len=128, vocab_size=VOCAB, max_concurrent_requests=0, random_seed=1),
        info={},
        policies=lambda _: FixedPolicy(),
    )
    try:
        yield engine
    finally:
        await engine.close()
        allocator.check_integrity()
        assert allocator.available == allocator.pages


async def ask(engine: AsyncEngine, prompt: list[int], max_tokens: int = 40, **fields) -> list[TextOutput]:
    params = SamplingParams(max_tokens=max_tokens, seed=0, logprobs=0, **fields)
    return await collect(engine.generate(prompt, params))


def counts_of(outputs: list[TextOutput]) -> list[DraftCounts]:
    return [output.drafts for output in outputs if output.drafts is not None]


def totals_of(engine: AsyncEngine) -> DraftTotals:
    totals = engine.metrics.draft_totals()
    assert totals is not None
    return totals


def letter(index: int, end: int | None = None) -> str:
    return text_of(TEXT[index : index + 1 if end is None else end])


STOPS = {
    # The prompt round gives TEXT[0], the next one TEXT[1:6]: four accepted drafts and a bonus token.
    "inside the run": (letter(3), 4, [DraftCounts(3, 3, 3)]),
    "at the bonus token": (letter(5), 6, [DraftCounts(4, 4, 4)]),
    "at the first draft": (letter(1), 2, [DraftCounts(1, 1, 1)]),
    "over two tokens of a round": (letter(2, 4), 4, [DraftCounts(3, 3, 3)]),
    "over two rounds": (letter(5, 7), 7, [DraftCounts(4, 4, 4), DraftCounts(1, 1, 1)]),
    "in the prompt's own round": (letter(0), 1, []),
}


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", STOPS)
async def test_what_follows_a_stop_string_leaves_no_trace(name: str, slots: int) -> None:
    stop, tokens, counts = STOPS[name]
    async with drafting(slots=slots) as engine:
        outputs = await ask(engine, PROMPT, stop=(stop,))
        assert tokens_of(outputs) == TEXT[:tokens]
        assert "".join(output.text for output in outputs) == text_of(TEXT[:tokens]).removesuffix(stop)
        decoded = [entry.token_id for output in outputs[1:] for entry in output.logprobs]
        assert decoded == TEXT[1:tokens]
        last = outputs[-1]
        assert (last.completion_tokens, last.finish_reason, last.stop_reason) == (
            tokens, FinishReason.STOP, stop,
        )  # fmt: skip
        assert counts_of(outputs) == counts
        metrics = engine.metrics
        assert value(metrics, "generation_tokens_total") == tokens
        assert value(metrics, "request_generation_tokens_sum") == tokens
        assert value(metrics, "spec_decode_num_drafts_total") == len(counts)
        assert value(metrics, "spec_decode_num_draft_tokens_total") == sum(c.proposed for c in counts)
        assert value(metrics, "spec_decode_num_accepted_tokens_total") == sum(c.accepted for c in counts)
        assert value(metrics, "spec_decode_num_committed_tokens_total") == tokens - 1
        # The cache finds nothing that came behind the stop either.
        again = await ask(engine, [*PROMPT, *TEXT[:20]], max_tokens=1)
        assert again[-1].cached_tokens <= len(PROMPT) + tokens


async def test_a_rejected_draft_is_no_generated_token() -> None:
    async with drafting(agree=always(1)) as engine:
        outputs = await ask(engine, PROMPT, max_tokens=11)
        assert tokens_of(outputs) == TEXT[:11]
        assert outputs[-1].completion_tokens == 11
        assert counts_of(outputs) == [DraftCounts(4, 4, 1)] * 3 + [DraftCounts(3, 3, 1), DraftCounts(1, 1, 1)]
        assert totals_of(engine) == DraftTotals(5, 16, 5, (5, 0, 0, 0))
        assert value(engine.metrics, "generation_tokens_total") == 11


async def test_answers_of_requests_with_stop_strings_are_cached_one_round_later() -> None:
    """Their next turn finds all but what the last round brought; without drafts that is nothing."""
    conversation = [*PROMPT, *TEXT[:17], 5]  # 20 tokens, of which 19 have known KV
    for draft, stop, cached in ((4, (), 16), (4, ("?",), 16), (0, ("?",), 16)):
        async with drafting(draft) as engine:
            await ask(engine, PROMPT, max_tokens=17, stop=stop)
            assert (await ask(engine, conversation, max_tokens=1))[-1].cached_tokens == cached
    async with drafting(draft=10) as engine:  # rounds of 1, 11 and 5 tokens: 15 were seen before the last
        await ask(engine, PROMPT, max_tokens=17, stop=("?",))
        assert (await ask(engine, conversation, max_tokens=1))[-1].cached_tokens == 12


async def test_speculation_off_for_one_request_alone() -> None:
    async with drafting() as engine:
        plain, fast = await asyncio.gather(
            ask(engine, PROMPT, max_tokens=20, speculative=False), ask(engine, [9, 9], max_tokens=20)
        )
        assert tokens_of(plain) == TEXT[:20]
        assert tokens_of(fast) == oracle([9, 9], 0, 20, set())
        assert counts_of(plain) == []
        assert [len(output.token_ids) for output in plain] == [1] * 20
        drafted = counts_of(fast)
        assert totals_of(engine).drafts == len(drafted) == 4
        assert totals_of(engine).accepted_tokens == sum(counts.accepted for counts in drafted) == 15
        assert value(engine.metrics, "generation_tokens_total") == 40


@pytest.mark.parametrize("slots", [1, 2, 3])
async def test_counters_are_the_sums_of_what_requests_were_told(slots: int) -> None:
    rng = random.Random(slots)
    agreed = [rng.randrange(6) for _ in range(64)]
    async with drafting(5, lambda s, r: agreed[(7 * s + r) % 64], slots=slots) as engine:
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))] for _ in range(24)]
        kinds = [
            {"stop": tuple(chr(ord("A") + rng.randrange(VOCAB)) for _ in range(rng.randrange(3)))},
            {"stop_token_ids": tuple(rng.randrange(VOCAB) for _ in range(2))},
            {"speculative": False},
        ]
        asked = [(prompt, rng.randrange(1, 30), rng.choice(kinds)) for prompt in prompts]
        results = await asyncio.gather(*(ask(engine, p, m, **fields) for p, m, fields in asked))
        tally = DraftTally(5)
        for (prompt, max_tokens, fields), outputs in zip(asked, results, strict=True):
            stops = {ord(stop) - ord("A") for stop in fields.get("stop", ())}
            stops |= set(fields.get("stop_token_ids", ()))
            assert tokens_of(outputs) == oracle(prompt, 0, max_tokens, stops)
            assert outputs[-1].completion_tokens == len(tokens_of(outputs))
            for output in outputs:
                if output.drafts is not None:
                    tally.add(output.drafts, len(output.token_ids))
        assert totals_of(engine) == tally.totals()
        assert tally.totals().drafts > 20
        delivered = sum(len(tokens_of(outputs)) for outputs in results)
        assert value(engine.metrics, "generation_tokens_total") == delivered
        verified = value(engine.metrics, "spec_decode_num_verified_tokens_total")
        assert verified == tally.verified_tokens <= tally.totals().draft_tokens


def test_an_output_is_cut_but_not_changed() -> None:
    """`Output` itself stays as committed: policies learn from it before the text is known."""
    output = Output("r", 0, (1, 2, 3), drafts=DraftCounts(4, 4, 2))
    assert output.drafts is not None and output.drafts.until(1) == DraftCounts(1, 1, 1)
    assert output.drafts == DraftCounts(4, 4, 2)
