"""xspec bench: statistics by worked examples, prompt files, load shapes, whole runs against a fake server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from server_fake import FakeEngine, Script, served

from xspec.config import Config, SpeculationConfig
from xspec.core.drafts import DraftCounts, DraftTotals
from xspec.errors import ConfigError
from xspec.metrics import Metrics
from xspec.progress import silent
from xspec_cli import bench
from xspec_cli.benchlib.facts import machine_facts
from xspec_cli.benchlib.http import HttpTarget, StreamReader, request_body, sse_data
from xspec_cli.benchlib.load import (
    Answer,
    AskOptions,
    Clock,
    Level,
    Phase,
    TargetError,
    poisson_arrivals,
    run_load,
)
from xspec_cli.benchlib.local import EngineTarget
from xspec_cli.benchlib.plan import PlanOptions, Run, compare, run_plan
from xspec_cli.benchlib.prompts import Prompt, load_prompts, take
from xspec_cli.benchlib.questions import QUESTIONS
from xspec_cli.benchlib.report import failures, table
from xspec_cli.benchlib.samples import Sample, figures
from xspec_cli.benchlib.speculation import SpeculationFigures, read_draft_totals, speculation_figures
from xspec_cli.benchlib.stats import (
    Ratio,
    Summary,
    bootstrap_interval,
    mean,
    paired_ratio,
    percentile,
    summarise,
)
from xspec_cli.flags_resolve import Launch, resolve

ASK = AskOptions(max_tokens=8, temperature=0.0, ignore_eos=False, chat=True)
TEXTS = tuple(Prompt(text=f"question {index}") for index in range(10))


# -- statistics --------------------------------------------------------------------------------


def test_percentiles_interpolate_between_neighbours() -> None:
    values = [40.0, 10.0, 20.0, 30.0]
    assert percentile(values, 0) == 10.0
    assert percentile(values, 50) == 25.0
    assert percentile(values, 95) == pytest.approx(38.5)
    assert percentile(values, 100) == 40.0
    assert percentile([7.0], 99) == 7.0


def test_percentiles_equal_numpys() -> None:
    import numpy as np

    values = [((index * 7919) % 1009) / 3 for index in range(257)]
    for percent in (0, 1, 12.5, 50, 95, 99, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-12)


def test_summary() -> None:
    assert summarise([1.0, 2.0, 3.0, 4.0, 100.0]) == Summary(
        count=5, mean=22.0, p50=3.0, p95=pytest.approx(80.8), p99=pytest.approx(96.16)
    )
    assert summarise([]) is None


@pytest.mark.parametrize(
    "call", [lambda: mean([]), lambda: percentile([], 50), lambda: percentile([1.0], 101)]
)
def test_undefined_statistics_raise(call: Any) -> None:
    with pytest.raises(ValueError):
        call()


def test_bootstrap_interval_of_equal_values_is_a_point() -> None:
    assert bootstrap_interval([1.5] * 9, seed=3) == (1.5, 1.5)


def test_bootstrap_interval_is_reproducible_and_brackets_the_median() -> None:
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
    low, high = bootstrap_interval(values, seed=1)
    assert (low, high) == bootstrap_interval(values, seed=1)
    assert 1.0 <= low < 1.35 < high <= 1.7
    narrow = bootstrap_interval(values, seed=1, level=0.5)
    assert low < narrow[0] <= narrow[1] < high


def test_paired_ratio() -> None:
    ratio = paired_ratio([20.0, 33.0, 44.0], [10.0, 30.0, 40.0], seed=0)
    assert (ratio.median, ratio.pairs) == (pytest.approx(1.1), 3)
    assert ratio.low == pytest.approx(1.1) and ratio.high == 2.0
    with pytest.raises(ValueError, match="pairs needed"):
        paired_ratio([1.0], [], seed=0)


def test_figures_of_a_run_by_hand() -> None:
    samples = [
        Sample(0, start_s=1.0, end_s=2.0, chunk_s=(1.1, 1.3, 1.9), prompt_tokens=10, completion_tokens=5),
        Sample(1, start_s=1.5, end_s=3.0, chunk_s=(2.5,), prompt_tokens=4, completion_tokens=1),
        Sample(2, start_s=2.0, end_s=5.0, error="HTTP 500: no"),
        Sample(3, start_s=2.0, end_s=2.5, prompt_tokens=3, completion_tokens=0),
    ]
    found = figures(samples)
    assert (found.completed, found.failed, found.duration_s) == (3, 1, 4.0)
    assert (found.prompt_tokens, found.output_tokens) == (17, 6)
    assert (found.output_tokens_per_s, found.requests_per_s) == (1.5, 0.75)
    assert found.ttft_ms is not None and found.ttft_ms.count == 2
    assert found.ttft_ms.mean == pytest.approx(550.0)
    assert found.tpot_ms is not None and found.tpot_ms.count == 1
    assert found.tpot_ms.mean == pytest.approx(200.0)  # 0.8 s for the four tokens after the first
    assert found.itl_ms is not None and found.itl_ms.count == 2
    assert found.itl_ms.p50 == pytest.approx(400.0)
    assert found.e2e_ms is not None and found.e2e_ms.mean == pytest.approx(1000.0)


def test_a_run_where_everything_failed_has_no_latencies() -> None:
    found = figures([Sample(0, start_s=0.0, end_s=1.0, error="x")])
    assert (found.completed, found.failed, found.output_tokens_per_s) == (0, 1, 0.0)
    assert found.ttft_ms is found.tpot_ms is found.itl_ms is found.e2e_ms is None
    with pytest.raises(ValueError):
        figures([])


def test_poisson_arrivals() -> None:
    arrivals = poisson_arrivals(4000, 8.0, seed=5)
    assert arrivals[0] == 0.0 and arrivals == sorted(arrivals)
    assert arrivals == poisson_arrivals(4000, 8.0, seed=5) != poisson_arrivals(4000, 8.0, seed=6)
    gaps = [late - early for early, late in itertools.pairwise(arrivals)]
    average = mean(gaps)
    spread = mean([(gap - average) ** 2 for gap in gaps]) ** 0.5
    assert average == pytest.approx(1 / 8, rel=0.05)
    assert spread == pytest.approx(1 / 8, rel=0.08)  # exponential: as wide as its mean
    assert poisson_arrivals(1, 1.0, seed=0) == [0.0]


# -- prompts -----------------------------------------------------------------------------------


def test_the_built_in_prompts_are_many_and_distinct() -> None:
    prompts = load_prompts("", chat=True)
    assert len(prompts) == len(QUESTIONS) == len(set(QUESTIONS)) >= 36


def test_text_file_prompts(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text('one\n\n  two  \r\n{"question": "kept as text"}\n', encoding="utf-8")
    assert [p.text for p in load_prompts(str(path), chat=False)] == [
        "one",
        "two",
        '{"question": "kept as text"}',
    ]


def test_jsonl_fields_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    message = {"role": "user", "content": "hi"}
    records: list[Any] = [
        {"turns": ["first", "second"], "category": "x"},
        {"question": "q", "answer": "a"},
        {"prompt": "p"},
        {"text": "t"},
        {"messages": [message]},
        "bare",
    ]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    prompts = load_prompts(str(path), chat=True)
    assert [p.text for p in prompts] == ["first", "q", "p", "t", None, "bare"]
    assert prompts[4].as_messages() == [message]
    assert prompts[1].as_messages() == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("line", "chat", "complaint"),
    [
        ("{", True, "line 2 is not JSON"),
        ("7", True, "line 2 is int; expected an object"),
        ("{}", True, "line 2 has the fields none; one of messages, turns, question, prompt, text is needed"),
        ('{"answer": "x"}', True, "has the fields answer"),
        ('{"turns": []}', True, "turns must be a non-empty list"),
        ('{"turns": [3]}', True, r"turns\[0\] must be a non-empty string, found 3"),
        ('{"question": "  "}', True, "question must be a non-empty string"),
        ('{"messages": [{"role": "user"}]}', True, "messages must be a non-empty list of objects"),
        ('{"messages": [{"role": "user", "content": "x"}]}', False, "holds messages, which need --chat"),
    ],
)
def test_bad_jsonl_names_its_line(line: str, chat: bool, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint):
        load_prompts(str(path), chat=chat)


def test_unreadable_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name, complaint in (
        ("no.txt", "cannot be read"),
        ("empty.txt", "no prompts"),
        ("binary.txt", "cannot be"),
    ):
        with pytest.raises(ConfigError, match=f"--prompts=.*{name}.*{complaint}"):
            load_prompts(str(tmp_path / name), chat=True)


def test_the_shared_prompt_files_load(data_dir: Path) -> None:
    for name, first in (
        ("mt-bench.jsonl", "Compose an engaging"),
        ("gsm8k_train.jsonl", "Natalia sold clips"),
    ):
        prompts = load_prompts(str(data_dir / name), chat=True)
        assert prompts[0].text is not None and prompts[0].text.startswith(first)


def test_taking_prompts_starts_over() -> None:
    assert [p.text for p in take(TEXTS, 8, 4)] == ["question 8", "question 9", "question 0", "question 1"]


# -- load --------------------------------------------------------------------------------------


@dataclass
class FakeTarget:
    """Answers after `delay_s`, remembers how many requests were in flight and which seeds it saw."""

    name: str = "fake"
    delay_s: float = 0.001
    fail_on: str = ""
    live: int = 0
    most: int = 0
    asked: list[tuple[str | None, int]] = field(default_factory=list)

    async def begin_turn(self) -> None:
        return None

    async def draft_totals(self) -> DraftTotals | None:
        return None

    def round_figures(self, begin_s: float, end_s: float) -> None:
        return None

    async def ask(self, prompt: Prompt, seed: int, clock: Clock) -> Answer:
        self.asked.append((prompt.text, seed))
        self.live += 1
        self.most = max(self.most, self.live)
        await asyncio.sleep(self.delay_s)
        self.live -= 1
        if prompt.text == self.fail_on:
            raise TargetError("refused")
        return Answer((clock(),), prompt_tokens=3, completion_tokens=1, finish_reason="stop")


async def test_closed_loop_keeps_its_concurrency() -> None:
    target = FakeTarget()
    seen: list[Sample] = []
    samples = await run_load(target, TEXTS, Level(concurrency=4), seed=100, done=seen.append)
    assert target.most == 4
    assert [sample.prompt_index for sample in samples] == list(range(10))
    assert sorted(target.asked, key=lambda asked: asked[1]) == [
        (p.text, 100 + i) for i, p in enumerate(TEXTS)
    ]
    assert len(seen) == 10 and all(sample.ok for sample in samples)


async def test_concurrency_above_the_number_of_prompts() -> None:
    target = FakeTarget()
    assert len(await run_load(target, TEXTS[:3], Level(concurrency=64), seed=0)) == 3
    assert target.most == 3


async def test_poisson_load_does_not_wait_for_answers() -> None:
    target = FakeTarget(delay_s=0.2)
    samples = await run_load(target, TEXTS, Level(rate_rps=500.0), seed=3)
    assert target.most == 10
    assert [sample.start_s for sample in samples] == poisson_arrivals(10, 500.0, seed=3)


async def test_a_failed_request_does_not_stop_the_run() -> None:
    samples = await run_load(FakeTarget(fail_on="question 3"), TEXTS, Level(concurrency=2), seed=0)
    assert [sample.error for sample in samples if not sample.ok] == ["refused"]
    assert figures(samples).completed == 9


async def test_a_bug_in_a_target_is_not_a_failed_request() -> None:
    class Broken(FakeTarget):
        async def ask(self, prompt: Prompt, seed: int, clock: Clock) -> Answer:
            raise ZeroDivisionError

    for level in (Level(concurrency=2), Level(rate_rps=1000.0)):
        with pytest.raises(ExceptionGroup) as caught:
            await run_load(Broken(), TEXTS, level, seed=0)
        assert caught.group_contains(ZeroDivisionError)


@pytest.mark.parametrize(
    "given", [{}, {"concurrency": 1, "rate_rps": 1.0}, {"concurrency": 1, "phases": (Phase(1, 1.0),)}]
)
def test_a_level_is_one_kind_of_load(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Level(**given)


# -- plan --------------------------------------------------------------------------------------


def options(**changes: Any) -> PlanOptions:
    base: dict[str, Any] = {
        "levels": (Level(concurrency=1),),
        "num_prompts": 3,
        "rounds": 1,
        "warmup": 0,
        "seed": 0,
    }
    return PlanOptions(**{**base, **changes})


async def test_targets_alternate_on_the_same_prompts() -> None:
    order: list[str] = []

    class Named(FakeTarget):
        async def ask(self, prompt: Prompt, seed: int, clock: Clock) -> Answer:
            order.append(f"{self.name}:{prompt.text}")
            return await super().ask(prompt, seed, clock)

    runs = await run_plan([Named("A"), Named("B")], TEXTS, options(num_prompts=2, rounds=2, warmup=1), silent)
    assert [(run.target, run.round_index) for run in runs] == [("A", 0), ("B", 0), ("A", 1), ("B", 1)]
    warm, first, second = ["question 0"], ["question 1", "question 2"], ["question 3", "question 4"]
    expected = [*(("A", q) for q in warm + first), *(("B", q) for q in warm + first)]
    expected += [*(("A", q) for q in second), *(("B", q) for q in second)]
    assert order == [f"{name}:{question}" for name, question in expected]


async def test_a_turn_of_another_target_begins_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds > 1.0:  # the fake targets sleep too, for a moment
            pauses.append(seconds)

    monkeypatch.setattr("xspec_cli.benchlib.plan.asyncio.sleep", sleep)
    await run_plan([FakeTarget("A"), FakeTarget("B")], TEXTS, options(rounds=2, settle_s=1.5), silent)
    assert pauses == [1.5] * 3, "B after A, A after B, B after A; none before the first turn"
    await run_plan([FakeTarget("A")], TEXTS, options(rounds=2, settle_s=1.5), silent)
    assert len(pauses) == 3


async def test_warm_up_fills_every_place_and_is_not_measured() -> None:
    target = FakeTarget()
    levels = (Level(concurrency=1), Level(concurrency=4), Level(rate_rps=1000.0))
    runs = await run_plan([target], TEXTS, options(levels=levels, warmup=None), silent)
    assert len(target.asked) == (1 + 3) + (4 + 3) + (8 + 3)
    assert [len(run.samples) for run in runs] == [3, 3, 3]


async def test_progress_is_told_of_every_request() -> None:
    told: list[tuple[str, int, int]] = []
    await run_plan([FakeTarget()], TEXTS, options(warmup=1), lambda *step: told.append(step))
    warm, real = "fake, concurrency 1: warm-up", "fake, concurrency 1, round 1 of 1"
    assert told == [(warm, 0, 1), (warm, 1, 1), (real, 0, 3), (real, 1, 3), (real, 2, 3), (real, 3, 3)]


def run_of(
    target: str, tokens: int, seconds: float, *, round_index: int = 0, error: str | None = None
) -> Run:
    sample = Sample(0, 0.0, seconds, (seconds / 2, seconds), 4, tokens, "stop", error)
    return Run(Level(concurrency=1), round_index, target, (sample,), figures([sample]))


def test_comparison_pairs_rounds() -> None:
    speeds = [("A", 100), ("B", 110), ("A", 50), ("B", 60), ("A", 80), ("B", 84)]
    runs = [run_of(name, tokens, 1.0, round_index=index // 2) for index, (name, tokens) in enumerate(speeds)]
    (found,) = compare(runs, options(rounds=3), ["A", "B"])
    assert (found.target, found.baseline) == ("B", "A")
    assert found.ratio == Ratio(pytest.approx(1.1), pytest.approx(1.05), pytest.approx(1.2), 3)
    assert compare(runs, options(rounds=3), ["A"]) == []


def test_a_silent_target_is_not_compared() -> None:
    runs = [run_of("A", 100, 1.0), run_of("B", 100, 1.0, error="HTTP 500: no")]
    assert compare(runs, options(), ["A", "B"]) == []


def test_the_table_shows_medians_over_rounds() -> None:
    runs = [run_of("A", tokens, 2.0, round_index=index) for index, tokens in enumerate((20, 60, 40))]
    assert table(runs, options(rounds=3), ["A"]).splitlines() == [
        "A, concurrency 1, median of 3 rounds",
        "  output tokens/s 20.0   requests/s 0.5   completed 3   failed 0",
        "                mean       p50       p95       p99",
        "  TTFT ms      1,000     1,000     1,000     1,000",
        "  TPOT ms       25.6      25.6      25.6      25.6",
        "  ITL ms       1,000     1,000     1,000     1,000",
        "  e2e ms       2,000     2,000     2,000     2,000",
    ]


def test_the_table_of_a_failed_run_shows_dashes() -> None:
    runs = [run_of("A", 5, 2.0, error="HTTP 503: full")]
    assert "  TTFT ms          -         -         -         -" in table(runs, options(), ["A"]).splitlines()
    assert failures(runs) == ["1 x HTTP 503: full"]


# -- stream of a server ------------------------------------------------------------------------


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
async def test_events_survive_any_cut(size: int, newline: bytes) -> None:
    raw = ': hello\n\ndata: {"a": "é"}\n\nevent: x\ndata:two\ndata: lines\n\n\ndata: [DONE]\n\n'.encode()
    found = [data async for data in sse_data(pieces(raw.replace(b"\n", newline), size))]
    assert found == ['{"a": "é"}'.encode(), b"two\nlines", b"[DONE]"]


def read(*events: Any, done: bool = True) -> Answer:
    ticks = itertools.count()
    reader = StreamReader(lambda: float(next(ticks)))
    for event in events:
        reader.feed(event if isinstance(event, bytes) else json.dumps(event).encode())
    if done:
        reader.feed(b"[DONE]")
    return reader.answer()


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}}


def delta(text: str | None, finish: str | None = None, **extra: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "delta": {"content": text, **extra}, "finish_reason": finish}],
        "usage": None,
    }


def test_only_chunks_with_text_are_timed() -> None:
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    answer = read(
        role, delta("a"), delta("bcd"), delta(None, reasoning_content="hm"), delta("", "stop"), USAGE
    )
    answer, digest = replace(answer, digest=""), answer.digest
    assert digest == read(delta("abcdhm"), USAGE).digest != read(delta("abcd"), USAGE).digest
    assert answer == Answer((0.0, 1.0, 2.0), prompt_tokens=5, completion_tokens=7, finish_reason="stop")


def test_completion_chunks_are_read_too() -> None:
    answer = read({"choices": [{"text": "a"}]}, {"choices": [{"text": "", "finish_reason": "length"}]}, USAGE)
    assert (answer.chunk_s, answer.finish_reason) == ((0.0,), "length")


@pytest.mark.parametrize(
    ("events", "done", "complaint"),
    [
        ([delta("a")], True, "carried no usage"),
        ([delta("a"), USAGE], False, "ended without"),
        ([b"nonsense"], True, "not an OpenAI chunk: b'nonsense'"),
        ([b"[1]"], True, "not an OpenAI chunk"),
        ([{"choices": [7]}], True, "not an OpenAI chunk"),
        ([{"choices": 7}], True, "not an OpenAI chunk"),
        ([{"choices": [{"delta": "x"}]}], True, "not an OpenAI chunk"),
        ([{"choices": [], "usage": {"prompt_tokens": 5}}], True, "the usage has no token counts"),
        (
            [delta("a"), {"error": {"message": "device lost", "code": 500}}],
            True,
            "error in the stream: device lost",
        ),
        ([delta("a"), delta("", "abort"), USAGE], True, "ended the request: abort"),
    ],
)
def test_broken_streams_are_failures(events: Sequence[Any], done: bool, complaint: str) -> None:
    with pytest.raises(TargetError, match=complaint):
        read(*events, done=done)


def test_request_bodies_carry_extensions_only_when_needed() -> None:
    plain = request_body(Prompt(text="hi"), "m", ASK, seed=9)
    assert plain == {
        "model": "m",
        "max_tokens": 8,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "hi"}],
    }
    sampled = AskOptions(max_tokens=8, temperature=0.7, ignore_eos=True, chat=False)
    body = request_body(Prompt(text="hi"), "m", sampled, seed=9)
    assert (body["prompt"], body["ignore_eos"], body["seed"], "messages" in body) == ("hi", True, 9, False)


# -- whole runs --------------------------------------------------------------------------------


@dataclass
class FakeServer:
    """Speaks just enough of the OpenAI API: `tokens` chunks an answer, two tokens in each."""

    tokens: int = 4
    status: int = 200
    api_key: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.version)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_post("/v1/completions", self.complete)
        return app

    async def models(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "who are you", "code": 401}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}, {"id": "other"}]})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "1.2.3"})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response(
                {"error": {"message": "too busy", "code": self.status}}, status=self.status
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        for index in range(self.tokens):
            choice = {"delta": {"content": f"w{index} "}} if chat else {"text": f"w{index} "}
            await self.send(response, {"choices": [choice]})
            await asyncio.sleep(0.001)
        usage = {"prompt_tokens": 5, "completion_tokens": 2 * self.tokens}
        await self.send(response, {"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]})
        await self.send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def serving(*servers: FakeServer) -> AsyncIterator[list[str]]:
    runners, urls = [], []
    for server in servers:
        runner = web.AppRunner(server.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield urls
    finally:
        for runner in runners:
            await runner.cleanup()


async def bench_main(*words: str) -> int:
    """`xspec bench` with an event loop of its own, while the fake servers run on this one."""
    return await asyncio.to_thread(bench.main, words)


async def test_two_servers_are_measured_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow = FakeServer(tokens=6), FakeServer(tokens=2)
    output = tmp_path / "result.json"
    async with serving(fast, slow) as (first, second):
        words = [f"--url={first}", f"--url={second}", "--concurrency=1,3", "--num_prompts=4", "--rounds=2"]
        words.append("--settle_s=0")
        code = await bench_main(*words, "--warmup=1", "--max_tokens=16", "--ignore_eos", f"--output={output}")
    assert code == 0
    assert len(fast.bodies) == len(slow.bodies) == 2 * (1 + 2 * 4)
    assert fast.bodies == slow.bodies
    assert fast.bodies[0]["model"] == "fake-model" and fast.bodies[0]["ignore_eos"] is True
    assert fast.bodies[0]["messages"] == [{"role": "user", "content": QUESTIONS[0]}]
    shown = capsys.readouterr().out
    assert f"{first}, concurrency 1, median of 2 rounds" in shown
    assert f"concurrency 3: {second} / {first} = " in shown

    kept = json.loads(output.read_bytes())
    assert (kept["format"], kept["version"]) == ("xspec bench", 1)
    assert [target["version"] for target in kept["targets"]] == ["1.2.3", "1.2.3"]
    assert [run["target"] for run in kept["runs"]] == [first, second] * 4
    assert kept["settings"]["num_prompts"] == 4 and kept["settings"]["levels"] == [
        "concurrency 1",
        "concurrency 3",
    ]
    sample = kept["runs"][0]["samples"][0]
    assert (sample["completion_tokens"], sample["finish_reason"], len(sample["chunk_s"])) == (12, "length", 6)
    assert kept["runs"][0]["figures"]["output_tokens"] == 4 * 12
    assert len(kept["comparisons"]) == 2 and kept["comparisons"][0]["ratio"]["pairs"] == 2
    assert kept["machine"]["python"] == machine_facts()["python"]


async def test_completions_at_a_request_rate(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer()
    async with serving(server) as (url,):
        words = [
            f"--url={url}",
            "--request_rate=400",
            "--num_prompts=5",
            "--warmup=0",
            "--nochat",
            "--seed=7",
        ]
        assert await bench_main(*words, "--model_id=other", "--temperature=0.5") == 0
    asked = {body["seed"]: body["prompt"] for body in server.bodies}
    assert asked == dict(zip((7, 8, 9, 10, 11), QUESTIONS, strict=False))
    assert {body["model"] for body in server.bodies} == {"other"}
    assert f"{url}, rate 400/s\n" in capsys.readouterr().out


async def test_failures_are_reported_and_make_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeServer(status=503)) as (url,):
        assert await bench_main(f"--url={url}", "--concurrency=2", "--num_prompts=3", "--warmup=0") == 1
    shown = capsys.readouterr()
    assert "completed 0   failed 3" in shown.out
    assert "failed: 3 x HTTP 503: too busy" in shown.err


async def test_a_server_without_an_answer_times_out() -> None:
    silent_server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(5), "127.0.0.1", 0)
    async with silent_server, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.05)) as session:
        url = f"http://127.0.0.1:{silent_server.sockets[0].getsockname()[1]}"
        target = HttpTarget(url, session, ASK)
        with pytest.raises(TargetError, match="--request_timeout_s"):
            await target.ask(TEXTS[0], 0, lambda: 0.0)
        with pytest.raises(ConfigError, match="cannot be reached"):
            await target.open()


async def test_a_server_that_hangs_up_is_a_failure() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server, aiohttp.ClientSession() as session:
        target = HttpTarget(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", session, ASK)
        with pytest.raises(TargetError, match="ClientPayloadError"):
            await target.ask(TEXTS[0], 0, lambda: 0.0)


async def test_the_api_key_and_the_model_are_checked_first() -> None:
    async with serving(FakeServer(api_key="s3cret")) as (url,):
        with pytest.raises(ConfigError, match="/v1/models answered 401"):
            await bench_main(f"--url={url}", "--warmup=0")
        with pytest.raises(
            ConfigError, match="--model_id=none is not served by .*; it has fake-model, other"
        ):
            await bench_main(f"--url={url}", "--api_key=s3cret", "--model_id=none")


async def test_nobody_there() -> None:
    async with serving(FakeServer()) as (url,):
        pass
    with pytest.raises(ConfigError, match=f"--url={url} cannot be reached"):
        await bench_main(f"--url={url}")


async def test_an_engine_in_this_process(loop_guard: None) -> None:
    engine = FakeEngine(Script(step_tokens=3))
    target = EngineTarget(engine, ASK)
    (sample,) = await run_load(target, [Prompt(text="hi")], Level(concurrency=1), seed=4)
    assert sample.prompt_tokens == len("[user]hi[assistant]")
    assert (sample.completion_tokens, len(sample.chunk_s), sample.finish_reason) == (8, 3, "length")
    bare = EngineTarget(engine, AskOptions(max_tokens=100, temperature=0.0, ignore_eos=False, chat=False))
    assert (await bare.ask(Prompt(text="hi"), 0, lambda: 0.0)).prompt_tokens == 2


async def test_engine_failures_are_failed_requests() -> None:
    broken = EngineTarget(FakeEngine(Script(fail_after=1, failure="device lost")), ASK)
    samples = await run_load(broken, TEXTS[:2], Level(concurrency=2), seed=0)
    assert [sample.error for sample in samples] == ["device lost"] * 2
    long = EngineTarget(FakeEngine(), ASK)
    (sample,) = await run_load(long, [Prompt(text="x" * 1000)], Level(concurrency=1), seed=0)
    assert sample.error is not None and sample.error.startswith("PromptTooLongError: ")
    with pytest.raises(ConfigError, match="has no chat template; use --nochat"):
        EngineTarget(FakeEngine(chat=False), ASK)


# -- speculation -------------------------------------------------------------------------------


def test_figures_of_speculation_are_those_of_the_run_alone() -> None:
    before = DraftTotals(10, 40, 12, (8, 4, 0, 0))
    after = DraftTotals(14, 56, 19, (11, 6, 2, 0))
    assert speculation_figures(before, after) == SpeculationFigures(
        drafts=4,
        draft_tokens=16,
        accepted_tokens=7,
        mean_acceptance_length=2.75,
        acceptance_rate=7 / 16,
        position_rates=(0.75, 0.5, 0.5, 0.0),
        conditional_rates=(0.75, 2 / 3, 1.0, 0.0),
    )
    assert speculation_figures(before, before) is None, "nothing was drafted"
    assert speculation_figures(after, before) is None, "the server began anew"
    assert speculation_figures(None, after) is speculation_figures(before, None) is None


def test_counters_are_read_from_xspec_and_from_vllm() -> None:
    metrics = Metrics("m", draft_width=3)
    metrics.delivered(3, DraftCounts(3, 3, 2))
    metrics.delivered(1, DraftCounts(3, 3, 0))
    assert read_draft_totals(metrics.render()[0].decode()) == metrics.draft_totals()
    assert read_draft_totals(Metrics("m").render()[0].decode()) is None
    text = "".join(
        f'vllm:spec_decode_num_{name}_total{{engine="{engine}"{label}}} {count}.0\n'
        for name, label, count in (
            ("drafts", "", 5), ("draft_tokens", "", 10), ("accepted_tokens", "", 6),
            ("accepted_tokens_per_pos", ',position="1"', 2), ("accepted_tokens_per_pos", ',position="0"', 4),
        )
        for engine in (0, 1)
    )  # fmt: skip
    assert read_draft_totals(text) == DraftTotals(10, 20, 12, (8, 4))
    assert read_draft_totals("") is None


@pytest.mark.parametrize(
    "text",
    [
        "<html>",
        'a:spec_decode_num_drafts_total{x="1"} NaN\n',
        'a:spec_decode_num_drafts_total{x="1"} +Inf\n',
        'a:spec_decode_num_accepted_tokens_per_pos_total{position="x"} 1\n',
        'a:spec_decode_num_accepted_tokens_per_pos_total{place="0"} 1\n',
    ],
)
async def test_a_metrics_page_of_something_else_is_no_failure(text: str) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with aiohttp.ClientSession() as session:
            target = HttpTarget(f"http://127.0.0.1:{runner.addresses[0][1]}", session, ASK)
            assert await target.draft_totals() is None
    finally:
        await runner.cleanup()


def test_positions_out_of_all_proportion_cost_nothing() -> None:
    page = "".join(
        f"spec_decode_num_{name}_total 1\n" for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    page += 'spec_decode_num_accepted_tokens_per_pos_total{position="999999999999"} 1\n'
    assert read_draft_totals(page) == DraftTotals(1, 1, 1, ())


def drafting_engine() -> FakeEngine:
    return FakeEngine(Script(step_tokens=3), draft_width=4)


# Answers of 8 tokens in steps of 3, 3 and 2: two drafts each, with 2 and 1 tokens accepted.
DRAFTED = SpeculationFigures(6, 18, 9, 2.5, 0.5, (1.0, 0.5, 0.0, 0.0), (1.0, 0.5, 0.0, None))


async def test_a_run_in_this_process_tells_its_acceptance_without_the_warm_up() -> None:
    (run,) = await run_plan([EngineTarget(drafting_engine(), ASK)], TEXTS, options(warmup=2), silent)
    assert run.speculation == DRAFTED
    (run,) = await run_plan([EngineTarget(FakeEngine(), ASK)], TEXTS, options(), silent)
    assert run.speculation is None


async def test_a_run_over_http_tells_the_same() -> None:
    async with served(drafting_engine()) as server, aiohttp.ClientSession() as session:
        target = HttpTarget(server.url, session, ASK)
        await target.open()
        (run,) = await run_plan([target], TEXTS, options(warmup=2), silent)
        assert run.speculation == DRAFTED
    async with serving(FakeServer()) as (url,), aiohttp.ClientSession() as session:
        assert await HttpTarget(url, session, ASK).draft_totals() is None
    async with aiohttp.ClientSession() as session:
        assert await HttpTarget("http://127.0.0.1:1", session, ASK).draft_totals() is None


def test_the_table_shows_acceptance_where_there_is_some() -> None:
    runs = [
        replace(run_of("A", 20, 2.0, round_index=index), speculation=drafted)
        for index, drafted in enumerate((DRAFTED, replace(DRAFTED, mean_acceptance_length=3.5), None))
    ]
    assert table(runs, options(rounds=3), ["A"]).splitlines()[2] == (
        "  acceptance length 3.00   drafts accepted up to each place 1.00 0.50 0.00 0.00"
    )


async def test_speculation_flags_reach_the_engine_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[Config] = []

    async def build_engine(config: Config, *, progress: Any) -> FakeEngine:
        built.append(config)
        return drafting_engine()

    monkeypatch.setattr("xspec.engine.build.build_engine", build_engine)
    output = tmp_path / "result.json"
    words = ["--num_speculative_tokens=4", "--target_verify_width=3", "--concurrency=1", "--num_prompts=3"]
    assert await bench_main(*words, "--warmup=0", "--max_tokens=8", f"--output={output}") == 0
    assert [config.speculation for config in built] == [SpeculationConfig("", "auto", 4, False, 3)]
    assert (
        "  acceptance length 2.50   drafts accepted up to each place 1.00 0.50 0.00"
        in capsys.readouterr().out
    )
    kept = json.loads(output.read_bytes())
    assert kept["settings"]["engine"]["target_verify_width"] == 3
    assert kept["runs"][0]["speculation"] == {
        "drafts": 6, "draft_tokens": 18, "accepted_tokens": 9, "mean_acceptance_length": 2.5,
        "acceptance_rate": 0.5, "position_rates": [1.0, 0.5, 0.0, 0.0],
        "conditional_rates": [1.0, 0.5, 0.0, None],
    }  # fmt: skip


# -- flags -------------------------------------------------------------------------------------


def launch(*words: str) -> Launch:
    found = resolve(bench.merge_urls(words), bench.COMMAND, environ={})
    assert isinstance(found, Launch)
    return found


def test_defaults() -> None:
    job = bench.job_of(launch())
    assert [level.concurrency for level in job.plan.levels] == [1, 8, 32]
    assert (job.urls, job.plan.rounds, job.ask.temperature, job.ask.chat) == ((), 1, 0.0, True)
    assert job.plan.warmup_of(job.plan.levels[2]) == 32
    assert job.plan.prompts_needed == (1 + 8 + 32) + 3 * 32


def test_urls_add_up() -> None:
    assert bench.merge_urls(["--url", "http://a:1/", "--seed=1", "-url=http://b:2"]) == [
        "--url=http://a:1/,http://b:2",
        "--seed=1",
    ]
    assert bench.merge_urls(["--seed=1"]) == ["--seed=1"]
    assert bench.job_of(launch("--url=http://a:1/", "--url", "http://b:2")).urls == (
        "http://a:1",
        "http://b:2",
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--url=localhost:80"], "--url=localhost:80: allowed: http://host:port"),
        (["--url=http://a/v1"], "leave /v1 out"),
        (["--url=http://[::1"], "allowed: http://host:port"),
        (["--url=http://a:99999"], "allowed: http://host:port"),
        (["--url=http://me:secret@a"], "--url holds a user name; give the server's key as --api_key"),
        (["--url=http://a", "--url=http://a"], "one server or two different ones"),
        (["--url=http://a,http://b,http://c"], "one server or two different ones"),
        (["--concurrency=0"], "--concurrency=0: allowed: integers from 1 to 4096"),
        (["--concurrency=1,x"], "--concurrency=x: allowed"),
        (["--request_rate=0"], "--request_rate=0: allowed: numbers above 0"),
        (["--request_rate=inf"], "--request_rate=inf: allowed"),
        (["--request_rate=1", "--concurrency=1"], "exclude each other"),
        (["--num_prompts=0"], "--num_prompts=0: allowed: integers from 1"),
        (["--prompts=/nowhere.txt"], "--prompts=/nowhere.txt cannot be read"),
        (["--output=/nowhere/at/all.json"], "--output=/nowhere/at/all.json: its folder does not exist"),
    ],
)
def test_refused_command_lines(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        bench.job_of(launch(*words))


async def test_an_existing_output_is_refused_before_any_work(tmp_path: Path) -> None:
    output = tmp_path / "kept.json"
    output.write_text("precious")
    server = FakeServer()
    async with serving(server) as (url,):
        with pytest.raises(ConfigError, match="exists already; a result is never overwritten"):
            await bench_main(f"--url={url}", f"--output={output}")
    assert output.read_text() == "precious" and server.bodies == []


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for flag in bench.BENCH_FLAGS:
        assert f"--{flag.name}" in shown
