"""`xspec simulate`: from a saved table and flags to a table for people and a document for machines."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sim_costs import CpuCosts, bundle_of, engine

from xspec.cost.bundle import write_bundle
from xspec.cost.bundle_json import encode
from xspec.cost.settings import Control
from xspec.errors import ConfigError
from xspec.policy.fixed import FixedPolicy
from xspec.sim.loads import ClosedLoad, OpenLoad, Phase
from xspec.sim.simulate import simulate
from xspec.sim.world import Difficulty, Synthetic, World
from xspec.trace import RoundTrace
from xspec_cli import simulate as command
from xspec_cli.flags_resolve import Launch, resolve

REPO = Path(__file__).resolve().parent.parent
COSTS = {Control.DRAFT_STEP: CpuCosts(), Control.TARGET_VERIFY: CpuCosts(block_ms=(5.0, 0.15))}


@pytest.fixture(
    scope="module", params=[Control.DRAFT_STEP, Control.TARGET_VERIFY], ids=lambda control: control.value
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Control, Path]:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    write_bundle(path, bundle_of(request.param, COSTS[request.param]))
    return request.param, path


@pytest.fixture(scope="module")
def steps_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    write_bundle(path, bundle_of(Control.DRAFT_STEP, CpuCosts()))
    return path


def launch(*words: str) -> Launch:
    result = resolve(words, command.COMMAND, environ={})
    assert isinstance(result, Launch)
    return result


def job(table: Path, *words: str) -> command.Job:
    return command.job_of(launch(f"--cost_table={table}", *words))


def document(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_a_whole_run(saved: tuple[Control, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control, table = saved
    output = tmp_path / "found.json"
    words = [
        f"--cost_table={table}",
        "--phases=1:8,8:8,1:8",
        "--acceptance=0.6,0.52,0.67",
        f"--output={output}",
    ]
    assert command.main(words) == 0
    shown = capsys.readouterr().out
    width = "depth" if control is Control.DRAFT_STEP else "verify"
    names = ["plain", f"{width} 1", f"{width} 2", f"{width} 3", "adaptive", "oracle"]
    assert shown.count("best fixed width in hindsight") == 4  # three phases and all
    assert all(shown.count(f"\n  {name} ") >= 4 for name in names)
    found = document(output)
    assert found["format"] == "xspec simulate" and found["costs"]["control"] == control.value
    assert found["costs"]["fingerprint"] == {"machine": "somewhere else"}
    assert [entry["name"] for entry in found["contenders"]] == names
    assert found["phases"] == ["1 clients", "8 clients", "1 clients"]
    by_name = {entry["name"]: entry for entry in found["contenders"]}
    best = by_name[found["best_fixed"]]
    assert best["total"]["regret_best_fixed"] == 0.0
    for entry in found["contenders"]:
        total = entry["total"]
        assert total["tokens"] == sum(phase["tokens"] for phase in entry["phases"])
        assert total["tokens_per_s"] == pytest.approx(total["tokens"] / total["seconds"])
        ratio = total["tokens_per_s"] / best["total"]["tokens_per_s"]
        assert total["regret_best_fixed"] == pytest.approx(1.0 - ratio)
        assert total["seconds"] == pytest.approx(24.0, abs=0.3)
    # every number again: the table is simulated in the same way without the command line
    shape = engine(width=3, lanes=engine(width=3).geometry.lanes)
    world = World(
        Synthetic((Difficulty("class 1", (0.6, 0.52, 0.67)),)),
        ClosedLoad((Phase(1, 8.0), Phase(8, 8.0), Phase(1, 8.0))),
        0,
    )
    plain = simulate(world, COSTS[control], shape, lambda device: FixedPolicy())
    assert by_name["plain"]["total"]["tokens"] == sum(record.tokens for record in plain.rounds)


def test_the_same_seed_gives_the_same_table(steps_table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--cost_table={steps_table}", "--phases=2:3", "--acceptance=0.6,0.5,0.5"]
    shown = []
    for seed in (7, 7, 8):
        assert command.main([*words, f"--seed={seed}"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]


def test_classes_bursts_and_signals_are_read(steps_table: Path) -> None:
    made = job(
        steps_table,
        "--acceptance=easy:0.9,0.8,0.7,0.6/0.3,0.2,0.1",
        "--acceptance_spread=0.2",
        "--burst_tokens=12",
        "--calibration_error=0.5",
        "--signal_noise=0.25",
        "--prompt_tokens=5",
        "--answer_tokens=6,9",
        "--phases=2:3:1,1:4.5",
        "--seed=3",
    )
    population = made.world.population
    assert isinstance(population, Synthetic)
    easy, hard = Difficulty("easy", (0.9, 0.8, 0.7), 0.2), Difficulty("class 2", (0.3, 0.2, 0.1), 0.2)
    assert population.difficulties == (easy, hard)
    assert (population.burst_tokens, population.prompt_tokens, population.answer_tokens) == (
        12.0,
        (5, 5),
        (6, 9),
    )
    assert (population.signals.calibration_error, population.signals.noise) == (0.5, 0.25)
    assert made.world.load == ClosedLoad((Phase(2, 3.0, (0,)), Phase(1, 4.5)))


def test_poisson_arrivals_are_read(steps_table: Path) -> None:
    made = job(steps_table, "--acceptance=0.6,0.5,0.5", "--rate=2.5", "--seconds=20", "--seed=3")
    assert made.world.load == OpenLoad.poisson(2.5, 20.0, 3)


def test_the_engine_is_the_one_that_was_measured(saved: tuple[Control, Path]) -> None:
    control, table = saved
    made = job(table, "--acceptance=0.6,0.5,0.5", "--phases=1:1", "--max_tokens_per_batch=64")
    geometry = made.engine.geometry
    assert [bucket.rows for bucket in geometry.lanes.buckets] == [1, 2, 4, 8]
    assert (geometry.draft_width, made.engine.slots) == (3, 2)
    assert (made.engine.limits.max_seqs_per_batch, made.engine.limits.max_tokens_per_batch) == (8, 64)
    budgets = (8, 16, 24, 32) if control is Control.TARGET_VERIFY else (32,)
    assert geometry.tiers.of(8, 3) == budgets


def test_the_policy_section_is_read(steps_table: Path, tmp_path: Path) -> None:
    config = tmp_path / "policy.json"
    config.write_text('{"version": 1, "policy": {"switch_min_gain": 0.02, "window_size": 7}}')
    made = job(steps_table, "--acceptance=0.6,0.5,0.5", "--phases=1:1", f"--policy_config={config}")
    assert (made.settings.switch_min_gain, made.settings.window_size) == (0.02, 7)


def test_a_trace_brings_requests_and_load(
    steps_table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rounds.jsonl"
    trace = RoundTrace(str(path))
    world = World(Synthetic((Difficulty("all", (0.7, 0.5)),)), ClosedLoad((Phase(3, 6.0),)), 0)

    class Traced(FixedPolicy):
        observed = 0

        def plan(self, view):  # type: ignore[no-untyped-def]
            plan = super().plan(view)
            trace.planned(view, plan, self.observed)
            return plan

        def observe(self, feedback):  # type: ignore[no-untyped-def]
            self.observed += 1
            trace.retired(feedback.plan.plan_id, feedback)

    simulate(world, CpuCosts(), engine(width=2), lambda device: Traced(2))
    trace.close()
    output = tmp_path / "found.json"
    words = [f"--cost_table={steps_table}", f"--trace={path}", f"--output={output}", "--log_level=warning"]
    assert command.main(words) == 0
    captured = capsys.readouterr()
    assert "no draft beyond position 2 was verified in the trace" in captured.err
    found = document(output)
    assert found["phases"] == ["arrivals of the trace"] and len(found["notes"]) == 1
    made = job(steps_table, f"--trace={path}", "--phases=2:4")
    assert made.world.load == ClosedLoad((Phase(2, 4.0),))


def test_a_width_that_was_not_measured_is_shown_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table with another bucket for plain rounds alone: wide rounds are refused, the others compared."""
    bundle = bundle_of(Control.DRAFT_STEP, CpuCosts())
    curves = {key: curve for key, curve in bundle.table.curves.items() if key[1] != 3}
    made = command.Job(
        costs=dataclasses.replace(bundle, table=dataclasses.replace(bundle.table, curves=curves)),
        engine=engine(width=3),
        world=World(Synthetic((Difficulty("all", (0.5,) * 3),)), ClosedLoad((Phase(2, 2.0),)), 0),
        settings=command.DraftStepSettings(),
        notes=(),
        output="",
    )
    found = command.compare(made.world, made.costs.table, made.engine, command.contenders_of(made))
    text = command.table(found)
    assert "depth 3   not measured: the cost table has no round of" in text
    assert found.of("depth 3").refused and found.of("adaptive").total is not None
    entry = command.document(found, settings={}, source={}, notes=())["contenders"][3]
    assert entry["name"] == "depth 3" and "no round of" in entry["refused"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--phases=1:1"], "either --acceptance=RATES or --trace=FILE"),
        (
            ["--acceptance=0.5,0.5,0.5", "--trace=x", "--phases=1:1"],
            "either --acceptance=RATES or --trace=FILE",
        ),
        (["--acceptance=0.5,0.5", "--phases=1:1"], "2 rates in '0.5,0.5'; allowed: at least 3"),
        (["--acceptance=0.5,0.5,1.5", "--phases=1:1"], "allowed: numbers from 0 to 1"),
        (["--acceptance=0.5,,0.5", "--phases=1:1"], "allowed: numbers from 0 to 1"),
        (["--acceptance=:0.5,0.5,0.5", "--phases=1:1"], "allowed: numbers from 0 to 1"),
        (["--acceptance=0.5,nan,0.5", "--phases=1:1"], "allowed: numbers from 0 to 1"),
        (["--acceptance=0.5,0.5,0.5"], "give --phases=clients:seconds,... or --rate"),
        (["--acceptance=0.5,0.5,0.5", "--phases=1:1", "--rate=2"], "exclude each other"),
        (["--acceptance=0.5,0.5,0.5", "--phases=1:1", "--seconds=2"], "only read with --rate"),
        (["--acceptance=0.5,0.5,0.5", "--rate=1e9"], "too many requests to simulate"),
        (["--acceptance=0.5,0.5,0.5", "--phases=1"], "'1'; allowed: clients:seconds"),
        (["--acceptance=0.5,0.5,0.5", "--phases=0:5"], "'0:5'; allowed: clients:seconds"),
        (["--acceptance=0.5,0.5,0.5", "--phases=1:0"], "'1:0'; allowed: clients:seconds"),
        (["--acceptance=0.5,0.5,0.5", "--phases=1:1:1:1"], "allowed: clients:seconds"),
        (["--acceptance=0.5,0.5,0.5", "--phases=1:1:2"], "allowed classes: 1 to 1"),
        (["--acceptance=0.5,0.5,0.5", "--phases=1:1:x"], "allowed classes: 1 to 1"),
        (["--acceptance=0.5,0.5,0.5", "--phases=1:1", "--answer_tokens=9,3"], "--answer_tokens=9,3: allowed"),
        (["--acceptance=0.5,0.5,0.5", "--phases=1:1", "--prompt_tokens=0"], "--prompt_tokens=0: allowed"),
        (["--acceptance=0.5,0.5,0.5", "--phases=1:1", "--burst_tokens=9"], "two classes"),
        (
            ["--acceptance=0.5,0.5,0.5", "--phases=1:1", "--policy_config=/nowhere"],
            "--policy_config=/nowhere: cannot",
        ),
        (["--trace=/nowhere"], "--trace=/nowhere: .*cannot be read"),
        (
            ["--acceptance=0.5,0.5,0.5", "--phases=1:1", "--adaptive_spec_config=x"],
            "--adaptive_spec_config is only read with costs of",
        ),
        (
            ["--acceptance=0.5,0.5,0.5", "--phases=1:1", "--match_flags=x", "--shadow_cost=1"],
            "--match_flags is only read with costs of",
        ),
        (["--trace=/nowhere", "--burst_tokens=3"], "--burst_tokens is only read with --acceptance"),
    ],
)
def test_refused_command_lines(steps_table: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        job(steps_table, *words)


def test_more_clients_than_were_measured_are_refused(steps_table: Path) -> None:
    with pytest.raises(ConfigError, match="9 requests at once; the costs allow 8"):
        command.main([f"--cost_table={steps_table}", "--acceptance=0.5,0.5,0.5", "--phases=9:1"])


def test_tables_that_cannot_be_used(steps_table: Path, tmp_path: Path) -> None:
    words = ("--acceptance=0.5,0.5,0.5", "--phases=1:1")
    with pytest.raises(ConfigError, match="--cost_table=FILE is needed"):
        command.job_of(launch(*words))
    with pytest.raises(ConfigError, match="cannot be read"):
        job(tmp_path / "none.json", *words)
    edited = tmp_path / "edited.json"
    content = encode(bundle_of(Control.DRAFT_STEP, CpuCosts()))
    content["samples"][0]["windows_ms"][0] *= 2
    edited.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="contradicts itself"):
        job(edited, *words)
    bare = tmp_path / "bare.json"
    bare.write_text(
        '{"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [10.0, 9.0], "max_batch_tokens": 2}'
    )
    with pytest.raises(ConfigError, match="bare table"):
        job(bare, *words)


def test_an_existing_output_is_refused_before_any_work(steps_table: Path, tmp_path: Path) -> None:
    output = tmp_path / "kept.json"
    output.write_text("precious")
    with pytest.raises(ConfigError, match="exists already"):
        job(steps_table, "--acceptance=0.5,0.5,0.5", "--phases=1:1", f"--output={output}")
    assert output.read_text() == "precious"


def test_help_lists_the_flags_and_torch_stays_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"--{flag.name}" in shown for flag in command.SIMULATE_FLAGS)
    script = "import sys, xspec_cli.simulate; print([n for n in ('torch', 'aiohttp') if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
