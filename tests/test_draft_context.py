"""Draft context in the whole engine: after the same prefix the same drafts, whatever happened before.

Plain spells, prefix-cache hits, chunks of any size, preemption, company and full acceptance must not show
in a drafter's logits (to 1e-9 in fp64). Hints stand in for what a random drafter lacks: being right.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_rounds import DraftRounds
from recorded import Prefix, Proposal, compare, watched
from scripted import ScriptedDrafter
from test_engine import KV_BYTES, prompt_of, run, tokens
from test_lossless import DRAFT_IDS, Scheduled, deep
from tiny_drafters import make_mtp
from tiny_dspark import Sizes, make_dspark

from xspec.core.request import SamplingParams
from xspec.draft.make import load_drafter
from xspec.kernels.cpu import CpuKernels
from xspec.models.loader import load_target

__all__ = ["deep"]  # a fixture

KINDS = [
    pytest.param((algorithm, ids), id=f"{algorithm}-{'whole' if ids is None else 'reduced'}")
    for algorithm in ("MTP", "DSpark")
    for ids in (None, DRAFT_IDS)
]
PROMPTS = [prompt_of(200 + i, length) for i, length in enumerate((1, 8, 9, 30))]
ANSWER = 26
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True}


@dataclass(frozen=True)
class Kind:
    """One drafter, texts, and what it proposes after each of their prefixes when nothing disturbs it."""

    algorithm: str
    checkpoint: Path
    model: Path
    steps: int
    texts: list[list[int]]
    expected: Mapping[Prefix, list[Proposal]]

    def schedule(self, steps: Sequence[int]) -> list[int]:
        """MTP as given; a block is drafted whole or not at all."""
        return list(steps) if self.algorithm == "MTP" else [self.steps if step else 0 for step in steps]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    algorithm, ids = request.param
    path = tmp_path_factory.mktemp("drafter")
    if algorithm == "MTP":
        make_mtp(path, draft_ids=None if ids is None else torch.tensor(ids))
    else:
        make_dspark(path, Sizes(draft_ids=ids))
    return asyncio.run(undisturbed(algorithm, path, deep, 7 if algorithm == "MTP" else Sizes().block))


async def undisturbed(algorithm: str, path: Path, deep: Path, steps: int) -> Kind:
    """One slot, one request at a time, one page, one chunk, and drafts that are never right."""
    wrong = ScriptedDrafter([[0] * 512], right=0.0)
    flags = {"enable_schedule_overlap": False, "enable_prefix_cache": False, "block_size": 512}
    policy, texts = Scheduled([steps]), []
    async with watched(deep, path, policy, wrong, num_speculative_tokens=steps, **flags) as (engine, found):
        for prompt in PROMPTS:
            texts.append([*prompt, *tokens(await run(engine, prompt, **GREEDY))])
    assert policy.accepted == 0
    assert len(found.made) == len(PROMPTS) * (ANSWER - 1)
    return Kind(algorithm, path, deep, steps, texts, found.made)


async def same_drafts(
    kind: Kind,
    steps: Sequence[int],
    verify: Sequence[int | None] = (None,),
    *,
    right: float = 0.7,
    times: int = 1,
    **flags: Any,
) -> None:
    policy = Scheduled(kind.schedule(steps), verify)
    hints = ScriptedDrafter(kind.texts, right=right)
    flags = {"num_speculative_tokens": max(kind.schedule(steps)), **flags}
    async with watched(kind.model, kind.checkpoint, policy, hints, **flags) as (engine, found):
        for _ in range(times):
            results = await asyncio.gather(*(run(engine, prompt, **GREEDY) for prompt in PROMPTS))
            for prompt, text, outputs in zip(PROMPTS, kind.texts, results, strict=True):
                assert [*prompt, *tokens(outputs)] == text
        if times > 1 and engine._scheduler.pages.prefix_cache:
            assert results[-1][-1].cached_tokens > 0
        if "max_cache_size" in flags:
            assert engine._scheduler.counters.preemptions > 0
    assert compare(found, kind.expected) > 10 * times
    assert policy.accepted > 0 or right == 0.0


def test_the_undisturbed_drafts_are_those_of_a_harness_that_prefills(kind: Kind) -> None:
    """Not only always the same, but right: recomputed from each prefix by other code."""
    kernels, cpu = CpuKernels(), torch.device("cpu")
    target = load_target(kind.model, kernels, dtype=torch.float64, device=cpu)
    for text, prompt in zip(kind.texts, PROMPTS, strict=True):
        for position in (len(prompt), len(prompt) + 7):
            drafter = load_drafter(
                kind.algorithm, kind.checkpoint, model=kind.model, target=target, kernels=kernels,
                dtype=torch.float64, device=cpu, steps=kind.steps,
            )  # fmt: skip
            rounds = DraftRounds(target, drafter, kernels, [[*text, *[0] * kind.steps]])
            rounds.prefill([(0, position)])
            found = rounds.draft([0], kind.steps)
            expected = kind.expected[(tuple(prompt), position)][0]
            assert found.draft.tokens[0].tolist() == list(expected.tokens)
            torch.testing.assert_close(found.logits[:, 0], expected.logits, atol=1e-9, rtol=1e-9)


RANDOM = random.Random(11)
SPELLS = [RANDOM.choice((0, 0, 0, 1, 3, 7)) for _ in range(37)]


@pytest.mark.parametrize("right", [0.7, 1.0])
async def test_after_plain_spells(kind: Kind, right: float) -> None:
    await same_drafts(kind, SPELLS, [None, None, 0, 2, 1], right=right, block_size=3)


async def test_through_prefix_cache_hits(kind: Kind) -> None:
    """Hits of the whole prompt but one token (blocks of 1), and up to a page boundary (blocks of 8)."""
    for block_size in (1, 8):
        await same_drafts(kind, [7, 0, 3], times=2, block_size=block_size)


@pytest.mark.parametrize("chunk", [1, 4, 7])
async def test_through_chunked_prefill(kind: Kind, chunk: int) -> None:
    flags = {"max_tokens_per_chunk_for_prefill": chunk, "max_tokens_per_batch": 24, "block_size": 8}
    await same_drafts(kind, [7, 2, 0], **flags)


async def test_through_preemption(kind: Kind) -> None:
    page_bytes = 8 * 4 * KV_BYTES  # generous: the drafter's own planes are in it
    await same_drafts(
        kind, [7, 0, 7, 1], block_size=8, max_model_len=64, max_cache_size=11 * page_bytes,
        prefill_scheduling_memory_usage_threshold=1.0,
    )  # fmt: skip


async def test_in_any_company(kind: Kind) -> None:
    """Neighbours that come, go, are aborted, sample, do not speculate or fill longer page tables."""
    rng = random.Random(5)
    policy = Scheduled(kind.schedule([7, 3, 0, 7]), [None, 2])
    hints = ScriptedDrafter(kind.texts, right=0.8)
    flags = {"num_speculative_tokens": kind.steps, "block_size": 8}
    async with watched(kind.model, kind.checkpoint, policy, hints, **flags) as (engine, found):

        async def visitor(index: int) -> None:
            prompt = prompt_of(300 + index, rng.choice((1, 3, 60)))
            params = SamplingParams(max_tokens=12, seed=index, speculative=index % 3 > 0)
            stream = engine.generate(prompt, params)
            for _ in range(rng.randrange(5)):
                if (await anext(stream)).finish_reason:
                    break
            await stream.aclose()

        async def resident(prompt: list[int], text: list[int]) -> None:
            await asyncio.sleep(rng.random() * 0.02)
            assert [*prompt, *tokens(await run(engine, prompt, **GREEDY))] == text

        residents = (resident(*pair) for pair in zip(PROMPTS, kind.texts, strict=True))
        await asyncio.gather(*residents, *(visitor(index) for index in range(12)))
    assert compare(found, kind.expected) > 10
