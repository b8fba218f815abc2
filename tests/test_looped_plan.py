"""benchmarks/looped.py: how prompts are packed into two groups, and the commands that are the RFC's plan."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from looped_world import config
from tiny_looped import write_ouro

from xspec.policy.spec_config import spec_config_json
from xspec.text.prompts import read_prompts
from xspec.text.tokenizer import load_text

GROUPS = ("selection", "evaluation")
REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def plan() -> ModuleType:
    spec = importlib.util.spec_from_file_location("looped_plan", REPO / "benchmarks" / "looped.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ouro(tmp_path_factory.mktemp("plan") / "ouro")


@pytest.fixture
def data(tmp_path: Path) -> list[Path]:
    sums, prose = tmp_path / "sums.jsonl", tmp_path / "prose.txt"
    sums.write_text("".join(json.dumps({"question": f"what is {i} + {2 * i}?"}) + "\n" for i in range(40)))
    prose.write_text("".join(f"The {i}th line of a text that goes on and on.\n" for i in range(40)))
    return [sums, prose]


def run(plan: ModuleType, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, list[list[str]]]:
    """The exit code, and the commands that would have run. Sampling leaves candidates behind."""
    commands: list[list[str]] = []

    def record(words: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
        assert words[:3] == [sys.executable, "-m", "xspec_cli.main"] and not check
        commands.append(words[3:])
        for flag in words[3:]:
            if flag.startswith("--candidates_output="):
                Path(flag.partition("=")[2]).write_text(json.dumps(spec_config_json(config())))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", record)
    return plan.main(plan.arguments(flags)), commands


def test_the_whole_plan(
    plan: ModuleType, model: Path, data: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    files = ",".join(map(str, data))
    code, (sampling, fixed, changing) = run(
        plan, monkeypatch, f"--model={model}", f"--data={files}", f"--output={out}", "--input_tokens=24",
        "--output_tokens=128", "--phase_seconds=5", "--", "--dtype=float32",
    )  # fmt: skip
    assert code == 0
    # two disjoint groups, half of each file in either, every prompt of the length asked for
    groups = [read_prompts(str(out / f"{name}.jsonl"), flag="x", chat=False) for name in GROUPS]
    texts = [[prompt.text for prompt in group] for group in groups]
    assert len(texts[0]) >= 4 and not set(texts[0]) & set(texts[1])
    assert all(any("what is" in str(t) for t in of) and any("goes on" in str(t) for t in of) for of in texts)
    tokenizer = load_text(model).tokenizer
    lengths = {len(tokenizer.encode(str(text))) for of in texts for text in of}
    assert max(lengths) <= 26 and min(lengths) >= 23, "a cut inside a word may be read otherwise"
    # sampling knows one group, the evaluation the other and what was frozen
    assert sampling[0] == "calibrate" and f"--prompts={out / 'selection.jsonl'}" in sampling
    assert {"--requests=1,8,32", "--confirm_tokens=128", "--screen_tokens=8", "--dtype=float32"} <= {
        *sampling
    }
    for command in (fixed, changing):
        assert command[0] == "bench" and f"--prompts={out / 'evaluation.jsonl'}" in command
        assert f"--adaptive_spec_config={out / 'candidates.json'}" in command
        assert f"--adaptive_spec_cost_table={out / 'costs.json'}" in command
        assert {"--nochat", "--ignore_eos", "--hindsight", "--max_tokens=128", "--dtype=float32"} <= {
            *command
        }
        (policies,) = [flag.partition("=")[2] for flag in command if flag.startswith("--policies=")]
        wanted = {f"fixed:{one.draft_steps}@{one.draft_loops}" for one in config().candidates}
        first, *pairs, ema, goodput = policies.split(",")
        assert (first, {*pairs}, ema, goodput) == ("plain", wanted, "acceptance_ema", "goodput")
    assert "--concurrency=1,8,32" in fixed
    assert "--phases=1:5,8:5,32:5,8:5,1:5" in changing


def test_the_defaults_are_those_of_the_rfc(plan: ModuleType) -> None:
    args = plan.arguments(["--output=x"])
    assert (args.input_tokens, args.output_tokens) == (512, 2048)
    assert plan.CHANGING == (1, 8, 32, 8, 1) and plan.REQUESTS == (1, 8, 32)


def test_too_little_text_is_refused_before_anything_runs(
    plan: ModuleType,
    model: Path,
    data: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, commands = run(
        plan, monkeypatch, f"--model={model}", f"--data={data[0]}", f"--output={tmp_path / 'o'}",
        "--input_tokens=4000",
    )  # fmt: skip
    assert code == 1 and not commands and not (tmp_path / "o").exists()
    assert "sums.jsonl has no text for two prompts of 4000 tokens" in capsys.readouterr().err
