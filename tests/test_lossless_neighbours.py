"""A request is alone: nothing its neighbours are, do or break shows in its text or in its drafts.

The model's embedding of one token is NaN: whoever feeds it goes wrong, in every layer and in the cache. A
request fails where plain decoding would, and a draft that was never right fails nobody.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tiny
from test_engine import engine_of, prompt_of, run, tokens
from tiny_dspark import target_config

from xspec.core.request import FinishReason
from xspec.engine.api import TextOutput

POISON = 200
URGE: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "logit_bias": {POISON: 5.0}}
PURE: dict[str, Any] = {"ignore_eos": True, "logit_bias": {POISON: -100.0}}

HEALTHY: dict[str, tuple[list[int], dict[str, Any]]] = {
    f"healthy {i}": (
        [token for token in prompt_of(60 + i, 4 + 7 * i) if token != POISON],
        {**PURE, "temperature": i % 2, "logprobs": 1},
    )
    for i in range(4)
}
SICK: dict[str, tuple[list[int], dict[str, Any]]] = {
    "prompted": ([5, POISON, 6], {"temperature": 0.0}),
    "draws it": (prompt_of(71, 9), URGE),
    "ends with it": (prompt_of(71, 9), {**URGE, "stop_token_ids": (POISON,)}),
    "its budget ends with it": (prompt_of(71, 9), URGE),
    "a string ends it before": (prompt_of(71, 9), URGE),
}
Plain = dict[str, list[TextOutput]]
Cases = dict[str, tuple[list[int], dict[str, Any]]]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("poisoned")
    tiny.make_checkpoint(path, "llama", overrides=target_config())
    weights = tiny.make_weights(tiny.make_config("llama", target_config()))
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    tiny.write_weights(path, weights)
    return path


@pytest.fixture(scope="module")
def cases(poisoned: Path) -> tuple[Cases, Plain]:
    return asyncio.run(_plainly(poisoned))


async def _plainly(model: Path) -> tuple[Cases, Plain]:
    cases: Cases = {**HEALTHY, **SICK}
    async with engine_of(model, enable_schedule_overlap=False, enable_prefix_cache=False) as engine:
        drawn = await run(engine, *_call(cases["draws it"]))
        assert drawn[-1].finish_reason is FinishReason.ERROR and tokens(drawn)[-1] == POISON
        count = len(tokens(drawn))
        assert 3 < count < 20, "choose another seed"
        prompt, params = cases["draws it"]
        cases["its budget ends with it"] = (prompt, {**params, "max_tokens": count})
        pieces = [output.text for output in drawn]
        before = "".join(pieces[: count - 1])[-2:]
        assert "".join(pieces).count(before) == 1
        cases["a string ends it before"] = (prompt, {**params, "stop": (before,)})
        return cases, {name: await run(engine, *_call(case)) for name, case in cases.items()}


def _call(case: tuple[list[int], dict[str, Any]]) -> tuple[list[int]]:
    raise NotImplementedError
