"""`xspec calibrate --candidates_output` on a tiny looped model in fp64, and the engine under what it wrote.

Text is that of plain decoding with every policy, counters are those of the replay, and a recorded trace
decides the same again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_engine import engine_of, prompt_of, run, tokens
from tiny import make_checkpoint
from tiny_drafters import make_mtp
from tiny_looped import write_ouro

from xspec.calib.replay import replay
from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.core.shapes import BucketGrid
from xspec.cost.bundle import read_saved_costs
from xspec.engine.engine import AsyncEngine
from xspec.errors import CalibrationError, ConfigError, UnsupportedError
from xspec.policy.base import PolicyView
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.make_spec import make_speculation_policy
from xspec.policy.spec_files import load_spec_config
from xspec.sim.looped import read_flags
from xspec.trace import read_trace
from xspec.trace import replay as replay_trace
from xspec_cli.main import main
from xspec_cli.spec_plots import MISSING

LANES, SEQS = (1, 2), 2
ENGINE = {"max_seqs_per_batch": SEQS, "dtype": "float64", "max_cache_size": 16 * 2**20, "max_model_len": 256}
PROMPTS = [prompt_of(seed, 9 + seed) for seed in range(4)]
LENGTH = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ouro(tmp_path_factory.mktemp("spec") / "tiny-ouro", loops=3)


@pytest.fixture(scope="module")
def files(model: Path) -> dict[str, Path]:
    """What offline sampling of the tiny model writes."""
    folder = model.parent
    prompts = folder / "words.txt"
    prompts.write_text("\n".join(f"number {i} of the prompts is {'long ' * i}" for i in range(8)))
    written = {name: folder / name for name in ("candidates.json", "table.json", "flags.json", "report.md")}
    code = main(
        [
            "calibrate",
            f"--model={model}",
            *(f"--{name}={value}" for name, value in ENGINE.items()),
            "--speculation_policy=acceptance_ema",
            "--num_speculative_tokens=2",
            f"--prompts={prompts}",
            "--prompt_tokens=24",
            "--requests=1,2",
            "--screen_tokens=12",
            "--confirm_tokens=24",
            "--confirm=2",
            "--confirm_runs=1",
            f"--candidates_output={written['candidates.json']}",
            f"--adaptive_spec_cost_table_output={written['table.json']}",
            f"--match_flags_output={written['flags.json']}",
            f"--report={written['report.md']}",
            "--log_level=warning",
        ]
    )
    assert code == 0
    return written


def adaptive(files: dict[str, Path], policy: str = "goodput", **flags: Any) -> dict[str, Any]:
    return {
        **ENGINE,
        "speculation_policy": policy,
        "adaptive_spec_config": str(files["candidates.json"]),
        "adaptive_spec_cost_table": str(files["table.json"]),
        **flags,
    }


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, ...]]:
    async def alone() -> list[tuple[int, ...]]:
        async with engine_of(model, **ENGINE) as engine:
            assert engine.server_info()["adaptation"] is None
            return await answers(engine)

    return asyncio.run(alone())


async def answers(engine: AsyncEngine, at_once: int = SEQS) -> list[tuple[int, ...]]:
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: list[int]) -> tuple[int, ...]:
        async with gate:
            outputs = await run(engine, prompt, temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
            return tokens(outputs)

    return list(await asyncio.gather(*map(one, PROMPTS)))


async def settled(engine: AsyncEngine, policy: str) -> None:
    """The last round of a finished request may still be in flight."""
    for _ in range(200):
        try:
            return engine.use_policy(policy)
        except RuntimeError:
            await asyncio.sleep(0.01)
    raise AssertionError("the engine never rests")


# -- what sampling wrote --------------------------------------------------------------------------


def test_the_candidates_are_of_the_grid_and_carry_where_they_are_from(files: dict[str, Path]) -> None:
    config = load_spec_config(str(files["candidates.json"]))
    assert (config.model.name, config.model.loops) == ("tiny-ouro", 3)
    assert [(one.min_requests, one.max_requests) for one in config.ranges] == [(1, 1), (2, 2)]
    assert set(config.steps) <= {1, 2} and set(config.depths) <= {1, 2}
    assert all(one.off is not None and one.acceptance is not None for one in config.candidates)
    assert config.provenance.kind == "measured"
    assert config.provenance.source == "xspec calibrate, prompts of words.txt"
    bundle = read_saved_costs(files["table.json"], flag="t").bundle
    assert bundle is not None and dict(config.fingerprint) == dict(bundle.fingerprint)
    assert set(bundle.table.looped) == {(0, k, d) for k in (1, 2) for d in (1, 2)}


def test_flags_are_those_of_the_judging_half_for_the_simulator(files: dict[str, Path]) -> None:
    recorded = read_flags(files["flags.json"], draft_width=2)
    assert recorded.depths == (1, 2) and recorded.names == ("words",)
    # every other prompt judges, and a trial has at least four
    assert [len(stream.flags) for stream in recorded.streams] == [23] * 4


def test_the_report_says_what_was_found(files: dict[str, Path]) -> None:
    text = files["report.md"].read_text()
    assert "# Offline sampling: (K, d) of tiny-ouro" in text
    assert "Match rates by depth: d = 1: " in text and "## Held-out prompts" in text
    pictures = sorted(path.name for path in files["report.md"].parent.glob("*.png"))
    if pictures:
        names = ("acceptance", "predicted", "speedup", "speedup_acceptance")
        assert pictures == [f"report_{name}.png" for name in names]
        assert all(f"({name})" in text for name in pictures)
        first = files["report.md"].with_name(pictures[0])
        assert first.read_bytes().startswith(b"\x89PNG")
    else:
        assert MISSING in text


# -- the engine under it --------------------------------------------------------------------------


async def test_every_policy_says_what_plain_decoding_says(
    model: Path, files: dict[str, Path], expected: list[tuple[int, ...]]
) -> None:
    """And counters of each fixed pair are those that the replay of shadow rounds' flags foretells."""
    async with engine_of(model, **adaptive(files)) as engine:
        info = engine.server_info()
        assert info["policy"] == "goodput" and info["adaptation"]["policy"] == "goodput"
        assert info["adaptation"]["config"]["provenance"]["kind"] == "measured"
        assert info["speculation"]["algorithm"] == "Looped", "unasked: the model loops and a policy chooses"
        assert info["calibration"]["source"].startswith(f"--adaptive_spec_cost_table={files['table.json']}")
        told: list[RoundFeedback] = []
        engine.metrics.observers.append(told.append)
        config = load_spec_config(str(files["candidates.json"]))
        pairs = [(k, d) for k in config.steps for d in config.depths]
        for name in ("goodput", "acceptance_ema", "adaptive", "plain", *(f"fixed:{k}@{d}" for k, d in pairs)):
            await settled(engine, name)
            told.clear()
            assert await answers(engine, 1 if name.startswith("fixed") else SEQS) == expected, name
            if name == "goodput":
                assert any(feedback.matches is not None for feedback in told), "it begins with shadow rounds"
        flags = await flags_of(engine, told)
        for k, d in pairs:
            await settled(engine, f"fixed:{k}@{d}")
            told.clear()
            await run(engine, PROMPTS[0], temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
            counts, rows = replay([flags[:, config.depths.index(d)]], k), [r for f in told for r in f.rows]
            found = (len(rows), sum(row.proposed for row in rows), sum(row.accepted for row in rows))
            assert found == (counts.rounds, counts.proposed, counts.accepted), (k, d)
        metrics = engine.metrics.render()[0].decode()
        for series in ("draft_loops", "candidate_index", "pair_rounds_total", "pair_switches_total"):
            assert f"xspec:spec_decode_adaptive_{series}{{" in metrics, series
        measured = engine.server_info()["adaptive"]["measured"]
        assert measured["pair_rounds"]["plain"] > 0 and len(measured["pair_rounds"]) > len(pairs)
        with pytest.raises(ConfigError, match="allowed: plain, acceptance_ema, goodput, or fixed:K@d"):
            await settled(engine, "fixed:9@1")


class Shadows:
    """Plain rounds that tell what every depth would have picked."""

    name = "shadows"

    def plan(self, view: PolicyView) -> SpeculationPlan:
        return SpeculationPlan(view.plan_id, self.name, 0, shadow=True)

    def observe(self, feedback: RoundFeedback) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {}


async def flags_of(engine: AsyncEngine, told: list[RoundFeedback]) -> np.ndarray:
    """Of the first prompt's answer, [tokens after the first, depths]."""
    await settled(engine, "plain")
    engine._driver.policy = Shadows()
    told.clear()
    await run(engine, PROMPTS[0], temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    rows = [f.matches[0, : f.rows[0].committed] for f in told if f.rows and f.matches is not None]
    return np.concatenate(rows)


@pytest.mark.parametrize("policy", ["acceptance_ema", "goodput"])
async def test_a_trace_decides_the_same_again(
    model: Path, files: dict[str, Path], expected: list[tuple[int, ...]], policy: str, tmp_path: Path
) -> None:
    trace = tmp_path / "rounds.jsonl"
    async with engine_of(model, **adaptive(files, policy, round_trace=str(trace))) as engine:
        assert engine.server_info()["policy"] == policy
        assert await answers(engine) == expected
    config = load_spec_config(str(files["candidates.json"]))
    table = read_saved_costs(files["table.json"], flag="t").table
    geometry = CandidateGeometry(BucketGrid(LANES), config.steps, config.depths, 3)
    fresh = make_speculation_policy(policy, config, table, geometry)
    read = read_trace(trace)
    assert len(read.rounds) > 40 and replay_trace(fresh, read) == []


# -- refusals -------------------------------------------------------------------------------------


async def test_candidates_that_the_model_cannot_run_are_refused(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    four = write_ouro(tmp_path / "ouro", loops=4)
    with pytest.raises((ConfigError, UnsupportedError), match="the candidates are for 3 loops.*has 4"):
        async with engine_of(four, **adaptive(files, adaptive_spec_cost_table="")):
            pass


async def test_costs_of_another_model_are_refused(tmp_path: Path, files: dict[str, Path]) -> None:
    other = write_ouro(tmp_path / "ouro", loops=3, seed=9)
    with pytest.raises(CalibrationError, match="(?s)was not measured on what is launched.*target"):
        async with engine_of(other, **adaptive(files)):
            pass


SAMPLE = ["--speculation_policy=goodput", "--candidates_output=c.json"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--speculation_policy=goodput", "--confirm=2"], "--confirm is only read with --candidates_output"),
        (["--enable_adaptive_draft_step=true", "--candidates_output=c.json"], "--speculation_policy="),
        ([*SAMPLE, "--requests=1,9", "--max_seqs_per_batch=8"], "--requests=9: allowed: integers from 1 to"),
        ([*SAMPLE, "--requests=2,2"], "--requests=2,2: allowed: different batch sizes"),
        ([*SAMPLE, "--requests=x"], "--requests=x: allowed"),
        ([*SAMPLE, "--screen_tokens=64", "--confirm_tokens=32"], "--screen_tokens=64: allowed: up to"),
        ([*SAMPLE, "--match_flags_output=c.json"], "is the file of --match_flags_output too"),
        ([*SAMPLE, "--adaptive_spec_cost_table_output=c.json"], "allowed: two files"),
        (["--speculation_policy=goodput", "--candidates_output=/no/where/c.json"], "does not exist"),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    flags: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("xspec_cli.calibrate_spec.run", None)
    monkeypatch.setattr("xspec_cli.calibrate.measure", None)
    assert main(["calibrate", *flags]) == 1
    assert said in capsys.readouterr().err


def test_sampling_needs_a_model_that_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama, drafter = make_checkpoint(tmp_path / "llama", "llama"), make_mtp(tmp_path / "mtp", "llama")
    flags = [f"--model={llama}", f"--draft_model={drafter}", "--num_speculative_tokens=2"]
    assert main(["calibrate", *flags, SAMPLE[0], f"--candidates_output={tmp_path / 'c.json'}"]) == 1
    assert "the drafter is MTP; allowed: --speculative_algorithm=Looped" in capsys.readouterr().err


# -- drafters without loops -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["goodput"])
async def test_the_same_policies_choose_k_of_an_mtp_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    llama, drafter = make_checkpoint(tmp_path / "llama", "llama"), make_mtp(tmp_path / "mtp", "llama")
    async with engine_of(llama, **ENGINE) as engine:
        plain = await answers(engine)
    flags = {**ENGINE, "draft_model": str(drafter), "num_speculative_tokens": 2, "speculation_policy": policy}
    async with engine_of(llama, **flags) as engine:
        info = engine.server_info()
        assert info["policy"] == policy and info["speculation"]["algorithm"] == "MTP"
        assert set(info["calibration"]["coverage"][0]["draft_steps"]) == {"0", "1", "2"}
        assert info["calibration"]["points"] >= 6  # whether they are kept is up to how busy the machine is
        told: list[RoundFeedback] = []
        engine.metrics.observers.append(told.append)
        assert await answers(engine) == plain
        assert all(feedback.plan.depth is None for feedback in told)
        await settled(engine, "fixed:2")
        assert await answers(engine) == plain
