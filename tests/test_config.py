"""Config: strict values, exact messages, flat names; threads settled from environment, flag and cgroups."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xspec.config import CacheConfig, Config, SchedulerConfig, ServiceConfig, SpeculationConfig, settings
from xspec.errors import ConfigError
from xspec.setting import Kind, Setting
from xspec.threads import LIBGOMP_SPIN_COUNT, cgroup_cpu_quota, settle_threads, usable_cores

REPO = Path(__file__).resolve().parent.parent


def refusal(**flat: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(flat)
    return str(caught.value)


def test_defaults_are_the_documented_ones() -> None:
    flat = Config().to_flat()
    assert flat == Config.from_mapping({}).to_flat()
    assert {name: flat[name] for name in ("host", "port", "block_size", "max_seqs_per_batch")} == {
        "host": "127.0.0.1", "port": 8010, "block_size": 32, "max_seqs_per_batch": 200,
    }  # fmt: skip
    assert flat["enable_schedule_overlap"] and flat["enable_task_pipeline"] and flat["enable_graph"]
    assert Config().to_flat(non_default_only=True) == {}


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"block_size": 0}, "--block_size=0: allowed: integers from 1 to 4096"),
        ({"block_size": True}, "--block_size=true: allowed: integers from 1 to 4096"),
        ({"block_size": 16.0}, "--block_size=16: allowed: integers from 1 to 4096"),
        ({"block_size": "16"}, "--block_size=16: allowed: integers from 1 to 4096"),
        (
            {"max_cache_size": 2**63},
            "--max_cache_size=9223372036854775808: allowed: integers from 0 to 9223372036854775807",
        ),
        ({"enable_graph": 1}, "--enable_graph=1: allowed: true or false"),
        ({"dtype": "fp8"}, "--dtype=fp8: allowed: auto, float64, float32, bfloat16, float16"),
        ({"dtype": "Float32"}, "--dtype=Float32: allowed: auto, float64, float32, bfloat16, float16"),
        ({"device": "cuda"}, "--device=cuda: allowed: auto, cpu"),
        ({"host": ""}, "--host=: allowed: non-empty text"),
        ({"model": "a\0b"}, "--model=a\0b: allowed: text"),
        ({"shutdown_timeout_s": float("nan")}, "--shutdown_timeout_s=nan: allowed: numbers from 0"),
        ({"shutdown_timeout_s": float("inf")}, "--shutdown_timeout_s=inf: allowed: numbers from 0"),
        ({"shutdown_timeout_s": 10**400}, f"--shutdown_timeout_s={10**400}: allowed: numbers from 0"),
        ({"max_memory_utilization": 1.5}, "--max_memory_utilization=1.5: allowed: numbers from 0.01 to 1"),
        (
            {"cors_allow_origins": ["a,b"]},
            "--cors_allow_origins=a,b: allowed: text, several separated by commas",
        ),
        ({"cors_allow_origins": 3}, "--cors_allow_origins=3: allowed: text, several separated by commas"),
        ({"api_key": "naïve\n"}, "--api_key=***: allowed: printable ASCII text"),
        (
            {"max_tokens_per_chunk_for_prefill": 0},
            "--max_tokens_per_chunk_for_prefill=0: allowed: -1 or integers from 1",
        ),
        (
            {"speculative_algorithm": "Eagle3"},
            "--speculative_algorithm=Eagle3: allowed: auto, MTP, DSpark, Looped",
        ),
        (
            {"speculative_algorithm": "suffix"},
            "--speculative_algorithm=suffix: allowed: auto, MTP, DSpark, Looped",
        ),
        ({"speculative_algorithm": ""}, "--speculative_algorithm=: allowed: auto, MTP, DSpark, Looped"),
        (
            {"num_speculative_tokens": 17},
            "--num_speculative_tokens=17: allowed: integers from -1 to 16",
        ),
        (
            {"num_speculative_tokens": -2},
            "--num_speculative_tokens=-2: allowed: integers from -1 to 16",
        ),
        ({"target_verify_width": 17}, "--target_verify_width=17: allowed: integers from -1 to 16"),
        (
            {"target_verify_width": 4, "num_speculative_tokens": 3},
            "--target_verify_width=4: allowed: -1 or integers from 0 to --num_speculative_tokens (3)",
        ),
        ({"enable_probabilistic_draft": 1}, "--enable_probabilistic_draft=1: allowed: true or false"),
        ({"block_sise": 1}, "--block_sise: unknown flag (did you mean --block_size?)"),
        ({"zzz": 1}, "--zzz: unknown flag"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(flat: dict[str, object], message: str) -> None:
    assert refusal(**flat) == message


def test_all_mistakes_are_told_together() -> None:
    assert refusal(port=-1, prot=1, dtype="x").splitlines() == [
        "--port=-1: allowed: integers from 0 to 65535",
        "--prot: unknown flag (did you mean --port?)",
        "--dtype=x: allowed: auto, float64, float32, bfloat16, float16",
    ]


def test_values_take_their_canonical_form() -> None:
    config = Config.from_mapping(
        {"shutdown_timeout_s": 3, "cors_allow_origins": " a, b,", "python_graph_backend": "0"}
    )
    assert config.service.cors_allow_origins == ("a", "b")
    assert config.service.shutdown_timeout_s == 3.0
    assert config.execution.python_graph_backend == "off"


def test_speculation_is_on_by_default_and_algorithms_have_any_case() -> None:
    assert Config().speculation == SpeculationConfig("", "auto", -1, False, -1)
    for name, canonical in (("mtp", "MTP"), ("DSPARK", "DSpark"), ("Auto", "auto"), ("MTP", "MTP")):
        config = Config.from_mapping({"speculative_algorithm": name})
        assert config.speculation.speculative_algorithm == canonical
    with pytest.raises(ConfigError, match="--speculative_algorithm=mtp: not in canonical form"):
        SpeculationConfig(speculative_algorithm="mtp")


@pytest.mark.parametrize(("drafted", "verified"), [(3, 3), (3, 0), (3, -1), (-1, 16), (0, 5), (16, 16)])
def test_verify_widths_that_may_hold(drafted: int, verified: int) -> None:
    """With -1 the drafter tells its width later; with 0 nothing is verified whatever this says."""
    flat = {"num_speculative_tokens": drafted, "target_verify_width": verified}
    assert Config.from_mapping(flat).speculation.target_verify_width == verified


def test_sections_are_strict_on_their_own() -> None:
    with pytest.raises(ConfigError, match="--block_size=-1: allowed"):
        CacheConfig(block_size=-1)
    with pytest.raises(ConfigError, match="not in canonical form"):
        ServiceConfig(cors_allow_origins=["a"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="-1 or integers from 1"):
        SchedulerConfig(max_tokens_per_chunk_for_prefill=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().cache.block_size = 1  # type: ignore[misc]


def test_the_api_key_is_shown_nowhere_unasked() -> None:
    config = Config.from_mapping({"api_key": "sesame"})
    assert "sesame" not in repr(config)
    assert "api_key" not in config.to_flat() and "api_key" not in config.to_flat(True)
    assert config.to_flat(True, secrets=True) == {"api_key": "sesame"}


def test_every_field_is_read_somewhere() -> None:
    sources = [path.read_text() for path in (REPO / "xspec").rglob("*.py") if path.name != "config.py"]
    unread = [name for name in settings() if not any(re.search(rf"\.{name}\b", text) for text in sources)]
    assert unread == []


def _values(setting: Setting) -> st.SearchStrategy[object]:
    if setting.choices:
        return st.sampled_from(setting.choices)
    match setting.kind:
        case Kind.BOOL:
            return st.booleans()
        case Kind.STRING:
            printable = st.characters(min_codepoint=32, max_codepoint=126 if setting.secret else 0x2FFF)
            return st.text(printable, min_size=int(setting.nonempty))
        case Kind.LIST:
            return st.lists(
                st.text(
                    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=1
                )
            ).map(tuple)
        case Kind.DOUBLE:
            return st.floats(setting.low, setting.high, allow_nan=False, allow_infinity=False)
    low, high = setting.low, setting.high
    values = st.integers(int(low) if low is not None else 0, int(high) if high is not None else 2**31 - 1)
    return values.filter(bool) if low == -1 else values


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any valid Config: some flags set, the others left alone."""
    names = draw(st.sets(st.sampled_from(sorted(settings()))))
    flat: dict[str, Any] = {name: draw(_values(settings()[name][1])) for name in sorted(names)}
    if flat.get("target_verify_width", -1) > flat.get("num_speculative_tokens", -1) > 0:
        del flat["target_verify_width"]
    return Config.from_mapping(flat)


@given(configs())
def test_flat_names_round_trip(config: Config) -> None:
    assert Config.from_mapping(config.to_flat(secrets=True)) == config
    assert Config.from_mapping(config.to_flat(non_default_only=True, secrets=True)) == config


# -- threads ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _keep_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_threads_fill_an_empty_environment() -> None:
    environ: dict[str, str] = {}
    threads = settle_threads(3, environ, torch_loaded=False)
    assert threads.compute_threads == 3 and threads.unsettled == ()
    assert environ == threads.environment == {
        "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(LIBGOMP_SPIN_COUNT),
        "LRU_CACHE_CAPACITY": "256", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    }  # fmt: skip


def test_the_users_environment_is_respected() -> None:
    environ = {"OMP_NUM_THREADS": "5,2", "OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "7"}
    assert settle_threads(0, environ, torch_loaded=False).compute_threads == 5
    assert (environ["OMP_NUM_THREADS"], environ["OMP_WAIT_POLICY"], environ["GOMP_SPINCOUNT"]) == (
        "5,2",
        "ACTIVE",
        "7",
    )
    assert environ["MKL_NUM_THREADS"] == "5"


def test_the_flag_wins_over_the_environment() -> None:
    environ = {"OMP_NUM_THREADS": "5", "MKL_NUM_THREADS": "5"}
    assert settle_threads(2, environ, torch_loaded=False).compute_threads == 2
    assert (environ["OMP_NUM_THREADS"], environ["MKL_NUM_THREADS"]) == ("2", "2")


def test_no_flag_and_no_environment_takes_the_usable_cores() -> None:
    assert settle_threads(0, {}, torch_loaded=False).compute_threads == usable_cores() >= 1


@pytest.mark.parametrize("text", ["0", "-1", "two", "99999999", "1.5"])
def test_a_broken_omp_num_threads_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settle_threads(0, {"OMP_NUM_THREADS": text}, torch_loaded=False)
    assert str(caught.value) == f"OMP_NUM_THREADS={text}: allowed: integers from 1"


def test_what_came_too_late_is_said(caplog: pytest.LogCaptureFixture) -> None:
    environ = {
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "1",
        "LRU_CACHE_CAPACITY": "64",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }
    with caplog.at_level(logging.WARNING):
        threads = settle_threads(0, environ, torch_loaded=True)
    assert threads.unsettled == ("OMP_WAIT_POLICY=PASSIVE",)
    assert caplog.messages == [
        "torch was imported before xspec could set OMP_WAIT_POLICY=PASSIVE; these have no effect now"
    ]
    caplog.clear()
    assert settle_threads(0, environ, torch_loaded=True).unsettled == () and not caplog.messages


@pytest.mark.parametrize(
    ("files", "membership", "quota"),
    [
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),
        (
            {"cpu.max": "max 100000", "a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"},
            "0::/a/b",
            2.0,
        ),
        ({"cpu.max": "100000 100000"}, "0::/the/hosts/own/path", 1.0),
        (
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            "4:cpu,cpuacct:/\n3:memory:/",
            3.0,
        ),
        ({"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/x", 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/", None),
        ({"cpu.max": "100000 0"}, "0::/", None),
        ({}, "0::/", None),
    ],
)
def test_cgroup_quota(tmp_path: Path, files: dict[str, str], membership: str, quota: float | None) -> None:
    root = tmp_path / "cgroup"
    root.mkdir()
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    listing = tmp_path / "membership"
    listing.write_text(membership + "\n")
    assert cgroup_cpu_quota(root, listing) == quota
    assert cgroup_cpu_quota(root, tmp_path / "absent") is None
