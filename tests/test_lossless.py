"""The text contract under speculation, in fp64 on tiny models: whatever is drafted and verified, the text,
its logprobs and its finish are those of plain decoding (architecture decision 7).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import ScriptedDrafter
from test_engine import KV_BYTES, LOAD, SCHEDULES, alone, engine_of, model, plain, run, tokens
from tiny import make_checkpoint
from tiny_drafters import make_mtp
from tiny_dspark import Sizes, make_dspark, target_config

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.draft.base import Drafter
from xspec.engine import build
from xspec.engine.api import TextOutput
from xspec.engine.engine import AsyncEngine
from xspec.policy.base import PolicyView

__all__ = ["model", "plain"]  # fixtures

Plain = dict[str, list[TextOutput]]


class Scheduled:
    """Draft steps by round, over and over; `verify` likewise (None: all). Keeps what it was told."""

    name = "scheduled"

    def __init__(self, steps: Sequence[int], verify: Sequence[int | None] = (None,)) -> None:
        self._steps, self._verify = steps, verify
        self.told: list[RoundFeedback] = []

    def plan(self, view: PolicyView) -> SpeculationPlan:
        steps = self._steps[view.plan_id % len(self._steps)]
        return SpeculationPlan(view.plan_id, self.name, steps, self._verify[view.plan_id % len(self._verify)])

    def observe(self, feedback: RoundFeedback) -> None:
        self.told.append(feedback)

    @property
    def proposed(self) -> int:
        return sum(row.proposed for feedback in self.told for row in feedback.rows)

    @property
    def accepted(self) -> int:
        return sum(row.accepted for feedback in self.told for row in feedback.rows)


@asynccontextmanager
async def speculating(
    model: Path,
    policy: Scheduled,
    drafter: Drafter | Path,
    monkeypatch: pytest.MonkeyPatch,
    **flags: Any,
) -> AsyncIterator[AsyncEngine]:
    """An engine with a drafter (a checkpoint, or one made here) under a policy of the test's own."""
    if isinstance(drafter, Path):
        flags["draft_model"] = str(drafter)
    else:
        ready = drafter
        monkeypatch.setattr(build, "make_drafter", lambda *_: ready)
    async with engine_of(model, **flags) as engine:
        engine._driver.policy = policy
        yield engine


def same(found: Sequence[TextOutput], expected: Sequence[TextOutput], name: str) -> None:
    assert tokens(found) == tokens(expected), name
    assert "".join(o.text for o in found) == "".join(o.text for o in expected), name
    assert found[-1].finish_reason == expected[-1].finish_reason, name
    scores = [[entry for o in outputs for entry in o.logprobs] for outputs in (found, expected)]
    assert [s.token_id for s in scores[0]] == [s.token_id for s in scores[1]], name
    assert [s.logprob for s in scores[0]] == pytest.approx([s.logprob for s in scores[1]], abs=1e-9), name
    assert [[i for i, _ in s.top] for s in scores[0]] == [[i for i, _ in s.top] for s in scores[1]], name


def texts_of(plain: Plain) -> list[list[int]]:
    return [[*prompt, *tokens(plain[name])] for name, prompt, _ in LOAD]


async def check_load(engine: AsyncEngine, plain: Plain, rounds: int = 2) -> None:
    for _ in range(rounds):  # from the second time on through a warm prefix cache
        results = await asyncio.gather(*(run(engine, p, **values) for _, p, values in LOAD))
        for (name, _, _), outputs in zip(LOAD, results, strict=True):
            same(outputs, plain[name], name)


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_scripted_drafts_on_every_schedule(
    model: Path, plain: Plain, schedule: str, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Scheduled([7, 1, 0, 7, 3, 16, 2, 5], [None, None, 0, 4, 2])
    drafter = ScriptedDrafter(texts_of(plain), right=right, block=(0, 9)[schedule == "few rows"])
    async with speculating(model, policy, drafter, monkeypatch, **SCHEDULES[schedule]) as engine:
        await check_load(engine, plain)
    assert policy.proposed > 300
    if right == 0.0:
        assert policy.accepted < policy.proposed / 20  # a wrong draft may still be right by chance
    else:
        assert policy.accepted > policy.proposed / 10


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers: enough to tap."""
    return make_checkpoint(tmp_path_factory.mktemp("deep") / "llama", "llama", overrides=target_config())


@pytest.fixture(scope="module")
def deep_plain(deep: Path) -> Plain:
    return asyncio.run(alone(deep))


DRAFT_IDS = tuple(sorted(random.Random(5).sample(range(300), 120)))


@pytest.mark.parametrize("ids", [None, DRAFT_IDS], ids=["whole vocabulary", "reduced"])
@pytest.mark.parametrize("algorithm", ["MTP", "DSpark"])
@pytest.mark.parametrize("schedule", ["two slots", "tiny chunks", "few rows", "preempting"])
async def test_real_drafters(
    deep: Path,
    deep_plain: Plain,
    schedule: str,
    algorithm: str,
    ids: tuple[int, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if algorithm == "MTP":
        path = make_mtp(tmp_path / "mtp", draft_ids=None if ids is None else torch.tensor(ids))
        policy, steps = Scheduled([7, 1, 0, 7, 3, 16], [None, 2, None]), 16
    else:
        path, steps = make_dspark(tmp_path / "dspark", Sizes(draft_ids=ids)), Sizes().block
        policy = Scheduled([steps, 0, steps], [None, 2, None, 0, 1])
    flags = {**SCHEDULES[schedule], "num_speculative_tokens": steps, "enable_probabilistic_draft": True}
    if schedule == "preempting":
        flags["max_cache_size"] = 3 * 9 * 16 * KV_BYTES
    async with speculating(deep, policy, path, monkeypatch, **flags) as engine:
        await check_load(engine, deep_plain)
        if schedule == "preempting":
            assert engine._scheduler.counters.preemptions > 0
    assert policy.proposed > 300
