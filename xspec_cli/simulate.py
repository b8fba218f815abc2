"""`xspec simulate`: fixed widths, the adaptive policy and an oracle under one load, by a saved cost table.

Turns flags into a world and contenders; the simulator is in `xspec.sim`. No model, no device, no torch.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.cost.bundle import Bundle, read_saved_costs
from xspec.cost.schema import Control
from xspec.errors import ConfigError
from xspec.policy.geometry import PolicyGeometry
from xspec.policy.settings import DraftStepSettings, default_settings, parse_draft_step_config
from xspec.policy.spec_config import spec_config_json
from xspec.sched.scheduler import Limits
from xspec.setting import Kind
from xspec.sim.compare import (
    Contender,
    adaptive_contender,
    compare,
    fixed_contenders,
    oracle_contender,
)
from xspec.sim.loads import ClosedLoad, Load, OpenLoad, Phase
from xspec.sim.recorded import Recorded
from xspec.sim.simulate import EngineShape
from xspec.sim.world import Difficulty, Population, SignalModel, Synthetic, World
from xspec.trace import read_trace
from xspec_cli.benchlib.report import check_output, write_document
from xspec_cli.flags_resolve import Command, Info, Launch, resolve
from xspec_cli.gflags import parse_value
from xspec_cli.progress import set_up_output
from xspec_cli.simulate_flags import SIMULATE_FLAGS, SYNTHETIC
from xspec_cli.simulate_report import document, table
from xspec_cli.simulate_spec import Pairs, pairs_of, recorded_flags, spec_contenders

COMMAND = Command(
    usage="xspec simulate --cost_table=FILE --phases=1:30,8:30 --acceptance=0.6,0.5,0.6 [flags]",
    about="Run every fixed width, the adaptive policy and an oracle under the same load on a virtual clock, "
    "by the costs of a saved table; by one of (K, d) every fixed pair, goodput and, with "
    "--adaptive_spec_config, acceptance_ema. Of the engine's flags only that one and those of the scheduler "
    "count.",
    flags=SIMULATE_FLAGS,
)
log = logging.getLogger(__name__)
MAX_CLIENTS = 4096
MAX_ARRIVALS = 100_000
PAIRS_ONLY = ("match_flags", "shadow_cost", "adaptive_spec_config")


@dataclass(frozen=True, slots=True)
class Job:
    """A command line, checked, with its files read."""

    costs: Bundle
    engine: EngineShape
    world: World
    settings: DraftStepSettings | None
    notes: tuple[str, ...]
    output: str
    pairs: Pairs | None = None  # where (K, d) are chosen, without `settings`


def main(argv: Sequence[str]) -> int:
    launch = resolve(argv, COMMAND)
    if isinstance(launch, Info):
        print(launch.text)
        return 0
    progress = set_up_output(launch.value("log_level"), sys.stderr)
    job = job_of(launch)
    for note in job.notes:
        log.warning("%s", note)
    contenders = list(contenders_of(job))
    done = iter(range(len(contenders) + 1))
    found = compare(
        job.world,
        job.costs.table,
        job.engine,
        contenders,
        lambda name: progress("simulating", next(done), len(contenders)),
    )
    progress("simulating", len(contenders), len(contenders))
    print(table(found))
    if job.output:
        settings = {flag.name: launch.value(flag.name) for flag in SIMULATE_FLAGS}
        write_document(job.output, document(found, settings=settings, source=source_of(job), notes=job.notes))
        print(f"\nwritten to {job.output}")
    return 0


def job_of(launch: Launch) -> Job:
    """Read the files and check what the flag table alone cannot. ConfigError names the flag."""
    if not launch.value("cost_table"):
        raise ConfigError("--cost_table=FILE is needed: saved costs, as a calibration writes them")
    check_output(launch.value("output"))
    costs = saved_costs(Path(launch.value("cost_table")))
    engine = engine_of(costs, launch)
    pairs = settings = recorded = None
    notes: tuple[str, ...] = ()
    if costs.control is Control.SPEC:
        pairs = pairs_of(costs, launch)
        flags = recorded_flags(launch, pairs)
        population: Population = flags
        load = load_of(launch, None, len(flags.names))
    else:
        stray = [name for name in PAIRS_ONLY if name in {*launch.given, *launch.chosen}]
        if stray:
            raise ConfigError("\n".join(f"--{name} is only read with costs of (K, d)" for name in stray))
        population, recorded, notes = population_of(launch, costs.draft_width)
        classes = len(population.difficulties) if isinstance(population, Synthetic) else 0
        load = load_of(launch, recorded, classes)
        settings = policy_settings(launch, costs.control)
    return Job(
        costs=costs,
        engine=engine,
        world=World(population, load, launch.value("seed")),
        settings=settings,
        notes=notes,
        output=launch.value("output"),
        pairs=pairs,
    )


def saved_costs(path: Path) -> Bundle:
    """A saved table that agrees with itself, whatever machine it is of."""
    bundle = read_saved_costs(path, flag="cost_table").bundle
    if bundle is None:
        raise ConfigError(
            f"--cost_table={path}: a bare table does not say what was captured; allowed: one that xspec saved"
        )
    return bundle


def engine_of(costs: Bundle, launch: Launch) -> EngineShape:
    """The engine that the table was measured on, with the scheduler's flags of this command line."""
    effective, settings = costs.effective, launch.config.scheduler
    lanes = BucketGrid(effective.geometry.request_buckets)
    tiers = {(bucket, costs.draft_width): rows for bucket, rows in effective.captured_tiers.items()}
    chunk = settings.max_tokens_per_chunk_for_prefill
    limits = Limits(
        max_tokens_per_batch=settings.max_tokens_per_batch,
        max_seqs_per_batch=min(settings.max_seqs_per_batch, max(effective.request_buckets)),
        max_tokens_per_chunk=settings.max_tokens_per_batch if chunk == -1 else chunk,
        chunked_prefill=settings.enable_chunked_prefill,
        mix_batch=settings.enable_mix_batch,
        admission_memory_threshold=1.0,  # no request of a simulation lacks pages
    )
    geometry = PolicyGeometry(lanes, TargetTiers(tiers), costs.draft_width, effective.uncovered)
    return EngineShape(geometry, limits, effective.geometry.slots, launch.value("shadow_cost"))


def policy_settings(launch: Launch, control: Control) -> DraftStepSettings:
    """The policy section of --policy_config; the defaults of the control without one."""
    path = str(launch.value("policy_config"))
    if not path:
        return default_settings(control)
    where = f"--policy_config={path}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not valid JSON: {error}") from error
    return parse_draft_step_config(content, where)[0]


def source_of(job: Job) -> dict[str, Any]:
    """What the costs are of, for the document."""
    costs = job.costs
    return {
        "control": costs.control.value,
        "algorithm": costs.algorithm,
        "draft_width": costs.draft_width,
        "created_at": costs.created_at,
        "fingerprint": dict(costs.fingerprint),
        "request_buckets": list(costs.effective.request_buckets),
        "policy": None if job.settings is None else dataclasses.asdict(job.settings),
        "candidates": None
        if job.pairs is None or job.pairs.config is None
        else spec_config_json(job.pairs.config),
    }


def contenders_of(job: Job) -> Iterator[Contender]:
    control, geometry = job.costs.control, job.engine.geometry
    if job.pairs is not None:
        yield from spec_contenders(job.costs, job.pairs)
        return
    assert job.settings is not None
    yield from fixed_contenders(control, geometry.draft_width)
    yield adaptive_contender(control, job.costs.table, geometry, job.settings)
    yield oracle_contender(control, job.costs.table, geometry)


def population_of(launch: Launch, draft_width: int) -> tuple[Population, Load | None, tuple[str, ...]]:
    """Requests, the load they bring along (a trace's own), and what there is to say of them."""
    trace, acceptance = str(launch.value("trace")), str(launch.value("acceptance"))
    if bool(trace) == bool(acceptance):
        raise ConfigError("give either --acceptance=RATES or --trace=FILE: which drafts are accepted")
    if trace:
        stray = [flag.name for flag in SIMULATE_FLAGS if flag.name in launch.given and flag.name in SYNTHETIC]
        if stray:
            raise ConfigError("\n".join(f"--{name} is only read with --acceptance" for name in stray))
        try:
            read = read_trace(trace)
        except ConfigError as error:
            raise ConfigError(f"--trace={trace}: {error}") from error
        recorded = Recorded.of(read, draft_width)
        return recorded, recorded.arrivals(), (*read.notes, *recorded.notes)
    burst = float(launch.value("burst_tokens"))
    synthetic = Synthetic(
        tuple(difficulties(acceptance, draft_width, float(launch.value("acceptance_spread")))),
        SignalModel(float(launch.value("calibration_error")), float(launch.value("signal_noise"))),
        prompt_tokens=_bounds(launch, "prompt_tokens"),
        answer_tokens=_bounds(launch, "answer_tokens"),
        burst_tokens=burst or None,
    )
    return synthetic, None, ()


def difficulties(text: str, draft_width: int, spread: float) -> Iterator[Difficulty]:
    """--acceptance as classes of requests."""
    for index, part in enumerate(text.split("/"), start=1):
        name, colon, listed = part.rpartition(":")
        values = [parse_value(Kind.DOUBLE, word.strip()) for word in listed.split(",")]
        rates = tuple(value for value in values if isinstance(value, float) and 0.0 <= value <= 1.0)
        if len(rates) != len(values) or (colon and not name):
            raise ConfigError(
                f"--acceptance={text}: allowed: numbers from 0 to 1 separated by commas, classes by /, each "
                "with or without a name: before it"
            )
        if len(rates) < draft_width:
            raise ConfigError(
                f"--acceptance={text}: {len(rates)} rates in {part!r}; allowed: at least {draft_width}, the "
                "number of drafts that the cost table was measured for"
            )
        yield Difficulty(name or f"class {index}", rates[:draft_width], spread)


def load_of(launch: Launch, recorded: Load | None, classes: int) -> Load:
    """--phases or --rate, else the arrivals of a trace."""
    phases, rate = launch.value("phases"), float(launch.value("rate"))
    if phases and rate:
        raise ConfigError("--phases and --rate exclude each other: a load is either closed or open")
    if "seconds" in launch.given and not rate:
        raise ConfigError("--seconds is only read with --rate; --phases has seconds of its own")
    if phases:
        return ClosedLoad(tuple(_phase(text, classes) for text in phases))
    if rate:
        if rate * float(launch.value("seconds")) > MAX_ARRIVALS:
            raise ConfigError(
                f"--rate={rate:g} for --seconds={launch.value('seconds'):g} are too many requests to "
                f"simulate; allowed: {MAX_ARRIVALS} on average"
            )
        return OpenLoad.poisson(rate, float(launch.value("seconds")), launch.value("seed"))
    if recorded is None:
        raise ConfigError("give --phases=clients:seconds,... or --rate=REQUESTS_PER_S: when requests come")
    return recorded


def _phase(text: str, classes: int) -> Phase:
    words = text.split(":")
    clients, seconds = (
        parse_value(Kind.INT32, words[0]),
        parse_value(Kind.DOUBLE, words[1] if words[1:] else ""),
    )
    of = parse_value(Kind.INT32, words[2]) if words[2:] else None
    good = isinstance(clients, int) and 1 <= clients <= MAX_CLIENTS and len(words) in (2, 3)
    if not good or not isinstance(seconds, float) or not 0.0 < seconds <= 1e6:
        raise ConfigError(
            f"--phases: {text!r}; allowed: clients:seconds or clients:seconds:class with 1 to {MAX_CLIENTS} "
            "clients and seconds above 0"
        )
    if words[2:] and (not isinstance(of, int) or not 1 <= of <= classes):
        raise ConfigError(f"--phases: {text!r}; allowed classes: 1 to {classes}")
    assert isinstance(clients, int)
    return Phase(clients, seconds, (of - 1,) if isinstance(of, int) else None)


def _bounds(launch: Launch, name: str) -> tuple[int, int]:
    texts = launch.value(name)
    values = [parse_value(Kind.INT32, text) for text in texts]
    numbers = [value for value in values if isinstance(value, int)]
    if (
        len(numbers) != len(texts)
        or len(numbers) not in (1, 2)
        or not 1 <= numbers[0] <= numbers[-1] <= 10**6
    ):
        raise ConfigError(
            f"--{name}={','.join(texts)}: allowed: one or two integers from 1, the lower one first"
        )
    return numbers[0], numbers[-1]
