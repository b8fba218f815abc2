"""`xspec train` as a user runs it, on tiny random targets: whole runs, kills, and what is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_engine import engine_of, run, tokens
from tiny import make_checkpoint
from tiny_drafters import make_mtp
from tiny_dspark import target_config

import xspec.train.evaluate
import xspec.train.run
from xspec.config import Config
from xspec.draft.choose import choose_drafter
from xspec.train.dataset import Reader, Writer
from xspec.train.journal import Journal, hold
from xspec.train.offline import OfflineEngine
from xspec_cli import train
from xspec_cli.flags import table
from xspec_cli.flags_train import FLAGS
from xspec_cli.main import main

WORDS = ["the cat sat", "another one for the list", "a dog", "what is it", "sing of the night", "on a hill"]


@pytest.fixture(autouse=True)
def _restore_process_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands set up logging and thread switching for a process of their own."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    root, interval = logging.getLogger(), sys.getswitchinterval()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    sys.setswitchinterval(interval)


class Killed(BaseException):
    """Not an error that anything may handle."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "llama", "llama", overrides=target_config())


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text("\n".join(WORDS))
    return path


def command(model: Path, words: Path, output: Path, algorithm: str, /, **flags: Any) -> list[str]:
    values = {
        "algorithm": algorithm, "model": model, "output": output, "prompts": words, "dtype": "float32",
        "self_prompts": 4, "tokens": 120, "answer_tokens": 12, "held_out": 0.25, "group": 6,
        "max_prompt_tokens": 120, "steps": 6, "save_every": 2, "draft_vocab_size": 200, "eval_tokens": 12,
        "max_seqs_per_batch": 8, "block_size": 16, **flags,
    }  # fmt: skip
    return ["train", *(f"--{name}={value}" for name, value in values.items())]


@pytest.fixture(scope="module")
def made(model: Path, words: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both drafters over one work folder, as two commands make them."""
    root = tmp_path_factory.mktemp("made")
    environ = dict(os.environ)
    for algorithm in ("MTP", "DSpark"):
        argv = command(model, words, root / algorithm, algorithm, work_dir=root / "work", eval_prompts=words)
        assert main(argv) == 0
    os.environ.clear()
    os.environ.update(environ)
    return {name: root / name for name in ("MTP", "DSpark", "work")}


# -- whole runs --------------------------------------------------------------------------------


def test_one_data_stage_serves_both_algorithms(made: dict[str, Path]) -> None:
    answers = [json.loads(line) for line in (made["work"] / "answers.jsonl").read_text().splitlines()]
    assert sum(len(answer["answer_ids"]) for answer in answers) >= 120
    plain, tapped = Reader(made["work"] / "states"), Reader(made["work"] / "states_1_2_3")
    assert len(plain) == len(tapped) == len(answers) and plain.held_out == tapped.held_out
    assert plain.spec.taps == () and tapped.spec.taps == (1, 2, 3)
    assert {answer["source"] for answer in answers} > {"words"}  # and what the model made up


@pytest.mark.parametrize("algorithm", ["MTP", "DSpark"])
def test_what_was_made_speculates(algorithm: str, made: dict[str, Path], model: Path) -> None:
    """The export is complete: width, vocabulary, confidence tables. And the text is the target's."""
    path = made[algorithm]
    config = json.loads((path / "config.json").read_text())
    choice = choose_drafter(Config.from_mapping({"draft_model": str(path)}).speculation, embedded=False)
    assert choice is not None and (choice.algorithm, choice.steps) == (
        algorithm,
        {"MTP": 3, "DSpark": 5}[algorithm],
    )
    assert config["draft_vocab_size"] == 200 and len(load_file(path / "model.safetensors")["d2t"]) == 200
    if algorithm == "DSpark":
        rounds = {regime: columns["samples"] for regime, columns in config["confidence_calibration"].items()}
        # Real rollouts of the 2 held-out prompts: rounds of at least one token, at least three verify all.
        assert set(rounds) == {"greedy", "sampled"}
        assert all(2 <= samples[0] <= 2 * 11 for samples in rounds.values())

    async def texts(**flags: Any) -> list[tuple[int, ...]]:
        async with engine_of(model, **flags) as engine:
            found = [tokens(await run(engine, [5, 6, 7 + i], temperature=i / 2)) for i in range(3)]
            totals = engine.metrics.draft_totals()
            assert (totals is not None and totals.drafts > 10) == bool(flags)
            return found

    assert asyncio.run(texts(draft_model=str(path))) == asyncio.run(texts())


def test_figures_are_kept_with_what_they_depend_on(made: dict[str, Path]) -> None:
    kept = json.loads((made["DSpark"] / "evaluation.json").read_text())
    assert kept["drafter"]["algorithm"] == "DSpark" and kept["drafter"]["num_speculative_tokens"] == 5
    assert kept["settings"]["prompts"] == {"words.txt": 6} and kept["target"]["name"] == "llama"
    assert [(found["prompts"], found["temperature"]) for found in kept["results"]] == [
        ("words.txt", 0.0), ("words.txt", 1.0),
    ]  # fmt: skip
    assert all(found["sequences"] == 6 and found["rounds"] > 6 for found in kept["results"])


def test_a_finished_run_has_nothing_left_to_do(
    made: dict[str, Path], model: Path, words: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(OfflineEngine, "__init__", refuse)
    monkeypatch.setattr(xspec.train.run, "train_mtp", refuse)
    before = state_of(made["MTP"])
    argv = command(model, words, made["MTP"], "MTP", work_dir=made["work"], eval_prompts=words)
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out.count("words.txt") == 2 and "tokens/round" in out
    assert state_of(made["MTP"]) == before


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("this was done before")


def state_of(folder: Path) -> dict[str, bytes]:
    """Everything that a run leaves in a folder, but for optimiser states, whose pickles hold no meaning."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "training.pt"
    }


# -- kills -------------------------------------------------------------------------------------


def kill_training(monkeypatch: pytest.MonkeyPatch) -> None:
    real = xspec.train.run.TimedReport.__call__

    def report(self: Any, step: Any) -> None:
        if step.step == 4:
            raise Killed
        real(self, step)

    monkeypatch.setattr(xspec.train.run.TimedReport, "__call__", report)


def kill_export(monkeypatch: pytest.MonkeyPatch) -> None:
    def amend(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(xspec.train.run, "amend", amend)


def kill_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = xspec.train.evaluate._rollout, []

    def rollout(engine: Any, recorder: Any, chosen: Any, temperature: float, *rest: Any) -> Any:
        calls.append(temperature)
        if chosen.name == "words.txt" and temperature == 1.0:
            raise Killed
        return real(engine, recorder, chosen, temperature, *rest)

    monkeypatch.setattr(xspec.train.evaluate, "_rollout", rollout)


@pytest.mark.parametrize("algorithm", ["MTP", "DSpark"])
@pytest.mark.parametrize("kill", [kill_training, kill_export, kill_evaluation])
def test_a_killed_run_ends_with_the_same_files(
    algorithm: str, kill: Any, made: dict[str, Path], model: Path, words: Path, tmp_path: Path
) -> None:
    shutil.copytree(made["work"], tmp_path / "work")
    argv = command(
        model, words, tmp_path / algorithm, algorithm, work_dir=tmp_path / "work", eval_prompts=words,
        report_every=1,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        kill(patch)
        with pytest.raises(Killed):
            main(argv)
    assert main(argv) == 0
    found, expected = state_of(tmp_path / algorithm), state_of(made[algorithm])
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == expected[name], name
    assert state_of(tmp_path / "work") == state_of(made["work"])


def test_a_folder_that_grew_meanwhile_changes_nothing(
    made: dict[str, Path], model: Path, words: Path, tmp_path: Path
) -> None:
    """Another run may have made more of the same data while this one lay there killed."""
    work = shutil.copytree(made["work"], tmp_path / "work")
    argv = command(model, words, tmp_path / "MTP", "MTP", work_dir=work, eval_prompts=words, report_every=1)
    with pytest.MonkeyPatch.context() as patch:
        kill_training(patch)
        with pytest.raises(Killed):
            main(argv)
    answers, reader = Journal(work / "answers.jsonl"), Reader(work / "states")
    answers.append(list(answers.read())[:4])
    with Writer(work / "states", reader.spec) as writer:
        for index in range(4):
            writer.append(reader.sequence(index))
    assert main(argv) == 0
    assert state_of(tmp_path / "MTP") == state_of(made["MTP"])


def test_a_whole_run_is_a_function_of_its_flags(
    made: dict[str, Path], model: Path, words: Path, tmp_path: Path
) -> None:
    """From an empty folder, cut inside the data; then the same again with another seed."""
    argv = command(model, words, tmp_path / "MTP", "MTP", work_dir=tmp_path / "work", eval_prompts=words)
    with pytest.MonkeyPatch.context() as patch:
        real = OfflineEngine.answer
        calls: list[int] = []

        def answer(self: Any, asks: Any, *rest: Any) -> Any:
            calls.append(len(asks))
            if len(calls) == 3:  # own prompts, answers of the first group, answers of the second
                raise Killed
            return real(self, asks, *rest)

        patch.setattr(OfflineEngine, "answer", answer)
        with pytest.raises(Killed):
            main(argv)
    assert main(argv) == 0
    assert state_of(tmp_path / "MTP") == state_of(made["MTP"])
    shared = {name: data for name, data in state_of(made["work"]).items() if "states_1_2_3" not in name}
    assert state_of(tmp_path / "work") == shared

    other = command(model, words, tmp_path / "other", "MTP", seed=1)
    assert main(other) == 0
    ours = load_file(made["MTP"] / "model.safetensors")
    theirs = load_file(tmp_path / "other" / "model.safetensors")
    assert not torch.equal(ours["model.eh_proj.weight"], theirs["model.eh_proj.weight"])
    figures = json.loads((tmp_path / "other" / "evaluation.json").read_text())["results"]
    assert [found["prompts"] for found in figures] == ["held-out prompts"] * 2  # without --eval_prompts


# -- figures alone -----------------------------------------------------------------------------


def test_figures_of_any_drafter(
    model: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = make_mtp(tmp_path / "mtp")
    shared = [
        "train", "--evaluate_only", f"--model={model}", f"--eval_prompts={words}", f"--eval_text={words}",
        "--continue_tokens=3", "--eval_tokens=6", "--dtype=float32", "--max_seqs_per_batch=8",
    ]  # fmt: skip
    # MTP's width is nowhere: not in this directory, not on the command line.
    assert main([*shared, f"--draft_model={drafter}"]) == 1
    assert "set --num_speculative_tokens" in capsys.readouterr().err
    (tmp_path / "prose.txt").write_text("a line that is long enough\n")
    shared[4] = f"--eval_text={tmp_path / 'prose.txt'}"
    figures = [*shared, f"--draft_model={drafter}", "--num_speculative_tokens=2", "--eval_limit=3"]
    assert main(figures) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:]] == ["words.txt"] * 2 + ["prose.txt"] * 2
    assert main([*figures, f"--output={tmp_path / 'kept'}"]) == 0
    assert capsys.readouterr().out == shown
    kept = json.loads((tmp_path / "kept" / "evaluation.json").read_text())
    assert kept["settings"]["prompts"] == {"words.txt": 3, "prose.txt": 1}
    # Asked again it measures again: the file is no cache of it.
    assert main([*figures, f"--output={tmp_path / 'kept'}"]) == 0
    assert json.loads((tmp_path / "kept" / "evaluation.json").read_text()) == kept


def test_figures_of_the_drafter_in_the_output_folder(
    made: dict[str, Path], model: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made["DSpark"], tmp_path / "DSpark")
    before = json.loads((tmp_path / "DSpark" / "evaluation.json").read_text())
    (tmp_path / "DSpark" / "evaluation.json").unlink()
    argv = [
        "train", "--evaluate_only", f"--model={model}", f"--output={tmp_path / 'DSpark'}", "--dtype=float32",
        f"--eval_prompts={words}", "--eval_tokens=12", "--max_prompt_tokens=120", "--max_seqs_per_batch=8",
        "--block_size=16",
    ]  # fmt: skip
    assert main(argv) == 0
    assert json.loads((tmp_path / "DSpark" / "evaluation.json").read_text()) == {
        **before,
        "results": json.loads(json.dumps(before["results"])),
    }
    capsys.readouterr()
    for words_, complaint in (
        ([*argv[:3], "--output=/nowhere", *argv[4:]], "--output=/nowhere holds no drafter"),
        ([*argv, f"--draft_model={made['MTP']}"], "figures of another do not belong there"),
        ([word for word in argv if "eval_prompts" not in word], "--evaluate_only needs --eval_prompts"),
    ):
        assert main(words_) == 1
        assert complaint in capsys.readouterr().err


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "complaints"),
    [
        (["--output=x"], ["--algorithm is needed: MTP, DSpark or Ouro"]),
        (["--algorithm=mtp"], ["--output=DIR is needed"]),
        (["--algorithm=EAGLE", "--output=x"], ["--algorithm=EAGLE: allowed: ", "MTP, DSpark"]),
        (["--algorithm=MTP", "--output=x", "--layers=2", "--anchors=3"],
         ["--layers is for --algorithm=DSpark", "--anchors is for --algorithm=DSpark"]),
        (["--algorithm=DSpark", "--output=x", "--unroll=2"], ["--unroll is for --algorithm=MTP"]),
        (["--algorithm=MTP", "--output=x", "--temperatures=1.0,0.7"], ["--temperatures=1.0,0.7: allowed: "]),
        (["--algorithm=MTP", "--output=x", "--temperatures=0.7"], ["--temperatures=0.7: allowed: two"]),
        (["--algorithm=MTP", "--output=x", "--taps=2,1"], ["--taps=2,1: allowed: ascending integers"]),
        (["--algorithm=MTP", "--output=x", "--taps=a"], ["--taps=a: allowed: ascending integers"]),
        (["--algorithm=MTP", "--output=x", "--draft_model=y", "--num_speculative_tokens=0"],
         ["--draft_model=y is only read with --evaluate_only", "--num_speculative_tokens=0"]),
        (["--algorithm=MTP", "--output=x", "--speculative_algorithm=DSpark"],
         ["--speculative_algorithm=DSpark: allowed: --algorithm (MTP)"]),
        (["--algorithm=MTP", "--output=x", "--self_prompts=0"], ["--self_prompts=0 leaves no prompts"]),
        (["--algorithm=MTP", "--output=x", "--held_out=1"], ["--held_out=1: allowed: numbers from 0 to 0.9"]),
        (["--algorithm=MTP", "--output=x", "--stepz=1"], ["--stepz: unknown flag (did you mean --steps?)"]),
    ],
)  # fmt: skip
def test_command_lines_that_are_refused(
    flags: list[str], complaints: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *flags]) == 1
    err = capsys.readouterr().err
    assert all(complaint in err for complaint in complaints), err


@pytest.mark.parametrize(
    ("algorithm", "flags", "complaint"),
    [
        (
            "MTP",
            {"answer_tokens": 400},
            "--max_prompt_tokens=120 and --answer_tokens=400 make sequences of 521",
        ),
        ("MTP", {"max_model_len": 100}, "more than --max_model_len=100"),
        ("DSpark", {"taps": "1,4"}, "--taps=1,4: allowed: ascending, from 1 to 3 for a target of 4 layers"),
        ("MTP", {"draft_vocab_size": 321}, "--draft_vocab_size=321: allowed: integers from 2 to 320"),
        ("MTP", {"draft_vocab_size": 1}, "--draft_vocab_size=1: allowed: integers from 2 to 320"),
        ("DSpark", {"num_speculative_tokens": 3}, "--num_speculative_tokens=3: a DSpark drafter of"),
        ("MTP", {"prompts": "/nowhere.txt"}, "--prompts=/nowhere.txt cannot be read"),
        ("MTP", {"eval_prompts": "/nowhere.txt"}, "--eval_prompts=/nowhere.txt cannot be read"),
        ("MTP", {"model": "/nowhere"}, "--model=/nowhere"),
        ("MTP", {"device": "cuda"}, "--device=cuda"),
    ],
)
def test_runs_that_cannot_work_are_refused_before_any_work(
    algorithm: str, flags: dict[str, Any], complaint: str, model: Path, words: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(OfflineEngine, "__init__", refuse)
    assert main(command(model, words, tmp_path / "out", algorithm, **flags)) == 1
    assert complaint in capsys.readouterr().err


def test_a_model_without_a_chat_template_needs_nochat(
    model: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(model, tmp_path / "bare")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    argv = command(bare, words, tmp_path / "out", "MTP", tokens=40, steps=2)
    assert main(argv) == 1
    assert "--chat: bare has no chat template; use --nochat" in capsys.readouterr().err
    assert main([*argv, "--nochat"]) == 0
    prompts = [json.loads(line) for line in (tmp_path / "out/work/prompts.jsonl").read_text().splitlines()]
    assert any(len(prompt["prompt_ids"]) < 6 for prompt in prompts)  # bare words


def test_folders_are_not_mixed_up(
    made: dict[str, Path], model: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of = {"work_dir": made["work"], "eval_prompts": words}
    with hold(made["work"], "work_dir"):
        assert main(command(model, words, tmp_path / "new", "MTP", **run_of)) == 1
    (tmp_path / "file").write_text("")
    for algorithm, output, flags, complaint in (
        ("MTP", made["MTP"], {**run_of, "steps": 7}, f"--steps was 6 in {made['MTP']}, now 7"),
        ("DSpark", made["DSpark"], {**run_of, "draft_block_size": 4}, "--draft_block_size was 5"),
        ("DSpark", made["MTP"], run_of, "--algorithm was MTP"),
        ("MTP", made["MTP"], {**run_of, "tokens": 400}, "--tokens was 120"),
        ("MTP", tmp_path / "new", {**run_of, "seed": 4}, f"--seed was 0 in {made['work']}, now 4"),
        ("MTP", tmp_path / "new", {**run_of, "answer_tokens": 9}, "give another --work_dir"),
        ("MTP", model, {}, "holds a model that xspec train did not make"),
        ("MTP", tmp_path / "file", {}, "file is a file; allowed: a folder"),
        ("MTP", tmp_path / "same", {"work_dir": tmp_path / "same"}, "allowed: another folder than --output"),
    ):
        assert main(command(model, words, output, algorithm, **flags)) == 1
        assert complaint in capsys.readouterr().err


def test_help_is_complete_and_no_flag_means_two_things(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"--{flag.name}: " in shown for flag in FLAGS)
    names = [flag.name for flag in FLAGS]
    assert len(set(names)) == len(names) and not set(names) & set(table())
    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
