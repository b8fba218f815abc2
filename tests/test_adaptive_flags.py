"""Adaptive speculation's flags: what they need, what speaks against them, and when they are on unasked."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import xspec_cli.bench
import xspec_cli.serve
from xspec.calib.choose import Adaptation
from xspec.config import Config, SpeculationConfig
from xspec.cost.settings import CalibrationSettings, Control
from xspec.draft.choose import DraftChoice, choose_drafter, shipped_drafter
from xspec.engine.build import _adaptation_facts
from xspec.errors import ConfigError
from xspec.policy.requirements import adaptive_refusals, calibration_with_table, control_of
from xspec.policy.settings import DraftStepSettings
from xspec_cli import train
from xspec_cli.flags import Status, table
from xspec_cli.flags_resolve import Command, Launch, resolve
from xspec_cli.flags_types import PLATFORMS

DRAFT_STEP = {"enable_adaptive_draft_step": True}
TARGET_VERIFY = {"enable_adaptive_target_verify": True}
GOODPUT = {"speculation_policy": "goodput"}


def refusals(algorithm: str | None = "MTP", steps: int = 5, **flags: object) -> list[str]:
    return adaptive_refusals(Config.from_mapping(flags), algorithm, steps)


def launch(*argv: str, command: Command = xspec_cli.serve.COMMAND) -> Launch:
    result = resolve(argv, command, environ={})
    assert isinstance(result, Launch)
    return result


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        (None, {}),
        ("DSpark", {"target_verify_width": 2, "enable_graph": False, "num_speculative_tokens": 5}),
        ("MTP", DRAFT_STEP),
        ("MTP", TARGET_VERIFY),
        ("DSpark", TARGET_VERIFY),
        ("MTP", {**DRAFT_STEP, "adaptive_draft_step_config": "c", "adaptive_draft_step_cost_table": "t"}),
        (
            "MTP",
            {**DRAFT_STEP, "adaptive_draft_step_config": "c", "adaptive_draft_step_cost_table_output": "o"},
        ),
        (
            "DSpark",
            {
                **TARGET_VERIFY,
                "adaptive_target_verify_calibration": "c",
                "adaptive_target_verify_cost_table_output": "o",
            },
        ),
        ("MTP", {**TARGET_VERIFY, "enable_probabilistic_draft": True}),
        ("MTP", {**DRAFT_STEP, "enable_probabilistic_draft": True, "num_speculative_tokens": 1}),
        ("MTP", {**DRAFT_STEP, "python_graph_backend": "cpu"}),
        ("MTP", GOODPUT),
        ("Looped", {"speculation_policy": "acceptance_ema", "adaptive_spec_config": "c"}),
        ("Looped", {**GOODPUT, "adaptive_spec_config": "c", "adaptive_spec_cost_table": "t"}),
    ],
)
def test_what_is_supported_is_not_refused(algorithm: str | None, flags: dict[str, object]) -> None:
    assert refusals(algorithm, **flags) == []


SWITCH = "--enable_adaptive_draft_step"
PREWARMED = f"{SWITCH} needs prewarmed graphs"
OVERLAPPED = f"{SWITCH} needs asynchronous scheduling and the task pipeline"


@pytest.mark.parametrize(
    ("algorithm", "flags", "reason"),
    [
        (
            "MTP",
            {**DRAFT_STEP, **TARGET_VERIFY},
            "--enable_adaptive_draft_step and --enable_adaptive_target_verify are both true: "
            "allowed: one of them",
        ),
        (
            "DSpark",
            DRAFT_STEP,
            "--enable_adaptive_draft_step=true: the drafter is DSpark; allowed: MTP",
        ),
        (
            "MTP",
            {**DRAFT_STEP, **GOODPUT},
            "--enable_adaptive_draft_step=true and --speculation_policy=goodput cannot go together; "
            "allowed: one of them",
        ),
        (
            "DSpark",
            GOODPUT,
            "--speculation_policy=goodput: the drafter is DSpark; allowed: MTP, Looped",
        ),
        (
            "Looped",
            {**GOODPUT, "draft_loops": 2},
            "--draft_loops=2 fixes what --speculation_policy=goodput is to choose; allowed: -1",
        ),
        (
            "Looped",
            {**GOODPUT, "adaptive_spec_cost_table": "t", "adaptive_spec_cost_table_output": "o"},
            "--adaptive_spec_cost_table_output=o: nothing is measured where --adaptive_spec_cost_table=t "
            "brings costs; allowed: one of the two",
        ),
        *(
            (
                "MTP",
                {flag: "x.json"},
                f"--{flag}=x.json: it is only read with --speculation_policy=acceptance_ema or goodput",
            )
            for flag in (
                "adaptive_spec_config",
                "adaptive_spec_cost_table",
                "adaptive_spec_cost_table_output",
            )
        ),
        (
            "Looped",
            TARGET_VERIFY,
            "--enable_adaptive_target_verify=true: the drafter is Looped; allowed: MTP, DSpark",
        ),
        (
            None,
            {**DRAFT_STEP, "num_speculative_tokens": 0},
            "--enable_adaptive_draft_step=true needs speculation: --num_speculative_tokens=0 switches it "
            "off; allowed: -1 or integers from 1",
        ),
        (
            None,
            TARGET_VERIFY,
            "--enable_adaptive_target_verify=true needs speculation: this model has no drafter; give "
            "--draft_model, or --speculative_algorithm=MTP where its checkpoint holds MTP layers, Looped "
            "where its layers loop",
        ),
        (
            "MTP",
            {**TARGET_VERIFY, "target_verify_width": 0},
            "--target_verify_width=0 fixes what --enable_adaptive_target_verify=true is to choose; "
            "allowed: -1",
        ),
        ("MTP", {**DRAFT_STEP, "enable_graph": False}, f"--enable_graph=false: {PREWARMED}; allowed: true"),
        (
            "MTP",
            {**DRAFT_STEP, "disable_graph_warmup": True},
            f"--disable_graph_warmup=true: {PREWARMED}; allowed: false",
        ),
        (
            "MTP",
            {**DRAFT_STEP, "python_graph_backend": "none"},
            f"--python_graph_backend=off: {PREWARMED}; allowed: auto",
        ),
        (
            "MTP",
            {**DRAFT_STEP, "enable_schedule_overlap": False},
            f"--enable_schedule_overlap=false: {OVERLAPPED}; allowed: true",
        ),
        (
            "MTP",
            {**DRAFT_STEP, "enable_task_pipeline": False},
            f"--enable_task_pipeline=false: {OVERLAPPED}; allowed: true",
        ),
        *(
            ("MTP", {flag: "x.json"}, f"--{flag}=x.json: it is only read with --{switch}=true")
            for switch, flags in (
                (
                    "enable_adaptive_draft_step",
                    (
                        "adaptive_draft_step_config",
                        "adaptive_draft_step_cost_table",
                        "adaptive_draft_step_cost_table_output",
                    ),
                ),
                (
                    "enable_adaptive_target_verify",
                    (
                        "adaptive_target_verify_calibration",
                        "adaptive_target_verify_cost_table",
                        "adaptive_target_verify_cost_table_output",
                    ),
                ),
            )
            for flag in flags
        ),
        (
            "MTP",
            {**DRAFT_STEP, "adaptive_target_verify_cost_table": "t"},
            "--adaptive_target_verify_cost_table=t: it is only read with "
            "--enable_adaptive_target_verify=true",
        ),
        (
            "MTP",
            {
                **DRAFT_STEP,
                "adaptive_draft_step_cost_table": "t",
                "adaptive_draft_step_cost_table_output": "o",
            },
            "--adaptive_draft_step_cost_table_output=o: nothing is measured where "
            "--adaptive_draft_step_cost_table=t brings costs; allowed: one of the two",
        ),
        (
            "MTP",
            {**TARGET_VERIFY, "adaptive_target_verify_cost_table_output": "o", "round_trace": "o"},
            "--adaptive_target_verify_cost_table_output=o: is the file of --round_trace too; "
            "allowed: two files",
        ),
    ],
)
def test_each_reason_alone(algorithm: str | None, flags: dict[str, object], reason: str) -> None:
    assert refusals(algorithm, 0 if algorithm is None else 5, **flags) == [reason]


def test_all_reasons_are_given_at_once() -> None:
    found = refusals(
        "DSpark",
        7,
        **DRAFT_STEP,
        **TARGET_VERIFY,
        target_verify_width=3,
        num_speculative_tokens=7,
        adaptive_target_verify_cost_table="t",
        adaptive_target_verify_calibration="c",
        adaptive_target_verify_cost_table_output="o",
        enable_graph=False,
        disable_graph_warmup=True,
        python_graph_backend="off",
        enable_schedule_overlap=False,
        enable_task_pipeline=False,
    )
    both = "--enable_adaptive_draft_step and --enable_adaptive_target_verify"
    assert [reason.split(":")[0] for reason in found] == [
        f"{both} are both true",
        "--enable_adaptive_draft_step=true",
        "--target_verify_width=3 fixes what --enable_adaptive_draft_step=true is to choose; allowed",
        "--target_verify_width=3 fixes what --enable_adaptive_target_verify=true is to choose; allowed",
        "--adaptive_target_verify_calibration=c",
        "--adaptive_target_verify_cost_table_output=o",
        "--enable_graph=false",
        "--disable_graph_warmup=true",
        "--enable_schedule_overlap=false",
        "--enable_task_pipeline=false",
        "--python_graph_backend=off",
    ]
    assert all(both in reason for reason in found[6:])


def test_the_control_that_is_on() -> None:
    assert control_of(SpeculationConfig()) is None
    assert control_of(SpeculationConfig(enable_adaptive_draft_step=True)) is Control.DRAFT_STEP
    assert control_of(SpeculationConfig(enable_adaptive_target_verify=True)) is Control.TARGET_VERIFY


def test_a_calibration_beside_a_saved_table_names_both_files() -> None:
    config = SpeculationConfig(adaptive_draft_step_config="c.json", adaptive_draft_step_cost_table="t.json")
    reason = calibration_with_table(config)
    assert "--adaptive_draft_step_config=c.json" in reason
    assert "--adaptive_draft_step_cost_table=t.json" in reason


# -- the flag rows ------------------------------------------------------------------------------


def test_the_flags_are_read_and_off_and_empty_by_default() -> None:
    rows = {name: flag for name, flag in table().items() if "adaptive" in name or name == "round_trace"}
    read = {name for name, flag in rows.items() if flag.section is not None}
    assert {name: rows[name].setting.default for name in read} == {
        "enable_adaptive_draft_step": False,
        "enable_adaptive_target_verify": False,
        "adaptive_draft_step_config": "",
        "adaptive_draft_step_cost_table": "",
        "adaptive_draft_step_cost_table_output": "",
        "adaptive_target_verify_calibration": "",
        "adaptive_target_verify_cost_table": "",
        "adaptive_target_verify_cost_table_output": "",
        "adaptive_spec_config": "",
        "adaptive_spec_cost_table": "",
        "adaptive_spec_cost_table_output": "",
        "round_trace": "",
    }
    assert all(rows[name].rules[p].status is Status.HONOURED for name in read for p in PLATFORMS)
    own = {name for name in read if "xLLM has no such flag" in rows[name].help}
    assert own == {
        "adaptive_draft_step_cost_table", "adaptive_draft_step_cost_table_output", "round_trace",
        "adaptive_spec_config", "adaptive_spec_cost_table", "adaptive_spec_cost_table_output",
    }  # fmt: skip


@pytest.mark.parametrize("old", ["enable_adaptive_spec_prune", "enable_adaptive_speculative_decode"])
def test_old_names_are_refused_with_the_new_one(old: str, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({old: True}))
    for words in ([f"--{old}"], [f"--no{old}"], [f"--config_json_file={file}"]):
        with pytest.raises(ConfigError, match=f"--{old}: removed, use --enable_adaptive_target_verify"):
            launch(*words)


def test_training_refuses_what_it_would_not_read() -> None:
    words = ["--enable_adaptive_draft_step", "--adaptive_draft_step_config=c.json", "--round_trace=t.jsonl"]
    for rest in (["--evaluate_only"], ["--algorithm=MTP", "--output=d"]):
        with pytest.raises(ConfigError) as caught:
            train.check(launch(*words, *rest, command=train.COMMAND))
        assert str(caught.value).splitlines() == [
            "--enable_adaptive_draft_step=true: not read by xspec train",
            "--adaptive_draft_step_config=c.json: not read by xspec train",
            "--round_trace=t.jsonl: not read by xspec train",
        ]


# -- on by default ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--port=0", "--max_seqs_per_batch=8", "--noenable_prefix_cache"],
        ["--speculative_algorithm=mtp"],
        ["--num_speculative_tokens=3"],
        ["--num_speculative_tokens=-1"],
        ["--model="],
    ],
)
def test_the_embedded_model_adapts_its_draft_steps(argv: list[str], caplog: pytest.LogCaptureFixture) -> None:
    asked = launch(*argv)
    with caplog.at_level(logging.INFO, "xspec_cli.serve"):
        config = xspec_cli.serve.adaptive_by_default(asked)
    assert config.speculation.enable_adaptive_draft_step
    changed = {**config.to_flat(), "enable_adaptive_draft_step": False}
    assert changed == asked.config.to_flat()
    assert [record.message for record in caplog.records] == [
        "adaptive draft steps are on by default for the embedded model; --noenable_adaptive_draft_step "
        "switches them off"
    ]


@pytest.mark.parametrize(
    "word",
    [
        "--model=m.gguf",
        "--draft_model=d",
        "--speculative_algorithm=DSpark",
        "--num_speculative_tokens=0",
        "--target_verify_width=1",
        "--target_verify_width=0",
        "--enable_probabilistic_draft",
        "--noenable_adaptive_draft_step",
        "--enable_adaptive_draft_step",
        "--enable_adaptive_target_verify",
        "--noenable_adaptive_target_verify",
        "--enable_graph=false",
        "--python_graph_backend=off",
        "--disable_graph_warmup",
        "--noenable_schedule_overlap",
        "--noenable_task_pipeline",
        "--adaptive_target_verify_cost_table=t",
    ],
)
def test_whatever_speaks_against_it_leaves_the_settings_alone(
    word: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = launch(word)
    with caplog.at_level(logging.INFO, "xspec_cli.serve"):
        assert xspec_cli.serve.adaptive_by_default(asked) is asked.config
    assert caplog.records == []


def test_a_config_file_speaks_like_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"enable_adaptive_draft_step": false}')
    assert launch(f"--config_json_file={file}").chosen == {"enable_adaptive_draft_step"}
    asked = launch(f"--config_json_file={file}")
    assert xspec_cli.serve.adaptive_by_default(asked) is asked.config


def test_only_an_engine_of_its_own_adapts_in_a_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Launch] = []

    def run(job: object, asked: Launch, progress: object) -> int:
        ran.append(asked)
        return 0

    monkeypatch.setattr(xspec_cli.bench, "run", run)
    monkeypatch.setattr(xspec_cli.bench, "begin", lambda asked: None)
    assert xspec_cli.bench.main([]) == 0
    assert xspec_cli.bench.main(["--url=http://h:1"]) == 0
    assert xspec_cli.bench.main(["--noenable_adaptive_draft_step"]) == 0
    adapts = [asked.config.speculation.enable_adaptive_draft_step for asked in ran]
    assert adapts == [True, False, False]


def test_a_dump_holds_what_was_asked_for_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch names its own model, to which the default of the embedded one means nothing."""
    served: list[Config] = []

    async def serve(config: Config, progress: object) -> int:
        served.append(config)
        return 0

    import xspec.server.serve

    monkeypatch.setattr(xspec.server.serve, "serve", serve)
    monkeypatch.setattr(xspec_cli.serve, "settle_threads", lambda asked: _Threads())
    monkeypatch.setattr(xspec_cli.serve, "set_up_output", lambda level, stream: None)
    dump = tmp_path / "d.json"
    argv = ["--block_size=64", "--enable_dump_config_json", f"--dump_config_json_file={dump}"]
    assert xspec_cli.serve.main(argv) == 0
    assert served[0].speculation.enable_adaptive_draft_step
    assert json.loads(dump.read_text()) == {"block_size": 64}


class _Threads:
    compute_threads = usable_cores = 1


# -- the greatest depth -------------------------------------------------------------------------


def drafter(folder: Path, **config: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama_mtp", **config}))
    (folder / "model.safetensors").touch()
    return str(folder)


def steps(path: str, **flags: object) -> int:
    choice = choose_drafter(Config.from_mapping({"draft_model": path, **flags}).speculation, embedded=False)
    assert isinstance(choice, DraftChoice) and choice.verify == choice.steps
    return choice.steps


def test_adaptive_draft_steps_may_go_as_deep_as_the_drafter_says(tmp_path: Path) -> None:
    both = drafter(tmp_path / "both", num_speculative_tokens=2, max_speculative_tokens=6)
    assert steps(both) == 2
    assert steps(both, **TARGET_VERIFY) == 2
    assert steps(both, **DRAFT_STEP) == 6
    assert steps(both, **DRAFT_STEP, num_speculative_tokens=4) == 4
    one = drafter(tmp_path / "one", num_speculative_tokens=2)
    assert steps(one, **DRAFT_STEP) == 2
    block = drafter(tmp_path / "block", block_size=3, max_speculative_tokens=6)
    assert steps(block, **DRAFT_STEP) == 3, "a DSpark drafter; adaptive draft steps are refused with it"


def test_a_drafter_that_names_no_width_needs_one(tmp_path: Path) -> None:
    bare = drafter(tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"max_speculative_tokens or num_speculative_tokens\): set"):
        steps(bare, **DRAFT_STEP)


def test_the_shipped_drafter_names_both() -> None:
    config = json.loads((shipped_drafter("MTP") / "config.json").read_text())
    assert (config["num_speculative_tokens"], config["max_speculative_tokens"]) == (2, 5)
    adaptive = SpeculationConfig(enable_adaptive_draft_step=True)
    choice = choose_drafter(adaptive, embedded=True)
    assert choice is not None and (choice.steps, choice.verify) == (5, 5)


@pytest.mark.parametrize(
    ("control", "shown"),
    [
        (
            Control.DRAFT_STEP,
            {
                "control": "draft_step",
                "window_size": 7,
                "update_interval": 5,
                "switch_min_gain": 0.05,
                "allow_plain_rounds": True,
            },
        ),
        (
            Control.TARGET_VERIFY,
            {"control": "target_verify", "switch_min_gain": 0.05, "allow_plain_rounds": True},
        ),
    ],
)
def test_operators_see_every_setting_of_the_policy(control: Control, shown: dict[str, object]) -> None:
    policy = DraftStepSettings(window_size=7)
    assert _adaptation_facts(Adaptation(control, CalibrationSettings(), "", policy=policy)) == shown


def test_importing_the_requirements_loads_nothing_heavy() -> None:
    code = (
        "import sys, xspec.policy.requirements\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
