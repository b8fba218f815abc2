"""What speculation samples, against exact laws: histograms of texts, and how often coupled drafts agree.

Seeds are fixed, so every test gives the same numbers each time; its bounds were not fitted to them, and a
wrong law next to the right one shows that they can be missed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import engine_of, run, tokens
from test_lossless import Scheduled, speculating
from tiny import make_checkpoint, make_config, make_weights, write_weights
from tiny_drafters import make_mtp

from xspec.core.request import SamplingParams
from xspec.core.round import RowBind
from xspec.draft.base import Draft, DraftContext, DrafterSpec, Published
from xspec.engine.engine import AsyncEngine
from xspec.exec.pick import Picker
from xspec.verify.sampler import draw, needs_of
from xspec.verify.state import SamplingState

VOCAB = 6
PROMPT = [3, 1, 5, 4]
LENGTH = 3
Law = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    return make_checkpoint(path, "llama", overrides={"vocab_size": VOCAB}, seed=3)


@pytest.fixture(scope="module")
def conditionals(small: Path) -> Mapping[tuple[int, ...], torch.Tensor]:
    """Log-probabilities of the next token after the prompt and up to two more, by scoring every text."""
    return asyncio.run(_conditionals(small))


async def _conditionals(model: Path, length: int = LENGTH) -> dict[tuple[int, ...], torch.Tensor]:
    table: dict[tuple[int, ...], torch.Tensor] = {}
    async with engine_of(model, enable_prefix_cache=False) as engine:
        for text in itertools.product(range(VOCAB), repeat=length - 1):
            prompt = [*PROMPT, *text, 0]
            (output, *_) = await run(engine, prompt, prompt_logprobs=VOCAB, max_tokens=1)
            assert output.prompt_logprobs is not None
            for given in range(length):
                entry = output.prompt_logprobs[len(PROMPT) + given]
                assert entry is not None
                row = torch.tensor([dict(entry.top)[token] for token in range(VOCAB)]).double()
                table[text[:given]] = row
    return table


def law_of(conditionals: Mapping[tuple[int, ...], torch.Tensor], params: Mapping[str, Any]) -> Law:
    """Products of the softmax after temperature, top_k and top_p, written out here on its own."""

    def chances(given: tuple[int, ...]) -> list[float]:
        p = torch.softmax(conditionals[given] / params["temperature"], 0)
        ranked = sorted(range(VOCAB), key=lambda token: -float(p[token]))[: params.get("top_k") or VOCAB]
        mass, kept = 0.0, []
        total = sum(float(p[token]) for token in ranked)
        for token in ranked:
            if mass >= params.get("top_p", 1.0) * total:
                break
            kept.append(token)
            mass += float(p[token])
        return [float(p[token]) / mass if token in kept else 0.0 for token in range(VOCAB)]

    law: Law = {(): 1.0}
    for _ in range(LENGTH):
        law = {
            (*given, token): mass * chance
            for given, mass in law.items()
            for token, chance in enumerate(chances(given))
        }
    return {text: mass for text, mass in law.items() if mass > 0}


def misfit(counts: Counter[tuple[int, ...]], law: Law) -> float:
    """Chi-square in standard deviations above its mean; cells that expect fewer than 5 are one."""
    total = counts.total()
    assert set(counts) <= set(law), "a text that the law excludes"
    big = [text for text, mass in law.items() if mass * total >= 5]
    cells = [(counts[text], law[text] * total) for text in big]
    rest = total - sum(expected for _, expected in cells)
    if rest >= 5:
        cells.append((total - sum(found for found, _ in cells), rest))
    square = sum((found - expected) ** 2 / expected for found, expected in cells)
    freedom = len(cells) - 1
    assert freedom >= 5
    return (square - freedom) / (2 * freedom) ** 0.5


async def sample(engine: AsyncEngine, params: Mapping[str, Any], count: int) -> Counter[tuple[int, ...]]:
    """`count` texts: many seeds, and many choices of each."""
    choices = 40
    requests = [
        run(engine, PROMPT, **params, seed=seed, n=choices, ignore_eos=True, max_tokens=LENGTH)
        for seed in range(count // choices)
    ]
    found = await asyncio.gather(*requests)
    return Counter(tokens(outputs, choice) for outputs in found for choice in range(choices))


SETTINGS: dict[str, dict[str, Any]] = {
    "temperature alone": {"temperature": 4.0},
    "top_k": {"temperature": 4.0, "top_k": 3},
    "top_p": {"temperature": 4.0, "top_p": 0.7},
}


@pytest.mark.parametrize("coupled", [False, True], ids=["greedy drafts", "coupled drafts"])
async def test_texts_follow_the_exact_law(
    small: Path,
    conditionals: Mapping[tuple[int, ...], torch.Tensor],
    coupled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = make_mtp(tmp_path, vocab_size=VOCAB)
    policy = Scheduled([2, 1, 2])
    flags = {"num_speculative_tokens": 2, "enable_probabilistic_draft": coupled, "max_seqs_per_batch": 64}
    async with speculating(small, policy, drafter, monkeypatch, **flags) as engine:
        for name, params in SETTINGS.items():
            counts = await sample(engine, params, 1200)
            assert misfit(counts, law_of(conditionals, params)) < 4, name
            warmer = {**params, "temperature": params["temperature"] * 1.5}
            assert misfit(counts, law_of(conditionals, warmer)) > 4, f"{name}: nothing would be noticed"
    assert policy.accepted > 300


class Constant:
    """Draws every draft from the same logits, as the drafters of the engine draw theirs."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.spec = DrafterSpec("constant", steps=(1, 2, 3, 4))
        self._logits = logits

    def attach(self, *memory: Any) -> None:
        return None

    def bind(self, row: int, last_page: int | None) -> None:
        return None

    def publish(self, published: Published) -> None:
        return None

    def draft(self, context: DraftContext, steps: int) -> Draft:
        logits = self._logits.expand(len(context.rows), -1)
        picked = [context.pick(logits, context.positions + step + 1, None) for step in range(steps)]
        return Draft(torch.stack(picked, 1), torch.ones(len(context.rows), steps))


@pytest.mark.parametrize("coupled", [True, False])
async def test_a_drafter_that_equals_the_target_is_always_right(
    coupled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same noise at the same position; a model of one hidden state makes the two laws the same."""
    config = {"vocab_size": VOCAB}
    make_checkpoint(tmp_path, "llama", overrides=config)
    weights = make_weights(make_config("llama", config))
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
        if "embed_tokens" in name:
            weight.copy_(weight[:1].expand_as(weight))
    write_weights(tmp_path, weights)
    (logits,) = (await _conditionals(tmp_path, 1)).values()
    policy = Scheduled([4, 1, 0, 3])
    flags = {"enable_probabilistic_draft": coupled, "block_size": 4}
    async with speculating(tmp_path, policy, Constant(logits), monkeypatch, **flags) as engine:
        params = [{"temperature": t, "n": 6, "ignore_eos": True, "max_tokens": 21} for t in (0.5, 1.0, 3.0)]
        await asyncio.gather(*(run(engine, PROMPT, **values) for values in params))
    assert policy.proposed > 200
    assert (policy.accepted == policy.proposed) == coupled


def rows_of(vocab: int, temperature: float, seeds: int) -> SamplingState:
    """Device rows 1 to `seeds`, each with its own key, in fp64."""
    state = SamplingState(seeds + 1, vocab, torch.device("cpu"), dtype=torch.float64)
    for row in range(1, seeds + 1):
        params = SamplingParams(temperature=temperature)
        state.bind(row, RowBind(row, row, params, 1000 + row, row % 3, 1, (0,), (), 8))
    return state


SEEDS, POSITIONS, WIDTH = 20, 150, 40


@pytest.mark.parametrize("distance", [0.1, 0.5, 1.5, 3.0])
@pytest.mark.parametrize("reduced", [False, True])
def test_coupled_drafts_agree_as_often_as_promised(distance: float, reduced: bool) -> None:
    """At least (1 - TV) / (1 + TV) at temperature 1 (Daliri, Musco, Suresh, arXiv 2408.07978)."""
    generator = torch.Generator().manual_seed(int(distance * 10))
    target = torch.randn(WIDTH, generator=generator).double() * 2
    guess = target + torch.randn(WIDTH, generator=generator).double() * distance
    ids = torch.arange(0, WIDTH, 2) if reduced else None
    known = torch.arange(WIDTH) if ids is None else ids
    q = torch.zeros(WIDTH).double().index_copy(0, known, guess[known].softmax(0))
    distance_tv = float((target.softmax(0) - q).abs().sum() / 2)
    count = SEEDS * POSITIONS
    state = rows_of(WIDTH, 1.0, SEEDS)
    rows = torch.arange(1, SEEDS + 1).repeat_interleave(POSITIONS)
    positions = torch.arange(POSITIONS).repeat(SEEDS)
    needs = needs_of([SamplingParams()] * count)
    draws = draw(target.expand(count, -1), rows, positions, state, needs).tokens
    pick = Picker(state, probabilistic=True)
    drafts = known[pick(guess[known].expand(count, -1), rows, positions, ids)]
    agreed = float((draws == drafts).double().mean())
    promised = (1 - distance_tv) / (1 + distance_tv)
    margin = 4 * (promised * (1 - promised) / count) ** 0.5
    assert agreed > promised - margin, (agreed, promised)
    assert agreed < 1 - distance_tv + 4 * (0.25 / count) ** 0.5, "no coupling agrees more often"
    foreign = Picker(rows_of(WIDTH, 1.0, SEEDS + 1), probabilistic=True)
    others = known[foreign(guess[known].expand(count, -1), rows + 1, positions, ids)]
    if promised > 0.5:
        assert float((draws == others).double().mean()) < promised - margin, "other noise would not do"


def test_coupled_drafts_beat_greedy_ones_where_the_law_is_flat() -> None:
    count = SEEDS * POSITIONS
    logits = torch.randn(WIDTH, generator=torch.Generator().manual_seed(4)).double() * 0.2
    state = rows_of(WIDTH, 1.0, SEEDS)
    rows = torch.arange(1, SEEDS + 1).repeat_interleave(POSITIONS)
    positions = torch.arange(POSITIONS).repeat(SEEDS)
    needs = needs_of([SamplingParams()] * count)
    draws = draw(logits.expand(count, -1), rows, positions, state, needs).tokens
    guess = logits + 0.2 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(5)).double()
    picks = [
        Picker(state, probabilistic=coupled)(guess.expand(count, -1), rows, positions, None)
        for coupled in (True, False)
    ]
    coupled, greedy = (float((draws == pick).double().mean()) for pick in picks)
    assert coupled > 0.7
    assert greedy < 0.06


def test_greedy_rows_are_drafted_greedily_under_noise_too() -> None:
    state = rows_of(WIDTH, 0.0, 3)
    logits = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(6)).double()
    picked = Picker(state, probabilistic=True)(logits, torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), None)
    assert picked.tolist() == logits.argmax(1).tolist()
