"""`xspec train --algorithm=Ouro` as run: kills, export, what is refused; and the models that ship."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ouro_library import make_library
from safetensors.torch import load_file
from test_engine import engine_of, run, tokens

import xspec.train.ouro_run
from xspec.models.locate import SHIPPED, locate_model
from xspec.models.registry import read_config
from xspec.text.tokenizer import load_text
from xspec.train.ouro_corpus import DOMAINS
from xspec.train.ouro_eval import greedy, match_flags
from xspec.train.ouro_export import load
from xspec_cli.main import main

SIZES = {"hidden_size": 32, "heads": 2, "loop_layers": 2, "inner_size": 48, "loops": 3, "vocab_size": 300}
LAYER = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "input_layernorm_2", "post_attention_layernorm",
    "post_attention_layernorm_2",
)  # fmt: skip


class Killed(BaseException):
    """Not an error that anything may handle."""


@pytest.fixture(autouse=True)
def _restore_process_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands set up logging and thread switching for a process of their own."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    root, interval = logging.getLogger(), sys.getswitchinterval()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_library(tmp_path_factory.mktemp("library"))


# -- the command -------------------------------------------------------------------------------


def command(library: Path, output: Path, **flags: Any) -> list[str]:
    values = {
        "algorithm": "ouro", "output": output, "corpus": library, "dtype": "float32", "held_out": 0.2,
        **SIZES,
        "steps": 8, "save_every": 2, "warmup_steps": 2, "windows": "32:0.8,64:0.2", "tokens_per_step": 64,
        "eval_limit": 2, "continue_tokens": 16, "eval_tokens": 16, **flags,
    }  # fmt: skip
    return ["train", *(f"--{name}={value}" for name, value in values.items())]


@pytest.fixture(scope="module")
def made(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("made") / "out"
    environ = dict(os.environ)
    assert main(command(library, output)) == 0
    os.environ.clear()
    os.environ.update(environ)
    return output


def test_the_export_has_exactly_the_published_names(made: Path) -> None:
    state = load_file(made / "model.safetensors")
    layers = {f"model.layers.{index}.{name}.weight" for index in range(2) for name in LAYER}
    rest = {"model.embed_tokens", "model.norm", "model.early_exit_gate", "lm_head"}
    assert set(state) == layers | {f"{name}.weight" for name in rest} | {"model.early_exit_gate.bias"}
    assert len(state) == 11 * 2 + 5 and {tensor.dtype for tensor in state.values()} == {torch.float16}
    assert list(state["model.early_exit_gate.weight"].shape) == [1, 32]
    assert list(state["model.early_exit_gate.bias"].shape) == [1]
    config = json.loads((made / "config.json").read_text())
    wanted = {
        "model_type": "ouro", "architectures": ["OuroForCausalLM"], "total_ut_steps": 3,
        "early_exit_threshold": 1.0,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "hidden_act": "silu", "max_position_embeddings": 64, "vocab_size": 300, "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
        "intermediate_size": 48,
    }  # fmt: skip
    assert {key: config[key] for key in wanted} == wanted


def test_the_export_reloads_and_serves_as_text(made: Path) -> None:
    text = load_text(made)
    assert text.eos_ids == {0} and text.chat is None
    prompt = "class Thing:\n    def stép"
    assert text.tokenizer.decode(text.tokenizer.encode(prompt)) == prompt
    served = read_config(json.loads((made / "config.json").read_text()), "config.json")
    assert (served.model_type, served.num_layers, served.max_position) == ("ouro", 2, 64)
    model, max_position = load(made)
    checkpoint = torch.load(made / "training.pt", weights_only=True)["module"]
    assert max_position == 64 and set(checkpoint) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, checkpoint[name].half().float())
    facts = json.loads((made / "training.json").read_text())
    assert facts["steps"] == 8 and facts["tokens"] == 9 * 64 and facts["corpus"]["documents"] == 45


def test_the_engine_answers_like_the_model_that_was_trained(made: Path) -> None:
    model, _ = load(made)
    prompts = [[5, 6, 7, 8], [40, 41, 3, 299]]

    async def answers() -> list[tuple[int, ...]]:
        async with engine_of(made) as engine:
            return [
                tokens(await run(engine, prompt, temperature=0.0, max_tokens=12, ignore_eos=True))
                for prompt in prompts
            ]

    with torch.no_grad():
        expected = greedy(model, torch.tensor(prompts), 12)
    assert asyncio.run(answers()) == [tuple(answer) for answer in expected.tolist()]


@pytest.mark.parametrize("step", [3, 7, 9])
def test_a_killed_run_ends_with_the_same_files(
    step: int, made: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at a steady step, in the wind-down, and in the gate's stage."""
    real = xspec.train.ouro_run.TimedReport.__call__

    def report(self: Any, progress: Any) -> None:
        if progress.step == step:
            raise Killed
        real(self, progress)

    output = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(xspec.train.ouro_run.TimedReport, "__call__", report)
        main(command(library, output, report_every=1))
    assert not (output / "config.json").exists() and (output / "training.pt").exists()
    assert main(command(library, output)) == 0
    for path in sorted(made.rglob("*")):
        if path.is_file() and path.name != "training.pt":  # whose pickle holds no meaning
            assert (output / path.relative_to(made)).read_bytes() == path.read_bytes(), path.name


def test_evaluate_only_repeats_the_figures_and_writes_prompts(
    made: Path, library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "train", "--algorithm=Ouro", "--evaluate_only", f"--model={made}", f"--corpus={library}",
        "--held_out=0.2",
        "--eval_limit=2", "--continue_tokens=16", "--eval_tokens=16",
    ]  # fmt: skip
    assert main([*argv, f"--output={tmp_path}", "--vocab_size=300"]) == 1  # the model has a tokenizer
    assert (
        "--vocab_size is not read by xspec train --algorithm=Ouro --evaluate_only" in capsys.readouterr().err
    )
    assert main([*argv, f"--output={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert "bits per byte after loop 1 to 3" in shown and "d = 2" in shown and "d = 3" not in shown
    old, new = (json.loads((folder / "evaluation.json").read_text()) for folder in (made, tmp_path))
    assert new["results"] == old["results"] and [found["domain"] for found in new["results"]] == list(DOMAINS)
    prompts = (tmp_path / "held_out_prose.jsonl").read_text().splitlines()
    assert len(prompts) == 2 and all(len(json.loads(line)["prompt"]) > 16 for line in prompts)
    assert prompts == (made / "held_out_prose.jsonl").read_text().splitlines()


def test_folders_are_not_mixed_up(
    made: Path, library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text("{}")
    for output, flags, complaint in (
        (made, {"steps": 9}, f"--steps was 8 in {made}, now 9"),
        (made, {"objective": "last_loop"}, "--objective was expected_loss"),
        (made, {"hidden_size": 64}, "--hidden_size was 32"),
        (made, {"windows": "32:0.7,64:0.3"}, "--windows was"),
        (tmp_path / "file", {}, "file is a file; allowed: a folder"),
        (tmp_path / "same", {"work_dir": tmp_path / "same"}, "allowed: another folder than --output"),
        (tmp_path / "foreign", {}, "holds a model that xspec train did not make"),
    ):
        assert main(command(library, output, **flags)) == 1
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaints"),
    [
        (["--tokens=5", "--unroll=2", "--output=x"],
         ["--tokens is not read by xspec train --algorithm=Ouro", "--unroll is not read by xspec train"]),
        (["--model=x", "--max_seqs_per_batch=4", "--output=x"],
         ["--model is not read by", "--max_seqs_per_batch is not read by"]),
        ([], ["--output=DIR is needed"]),
        (["--evaluate_only"], ["--evaluate_only needs --model, or --output=DIR"]),
        (["--evaluate_only", "--model=x", "--dtype=bfloat16"],
         ["--dtype=bfloat16: figures are made in float32"]),
        (["--evaluate_only", "--model=/nowhere"], ["that ship with xspec: ouro-tiny, ouro-tiny-last-loop"]),
        (["--output=x", "--windows=256"], ["--windows=256: allowed: tokens:share"]),
        (["--output=x", "--windows=256:0.9"], ["shares that make up 1"]),
        (["--output=x", "--heads=5"], ["hidden is 192, allowed: multiples of twice the heads (10)"]),
        (["--output=x", "--objective=first_loop"], ["--objective=first_loop: allowed: "]),
        (["--output=x", "--corpus=/nowhere"], ["--corpus=/nowhere: there is no such folder"]),
        (["--output=x", "--held_out=0"], ["--held_out=0: allowed: above 0 and below 1"]),
    ],
)  # fmt: skip
def test_command_lines_that_are_refused(
    flags: list[str], complaints: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--algorithm=Ouro", *flags]) == 1
    err = capsys.readouterr().err
    assert all(complaint in err for complaint in complaints), err
    assert main(["train", "--algorithm=MTP", "--output=x", "--objective=last_loop"]) == 1
    assert "--objective is for --algorithm=Ouro" in capsys.readouterr().err


# -- the models that ship ----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SHIPPED))
def test_a_name_means_a_shipped_model_unless_there_is_such_a_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = locate_model(name)
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        p.name for p in path.iterdir()
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    assert locate_model(name) == Path(name)


@pytest.fixture(scope="module")
def shipped_matches() -> dict[str, list[float]]:
    """How often each depth drafts the next token of short answers about held-out code."""
    found = {}
    for name in SHIPPED:
        model, _ = load(locate_model(name))
        text = load_text(locate_model(name)).tokenizer
        prompts = [
            "class Reader:\n    def __init__(self, path):\n        self.path = path\n",
            "import os\nimport sys\n\n\ndef main(arguments):\n    for name in arguments:\n",
        ]
        with torch.no_grad():
            encoded = torch.tensor([list(text.encode(prompt))[:12] for prompt in prompts])
            flags = match_flags(model, encoded, greedy(model, encoded, 40))
        found[name] = flags.float().mean((0, 2)).tolist()
    return found


def test_depths_of_the_shipped_models_differ(shipped_matches: dict[str, list[float]]) -> None:
    first, second, third = shipped_matches["ouro-tiny"]
    assert first < second < third and first > 0.4
    assert shipped_matches["ouro-tiny-last-loop"][0] < first - 0.15
