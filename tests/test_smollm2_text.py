"""Greedy fp32 text of the whole engine on the embedded model equals transformers', token by token.

A first divergence is legal only where the reference itself was within MAX_GAP of choosing our token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from smollm2 import GreedyText, greedy_text, reference_model

from xspec.config import Config
from xspec.core.request import SamplingParams
from xspec.engine.api import TextOutput
from xspec.engine.build import build_engine
from xspec.engine.engine import AsyncEngine
from xspec.text.tokenizer import load_text

pytest.importorskip("transformers")

MAX_GAP = 1e-4
LONG = 64
SHORT_TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a village far from the sea, lived an old clockmaker who could not sleep. " * 4,
)


@asynccontextmanager
async def engine_of(path: Path, **flags: object) -> AsyncIterator[AsyncEngine]:
    values = {
        "model": str(path), "dtype": "float32", "max_model_len": 640, "max_seqs_per_batch": 20,
        "block_size": 16, "max_cache_size": 700 * 2**20, "max_tokens_per_chunk_for_prefill": 40,
        "max_tokens_per_batch": 96, "disable_graph_warmup": True, **flags,
    }  # fmt: skip
    engine = await build_engine(Config.from_mapping(values))
    try:
        yield engine
    finally:
        await engine.close()


async def greedy(engine: AsyncEngine, prompt: list[int], count: int) -> list[TextOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [output async for output in engine.generate(prompt, params)]


async def texts(
    engine: AsyncEngine, prompts: list[list[int]], count: int, *, together: bool
) -> list[list[TextOutput]]:
    if together:
        return await asyncio.gather(*(greedy(engine, prompt, count) for prompt in prompts))
    return [await greedy(engine, prompt, count) for prompt in prompts]


def check(way: str, found: list[list[TextOutput]], expected: list[GreedyText]) -> None:
    for index, (outputs, reference) in enumerate(zip(found, expected, strict=True)):
        tokens = [token for output in outputs for token in output.token_ids]
        divergence = reference.divergence(tokens)
        if divergence is not None:
            at, gap = divergence
            print(f"{way}: prompt {index} leaves the reference at token {at}, logit gap {gap:.2e}")
            assert gap < MAX_GAP, f"{way}: prompt {index}, token {at}: the gap is {gap:.2e}"


async def test_a_few_short_texts(smollm2_gguf: Path) -> None:
    async with engine_of(smollm2_gguf, max_model_len=256, max_cache_size=64 * 2**20) as engine:
        prompts = [engine.text.tokenizer.encode(text) for text in SHORT_TEXTS]
        found = await texts(engine, prompts, 8, together=True)
        again = await texts(engine, prompts, 8, together=False)
        assert again[2][-1].cached_tokens >= 64
    reference = await asyncio.to_thread(reference_model, smollm2_gguf)
    expected = [await asyncio.to_thread(greedy_text, reference, prompt, 8) for prompt in prompts]
    check("batch", found, expected)
    check("alone", again, expected)


Expected = tuple[list[list[int]], list[GreedyText]]


@pytest.fixture(scope="module")
def twenty(smollm2_gguf: Path, data_dir: Path) -> Expected:
    """Twenty real prompts of 31 to 421 tokens and the reference's texts of LONG tokens."""
    text = load_text(smollm2_gguf)
    assert text.chat is not None
    encode = text.tokenizer.encode
    files = ("gsm8k_test_first660.jsonl", "mt-bench.jsonl", "humaneval.jsonl")
    chats = [_lines(data_dir / name, 4) for name in files]
    asked = [line.get("question") or line["turns"][0] for lines in chats for line in lines]
    rendered = [text.chat.render([{"role": "user", "content": question}]) for question in asked]
    prompts = [encode(chat, add_special_tokens=False)[:560] for chat in rendered]
    prose = (data_dir / "wikitext2_valid.txt").read_text(encoding="utf-8")
    prompts += [encode(prose[at : at + 60 + at // 20])[:560] for at in range(2000, 34_000, 4000)]
    assert len(prompts) == 20
    reference = reference_model(smollm2_gguf)
    return prompts, [greedy_text(reference, prompt, LONG) for prompt in prompts]


@pytest.mark.slow
async def test_twenty_real_prompts_in_a_batch(smollm2_gguf: Path, twenty: Expected) -> None:
    """Ragged chunks beside decode rows first, then on prompts that are served from the cache."""
    prompts, expected = twenty
    async with engine_of(smollm2_gguf) as engine:
        check("cold batch", await texts(engine, prompts, LONG, together=True), expected)
        warm = await texts(engine, prompts, LONG // 4, together=True)
        check("warm batch", warm, [text.beginning(LONG // 4) for text in expected])
        hits = [outputs[-1].cached_tokens for outputs in warm]
        assert hits == [(len(prompt) - 1) // 16 * 16 for prompt in prompts], "every full block is a hit"


@pytest.mark.slow
async def test_twenty_real_prompts_alone(smollm2_gguf: Path, twenty: Expected) -> None:
    prompts, expected = twenty
    async with engine_of(smollm2_gguf) as engine:
        check("alone", await texts(engine, prompts, LONG, together=False), expected)


def _lines(path: Path, count: int) -> list[dict]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(count), strict=False)]
