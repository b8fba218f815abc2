"""A request is alone: nothing its neighbours are, do or break shows in its text or in its drafts.

The model's embedding of one token is NaN: whoever feeds it goes wrong, in every layer and in the cache. A
request fails where plain decoding would, and a draft that was never right fails nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from recorded import compare, watched
from scripted import ScriptedDrafter
from test_engine import engine_of, prompt_of, run, tokens
from test_lossless import Scheduled, same, speculating
from tiny_drafters import make_mtp
from tiny_dspark import make_dspark, target_config

from xspec.core.request import FinishReason
from xspec.engine.api import TextOutput
from xspec.engine.engine import AsyncEngine

POISON = 200
Case = tuple[list[int], dict[str, Any]]
URGE: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "logit_bias": {POISON: 7.0}}
PURE: dict[str, Any] = {"ignore_eos": True, "logit_bias": {POISON: -100.0}}


def pure(seed: int, length: int) -> list[int]:
    return [token for token in prompt_of(seed, length) if token != POISON]


HEALTHY: dict[str, Case] = {
    f"healthy {i}": (pure(60 + i, 4 + 7 * i), {**PURE, "temperature": i % 2, "logprobs": 1}) for i in range(4)
}
SICK: dict[str, Case] = {
    "prompted": ([5, POISON, 6], {"temperature": 0.0}),
    "draws it": (prompt_of(88, 9), URGE),
    "ends with it": (prompt_of(88, 9), {**URGE, "stop_token_ids": (POISON,)}),
    "its budget ends with it": (prompt_of(88, 9), URGE),
    "a string ends it before": (prompt_of(88, 9), URGE),
}
Plain = dict[str, list[TextOutput]]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("poisoned")
    tiny.make_checkpoint(path, "llama", overrides=target_config())
    weights = tiny.make_weights(tiny.make_config("llama", target_config()))
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    tiny.write_weights(path, weights)
    return path


@pytest.fixture(scope="module")
def cases(poisoned: Path) -> tuple[dict[str, Case], Plain]:
    return asyncio.run(_plainly(poisoned))


async def _plainly(model: Path) -> tuple[dict[str, Case], Plain]:
    cases: dict[str, Case] = {**HEALTHY, **SICK}
    async with engine_of(model, enable_schedule_overlap=False, enable_prefix_cache=False) as engine:
        drawn = await ask(engine, cases["draws it"])
        assert drawn[-1].finish_reason is FinishReason.ERROR and tokens(drawn)[-1] == POISON
        count = len(tokens(drawn))
        assert 3 < count < 20, "choose another seed"
        prompt, params = cases["draws it"]
        cases["its budget ends with it"] = (prompt, {**params, "max_tokens": count})
        before = drawn[count - 2].text
        assert before and "".join(output.text for output in drawn).count(before) == 1
        cases["a string ends it before"] = (prompt, {**params, "stop": (before,)})
        return cases, {name: await ask(engine, case) for name, case in cases.items()}


async def ask(engine: AsyncEngine, case: Case) -> list[TextOutput]:
    prompt, params = case
    return await run(engine, prompt, **params)


def scripts(cases: Mapping[str, Case], plain: Plain) -> list[list[int]]:
    return [[*case[0], *tokens(plain[name]), *prompt_of(9, 8)] for name, case in cases.items()]


def check(found: Sequence[TextOutput], expected: Sequence[TextOutput], name: str) -> None:
    same(found, expected, name)
    assert (found[-1].error, found[-1].stop_reason) == (expected[-1].error, expected[-1].stop_reason), name


def test_the_cases_are_what_they_say(cases: tuple[dict[str, Case], Plain]) -> None:
    reasons = {name: outputs[-1].finish_reason for name, outputs in cases[1].items()}
    assert reasons == {
        **dict.fromkeys(HEALTHY, FinishReason.LENGTH),
        "prompted": FinishReason.ERROR,
        "draws it": FinishReason.ERROR,
        "ends with it": FinishReason.STOP,
        "its budget ends with it": FinishReason.LENGTH,
        "a string ends it before": FinishReason.STOP,
    }


@pytest.mark.parametrize("right", [1.0, 0.6])
@pytest.mark.parametrize("overlap", [True, False])
async def test_what_is_not_finite_fails_only_who_would_have_met_it(
    poisoned: Path,
    cases: tuple[dict[str, Case], Plain],
    right: float,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every wrong draft is the poison; pages of the failed go to the healthy."""
    asked, plain = cases
    drafter = ScriptedDrafter(scripts(asked, plain), right=right, wrong=POISON)
    policy = Scheduled([7, 3, 0, 7], [None, None, None, 4])
    flags = {"block_size": 4, "max_cache_size": 80 * 4 * 2048, "max_model_len": 100}
    async with speculating(
        poisoned, policy, drafter, monkeypatch, enable_schedule_overlap=overlap, **flags
    ) as engine:
        for _ in range(2):
            found = await asyncio.gather(*(ask(engine, case) for case in asked.values()))
            for name, outputs in zip(asked, found, strict=True):
                check(outputs, plain[name], name)
        fillers = [run(engine, pure(90 + i, 20), **PURE, temperature=0.0) for i in range(6)]
        assert all(o[-1].finish_reason is FinishReason.LENGTH for o in await asyncio.gather(*fillers))
    assert policy.accepted > 50


@pytest.mark.parametrize("algorithm", ["MTP", "DSpark"])
async def test_drafts_do_not_notice_either(
    poisoned: Path, cases: tuple[dict[str, Case], Plain], algorithm: str, tmp_path: Path
) -> None:
    asked, plain = cases
    path = make_mtp(tmp_path) if algorithm == "MTP" else make_dspark(tmp_path)
    steps = 5
    alone = ScriptedDrafter(scripts(asked, plain), right=0.0)
    flags = {"num_speculative_tokens": steps, "block_size": 4, "max_model_len": 100}
    async with watched(poisoned, path, Scheduled([steps]), alone, **flags) as (engine, expected):
        for name in HEALTHY:
            check(await ask(engine, asked[name]), plain[name], name)
    company = ScriptedDrafter(scripts(asked, plain), right=0.7, wrong=POISON)
    flags["max_cache_size"] = 60 * 4 * 4096
    async with watched(poisoned, path, Scheduled([steps, 0, steps]), company, **flags) as (engine, found):
        for _ in range(2):
            outputs = await asyncio.gather(*(ask(engine, case) for case in asked.values()))
            for name, output in zip(asked, outputs, strict=True):
                check(output, plain[name], name)
    assert compare(found, expected.made) > 30
