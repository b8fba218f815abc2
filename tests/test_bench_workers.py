"""Engines in processes of their own, and the script that compares configurations: what it asks of engines."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from server_fake import FakeEngine, Script

from benchmarks import speculation
from benchmarks.speculation import Files, Setup, contest_of, flags_of, parse_setup, plan_of
from xspec.config import Config
from xspec.errors import ConfigError
from xspec.policy.requirements import adaptive_refusals
from xspec_cli.benchlib.hindsight import Contest
from xspec_cli.benchlib.load import AskOptions, Level, Phase
from xspec_cli.benchlib.local import EngineTarget
from xspec_cli.benchlib.plan import Turn
from xspec_cli.benchlib.prompts import Prompt
from xspec_cli.benchlib.worker import Job, Worker, WorkerError, take_turns

ASK = AskOptions(max_tokens=8, temperature=0.0, ignore_eos=False, chat=True)


# -- configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "setup"),
    [
        ("none", Setup("none")),
        ("mtp:3", Setup("mtp:3", "MTP", 3)),
        ("MTP:0", Setup("MTP:0", "MTP", 0)),
        ("dspark:5:2", Setup("dspark:5:2", "DSpark", 5, 2)),
        ("mtp:adaptive:4", Setup("mtp:adaptive:4", "MTP", 4, None, "draft_step")),
        ("mtp:adaptive:4:0.02", Setup("mtp:adaptive:4:0.02", "MTP", 4, None, "draft_step", 0.02)),
        ("mtp:verify:5", Setup("mtp:verify:5", "MTP", 5, None, "target_verify")),
        ("dspark:verify:5", Setup("dspark:verify:5", "DSpark", 5, None, "target_verify")),
    ],
)
def test_setups_as_they_are_written(text: str, setup: Setup) -> None:
    assert parse_setup(text) == setup


@pytest.mark.parametrize(
    "text",
    ["", "no", "none:1", "mtp", "mtp:", "mtp:x", "mtp:3:2", "mtp:-1", "dspark:5", "dspark:2:5",
     "mtp:adaptive", "mtp:adaptive:0", "mtp:adaptive:4:x", "mtp:adaptive:4:0.1:1", "dspark:adaptive:5",
     "mtp:verify:4:0.1"],
)  # fmt: skip
def test_setups_that_are_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=f"--config {text}: allowed: none, mtp:K"):
        parse_setup(text)


@pytest.fixture
def tables(tmp_path: Path) -> Files:
    return Files(str(tmp_path / "tables"), str(tmp_path), "32-auto")


def flags(text: str, files: Files, *words: str) -> dict[str, Any]:
    args = speculation.arguments(["--config", text, *words])
    return flags_of(parse_setup(text), args, 32, files)


def test_flags_of_fixed_widths(tables: Files) -> None:
    base = {
        "model": "", "max_seqs_per_batch": 32, "enable_prefix_cache": False, "max_model_len": 2048,
        "random_seed": 1, "max_cache_size": 400 * 2**20, "dtype": "auto", "num_speculative_tokens": 0,
    }  # fmt: skip
    assert flags("none", tables) == base
    mtp = base | {"speculative_algorithm": "MTP", "draft_model": ""}
    assert flags("mtp:3", tables) == mtp | {"num_speculative_tokens": 3}
    assert flags("mtp:0", tables) == mtp | {"num_speculative_tokens": -1, "target_verify_width": 0}
    dspark = base | {"speculative_algorithm": "DSpark", "draft_model": "mine", "num_speculative_tokens": 5}
    assert flags("dspark:5:2", tables, "--dspark=mine") == dspark | {"target_verify_width": 2}
    for text in ("none", "mtp:3", "mtp:0", "dspark:5:2", "dspark:0:0", "dspark:5:0"):
        Config.from_mapping(flags(text, tables))


def test_a_cost_table_is_written_once_and_read_from_then_on(tables: Files, tmp_path: Path) -> None:
    path = tmp_path / "tables" / "MTP-draft_step-4-32-auto.json"
    first = flags("mtp:adaptive:4", tables)
    assert first["adaptive_draft_step_cost_table_output"] == str(path) and first["enable_adaptive_draft_step"]
    assert "adaptive_draft_step_cost_table" not in first and "adaptive_draft_step_config" not in first
    path.write_text("{}")
    second = flags("mtp:adaptive:4:0.02", tables)  # another policy, the same costs
    assert second["adaptive_draft_step_cost_table"] == str(path)
    assert "adaptive_draft_step_cost_table_output" not in second
    settings = json.loads(Path(second["adaptive_draft_step_config"]).read_text())
    assert settings == {"version": 1, "policy": {"switch_min_gain": 0.02}}
    verify = flags("dspark:verify:5", tables)
    assert verify["enable_adaptive_target_verify"] is True
    assert verify["adaptive_target_verify_cost_table_output"].endswith("DSpark-target_verify-5-32-auto.json")
    unkept = flags("mtp:verify:5", Files("", str(tmp_path), "x"))
    assert not [name for name in unkept if "table" in name]


@pytest.mark.parametrize("text", ["mtp:adaptive:4", "mtp:adaptive:4:0.02", "mtp:verify:5", "dspark:verify:5"])
def test_the_engine_takes_these_flags(text: str, tables: Files) -> None:
    setup = parse_setup(text)
    config = Config.from_mapping(flags(text, tables))
    assert adaptive_refusals(config, setup.algorithm, setup.steps) == []


def test_who_is_compared_with_whom() -> None:
    setups = [parse_setup(text) for text in ("mtp:0", "none", "mtp:2", "mtp:adaptive:3")]
    names = ("mtp:0", "none", "mtp:2", "mtp:adaptive:3")
    assert contest_of(setups) == Contest(names, names[:3], "mtp:0")
    assert contest_of(setups[2:]) == Contest(names[2:], ("mtp:2",))


def test_the_plan_of_the_script() -> None:
    plan = plan_of(speculation.arguments(["--config=none", "--concurrency=1,16", "--num_prompts=8"]))
    assert [plan.prompts_of(level) for level in plan.levels] == [8, 32]
    assert (plan.rotate, plan.hindsight, plan.rounds) == (True, True, 4)
    plan = plan_of(speculation.arguments(["--config=none", "--phases=1:2,8:3", "--rounds=1"]))
    assert plan.levels == (Level(phases=(Phase(1, 2.0), Phase(8, 3.0))),)
    assert not plan.hindsight and plan.warmup_of(plan.levels[0]) == 8
    with pytest.raises(ConfigError, match="--phases=8: allowed"):
        plan_of(speculation.arguments(["--config=none", "--phases=8"]))


# -- turns over a pipe -------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[Connection]:
    """The near end of a pipe; at the other one a scripted engine takes turns, in a thread."""
    near, far = multiprocessing.Pipe()

    async def work() -> None:
        await take_turns(far, EngineTarget(FakeEngine(Script(step_tokens=3), draft_width=4), ASK))

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    yield near
    near.close()
    thread.join(timeout=30)
    assert not thread.is_alive(), "a closed pipe ends the worker"


def test_turns_are_taken_over_a_pipe(pipe: Connection) -> None:
    assert pipe.recv() is None, "ready"
    for seed in (1, 2):
        pipe.send(Job((Prompt(text="a"), Prompt(text="b")), Level(concurrency=2), seed))
        turn = pipe.recv()
        assert isinstance(turn, Turn)
        assert [sample.completion_tokens for sample in turn.samples] == [8, 8]
        assert turn.speculation is not None and turn.speculation.drafts == 4
    pipe.send(Job((Prompt(text="a"),), Level(phases=(Phase(1, 0.02),)), 0))
    assert [phase.concurrency for phase in pipe.recv().phases] == [1]


def test_an_engine_that_cannot_be_built_says_why() -> None:
    """A real process; its flags are wrong, so that it never loads an engine."""
    with pytest.raises(WorkerError, match="ConfigError: --nonsense: unknown flag"):
        Worker({"nonsense": 1}, ASK)
