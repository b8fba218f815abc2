"""Self-speculation in the engine, in fp64 on tiny looped models: text, K/V planes and counters are those of
plain decoding, whatever (K, d) is planned round by round, and no loop of a row runs twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_engine import LOAD, SCHEDULES, alone, engine_of, prompt_of, run, tokens
from test_lossless import Plain, check_load, same
from tiny import make_checkpoint
from tiny_drafters import make_mtp
from tiny_looped import WRITERS, write_ouro

from xspec.config import Config
from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.engine import build
from xspec.engine.engine import AsyncEngine
from xspec.errors import ConfigError
from xspec.exec.assemble import Speculation
from xspec.models.looped import LoopedDecoder
from xspec.policy.base import PolicyView

LOOPS = {"ouro": 4, "huginn_raven": 3, "nanbeige": 2}
TOKEN_BYTES = {"ouro": 2 * 8 * 4 * 16 * 8, "huginn_raven": 2 * 9 * 4 * 16 * 8, "nanbeige": 2 * 4 * 2 * 16 * 8}
STEPS = (7, 1, 3)


class Pairs:
    """(K, d) by round, over and over; d 0 with K 0. Every third round is a shadow round if `shadows`."""

    name = "pairs"

    def __init__(self, pairs: Sequence[tuple[int, int]], shadows: bool = False) -> None:
        self._pairs, self._shadows = pairs, shadows
        self.told: list[RoundFeedback] = []

    def plan(self, view: PolicyView) -> SpeculationPlan:
        steps, depth = self._pairs[view.plan_id % len(self._pairs)]
        shadow = self._shadows and view.plan_id % 3 != 1
        return SpeculationPlan(view.plan_id, self.name, steps, depth=depth or None, shadow=shadow)

    def observe(self, feedback: RoundFeedback) -> None:
        self.told.append(feedback)

    def status(self) -> dict[str, Any]:
        return {}


def grid(loops: int) -> list[tuple[int, int]]:
    return [(steps, depth) for steps in STEPS for depth in range(1, loops)]


@asynccontextmanager
async def looped(
    model: Path, policy: Pairs, loops: int, monkeypatch: pytest.MonkeyPatch, **flags: Any
) -> AsyncIterator[AsyncEngine]:
    """An engine in which every (K, d) of the grid is prepared, in shadow too, under a test's policy."""
    pairs = grid(loops)
    prepared = Speculation(steps=STEPS, widths=STEPS, pairs=pairs, shadows=True)
    monkeypatch.setattr(build, "speculation_of", lambda *_: prepared)
    load = build.make_drafter

    def every_depth(config: Any, platform: Any, path: Path, choice: Any, target: Any) -> Any:
        choice = build.DraftChoice("Looped", None, max(STEPS), max(STEPS), loops=tuple(range(1, loops)))
        return load(config, platform, path, choice, target)

    monkeypatch.setattr(build, "make_drafter", every_depth)
    async with engine_of(model, speculative_algorithm="Looped", num_speculative_tokens=7, **flags) as engine:
        engine._driver.policy = policy
        yield engine


@pytest.fixture(scope="module", params=list(LOOPS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name = request.param
    return name, WRITERS[name](tmp_path_factory.mktemp(name) / name, loops=LOOPS[name])


@pytest.fixture(scope="module")
def plain(family: tuple[str, Path]) -> Plain:
    return asyncio.run(alone(family[1]))


@pytest.mark.parametrize("schedule", ["two slots", "tiny chunks", "few rows", "preempting"])
async def test_text_is_that_of_plain_decoding(
    family: tuple[str, Path],
    plain: Plain,
    schedule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, path = family
    loops, probabilistic = LOOPS[name], schedule in ("two slots", "preempting")
    policy = Pairs([*grid(loops), (0, 0), (7, 1), (0, 0)], shadows=probabilistic)
    flags = {**SCHEDULES[schedule], "enable_probabilistic_draft": probabilistic}
    if schedule == "preempting":
        flags["max_cache_size"] = 9 * 16 * TOKEN_BYTES[name]
    async with looped(path, policy, loops, monkeypatch, **flags) as engine:
        await check_load(engine, plain)
        if schedule == "preempting":
            assert engine._scheduler.counters.preemptions > 0
    rows = [row for told in policy.told for row in told.rows]
    assert sum(row.proposed for row in rows) > 300
    assert sum(row.accepted for row in rows) > 20


def count_loops(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the target runs from now on: rows times loops, and rows that began."""
    counted = {"loops": 0, "begun": 0}
    run_loops, begin = LoopedDecoder.run_loops, LoopedDecoder.begin

    def counting_loops(self: Any, state: Any, inputs: Any, kv: Any, first: int, last: int) -> Any:
        counted["loops"] += len(state) * (last - first)
        return run_loops(self, state, inputs, kv, first, last)

    def counting_begin(self: Any, tokens: Any, inputs: Any, kv: Any) -> Any:
        counted["begun"] += len(tokens)
        return begin(self, tokens, inputs, kv)

    monkeypatch.setattr(LoopedDecoder, "run_loops", counting_loops)
    monkeypatch.setattr(LoopedDecoder, "begin", counting_begin)
    return counted


@pytest.mark.parametrize("shadows", [False, True])
async def test_nothing_runs_twice(tmp_path: Path, shadows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path, loops = write_ouro(tmp_path / "ouro"), 4
    policy = Pairs([(3, 2), (7, 1), (0, 0), (3, 3)], shadows)
    async with looped(path, policy, loops, monkeypatch, max_seqs_per_batch=1) as engine:
        counted = count_loops(engine, monkeypatch)
        await run(engine, prompt_of(3, 9), temperature=0.0, max_tokens=60, ignore_eos=True)
    rounds = [told for told in policy.told if told.rows]
    # every row of a round begins once and runs each loop once: K + 1 rows of a speculative round
    rows = 9 + sum(told.plan.draft_steps + 1 for told in rounds)
    assert len(rounds) > 12
    assert counted["begun"] == rows
    assert counted["loops"] == loops * rows


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_planes_are_those_of_plain_decoding(
    tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below d the planes were written by passes of the same shape, one row at a time: bit-equal."""
    path, loops, layers = write_ouro(tmp_path / "ouro"), 4, 2
    prompt, planes = prompt_of(4, 21), []
    for pairs in ([(0, 0)], [(3, depth)]):
        async with looped(
            path, Pairs(pairs), loops, monkeypatch, max_seqs_per_batch=1, block_size=64
        ) as engine:
            text = tokens(await run(engine, prompt, temperature=0.0, max_tokens=30, ignore_eos=True))
            slabs = engine._driver.pipeline._executor._kv
            planes.append((text, [slab[1].clone() for slab in slabs]))  # the first page that is given away
    (text, expected), (other, found) = planes
    assert text == other
    written = len(prompt) + len(text) - 1
    assert any(slab[..., :written, :].abs().sum() > 0 for slab in expected)
    for index, (one, two) in enumerate(zip(expected, found, strict=True)):
        one, two = positions(one, written), positions(two, written)
        assert one.abs().sum() > 0
        if index < depth * layers:
            assert torch.equal(one, two), index
        else:
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def positions(page: torch.Tensor, count: int) -> torch.Tensor:
    """The entries of the first `count` positions of one page of a slab: the axis of 64."""
    axis = page.shape.index(64)
    return page.movedim(axis, 0)[:count]


def replayed(flags: np.ndarray, steps: int) -> list[int]:
    """Accepted drafts round by round over a request's match flags: a round takes the run of ones, up to K."""
    at, found = 0, []
    while at < len(flags):
        run = 0
        while run < steps and at + run < len(flags) and flags[at + run]:
            run += 1
        found.append(run)
        at += run + 1
    return found


async def test_counters_equal_the_replay_of_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags of plain shadow rounds foretell what every (K, d) accepts; those of others are the same."""
    path, loops = write_ouro(tmp_path / "ouro", seed=2), 4
    prompt, length = prompt_of(8, 11), 120

    async def told_by(pairs: Sequence[tuple[int, int]], shadows: bool) -> list[RoundFeedback]:
        policy = Pairs(pairs, shadows)
        if shadows:
            policy.plan = lambda view: SpeculationPlan(  # type: ignore[method-assign]
                view.plan_id, "pairs", pairs[0][0], depth=pairs[0][1] or None, shadow=True
            )
        async with looped(path, policy, loops, monkeypatch, max_seqs_per_batch=1) as engine:
            await run(engine, prompt, temperature=0.0, max_tokens=length, ignore_eos=True)
        return [told for told in policy.told if told.rows]

    def stream(told: Sequence[RoundFeedback]) -> np.ndarray:
        rows = []
        for feedback in told:
            assert feedback.matches is not None and feedback.matches.dtype == bool
            rows.append(feedback.matches[0, : feedback.rows[0].committed])
        return np.concatenate(rows)

    flags = stream(await told_by([(0, 0)], True))  # [tokens, depths]: of the tokens after the first
    assert flags.shape == (length - 1, loops - 1)
    assert 0.05 < flags[:, 0].mean() < flags[:, -1].mean() < 1.0
    for steps, depth in ((7, 1), (7, 3), (1, 2), (3, 1)):
        rounds = await told_by([(steps, depth)], False)
        accepted = [feedback.rows[0].accepted for feedback in rounds]
        expected = replayed(flags[:, depth - 1], steps)
        assert accepted[:-1] == expected[: len(accepted) - 1], (steps, depth)
    for pair in ((7, 1), (3, 2)):
        assert np.array_equal(stream(await told_by([pair], True)), flags), pair


async def test_speculation_that_a_request_declines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_ouro(tmp_path / "ouro")
    expected = await alone(path)
    async with looped(path, Pairs([(3, 2)]), 4, monkeypatch) as engine:
        results = await asyncio.gather(
            *(
                run(engine, p, **{**values, "speculative": i % 2 == 0})
                for i, (_, p, values) in enumerate(LOAD)
            )
        )
    for (name, _, _), outputs in zip(LOAD, results, strict=True):
        same(outputs, expected[name], name)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"draft_loops": 4}, "--draft_loops=4: this model has 4 loops; allowed: -1 or integers from 1 to 3"),
        ({"draft_loops": 0}, "--draft_loops=0"),
        ({"target_verify_width": 1}, "--target_verify_width=1"),
        ({"draft_model": "itself"}, "a looped model drafts for itself"),
        ({"early_exit_threshold": 0.5}, "--early_exit_threshold=0.5"),
        ({"speculative_algorithm": "MTP", "draft_loops": 1}, "--draft_loops=1: only --speculative_algorithm"),
    ],
)
async def test_refusals(tmp_path: Path, flags: dict[str, Any], said: str) -> None:
    path = write_ouro(tmp_path / "ouro")
    if "draft_model" in flags:
        flags = {"draft_model": str(path)}
    with pytest.raises(ConfigError, match="(?s)" + said.replace("(", r"\(")):
        async with engine_of(
            path, **{"speculative_algorithm": "Looped", "num_speculative_tokens": 3, **flags}
        ):
            pass


@pytest.mark.parametrize(
    ("written", "flags", "said"),
    [
        (0.5, {}, r"--early_exit_threshold=0\.5 \(the model says so\) with --speculative_algorithm=Looped"),
        (
            1.0,
            {"early_exit_threshold": 0.9},
            "--early_exit_threshold=0.9 with --speculative_algorithm=Looped",
        ),
        (0.5, {"early_exit_threshold": 1.0}, None),
    ],
)
def test_early_exit_is_refused_before_anything_is_loaded(
    tmp_path: Path, written: float, flags: dict[str, Any], said: str | None
) -> None:
    path = write_ouro(tmp_path / "ouro", early_exit_threshold=written)
    (path / "model.safetensors").unlink()
    config = Config.from_mapping({"model": str(path), "speculative_algorithm": "Looped", **flags})
    if said is None:
        assert build.choose(config).drafter is not None
    else:
        with pytest.raises(ConfigError, match=said):
            build.choose(config)


async def test_a_model_without_loops_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runs its layers once"):
        async with engine_of(make_checkpoint(tmp_path / "llama"), speculative_algorithm="Looped"):
            pass


async def test_the_flags_alone_draft_with_a_fixed_pair(tmp_path: Path) -> None:
    path = write_ouro(tmp_path / "ouro")
    prompt = prompt_of(2, 13)
    async with engine_of(path) as engine:
        expected = tokens(await run(engine, prompt, temperature=0.0, max_tokens=40, ignore_eos=True))
    flags = {"speculative_algorithm": "looped", "num_speculative_tokens": 3, "draft_loops": 3}
    async with engine_of(path, **flags, max_seqs_per_batch=2) as engine:
        assert engine.server_info()["speculation"]["draft_loops"] == [3]
        assert engine._driver.policy.status() == {"draft_steps": 3, "verify_steps": None, "draft_loops": 3}
        outputs = await run(engine, prompt, temperature=0.0, max_tokens=40, ignore_eos=True)
        assert tokens(outputs) == expected
        assert len(outputs) < 35  # several tokens at a time


async def test_other_drafters_are_refused_for_a_looped_target(tmp_path: Path) -> None:
    path = write_ouro(tmp_path / "ouro")
    drafter = make_mtp(tmp_path / "mtp")
    with pytest.raises(ConfigError, match="a looped target .ouro. has no such drafter; allowed: Looped"):
        async with engine_of(path, draft_model=str(drafter), num_speculative_tokens=2):
            pass
