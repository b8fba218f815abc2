"""Named cases of speculation, in fp64: what ends, bends or measures a text inside an accepted run.

Every case is decoded plainly first, alone in one slot; then all of them run together under a drafter that
knows the answers, and nothing a client can see may differ.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedDrafter
from test_engine import KV_BYTES, engine_of, model, prompt_of, run, tokens
from test_lossless import Scheduled, same, speculating

from xspec.core.request import FinishReason, SamplingParams
from xspec.engine.api import TextOutput

__all__ = ["model"]  # a fixture

ONE_SLOT = {"enable_schedule_overlap": False}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 25}
STOPPED_PROMPT = prompt_of(42, 6)
PALETTE = {40 + 7 * i: 30.0 for i in range(10)}
"""Ten likely tokens: penalties decide between them, so a count that is off by one draft shows."""

LOUD: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logit_bias": PALETTE}

CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": (prompt_of(31, 10), {"temperature": 0.0, "ignore_eos": True, "max_tokens": 25}),
    "sampled": (STOPPED_PROMPT, SAMPLED),
    "one token": ([7], {"temperature": 0.0}),
    "a page of 8": (prompt_of(32, 8), {"temperature": 1.0, "logprobs": 0}),
    "three pages of 8": (prompt_of(33, 24), {"temperature": 0.0, "logprobs": 1}),
    "pages of 8 and one": (prompt_of(34, 17), {"temperature": 1.3}),
    "budget 1": (prompt_of(35, 5), {"max_tokens": 1, "logprobs": 2}),
    "budget 2": (prompt_of(35, 6), {"max_tokens": 2, "logprobs": 2}),
    "budget 5": (prompt_of(35, 7), {"max_tokens": 5, "logprobs": 2}),
    "palette": (prompt_of(36, 9), LOUD),
    "repetition": (prompt_of(36, 9), {**LOUD, "repetition_penalty": 1.9, "logprobs": 1}),
    "presence": (prompt_of(36, 9), {**LOUD, "presence_penalty": 2.0}),
    "frequency": (prompt_of(36, 9), {**LOUD, "frequency_penalty": 2.0}),
    "every penalty": (
        prompt_of(36, 9),
        {**LOUD, "temperature": 0.8, "frequency_penalty": 1.0, "presence_penalty": 0.5,
         "repetition_penalty": 1.2, "top_k": 5},
    ),
    "bias": (prompt_of(37, 3), {"temperature": 1.0, "logit_bias": {9: 5.0, 14: -50.0}, "logprobs": 3}),
    "min_tokens": (prompt_of(38, 4), {"temperature": 1.0, "logit_bias": {0: 30.0}, "min_tokens": 11}),
    "three choices": (prompt_of(39, 11), {"temperature": 1.2, "n": 3, "logprobs": 1}),
    "echo": (prompt_of(40, 29), {"temperature": 1.0, "prompt_logprobs": 2, "logprobs": 2, "n": 2}),
    "not speculating": (prompt_of(41, 8), {"temperature": 1.0, "speculative": False, "logprobs": 1}),
    "filters": (prompt_of(43, 13), {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01}),
}  # fmt: skip


@dataclass(frozen=True)
class Reference:
    cases: dict[str, tuple[list[int], dict[str, Any]]]
    plain: dict[str, list[TextOutput]]
    scripts: list[list[int]]  # texts a drafter may know: past every stop

    def text(self, name: str) -> list[int]:
        return [*self.cases[name][0], *tokens(self.plain[name])]


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return asyncio.run(_reference(model))


async def _reference(model: Path) -> Reference:
    flags = {**ONE_SLOT, "enable_prefix_cache": False, "enable_graph": False, "block_size": 512}
    async with engine_of(model, **flags) as engine:
        endless = await run(engine, STOPPED_PROMPT, **SAMPLED)
        cases = {**CASES, **stopped(endless)}
        plain = {name: await run(engine, prompt, **params) for name, (prompt, params) in cases.items()}
    scripts = [
        [*prompt, *tokens(plain[name], choice), *prompt_of(9, 8)]
        for name, (prompt, params) in cases.items()
        for choice in range(params.get("n", 1))
        if prompt is not STOPPED_PROMPT
    ]
    return Reference(cases, plain, [[*STOPPED_PROMPT, *tokens(endless)], *scripts])


def stopped(endless: Sequence[TextOutput]) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Cases that end the same text somewhere: an id, a string over two tokens, one that min_tokens skips."""
    ids, pieces = tokens(list(endless)), [output.text for output in endless]
    text = "".join(pieces)
    ends = [i for i in range(3, 20) if ids.index(ids[i]) == i]
    pairs = [
        pieces[i] + pieces[i + 1]
        for i in range(3, 20)
        if pieces[i].isascii() and pieces[i + 1].isascii() and pieces[i].strip() and pieces[i + 1].strip()
    ]
    pairs = [pair for pair in pairs if text.count(pair) == 1]
    assert len(ends) > 5 and len(pairs) > 1, "the text has changed: choose another seed"
    ended = {**SAMPLED, "logprobs": 2}
    return {
        "stop id": (STOPPED_PROMPT, {**ended, "stop_token_ids": (ids[ends[2]],)}),
        "stop id held back": (STOPPED_PROMPT, {**ended, "stop_token_ids": (ids[ends[4]],), "min_tokens": 3}),
        "stop string": (STOPPED_PROMPT, {**ended, "stop": (pairs[0],)}),
        "stop string shown": (
            STOPPED_PROMPT, {**ended, "stop": (pairs[1],), "include_stop_str_in_output": True},
        ),
        "stop string too early": (STOPPED_PROMPT, {**ended, "stop": (pairs[0],), "min_tokens": 20}),
    }  # fmt: skip


def identical(found: Sequence[TextOutput], expected: Sequence[TextOutput], name: str) -> None:
    """Everything a client can see, choice by choice."""
    for choice in {output.choice for output in expected}:
        ours, theirs = ([o for o in outputs if o.choice == choice] for outputs in (found, expected))
        same(ours, theirs, name)
        for field in ("stop_reason", "completion_tokens", "prompt_tokens", "error"):
            assert getattr(ours[-1], field) == getattr(theirs[-1], field), (name, field)
        scores = [[s for o in outputs for s in o.prompt_logprobs or ()] for outputs in (ours, theirs)]
        assert len(scores[0]) == len(scores[1]), name
        for mine, other in zip(*scores, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                assert mine.token_id == other.token_id
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-9), name
                assert [i for i, _ in mine.top] == [i for i, _ in other.top], name
                values = [value for _, value in other.top]
                assert [value for _, value in mine.top] == pytest.approx(values, abs=1e-9), name


async def run_all(engine: Any, reference: Reference) -> dict[str, list[TextOutput]]:
    found = await asyncio.gather(*(run(engine, p, **params) for p, params in reference.cases.values()))
    return dict(zip(reference.cases, found, strict=True))


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "all right": {"steps": [7], "right": 1.0, "block_size": 1},
    "7-1-0-7": {"steps": [7, 1, 0, 7], "right": 0.85, "block_size": 3, **ONE_SLOT},
    "16 wide": {"steps": [16], "right": 1.0, "block_size": 8},
    "all wrong": {"steps": [3], "right": 0.0, "block_size": 8, "max_tokens_per_chunk_for_prefill": 5},
    "clipped": {"steps": [7], "verify": [None, 0, 3, 1], "right": 0.9, "block_size": 5},
    "few rows": {"steps": [4, 7], "right": 0.95, "block_size": 8, "max_seqs_per_batch": 3},
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
async def test_every_case_at_once(
    model: Path, reference: Reference, configuration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = dict(CONFIGURATIONS[configuration])
    policy = Scheduled(flags.pop("steps"), flags.pop("verify", (None,)))
    drafter = ScriptedDrafter(reference.scripts, right=flags.pop("right"))
    async with speculating(model, policy, drafter, monkeypatch, **flags) as engine:
        cold, warm = await run_all(engine, reference), await run_all(engine, reference)
    for name, expected in reference.plain.items():
        identical(cold[name], expected, name)
        identical(warm[name], expected, name)
    assert policy.proposed > 500
    assert (policy.accepted > policy.proposed / 5) == (drafter._right > 0)
    if flags["block_size"] == 1:
        assert warm["greedy"][-1].cached_tokens == 9, "the whole prompt but one token"
    if flags["block_size"] == 8:
        hits = [warm[name][-1].cached_tokens for name in ("a page of 8", "pages of 8 and one", "echo")]
        assert hits == [0, 16, 0]


def test_the_cases_are_what_they_say(reference: Reference) -> None:
    plain = reference.plain
    penalised = ("palette", "repetition", "presence", "frequency", "every penalty")
    assert len({tokens(plain[name]) for name in penalised}) == len(penalised)
    assert all(len(set(tokens(plain[name]))) < 15 for name in penalised), "they repeat"
    assert len(tokens(plain["min_tokens"])) == 12 and tokens(plain["min_tokens"])[-1] == 0
    assert len({tokens(plain["three choices"], choice) for choice in range(3)}) == 3
    assert tokens(plain["stop string too early"]) == tokens(plain["sampled"])
    for name in ("stop id", "stop id held back", "stop string", "stop string shown"):
        assert plain[name][-1].finish_reason is FinishReason.STOP, name
        assert 4 < len(tokens(plain[name])) < 25, name


async def rounds_of(
    model: Path,
    reference: Reference,
    policy: Scheduled,
    monkeypatch: pytest.MonkeyPatch,
    *,
    right: float = 1.0,
    name: str = "greedy",
    flags: dict[str, Any] | None = None,
    **params: Any,
) -> list[tuple[int, int, int]]:
    """(proposed, accepted, committed) of every round of one request in one slot, the prefill left out."""
    drafter = ScriptedDrafter(reference.scripts, right=right)
    prompt, values = reference.cases[name]
    async with speculating(model, policy, drafter, monkeypatch, **ONE_SLOT, **(flags or {})) as engine:
        outputs = await run(engine, prompt, **{**values, **params})
    found = tokens(outputs)
    assert found == tokens(reference.plain[name])[: len(found)]
    assert [len(o.token_ids) for o in outputs] == [1, *(row.committed for f in policy.told for row in f.rows)]
    length = len(prompt) + len(found)
    assert list(drafter.published.values()) == [list(range(length - 1))], "each fact once, in order"
    return [(row.proposed, row.accepted, row.committed) for f in policy.told for row in f.rows]


@pytest.mark.parametrize(
    ("steps", "max_tokens", "expected"),
    [
        (1, 25, [(1, 1, 2)] * 12),
        (3, 25, [(3, 3, 4)] * 6),
        (7, 25, [(7, 7, 8)] * 3),
        (7, 24, [(7, 7, 8)] * 2 + [(6, 6, 7)]),
        (7, 18, [(7, 7, 8)] * 2 + [(0, 0, 1)]),
        (16, 24, [(16, 16, 17), (5, 5, 6)]),
    ],
)
async def test_full_acceptance(
    model: Path,
    reference: Reference,
    steps: int,
    max_tokens: int,
    expected: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """K + 1 tokens a round, and the last one exactly to max_tokens."""
    found = await rounds_of(model, reference, Scheduled([steps]), monkeypatch, max_tokens=max_tokens)
    assert found == expected


async def test_zero_acceptance(model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await rounds_of(model, reference, Scheduled([3]), monkeypatch, right=0.0)
    assert found == [(3, 0, 1)] * 21 + [(2, 0, 1), (1, 0, 1), (0, 0, 1)]


@pytest.mark.parametrize("block_size", [1, 3, 8])
async def test_depths_7_1_0_7_across_page_boundaries(
    model: Path, reference: Reference, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of 10 leaves 6 slots of the second page of 8: each 7 crosses a boundary."""
    policy = Scheduled([0, 7, 1, 0, 7, 7])  # the first is the prefill's
    flags = {"block_size": block_size}
    found = await rounds_of(model, reference, policy, monkeypatch, flags=flags)
    assert found == [(7, 7, 8), (1, 1, 2), (0, 0, 1), (7, 7, 8), (4, 4, 5)]


@pytest.mark.parametrize(("steps", "last"), [(7, (7, 7, 8)), (4, (3, 3, 4))])
async def test_acceptance_to_exactly_max_model_len(
    model: Path, reference: Reference, steps: int, last: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"max_model_len": 35, "block_size": 8}  # the prompt has 10
    found = await rounds_of(model, reference, Scheduled([steps]), monkeypatch, flags=flags, max_tokens=None)
    assert found[-1] == last and sum(row[2] for row in found) == 24


@pytest.mark.parametrize("name", ["stop id", "stop string", "budget 5", "min_tokens"])
@pytest.mark.parametrize("overlap", [False, True])
async def test_what_follows_a_stop_is_not_in_the_prefix_cache(
    model: Path, reference: Reference, name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later turn that repeats prompt, answer and what the drafter knew to follow finds the answer only."""
    prompt, params = reference.cases[name]
    answer = tokens(reference.plain[name])
    script = next(s for s in reference.scripts if s[: len(prompt) + len(answer)] == [*prompt, *answer])
    flags = {"block_size": 2, "enable_schedule_overlap": overlap}
    later = {"max_tokens": 2, "temperature": 0.0}

    async def hits(engine: Any) -> tuple[int, int]:
        outputs = await run(engine, prompt, **params)
        identical(outputs, reference.plain[name], name)
        again = await run(engine, prompt, **params)
        identical(again, reference.plain[name], name)
        assert again[-1].cached_tokens == (len(prompt) - 1) // 2 * 2
        turn = await run(engine, [*script, 5], **later)
        return turn[-1].cached_tokens, tokens(turn)

    async with engine_of(model, **flags) as engine:
        plainly = await hits(engine)
    drafter = ScriptedDrafter(reference.scripts, right=1.0)
    async with speculating(model, Scheduled([7]), drafter, monkeypatch, **flags) as engine:
        found = await hits(engine)
    assert found[1] == plainly[1]
    facts = (len(prompt) + len(answer) - 1) // 2 * 2
    assert plainly[0] <= facts
    if name == "stop string":  # found by the text only: the round it came in stays out
        assert len(prompt) <= found[0] <= plainly[0]
    else:
        assert found[0] == plainly[0] == facts


async def test_aborts_at_random_points_leave_nothing(
    model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients come and go in a pool that is too small; every page returns (`engine_of` looks)."""
    rng = random.Random(8)
    drafter = ScriptedDrafter(reference.scripts, right=0.9)
    flags = {
        "block_size": 4, "max_seqs_per_batch": 6, "max_cache_size": 32 * 4 * KV_BYTES, "max_model_len": 100,
        "prefill_scheduling_memory_usage_threshold": 1.0,
    }  # fmt: skip
    policy = Scheduled([7, 3, 0, 7], [None, 2])
    async with speculating(model, policy, drafter, monkeypatch, **flags) as engine:

        async def visitor(index: int) -> None:
            await asyncio.sleep(rng.random() * 0.1)
            prompt, params = reference.cases[rng.choice([*reference.cases])]
            stream = engine.generate(prompt, SamplingParams(**{"max_tokens": 24, "seed": 7, **params}))
            for _ in range(rng.randrange(5)):
                if (await anext(stream)).finish_reason:
                    break
            await stream.aclose()

        async def resident(name: str) -> None:
            prompt, params = reference.cases[name]
            identical(await run(engine, prompt, **params), reference.plain[name], name)

        names = ("greedy", "sampled", "stop id", "stop string", "every penalty", "three choices", "echo")
        await asyncio.gather(*(resident(name) for name in names), *(visitor(i) for i in range(30)))
        assert engine._scheduler.counters.preemptions > 0
