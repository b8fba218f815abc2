"""Speculation on the embedded model and real prompts in fp32: greedy and sampled text equals plain text.

A first divergence is legal only where two tokens stood within MAX_GAP of each other; the gap is shown.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from scripted import ScriptedDrafter
from test_lossless import Scheduled
from tiny_drafters import exported_names, write_directory

from xspec.config import Config
from xspec.core.request import SamplingParams
from xspec.draft.base import Drafter
from xspec.engine import build
from xspec.engine.api import TextOutput
from xspec.engine.engine import AsyncEngine
from xspec.models.loader import open_checkpoint
from xspec.verify.noise import GumbelNoise, row_keys

pytestmark = pytest.mark.slow

MAX_GAP = 1e-4
LENGTH = 40
SEED = 5
TOP = 20


@dataclass(frozen=True)
class Asked:
    prompts: list[list[int]]
    params: list[SamplingParams]
    plain: list[list[TextOutput]]

    def texts(self) -> list[list[int]]:
        return [[*p, *ids(outputs)] for p, outputs in zip(self.prompts, self.plain, strict=True)]


def ids(outputs: Sequence[TextOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@asynccontextmanager
async def engine_of(
    model: Path, policy: Scheduled | None, drafter: Drafter | Path | None, **flags: Any
) -> AsyncIterator[AsyncEngine]:
    values = {
        "model": str(model), "dtype": "float32", "max_model_len": 512, "max_seqs_per_batch": 8,
        "max_cache_size": 400 * 2**20, "disable_graph_warmup": True, "num_speculative_tokens": 0, **flags,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(drafter, Path):
            values |= {"draft_model": str(drafter), "num_speculative_tokens": 7}
        elif drafter is not None:
            patch.setattr(build, "make_drafter", lambda *_: drafter)
        engine = await build.build_engine(Config.from_mapping(values))
        try:
            if policy is not None:
                engine._driver.policy = policy
            yield engine
        finally:
            await engine.close()


async def ask(engine: AsyncEngine, prompts: list[list[int]], params: list[SamplingParams]) -> Any:
    async def one(prompt: list[int], wanted: SamplingParams) -> list[TextOutput]:
        return [output async for output in engine.generate(prompt, wanted)]

    return await asyncio.gather(*(one(*pair) for pair in zip(prompts, params, strict=True)))


@pytest.fixture(scope="module")
def asked(smollm2_gguf: Path, data_dir: Path) -> Asked:
    """Eight prompts, every other one sampled, decoded plainly."""
    return asyncio.run(_plainly(smollm2_gguf, data_dir))


async def _plainly(model: Path, data: Path) -> Asked:
    async with engine_of(model, None, None) as engine:
        text = engine.text
        assert text.chat is not None
        prompts = []
        for name, count in (("gsm8k_test_first660.jsonl", 4), ("humaneval.jsonl", 4)):
            with (data / name).open(encoding="utf-8") as file:
                lines = [json.loads(line) for line, _ in zip(file, range(count), strict=False)]
            asked = [line.get("question") or line["turns"][0] for line in lines]
            chats = [text.chat.render([{"role": "user", "content": question}]) for question in asked]
            prompts += [text.tokenizer.encode(chat, add_special_tokens=False)[:400] for chat in chats]
        params = [
            SamplingParams(temperature=i % 2, seed=SEED, max_tokens=LENGTH, ignore_eos=True, logprobs=TOP)
            for i in range(len(prompts))
        ]
        return Asked(prompts, params, await ask(engine, prompts, params))


def check(way: str, asked: Asked, found: list[list[TextOutput]], vocab: int) -> None:
    for index, (ours, theirs) in enumerate(zip(found, asked.plain, strict=True)):
        mine, plain = ids(ours), ids(theirs)
        assert len(mine) == len(plain) == LENGTH
        at = next((i for i in range(LENGTH) if mine[i] != plain[i]), None)
        if at is None:
            continue
        gap = _gap(asked, index, at, mine[at], vocab)
        print(f"{way}: prompt {index} leaves the plain text at token {at}, gap {gap:.2e}")
        assert gap < MAX_GAP, f"{way}: prompt {index}, token {at}: the gap is {gap:.2e}"


def _gap(asked: Asked, index: int, at: int, mine: int, vocab: int) -> float:
    """By how much plain decoding preferred its own token, noise included."""
    entry = [entry for output in asked.plain[index] for entry in output.logprobs][at]
    chances = {entry.token_id: entry.logprob, **dict(entry.top)}
    assert mine in chances, f"prompt {index}, token {at}: {mine} was not even among the {TOP} likeliest"
    gap = chances[entry.token_id] - chances[mine]
    if asked.params[index].greedy:
        return gap
    noise = GumbelNoise(vocab, torch.device("cpu"))
    keys, position = torch.tensor([row_keys(SEED, 0)], dtype=torch.int32), len(asked.prompts[index]) + at
    (row,) = noise.gumbel(keys, torch.tensor([position]), torch.tensor([[entry.token_id, mine]]))
    return gap + float(row[0] - row[1])


def vocab_of(model: Path) -> int:
    checkpoint = open_checkpoint(model)
    try:
        return int(checkpoint.config["vocab_size"])
    finally:
        checkpoint.close()


async def test_scripted_drafts(smollm2_gguf: Path, asked: Asked) -> None:
    drafter = ScriptedDrafter(asked.texts(), right=0.85)
    policy = Scheduled([7, 3, 0, 7], [None, 2, None])
    async with engine_of(smollm2_gguf, policy, drafter) as engine:
        for way in ("cold", "warm"):
            check(way, asked, await ask(engine, asked.prompts, asked.params), vocab_of(smollm2_gguf))
    assert policy.accepted > policy.proposed / 4


@pytest.fixture(scope="module")
def random_mtp(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MTP drafter of the model's own size whose weights are noise."""
    checkpoint = open_checkpoint(smollm2_gguf)
    config = {**checkpoint.config, "num_hidden_layers": 1}
    checkpoint.close()
    hidden = config["hidden_size"]
    shapes = {
        f"layer.{name.removeprefix('model.layers.0.')}": shape
        for name, shape in tiny.tensor_shapes(config).items()
        if name.startswith("model.layers.0.")
    }
    shapes |= {f"{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "norm")}
    shapes["eh_proj.weight"] = (hidden, 2 * hidden)
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: 1.0 + 0.1 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    path = tmp_path_factory.mktemp("mtp")
    config["model_type"] = f"{config['model_type']}_mtp"
    return write_directory(path, config, exported_names(weights))


async def test_a_drafter_of_noise(smollm2_gguf: Path, asked: Asked, random_mtp: Path) -> None:
    policy = Scheduled([7, 0, 2])
    async with engine_of(smollm2_gguf, policy, random_mtp, enable_probabilistic_draft=True) as engine:
        found = await ask(engine, asked.prompts, asked.params)
    check("noise", asked, found, vocab_of(smollm2_gguf))
    assert policy.proposed > 500
