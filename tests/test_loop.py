"""The engine loop over a fake device: overlap, tails, idling, aborts, failures, draining."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import tokenizers
from paged_fake import VOCAB, DoneEvent, FakeDevice, oracle

from xspec.core.request import FinishReason, SamplingParams
from xspec.core.round import RoundPlan
from xspec.core.shapes import BucketGrid
from xspec.engine.api import Phase, TextOutput, TextStream
from xspec.engine.engine import Admission, AsyncEngine
from xspec.engine.threads import Threads
from xspec.errors import EngineDeadError, OverloadedError, PromptTooLongError, RequestError
from xspec.exec.driver import Driver
from xspec.exec.pipeline import Pipeline
from xspec.metrics import Metrics
from xspec.policy.fixed import FixedPolicy
from xspec.sched.pages import PageAllocator
from xspec.sched.scheduler import Limits, Scheduler
from xspec.text.tokenizer import TextAssets, Tokenizer


def letters() -> TextAssets:
    """A vocabulary of VOCAB one-letter words: token i is chr(ord('A') + i)."""
    vocab = {chr(ord("A") + i): i for i in range(VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="A"))
    backend.decoder = tokenizers.decoders.Fuse()
    return TextAssets(Tokenizer(backend), None, frozenset(), {})


def text_of(tokens: list[int]) -> str:
    return "".join(chr(ord("A") + t) for t in tokens)


class SlowDevice(FakeDevice):
    """Takes a moment per round, so that the host really runs ahead of it."""

    delay_s: float = 0.001

    def execute(self, plan: RoundPlan, slot: object) -> DoneEvent:
        time.sleep(self.delay_s)
        return super().execute(plan, slot)  # type: ignore[arg-type]


@asynccontextmanager
async def running(
    slots: int = 2, pages: int = 64, cap: int = 0
) -> AsyncIterator[tuple[AsyncEngine, SlowDevice]]:
    device = SlowDevice(block_size=4)
    allocator = PageAllocator(pages, 4)
    limits = Limits(max_tokens_per_batch=64, max_seqs_per_batch=8, max_tokens_per_chunk=16)
    threads = Threads()
    scheduler = Scheduler(allocator, limits, BucketGrid.graph(8))
    driver = Driver(scheduler, FixedPolicy(), Pipeline(device, threads, slots), clock_s=time.monotonic)
    engine = AsyncEngine(
        model_id="fake",
        text=letters(),
        driver=driver,
        threads=threads,
        metrics=Metrics("fake"),
        admission=Admission(max_model_len=64, vocab_size=VOCAB, max_concurrent_requests=cap, random_seed=1),
        info={},
        policies=lambda _: FixedPolicy(),
    )
    try:
        yield engine, device
    finally:
        dead = engine.phase is Phase.DEAD
        await engine.close()
        if not dead:  # a dead engine keeps what its last rounds may still be writing to
            allocator.check_integrity()
            assert allocator.available == pages


async def collect(stream: TextStream) -> list[TextOutput]:
    return [output async for output in stream]


def tokens_of(outputs: list[TextOutput], choice: int = 0) -> list[int]:
    return [t for o in outputs if o.choice == choice for t in o.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def params(max_tokens: int = 8, **kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, **kwargs)


@pytest.mark.parametrize("slots", [1, 2])
async def test_many_requests_at_once_keep_their_text(slots: int) -> None:
    async with running(slots) as (engine, _):
        prompts = [[i, i + 1, 3] for i in range(20)]
        results = await asyncio.gather(*(collect(engine.generate(p, params(12))) for p in prompts))
        for prompt, outputs in zip(prompts, results, strict=True):
            expected = oracle(prompt, 0, 12, set())
            assert tokens_of(outputs) == expected
            assert "".join(o.text for o in outputs) == text_of(expected)
            assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
            assert outputs[-1].completion_tokens == 12
            assert outputs[-1].prompt_tokens == 3


async def test_tail_of_a_load_retires_the_round_in_flight() -> None:
    """One token: after the prefill round nothing can be planned, and the round in flight must still end."""
    async with running() as (engine, device):
        outputs = await collect(engine.generate([1, 2], params(1)))
        assert tokens_of(outputs) == oracle([1, 2], 0, 1, set())
        assert len(device.rounds) == 1


async def test_an_idle_engine_sleeps_and_wakes() -> None:
    async with running() as (engine, device):
        await collect(engine.generate([1], params(2)))
        await until(lambda: engine._driver.pipeline.empty)
        await asyncio.sleep(0.01)
        steps = 0
        driver = engine._driver
        step = driver.step

        def counted() -> bool:
            nonlocal steps
            steps += 1
            return step()

        driver.step = counted  # type: ignore[method-assign]
        await asyncio.sleep(0.05)
        assert steps == 0, "an idle loop must not poll"
        assert tokens_of(await collect(engine.generate([2], params(2)))) == oracle([2], 0, 2, set())
        assert steps > 0


async def test_a_request_that_arrives_while_nothing_can_be_planned_is_not_kept_waiting() -> None:
    async with running() as (engine, device):
        device.delay_s = 0.4  # long against any hiccup of the machine
        first = asyncio.create_task(collect(engine.generate([1], params(1))))
        await asyncio.sleep(0.03)
        second = asyncio.create_task(collect(engine.generate([2], params(1))))
        await asyncio.sleep(0.02)
        assert not first.done()
        assert len(engine._driver.pipeline._ring) == 2, (
            "the second prompt is queued behind the round in flight"
        )
        await asyncio.gather(first, second)


@pytest.mark.parametrize("slots", [1, 2])
async def test_abort_returns_pages_within_two_rounds(slots: int) -> None:
    async with running(slots) as (engine, device):
        stream = engine.generate([1, 2, 3], params(50))
        await anext(stream)
        rounds = len(device.rounds)
        await stream.aclose()
        await until(lambda: engine._scheduler.idle)
        assert len(device.rounds) <= rounds + 2
        assert engine._scheduler.pages.available == 64


async def test_closing_a_stream_before_its_first_output_aborts() -> None:
    async with running() as (engine, _):
        await engine.generate([1], params(50)).aclose()
        await until(lambda: engine._scheduler.idle)


async def test_cancelling_the_consumer_aborts() -> None:
    async with running() as (engine, _):
        task = asyncio.create_task(collect(engine.generate([1], params(60))))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine._scheduler.idle)


async def test_a_stop_string_ends_the_sequence_and_hides_what_follows() -> None:
    expected = oracle([5], 0, 20, set())
    stop = text_of(expected[4:6])
    async with running() as (engine, device):
        outputs = await collect(engine.generate([5], params(20, stop=(stop,))))
        assert "".join(o.text for o in outputs) == text_of(expected).split(stop)[0]
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].stop_reason == stop
        assert outputs[-1].completion_tokens == 6
        await until(lambda: engine._scheduler.idle)
        assert len(device.rounds) <= 6 + 2


async def test_choices_interleave_and_each_ends_once() -> None:
    async with running() as (engine, _):
        outputs = await collect(engine.generate([7, 8], params(5, n=3)))
        for choice in range(3):
            assert tokens_of(outputs, choice) == oracle([7, 8], 0, 5, set())
        assert [o.choice for o in outputs if o.finish_reason] == [0, 1, 2]


async def test_a_lost_round_fails_its_requests_and_the_engine_goes_on() -> None:
    async with running() as (engine, device):
        device.fail_rounds = {3}
        outputs = await collect(engine.generate([1, 2], params(9)))
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "round 3 is lost" in (outputs[-1].error or "")
        assert engine.phase is Phase.READY
        assert tokens_of(await collect(engine.generate([3], params(4)))) == oracle([3], 0, 4, set())


async def test_a_broken_device_kills_the_engine_and_hangs_nobody() -> None:
    async with running() as (engine, device):
        device.fail_rounds = set(range(2, 1000))
        async with asyncio.timeout(5):
            results = await asyncio.gather(*(collect(engine.generate([i], params(9))) for i in range(6)))
            while engine.phase is not Phase.DEAD:
                await collect(engine.generate([1], params(9)))
        assert all(outputs[-1].finish_reason is FinishReason.ERROR for outputs in results)
        with pytest.raises(EngineDeadError, match="rounds in a row failed"):
            engine.generate([1], params(1))
        device.fail_rounds = set()


async def test_a_broken_text_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as (engine, _):
        healthy = asyncio.create_task(collect(engine.generate([3], params(20))))
        broken = engine.generate([1, 2], params(20, n=2), request_id="broken")

        def push(*_: object) -> None:
            raise ValueError("no such character")

        monkeypatch.setattr(engine._live["broken"].texts[1], "_consume", push)
        async with asyncio.timeout(5):
            outputs = await collect(broken)
            last = {o.choice: o for o in outputs if o.finish_reason}
            assert {c: o.finish_reason for c, o in last.items()} == dict.fromkeys((0, 1), FinishReason.ERROR)
            assert "no such character" in (last[0].error or "") and last[1].error == last[0].error
            assert tokens_of(await healthy) == oracle([3], 0, 20, set())
        await until(lambda: engine._scheduler.idle)
        assert engine.phase is Phase.READY


async def test_broken_books_kill_the_engine_and_hang_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as (engine, _):
        streams = [engine.generate([i], params(20)) for i in range(3)]

        def fail(*_: object) -> None:
            raise AssertionError("page 7 was released more often than it was taken")

        monkeypatch.setattr(engine._scheduler.pages, "release", fail)
        async with asyncio.timeout(5):
            results = [await collect(stream) for stream in streams]
        assert all(outputs[-1].finish_reason is FinishReason.ERROR for outputs in results)
        assert all("page 7" in (outputs[-1].error or "") for outputs in results)
        assert engine.phase is Phase.DEAD


async def test_draining_refuses_new_work_and_finishes_old() -> None:
    async with running() as (engine, _):
        old = asyncio.create_task(collect(engine.generate([1], params(30))))
        await asyncio.sleep(0.005)
        drained = asyncio.create_task(engine.drain(5.0))
        await asyncio.sleep(0)
        assert engine.phase is Phase.DRAINING
        with pytest.raises(OverloadedError) as refusal:
            engine.generate([2], params(1))
        assert refusal.value.draining
        assert await drained is True
        assert tokens_of(await old) == oracle([1], 0, 30, set())


async def test_draining_gives_up_after_its_time() -> None:
    async with running() as (engine, device):
        device.delay_s = 0.01
        old = asyncio.create_task(collect(engine.generate([1], params(60))))
        await asyncio.sleep(0.02)
        assert await engine.drain(0.02) is False
        assert (await old)[-1].finish_reason is FinishReason.ABORT


async def test_admission_names_the_field() -> None:
    async with running(cap=2) as (engine, _):
        with pytest.raises(RequestError) as empty:
            engine.generate([], params())
        assert empty.value.param == "prompt"
        with pytest.raises(PromptTooLongError, match="64 tokens"):
            engine.generate([1] * 64, params())
        with pytest.raises(RequestError, match="outside the vocabulary of 50"):
            engine.generate([50], params())
        with pytest.raises(RequestError) as bias:
            engine.generate([1], params(logit_bias={99: 1.0}))
        assert bias.value.param == "logit_bias"
        streams = [engine.generate([i], params(50)) for i in range(2)]
        with pytest.raises(OverloadedError, match="max_concurrent_requests=2"):
            engine.generate([3], params())
        for stream in streams:
            await stream.aclose()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("n", 0), ("max_tokens", 0),
        ("top_k", -5), ("min_tokens", 9), ("repetition_penalty", 0.0), ("logprobs", -1),
    ],
)  # fmt: skip
async def test_parameters_out_of_range_never_reach_a_round(field: str, value: float) -> None:
    async with running() as (engine, device):
        with pytest.raises(RequestError) as refusal:
            engine.generate([1], SamplingParams(**{"max_tokens": 8, field: value}))
        assert refusal.value.param == field
        assert engine._scheduler.idle
        assert tokens_of(await collect(engine.generate([1], params(2)))) == oracle([1], 0, 2, set())


async def test_token_latencies_start_at_each_choices_first_token() -> None:
    async with running() as (engine, _):
        await collect(engine.generate([1, 2], params(4, n=3)))
        assert sum(engine.metrics._inter_token.counts) == 3 * 3
        assert sum(engine.metrics._ttft.counts) == 1


async def test_answers_are_clipped_to_the_context() -> None:
    async with running() as (engine, _):
        outputs = await collect(engine.generate([1] * 60, params(50)))
        assert len(tokens_of(outputs)) == 4
        assert outputs[-1].finish_reason is FinishReason.LENGTH
