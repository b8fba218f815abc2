"""The whole engine on tiny models in fp64: one text per (prompt, parameters, seed), whatever the schedule."""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_checkpoint

from xspec.config import Config
from xspec.core.request import FinishReason, SamplingParams
from xspec.engine.api import TextOutput
from xspec.engine.build import build_engine
from xspec.engine.engine import AsyncEngine
from xspec.errors import ConfigError, UnsupportedError

KV_BYTES = 1024  # of one token of the tiny llama: 2 x 2 layers x 2 heads x 16 x 8 bytes

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.5},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all filters": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.8},
    "presence": {"temperature": 0.7, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.9},
    "bias": {"temperature": 1.0, "logit_bias": {5: 4.0, 17: -100.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 12, "logit_bias": {0: 12.0}},
    "stop ids": {"temperature": 1.2, "stop_token_ids": tuple(range(100, 160))},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "ignore_eos": {"temperature": 1.0, "ignore_eos": True, "logit_bias": {0: 3.0}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@asynccontextmanager
async def engine_of(model: Path, **flags: Any) -> AsyncIterator[AsyncEngine]:
    defaults = {"dtype": "float64", "max_seqs_per_batch": 16, "max_cache_size": 16 * 2**20, "random_seed": 1}
    engine = await build_engine(Config.from_mapping({"model": str(model), **defaults, **flags}))
    try:
        yield engine
    finally:
        await engine.close()
        pages = engine._scheduler.pages
        pages.check_integrity()
        assert pages.available == pages.pages


async def run(engine: AsyncEngine, prompt: list[int], **params: Any) -> list[TextOutput]:
    values = {"max_tokens": 24, "seed": 7, **params}
    return [output async for output in engine.generate(prompt, SamplingParams(**values))]


def tokens(outputs: list[TextOutput], choice: int = 0) -> tuple[int, ...]:
    return tuple(t for o in outputs if o.choice == choice for t in o.token_ids)


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


LOAD = [(name, prompt_of(i, 3 + 5 * i), values) for i, (name, values) in enumerate(PARAMS.items())]


async def alone(model: Path) -> dict[str, list[TextOutput]]:
    """Every request alone, one slot, no cache, no padding: what all other schedules must reproduce."""
    flags = {"enable_schedule_overlap": False, "enable_prefix_cache": False, "enable_graph": False}
    async with engine_of(model, block_size=512, **flags) as engine:
        return {name: await run(engine, prompt, **values) for name, prompt, values in LOAD}


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, list[TextOutput]]:
    return asyncio.run(alone(model))


SCHEDULES: dict[str, dict[str, Any]] = {
    "two slots": {},
    "one slot": {"enable_schedule_overlap": False},
    "no pipeline": {"enable_task_pipeline": False},
    "eager": {"enable_graph": False},
    "exact buckets": {"enable_graph_mode_decode_no_padding": True},
    "tiny chunks": {"max_tokens_per_chunk_for_prefill": 5, "max_tokens_per_batch": 24},
    "separate prefill": {"enable_mix_batch": False, "max_tokens_per_chunk_for_prefill": 16},
    "few rows": {"max_seqs_per_batch": 3, "block_size": 8},
    "preempting": {"max_cache_size": 9 * 16 * KV_BYTES, "block_size": 16, "max_model_len": 100,
                   "prefill_scheduling_memory_usage_threshold": 1.0},
    "lazy graphs": {"disable_graph_warmup": True, "block_size": 1},
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_text_does_not_depend_on_the_schedule(
    model: Path, plain: dict[str, list[TextOutput]], schedule: str
) -> None:
    async with engine_of(model, **SCHEDULES[schedule]) as engine:
        for _ in range(2):  # the second time through a warm prefix cache
            results = await asyncio.gather(*(run(engine, p, **values) for _, p, values in LOAD))
            for (name, _, _), outputs in zip(LOAD, results, strict=True):
                assert tokens(outputs) == tokens(plain[name]), name
                assert "".join(o.text for o in outputs) == "".join(o.text for o in plain[name])
                assert outputs[-1].finish_reason == plain[name][-1].finish_reason
        if schedule == "preempting":
            assert engine._scheduler.counters.preemptions > 0, "the pool was meant to be too small"


async def test_arrivals_and_departures_do_not_change_a_text(
    model: Path, plain: dict[str, list[TextOutput]]
) -> None:
    rng = random.Random(3)
    async with engine_of(model, block_size=4, max_seqs_per_batch=6) as engine:

        async def visitor(index: int) -> None:
            await asyncio.sleep(rng.random() * 0.1)
            stream = engine.generate(
                prompt_of(100 + index, rng.randrange(1, 40)), SamplingParams(max_tokens=40)
            )
            for _ in range(rng.randrange(6)):
                if (await anext(stream)).finish_reason:
                    break
            await stream.aclose()

        async def resident(name: str, prompt: list[int], values: dict[str, Any]) -> None:
            await asyncio.sleep(rng.random() * 0.1)
            assert tokens(await run(engine, prompt, **values)) == tokens(plain[name]), name

        await asyncio.gather(*(visitor(i) for i in range(40)), *(resident(*load) for load in LOAD))


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
async def test_greedy_text_is_that_of_transformers(tmp_path: Path, variant: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = make_checkpoint(tmp_path / variant, variant)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    prompts = [prompt_of(i, n) for i, n in enumerate((1, 9, 33))]
    async with engine_of(path, max_tokens_per_chunk_for_prefill=10) as engine:
        results = await asyncio.gather(
            *(run(engine, p, temperature=0.0, max_tokens=20, ignore_eos=True) for p in prompts)
        )
    for prompt, outputs in zip(prompts, results, strict=True):
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(20):
                ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        assert list(tokens(outputs)) == ids[len(prompt) :]


async def test_logprobs_are_those_of_transformers(model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    prompt = prompt_of(5, 21)
    async with engine_of(model, max_tokens_per_chunk_for_prefill=8) as engine:
        outputs = await run(engine, prompt, temperature=1.0, logprobs=4, prompt_logprobs=2, max_tokens=6)
    ids = torch.tensor([[*prompt, *tokens(outputs)]])
    with torch.no_grad():
        table = reference(ids).logits[0].log_softmax(-1)  # its norms and rotations are fp32: 1e-5
    measured = [entry for o in outputs for entry in o.logprobs]
    assert len(measured) == len(tokens(outputs))
    for offset, entry in enumerate(measured):
        row = table[len(prompt) - 1 + offset]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
        assert [i for i, _ in entry.top] == row.topk(4).indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)
    scores = outputs[0].prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert [s.token_id for s in scores[1:] if s] == prompt[1:]
    for index, entry in enumerate(scores[1:], start=1):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(table[index - 1][prompt[index]]), abs=1e-5)
        assert [i for i, _ in entry.top] == table[index - 1].topk(2).indices.tolist()
    assert all(o.prompt_logprobs is None for o in outputs[1:])


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_a_prompt_is_scored_once_and_before_any_choice_speaks(model: Path, prefix_cache: bool) -> None:
    prompt = prompt_of(5, 70)
    async with engine_of(model, enable_prefix_cache=prefix_cache, max_tokens_per_batch=16) as engine:
        outputs = await run(engine, prompt, prompt_logprobs=1, n=3, max_tokens=3)
    scored = [o for o in outputs if o.prompt_logprobs is not None]
    assert [(o.choice, len(o.prompt_logprobs or ())) for o in scored] == [(0, 70)]
    assert outputs[0] is scored[0]
    assert {o.choice for o in outputs} == {0, 1, 2}


async def test_choices_differ_and_each_is_reproducible(model: Path) -> None:
    async with engine_of(model) as engine:
        first = await run(engine, prompt_of(1, 9), temperature=1.0, n=4)
        texts = [tokens(first, choice) for choice in range(4)]
        assert len(set(texts)) == 4
        alone = await run(engine, prompt_of(1, 9), temperature=1.0)
        assert tokens(alone) == texts[0]


async def test_without_a_seed_texts_differ_and_random_seed_pins_them(model: Path) -> None:
    async def two() -> list[tuple[int, ...]]:
        async with engine_of(model, random_seed=9) as engine:
            return [tokens(await run(engine, [5, 6, 7], temperature=1.0, seed=None)) for _ in range(2)]

    first, second = await two(), await two()
    assert first[0] != first[1]
    assert first == second


async def test_multi_turn_answers_are_served_from_the_prefix_cache(model: Path) -> None:
    async with engine_of(model, block_size=8) as engine:
        prompt = prompt_of(2, 20)
        first = await run(engine, prompt, temperature=0.0, max_tokens=21, ignore_eos=True)
        assert first[-1].cached_tokens == 0
        conversation = [*prompt, *tokens(first), *prompt_of(3, 5)]
        second = await run(engine, conversation, temperature=0.0, max_tokens=4, ignore_eos=True)
        assert (
            second[-1].cached_tokens == 40
        )  # 41 tokens of the first turn, 40 of them in full computed blocks
    async with engine_of(model, enable_prefix_cache=False, block_size=8) as engine:
        fresh = await run(engine, conversation, temperature=0.0, max_tokens=4, ignore_eos=True)
        assert fresh[-1].cached_tokens == 0
        assert tokens(fresh) == tokens(second)


async def test_min_tokens_holds_eos_back_and_max_tokens_cuts(model: Path) -> None:
    async with engine_of(model) as engine:
        urge = {"logit_bias": {0: 50.0}, "temperature": 1.0}
        assert tokens(await run(engine, [9, 9], **urge)) == (0,)
        held = await run(engine, [9, 9], min_tokens=5, **urge)
        assert len(tokens(held)) == 6
        assert tokens(held)[-1] == 0
        assert held[-1].finish_reason is FinishReason.STOP
        cut = await run(engine, [9, 9], max_tokens=3, min_tokens=3, **urge)
        assert cut[-1].finish_reason is FinishReason.LENGTH


async def test_a_context_that_fills_up_ends_with_length(model: Path) -> None:
    async with engine_of(model, max_model_len=40) as engine:
        outputs = await run(engine, prompt_of(1, 39), max_tokens=None, ignore_eos=True)
        assert len(tokens(outputs)) == 1
        assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_logits_that_are_not_finite_fail_the_request_alone(model: Path) -> None:
    async with engine_of(model) as engine:
        broken = asyncio.create_task(run(engine, [5], temperature=1.0, max_tokens=200, ignore_eos=True))
        healthy = asyncio.create_task(run(engine, [6], temperature=0.0, max_tokens=30, ignore_eos=True))
        while not engine._scheduler.running:
            await asyncio.sleep(0.001)
        victim = next(s for s in engine._scheduler.live.values() if s.request.prompt_ids == (5,))
        slabs = engine._driver.pipeline._executor._kv  # type: ignore[attr-defined]

        @torch.inference_mode()
        def poison() -> None:
            slabs[0][:, victim.pages[0]] = math.nan

        await engine._threads.call(poison)
        outputs = await broken
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert "not finite" in (outputs[-1].error or "")
        assert len(tokens(await healthy)) == 30
        # The poisoned page finds a new tenant, whose text must not notice.
        after = await asyncio.gather(
            *(run(engine, [7, i], temperature=0.0, max_tokens=3) for i in range(3, 12))
        )
        assert all(outputs[-1].finish_reason is not FinishReason.ERROR for outputs in after)


async def test_a_prompt_that_is_not_finite_halfway_is_not_computed_further(model: Path) -> None:
    prompt = prompt_of(4, 480)
    async with engine_of(model, block_size=8, max_tokens_per_chunk_for_prefill=8) as engine:
        broken = asyncio.create_task(run(engine, prompt, temperature=0.0, max_tokens=3))
        while not engine._scheduler.running or engine._scheduler.running[0].computed < 16:
            await asyncio.sleep(0)
        victim = engine._scheduler.running[0]
        slabs = engine._driver.pipeline._executor._kv  # type: ignore[attr-defined]

        @torch.inference_mode()
        def poison() -> None:
            slabs[0][:, victim.pages[0]] = math.nan

        await engine._threads.call(poison)
        outputs = await broken
        assert outputs[-1].finish_reason is FinishReason.ERROR
        assert victim.computed < 400, "it should have ended at the next chunk"
        while not engine._scheduler.idle:
            await asyncio.sleep(0.001)
        again = await run(engine, prompt, temperature=0.0, max_tokens=3)
    async with engine_of(model) as engine:
        assert tokens(again) == tokens(await run(engine, prompt, temperature=0.0, max_tokens=3))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_model_len": 513}, "--max_model_len=513: the checkpoint allows at most 512"),
        ({"max_cache_size": 4096}, "needs at least 3 pages"),
        (
            {"max_cache_size": 200_000, "max_model_len": 500},
            "raise --max_cache_size or lower --max_model_len",
        ),
        (
            {"enable_chunked_prefill": False, "max_tokens_per_batch": 100},
            "--max_tokens_per_batch of at least",
        ),
        ({"python_graph_backend": "aclgraph"}, "--python_graph_backend=aclgraph"),
    ],
)
async def test_refusals_at_start_name_the_flag(model: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError)) as refusal:
        async with engine_of(model, **flags):
            pass
    assert message in str(refusal.value)


async def test_a_small_cache_shortens_the_context_when_none_was_asked_for(model: Path) -> None:
    async with engine_of(model, max_cache_size=32 * KV_BYTES * 6) as engine:
        assert engine.max_model_len == 128


def test_a_script_that_never_closes_its_llm_ends_in_silence(model: Path) -> None:
    code = f"""
from xspec.llm import LLM
llm = LLM({str(model)!r}, dtype="float32", num_compute_threads=1, disable_graph_warmup=True)
llm.generate([[5, 6, 7]], llm.params(max_tokens=3))
"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
