"""gflags syntax, the flag table and what a whole command line resolves to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_config import configs

from xspec.config import Config, SpeculationConfig, settings
from xspec.errors import ConfigError
from xspec.setting import Kind, Setting
from xspec_cli import gflags
from xspec_cli.flags import Status, engine_flags, table
from xspec_cli.flags_resolve import Command, Info, Launch, dump_json, resolve
from xspec_cli.flags_text import render_help, render_markdown
from xspec_cli.flags_types import PLATFORMS

REPO = Path(__file__).resolve().parent.parent
COMMAND = Command("xspec test", "A command of the tests.")

KINDS = {
    "switch": Setting(Kind.BOOL, False),
    "count": Setting(Kind.INT32, 0),
    "big": Setting(Kind.INT64, 0),
    "size": Setting(Kind.UINT32, 0),
    "share": Setting(Kind.DOUBLE, 0.0),
    "name": Setting(Kind.STRING, ""),
    "names": Setting(Kind.LIST, ()),
    "node": Setting(Kind.STRING, ""),
}


def parsed(*argv: str, environ: Mapping[str, str] | None = None) -> gflags.Parsed:
    return gflags.parse(argv, KINDS, environ or {})


def launch(*argv: str, environ: Mapping[str, str] | None = None) -> Launch:
    result = resolve(argv, COMMAND, environ=environ or {})
    assert isinstance(result, Launch)
    return result


def mistakes(*argv: str, environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(argv, COMMAND, environ=environ or {})
    return str(caught.value).splitlines()


# -- syntax -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--count=3"], {"count": 3}),
        (["-count=3"], {"count": 3}),
        (["--count", "3"], {"count": 3}),
        (["-count", "-3"], {"count": -3}),
        (["--count=0x1F"], {"count": 31}),
        (["--count=1", "--count=2"], {"count": 2}),
        (["--count=2147483647"], {"count": 2**31 - 1}),
        (["--count=-2147483648"], {"count": -(2**31)}),
        (["--big=-9223372036854775808"], {"big": -(2**63)}),
        (["--size=4294967295"], {"size": 2**32 - 1}),
        (["--share=.5"], {"share": 0.5}),
        (["--share", "1e-3"], {"share": 0.001}),
        (["--name=a=b"], {"name": "a=b"}),
        (["--name="], {"name": ""}),
        (["--name", ""], {"name": ""}),
        (["--name", "-x"], {"name": "-x"}),
        (["--name", "--unknown"], {"name": "--unknown"}),
        (["--names=a,, b "], {"names": ("a", "b")}),
        (["--switch"], {"switch": True}),
        (["--noswitch"], {"switch": False}),
        (["--switch", "--noswitch"], {"switch": False}),
        (["--node=n"], {"node": "n"}),
        (["--"], {}),
        *[([f"--switch={word}"], {"switch": True}) for word in ("true", "t", "yes", "y", "1", "TRUE", "Yes")],
        *[([f"--switch={word}"], {"switch": False}) for word in ("false", "f", "no", "n", "0", "False")],
    ],
)
def test_syntax(argv: list[str], values: dict[str, object]) -> None:
    result = parsed(*argv)
    assert (result.values, result.mistakes) == (values, [])
    assert [type(value) for value in result.values.values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize(
    ("argv", "mistake"),
    [
        (
            ["--switch", "false"],
            "false: unexpected argument, only flags are taken "
            "(a switch takes its value with =: --switch=false)",
        ),
        (["--switch", "stray"], "stray: unexpected argument, only flags are taken"),
        (["stray"], "stray: unexpected argument, only flags are taken"),
        (["-"], "-: unexpected argument, only flags are taken"),
        (["--", "--count=1"], "--count=1: unexpected argument, only flags are taken"),
        (["--switch=maybe"], "--switch=maybe: allowed: true or false (or t, f, yes, no, y, n, 1, 0)"),
        (["--switch="], "--switch=: allowed: true or false (or t, f, yes, no, y, n, 1, 0)"),
        (["--noswitch=true"], "--noswitch: takes no value; write --switch=true or --switch=false"),
        (["--nocount"], "--nocount: --count is not a switch but takes a value (int32)"),
        (["--count"], "--count: its value is missing (int32)"),
        (
            ["--count", "--name", "x"],
            "--count: its value is missing (write --count=--name if that is the value)",
        ),
        (["--count=2147483648"], "--count=2147483648: allowed: integers from -2147483648 to 2147483647"),
        (["--count=1_000"], "--count=1_000: allowed: integers from -2147483648 to 2147483647"),
        (["--count=٣"], "--count=٣: allowed: integers from -2147483648 to 2147483647"),
        (["--count=1.0"], "--count=1.0: allowed: integers from -2147483648 to 2147483647"),
        (["--count="], "--count=: allowed: integers from -2147483648 to 2147483647"),
        (["--size=-1"], "--size=-1: allowed: integers from 0 to 4294967295"),
        (["--share=nan"], "--share=nan: allowed: numbers"),
        (["--share=1_0"], "--share=1_0: allowed: numbers"),
        (["--cuont=1"], "--cuont: unknown flag (did you mean --count?)"),
        (["---count=1"], "---count=1: flags start with one or two dashes"),
        (["--=1"], "--: unknown flag"),
    ],
)
def test_mistakes_of_syntax(argv: list[str], mistake: str) -> None:
    assert parsed(*argv).mistakes[:1] == [mistake]


@given(
    st.lists(
        st.text(max_size=12)
        | st.sampled_from(
            ["--switch", "--count", "--", "-", "--no", "--nocount", "=", "--undefok", "--fromenv=count"]
        )
    )
)
def test_no_command_line_makes_the_parser_fall_over(argv: list[str]) -> None:
    result = parsed(*[word for word in argv if not word.lstrip("-").startswith("flagfile")])
    assert all(isinstance(text, str) for text in result.mistakes)


def test_undefok_forgives_unknown_names_wherever_it_stands() -> None:
    assert parsed("--gone=1", "--nogone", "--undefok=gone,other", "--count=2").mistakes == []
    assert parsed("--gone=1", "--undefok=other").mistakes == ["--gone: unknown flag"]


def test_values_from_the_environment() -> None:
    environ = {"FLAGS_count": "4", "FLAGS_switch": "no", "FLAGS_share": "x"}
    assert parsed("--fromenv=count,switch", environ=environ).values == {"count": 4, "switch": False}
    assert parsed("--fromenv=count", "--count=5", environ=environ).values == {"count": 5}
    assert parsed("--count=5", "--fromenv=count", environ=environ).values == {"count": 4}
    assert parsed("--tryfromenv=count,name", environ=environ).values == {"count": 4}
    assert parsed("--fromenv=name,share,nome", environ=environ).mistakes == [
        "--fromenv=name: FLAGS_name is not set in the environment",
        "FLAGS_share: --share=x: allowed: numbers",
        "--nome: unknown flag (did you mean --node?)",
    ]


def test_flag_files_nest_and_the_last_occurrence_wins(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.txt", tmp_path / "outer.txt"
    inner.write_text("--count=2\n  --noswitch\n")
    outer.write_text(f"# comment\n\n--count=1\n--switch\n--flagfile={inner}\n--name spaced value \n")
    assert parsed(f"--flagfile={outer}").values == {"count": 2, "switch": False, "name": "spaced value"}
    assert parsed(f"--flagfile={outer}", "--count=9").values["count"] == 9
    assert parsed("--count=9", "--flagfile", str(outer)).values["count"] == 2
    assert parsed(f"--flagfile={outer},{inner}").mistakes == []


def test_mistakes_in_flag_files_carry_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "flags.txt"
    file.write_text("--count=x\n--quux=1\nplain\n--name\n--switch true\n--\n")
    assert parsed(f"--flagfile={file}").mistakes == [
        f"{file}:1: --count=x: allowed: integers from -2147483648 to 2147483647",
        f"{file}:3: plain: expected one --flag=value a line, or a # comment",
        f"{file}:4: --name: its value is missing (string)",
        f"{file}:5: true: unexpected text after --switch",
        f"{file}:6: --: expected one --flag=value a line, or a # comment",
        f"{file}:2: --quux: unknown flag",
    ]
    absent = tmp_path / "absent"
    assert parsed(f"--flagfile={absent}").mistakes == [
        f"--flagfile={absent}: cannot be read: No such file or directory"
    ]


def test_flag_files_that_include_themselves_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(f"--count=1\n--flagfile={two}\n")
    two.write_text(f"--flagfile={one}\n--name=n\n")
    result = parsed(f"--flagfile={one}")
    assert result.mistakes == [f"{two}:1: --flagfile={one}: includes itself: {one} -> {two} -> {one}"]
    assert result.values == {"count": 1, "name": "n"}


# -- the table ----------------------------------------------------------------------------------


def test_every_flag_name_is_unique() -> None:
    names = [flag.name for flag in engine_flags()]
    assert len(names) == len(set(names)) and not set(names) & set(gflags.BUILT_IN)
    # --nofoo must always mean foo=false
    assert [name for name in names if name.startswith("no") and name[2:] in names] == []


def test_config_fields_and_honoured_flags_are_the_same_set() -> None:
    assert {flag.name for flag in engine_flags() if flag.section is not None} == set(settings())
    for flag in engine_flags():
        honoured = any(rule.status is Status.HONOURED for rule in flag.rules.values())
        if flag.section is not None:
            assert honoured and settings()[flag.name] == (flag.section, flag.setting)
        elif honoured:
            assert flag.category == "Config"  # read by the command line itself


def test_every_row_is_whole() -> None:
    for flag in engine_flags():
        assert set(flag.rules) == set(PLATFORMS) and flag.help, flag.name
        assert flag.setting.check(flag.name, flag.setting.default) == flag.setting.default
        for rule in flag.rules.values():
            assert rule.admits(flag.setting.default), flag.name
            assert rule.why or rule.status is Status.HONOURED, flag.name
            assert rule.allowed or rule.status is not Status.REFUSED, flag.name


XLLM_DEFAULTS = {
    "host": "", "enable_json_object_output": True, "block_size": 128, "max_tokens_per_batch": 10240,
    "enable_schedule_overlap": False,
    "enable_task_pipeline": False, "enable_graph": False, "python_graph_backend": "off",
    "speculative_algorithm": "MTP", "num_speculative_tokens": 0,
}  # fmt: skip


def test_defaults_that_differ_from_xllm_say_why() -> None:
    for name in XLLM_DEFAULTS:
        flag = table()[name]
        assert flag.setting.default != XLLM_DEFAULTS[name] and flag.default_note.startswith("xLLM:"), name
    noted = {flag.name for flag in engine_flags() if flag.default_note}
    assert noted == {*XLLM_DEFAULTS, "model"}


def test_the_committed_document_is_current() -> None:
    assert (REPO / "docs" / "flags.md").read_text() == render_markdown(), (
        "run: python -m xspec_cli.flags_text > docs/flags.md"
    )


def test_help_shows_types_defaults_and_only_what_works() -> None:
    text = render_help("xspec test", "About.", engine_flags(), full=False)
    assert "  --port: HTTP port; 0 takes a free one (int32, default 8010)\n" in text
    assert "SERVICE OPTIONS\n" in text and "KERNEL OPTIONS" not in text and "--nnodes" not in text
    full = render_help("xspec test", "About.", engine_flags(), full=True)
    assert "--npu_kernel_backend: NPU kernels: AUTO, ATB or TORCH (AUTO, ATB, TORCH, default AUTO)" in full
    assert all(f"--{name}:" in full for name in table())
    assert max(map(len, full.splitlines())) <= 100


# -- whole command lines ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--nnodes=2", "--nnodes=2: allowed: 1 (more than one process is not in this version yet)"),
        ("--dp_size=2", "--dp_size=2: allowed: 1 (more than one process is not in this version yet)"),
        ("--cp_size=4", "--cp_size=4: allowed: 1 (more than one process is not in this version yet)"),
        (
            "--kv_split_size=2",
            "--kv_split_size=2: allowed: 1, 0 (more than one process is not in this version yet)",
        ),
        (
            "--enable_unified_mtp_graph",
            "--enable_unified_mtp_graph=true: allowed: false (unified graphs are not in this version yet)",
        ),
        (
            "--enable_disagg_pd",
            "--enable_disagg_pd=true: allowed: false (prefill and decode share one engine)",
        ),
        (
            "--instance_role=PREFILL",
            "--instance_role=PREFILL: allowed: DEFAULT (prefill and decode share one engine)",
        ),
        (
            "--etcd_addr=e:1",
            '--etcd_addr=e:1: allowed: "" (put a router in front of several engines instead)',
        ),
        (
            "--python_graph_backend=aclgraph",
            "--python_graph_backend=aclgraph: allowed: auto, off, cpu "
            "(a CPU has no inductor, cudagraphs or aclgraph backend here)",
        ),
        (
            "--python_graph_backend=weird",
            "--python_graph_backend=weird: allowed: auto, off, cpu, inductor, cudagraphs, aclgraph",
        ),
        ("--task=embed", "--task=embed: allowed: generate (embedding is not in this version yet)"),
        (
            "--backend=vlm",
            '--backend=vlm: allowed: "", llm (only text models are served; requests with images are refused)',
        ),
        ("--beam_width=4", "--beam_width=4: allowed: 1 (beam search is not supported)"),
        (
            "--kv_cache_dtype=int8",
            "--kv_cache_dtype=int8: allowed: auto (the KV cache has the type of the model)",
        ),
        ("--host_blocks_factor=2", "--host_blocks_factor=2: allowed: 0 (the KV cache has one tier)"),
        ("--enable_xtensor", "--enable_xtensor=true: allowed: false (it needs an NPU)"),
        (
            "--priority_strategy=deadline",
            "--priority_strategy=deadline: allowed: fcfs (priorities and deadlines are "
            "not in this version yet)",
        ),
        (
            "--enable_in_batch_prefix_cache",
            "--enable_in_batch_prefix_cache=true: allowed: false (not in this version yet)",
        ),
        ("--reasoning_parser=auto", '--reasoning_parser=auto: allowed: "" (not in this version yet)'),
        (
            "--speculative_algorithm=DFlash2",
            "--speculative_algorithm=DFlash2: allowed: auto, MTP, DSpark, Looped",
        ),
        ("--num_speculative_tokens=17", "--num_speculative_tokens=17: allowed: integers from -1 to 16"),
        ("--npu_kernel_backend=FOO", "--npu_kernel_backend=FOO: allowed: AUTO, ATB, TORCH"),
        (
            "--enable_adaptive_spec_prune=false",
            "--enable_adaptive_spec_prune: removed, use --enable_adaptive_target_verify",
        ),
        (
            "--enable_adaptive_speculative_decode",
            "--enable_adaptive_speculative_decode: removed, use --enable_adaptive_target_verify",
        ),
        ("--devices=npu:0", "--devices: removed, use --device; one process drives one device"),
        ("--port=70000", "--port=70000: allowed: integers from 0 to 65535"),
        ("--api_key=\n", "--api_key=***: allowed: printable ASCII text"),
        ("--log_level=loud", "--log_level=loud: allowed: debug, info, warning, error"),
    ],
)
def test_refusals(word: str, message: str) -> None:
    assert mistakes(word) == [message]


def test_neutral_values_and_other_cases_are_accepted() -> None:
    result = launch(
        "--nnodes=1", "--dp_size=1", "--cp_size=1", "--enable_unified_mtp_graph=false", "--backend=llm",
        "--speculative_algorithm=AUTO", "--priority_strategy=FCFS", "--enable_adaptive_draft_step=false",
        "--kv_split_size=0", "--noenable_disagg_pd",
    )  # fmt: skip
    assert result.config == Config() and result.notes == ()


def test_speculation_flags_reach_the_config_in_any_case() -> None:
    words = ("--speculative_algorithm=dspark", "--target_verify_width=3", "--enable_probabilistic_draft")
    result = launch(*words, "--draft_model=d", "--num_speculative_tokens=7", "--enable_opt_validate_probs")
    assert result.config.speculation == SpeculationConfig("d", "DSpark", 7, True, 3)
    assert result.notes == (
        "--enable_opt_validate_probs=true: accepted, has no effect here because verification needs no "
        "draft probabilities",
    )
    assert mistakes("--num_speculative_tokens=2", "--target_verify_width=3") == [
        "--target_verify_width=3: allowed: -1 or integers from 0 to --num_speculative_tokens (2)"
    ]


def test_a_copied_launch_line_gets_every_reason_at_once() -> None:
    line = (
        "--model=/models/target --draft_model=/models/mtp --backend=llm --model_impl=python "
        "--npu_kernel_backend=TORCH --nnodes=16 --node_rank=0 --host=127.0.0.1 --port=8000 "
        "--master_node_addr=127.0.0.1:27000 --speculative_algorithm=MTP --num_speculative_tokens=5 "
        "--enable_adaptive_draft_step=true --enable_graph=true --python_graph_backend=aclgraph "
        "--disable_graph_warmup=false --enable_unified_mtp_graph=false --enable_schedule_overlap=true "
        "--enable_task_pipeline=true --dp_size=1 --cp_size=1 --max_seqs_per_batch=16 "
        "--acl_graph_decode_batch_size_limit=16"
    )
    named = [message.split("=")[0] for message in mistakes(*line.split())]
    assert named == ["--nnodes", "--python_graph_backend"]
    kept = [word for word in line.split() if word.split("=")[0] not in named]
    result = launch(*kept)
    assert result.config == Config.from_mapping(
        {
            "model": "/models/target", "port": 8000, "max_seqs_per_batch": 16, "draft_model": "/models/mtp",
            "speculative_algorithm": "MTP", "num_speculative_tokens": 5, "enable_adaptive_draft_step": True,
        }
    )  # fmt: skip
    assert result.notes == (
        "--model_impl=python: accepted, has no effect here because each model family has one implementation",
        "--npu_kernel_backend=TORCH: accepted, has no effect here because it chooses an NPU kernel",
        "--master_node_addr=127.0.0.1:27000: accepted, has no effect here because it is only read with "
        "--nnodes above 1, which is refused",
        "--acl_graph_decode_batch_size_limit=16: accepted, has no effect here because it shapes device "
        "graphs, which this device does not have",
    )


def test_mistakes_of_every_kind_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"prot": 1, "block_size": "16", "nnodes": 2}')
    assert mistakes("--port=x", "stray", "--bolck_size=3", "--dtype=fp4", f"--config_json_file={file}") == [
        "--port=x: allowed: integers from 0 to 65535",
        "stray: unexpected argument, only flags are taken",
        "--bolck_size: unknown flag (did you mean --block_size?)",
        f"{file}: --prot: unknown flag (did you mean --port?)",
        f"{file}: --block_size=16: allowed: integers from 1 to 4096",
        f"{file}: --nnodes=2: allowed: 1 (more than one process is not in this version yet)",
        "--dtype=fp4: allowed: auto, float64, float32, bfloat16, float16",
    ]


def test_command_line_wins_over_json_wins_over_default(tmp_path: Path) -> None:
    file, flags = tmp_path / "c.json", tmp_path / "flags"
    file.write_text('{"port": 1, "block_size": 8, "shutdown_timeout_s": 5, "cors_allow_origins": "a,b"}')
    flags.write_text("--block_size=64\n")
    config = launch("--port=2", f"--config_json_file={file}").config
    assert (config.service.port, config.cache.block_size) == (2, 8)
    assert config.service.shutdown_timeout_s == 5.0 and config.service.cors_allow_origins == ("a", "b")
    assert config.scheduler.max_seqs_per_batch == 200
    assert launch(f"--config_json_file={file}", f"--flagfile={flags}").config.cache.block_size == 64
    # given explicitly, a default wins over the file too
    assert launch(f"--config_json_file={file}", "--port=8010").config.service.port == 8010
    environ = {"FLAGS_config_json_file": str(file)}
    assert launch("--fromenv=config_json_file", environ=environ).config.service.port == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":', "is not valid JSON: Expecting value: line 1 column 6 (char 5)"),
        ("[]", "allowed: one JSON object of flag values"),
        ('{"port": NaN}', "is not valid JSON: NaN is not a JSON number"),
        ('{"port": 1, "port": 2}', "is not valid JSON: port occurs twice"),
    ],
)
def test_broken_json_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(text)
    assert mistakes(f"--config_json_file={file}") == [f"--config_json_file={file}: {message}"]


def test_unreadable_and_hostile_json_files(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert mistakes(f"--config_json_file={absent}") == [
        f"--config_json_file={absent}: cannot be read: No such file or directory"
    ]
    file = tmp_path / "c.json"
    file.write_bytes(b'{"model": "\xff"}')
    assert len(mistakes(f"--config_json_file={file}")) == 1
    file.write_text("[" * 100_000)
    assert len(mistakes(f"--config_json_file={file}")) == 1
    file.write_text(
        json.dumps({"port": None, "cors_allow_origins": [1], "config_json_file": "x", "host": {}})
    )
    assert mistakes(f"--config_json_file={file}") == [
        f"{file}: --port=None: allowed: integers from 0 to 65535",
        f"{file}: --cors_allow_origins=1: allowed: text, several separated by commas",
        f"{file}: --config_json_file: only taken on the command line",
        f"{file}: --host={{}}: allowed: non-empty text",
    ]


def _runs_here(config: Config) -> bool:
    return table()["python_graph_backend"].rules["cpu"].admits(config.execution.python_graph_backend)


@given(configs().filter(_runs_here))
def test_a_dumped_config_comes_back_equal(config: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "new" / "dump.json")
        dump_json(config, path)
        dumped = json.loads(Path(path).read_text())
        argv = [
            f"--config_json_file={path}",
            f"--model={config.model.model}",
            f"--api_key={config.service.api_key}",
        ]
        result = launch(*argv)
    assert result.config == config
    # the default may say so explicitly, but the file holds neither model nor key nor defaults
    assert dumped.keys() == Config().to_flat().keys() & dumped.keys() - {"model", "api_key"}
    assert all(value != Config().to_flat()[name] for name, value in dumped.items())


def test_a_dump_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--dump_config_json_file=.*: cannot be written"):
        dump_json(Config(), str(tmp_path / "file" / "dump.json"))


@pytest.mark.parametrize("word", ["--help", "-h", "-help", "--helpfull", "--help=true"])
def test_help_wins_over_mistakes(word: str) -> None:
    result = resolve(["--nnodes=3", word, "stray"], COMMAND, environ={})
    assert isinstance(result, Info) and result.text.startswith("USAGE: xspec test\n")
    assert ("--nnodes" in result.text) == (word == "--helpfull")


def test_version() -> None:
    result = resolve(["--version"], COMMAND, environ={})
    assert isinstance(result, Info) and result.text == "xspec 0.1.0"
