"""`xspec bench --kernels`: the kernels of a model against what the machine can do, measured in one run.

Checks flags and shows the result; the measuring is in `benchlib.kernels`. There is no engine and no traffic.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xspec.errors import ConfigError
from xspec.progress import Progress
from xspec.setting import Kind
from xspec_cli.bench_flags import BENCH_FLAGS
from xspec_cli.benchlib.facts import machine_facts
from xspec_cli.benchlib.kernel_report import ceiling_line, document, kernel_table, pass_table
from xspec_cli.benchlib.kernel_timing import Case
from xspec_cli.benchlib.report import check_output, write_document
from xspec_cli.flags_resolve import Launch
from xspec_cli.gflags import parse_value

OWN = ("kernel_rows", "kernel_requests", "kernel_context", "kernel_repeats")
"""Bench flags that only --kernels reads."""

SHARED = ("kernels", "output")

ENGINE = ("model", "dtype", "quantization", "device", "num_compute_threads", "cpu_kernels", "block_size")
"""Engine flags that say what the kernels are and what they run on."""

VERIFIED_ROWS = (4, 8)
"""Rows of one request, beside one: what verifying drafts costs."""


@dataclass(frozen=True, slots=True)
class Job:
    """Lists checked and in order."""

    rows: tuple[int, ...]
    cases: tuple[Case, ...]
    repeats: int
    output: str


def refuse_without_kernels(launch: Launch) -> None:
    """ConfigError for flags that have no meaning in a benchmark of traffic."""
    if found := [f"--{name}" for name in OWN if name in launch.given]:
        raise ConfigError(f"{', '.join(found)}: allowed: with --kernels")


def job_of(launch: Launch) -> Job:
    """Check the command line. ConfigError names flags, values found and values allowed."""
    allowed = {*OWN, *SHARED}
    strangers = [flag.name for flag in BENCH_FLAGS if flag.name in launch.given and flag.name not in allowed]
    strangers += sorted(launch.chosen - set(ENGINE))
    if strangers:
        known = ", ".join(f"--{name}" for name in (*OWN, "output", *ENGINE))
        raise ConfigError(
            f"{', '.join(f'--{name}' for name in strangers)}: without meaning beside --kernels, which runs "
            f"neither engine nor traffic; allowed: {known}"
        )
    check_output(launch.value("output"))
    requests = _integers("kernel_requests", launch.value("kernel_requests"), 1024)
    contexts = _integers("kernel_context", launch.value("kernel_context"), 1_000_000)
    if contexts[0] < max(VERIFIED_ROWS):
        raise ConfigError(
            f"--kernel_context={contexts[0]}: allowed: integers from {max(VERIFIED_ROWS)}, the most rows "
            "that are verified"
        )
    return Job(
        rows=_integers("kernel_rows", launch.value("kernel_rows"), 8192),
        cases=tuple(case for keys in contexts for case in _cases(requests, keys)),
        repeats=launch.value("kernel_repeats"),
        output=launch.value("output"),
    )


def _cases(requests: Sequence[int], keys: int) -> list[Case]:
    """Decoding a row of each request, verifying several of one; all are compared with one row of one."""
    decoding = [Case(1, count, keys) for count in sorted({1, *requests})]
    return decoding + [Case(rows, 1, keys) for rows in VERIFIED_ROWS]


def _integers(name: str, texts: Sequence[str], high: int) -> tuple[int, ...]:
    found = set()
    for text in texts:
        value = parse_value(Kind.INT32, text)
        if not isinstance(value, int) or not 1 <= value <= high:
            raise ConfigError(f"--{name}={text}: allowed: integers from 1 to {high}")
        found.add(value)
    if not found:
        raise ConfigError(f"--{name}: allowed: integers from 1 to {high}, several separated by commas")
    return tuple(sorted(found))


def run(job: Job, launch: Launch, progress: Progress) -> int:
    """Load, measure, show and keep."""
    # imported late: they load torch, which has to see the threads that begin() settled
    import torch

    from xspec_cli.benchlib.kernel_model import load_kernel_model
    from xspec_cli.benchlib.kernels import FULL, LAYERS, Plan, measure_kernels

    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    model = load_kernel_model(launch.config, job.cases, max(job.rows), progress)
    measured = measure_kernels(model, Plan(job.rows, job.cases, job.repeats), progress)
    dtype = str(model.dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    passes = [found for found in measured if found.kernel in (LAYERS, FULL)]
    parts = [found for found in measured if found.kernel not in (LAYERS, FULL)]
    facts: dict[str, Any] = {
        "model_type": model.target.spec.model_type,
        "layers": model.target.spec.num_layers,
        "dtype": dtype,
        "kernels": model.platform.kernels_name(),
        "layers_are_one_call": model.fused,
        "compute_threads": threads,
    }
    how = "in one call" if model.fused else "op by op"
    print(f"{facts['model_type']}, {dtype}, {facts['layers']} layers {how}, kernels: {facts['kernels']}")
    print(ceiling_line(measured, threads))
    print(f"\n{kernel_table(parts)}\n\n{pass_table(passes)}")
    if model.fused:
        print("\nA pass runs these inside one call; as calls of their own, each also wakes the threads.")
    if job.output:
        settings = {name: launch.value(name) for name in (*SHARED, *OWN)}
        settings["engine"] = launch.config.to_flat()
        body = document(
            measured, settings=settings, model=facts, machine=machine_facts(), started_at=started_at
        )
        write_document(job.output, body)
        print(f"\nwritten to {job.output}")
    return 0
