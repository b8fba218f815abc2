"""`xspec bench`: measures an engine in this process, or one or two servers, under load.

Turns flags into targets, levels and prompts, runs them and shows the result; the measuring is in `benchlib`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from xspec.errors import ConfigError
from xspec.progress import Progress
from xspec.setting import Kind
from xspec_cli import bench_kernels
from xspec_cli.bench_flags import BENCH_FLAGS
from xspec_cli.benchlib.facts import machine_facts
from xspec_cli.benchlib.hindsight import Contest, Verdict, verdicts
from xspec_cli.benchlib.load import AskOptions, Level, Target
from xspec_cli.benchlib.mix import load_mix, parse_mix
from xspec_cli.benchlib.phases import parse_phases
from xspec_cli.benchlib.plan import PlanOptions, Run, compare, run_plan
from xspec_cli.benchlib.policies import check_policies, contest, policy_targets
from xspec_cli.benchlib.prompts import Prompt, halves, load_prompts
from xspec_cli.benchlib.report import (
    check_output,
    comparison_lines,
    document,
    failures,
    table,
    write_document,
)
from xspec_cli.benchlib.tables import (
    acceptance_lines,
    class_tables,
    phase_tables,
    policy_tables,
    verdict_tables,
)
from xspec_cli.flags_resolve import Command, Info, Launch, resolve
from xspec_cli.gflags import parse_value
from xspec_cli.serve import adaptive_by_default, begin

COMMAND = Command(
    usage="xspec bench [--url=http://host:port] [--concurrency=1,8,32] [flags]",
    about="Measure throughput and latency of an engine in this process or of running servers, or with "
    "--kernels the kernels of a model.",
    flags=BENCH_FLAGS,
)
log = logging.getLogger(__name__)
DEFAULT_CONCURRENCY = ("1", "8", "32")
MAX_CONCURRENCY = 4096


@dataclass(frozen=True, slots=True)
class Job:
    """A bench command line, checked: everything that can be refused has been before the first request."""

    urls: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    ask: AskOptions
    plan: PlanOptions
    request_timeout_s: float
    output: str
    contest: Contest | None = None  # policies that are compared; None: targets as they are
    mixed: bool = False


def merge_urls(argv: Sequence[str]) -> list[str]:
    """gflags lets the last occurrence win; here a second --url adds a second target."""
    urls: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("--url", "-url"):
            others.append(word)
        elif equals:
            urls.append(value)
        else:
            urls.append(next(words, ""))
    return [f"--url={','.join(urls)}", *others] if urls else others


def job_of(launch: Launch) -> Job:
    """Check what the flag table alone cannot. ConfigError names flag, value found and values allowed."""
    urls = tuple(url.rstrip("/") for url in launch.value("url"))
    for url in urls:
        check_url(url)
    if len(urls) > 2 or len(set(urls)) < len(urls):
        raise ConfigError(f"--url={','.join(urls)}: allowed: one server or two different ones")
    check_output(launch.value("output"))
    policies = launch.value("policies")
    check_comparison(launch, urls)
    chat = launch.value("chat")
    warmup = launch.value("warmup")
    prompts = prompts_of(launch)
    if launch.value("hindsight"):
        halves(prompts)
    return Job(
        urls=urls,
        prompts=prompts,
        ask=AskOptions(
            max_tokens=launch.value("max_tokens"),
            temperature=float(launch.value("temperature")),
            ignore_eos=launch.value("ignore_eos"),
            chat=chat,
        ),
        plan=PlanOptions(
            levels=tuple(
                levels(launch.value("concurrency"), launch.value("request_rate"), launch.value("phases"))
            ),
            num_prompts=launch.value("num_prompts"),
            rounds=launch.value("rounds"),
            warmup=None if warmup < 0 else warmup,
            seed=launch.value("seed"),
            settle_s=0.0 if policies else float(launch.value("settle_s")),
            rotate=bool(policies),
            hindsight=launch.value("hindsight"),
        ),
        request_timeout_s=float(launch.value("request_timeout_s")),
        output=launch.value("output"),
        contest=contest(policies) if policies else None,
        mixed=bool(launch.value("mix")),
    )


def prompts_of(launch: Launch) -> tuple[Prompt, ...]:
    mix, path, chat = launch.value("mix"), launch.value("prompts"), launch.value("chat")
    if mix and path:
        raise ConfigError("--mix and --prompts exclude each other: either names the prompts")
    return tuple(load_mix(parse_mix(mix), chat=chat) if mix else load_prompts(path, chat=chat))


def check_comparison(launch: Launch, urls: Sequence[str]) -> None:
    """Refuse policies where there is no engine to exchange them on, and hindsight where it has no sense."""
    policies = launch.value("policies")
    check_policies(policies)
    if policies and urls:
        raise ConfigError("--policies and --url exclude each other: policies take turns on an engine in here")
    if not launch.value("hindsight"):
        return
    sides = contest(policies)
    if not sides.candidates or not sides.fixed:
        raise ConfigError("--hindsight: allowed: with --policies that hold adaptive and fixed ones")
    if launch.value("rounds") < 2:
        raise ConfigError(f"--rounds={launch.value('rounds')}: allowed: integers from 2 with --hindsight")


def check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"--url={url}: allowed: http://host:port")
    if parts.username is not None:
        raise ConfigError("--url holds a user name; give the server's key as --api_key")
    if parts.path.endswith("/v1"):
        raise ConfigError(f"--url={url}: leave /v1 out; the paths below it are added")


def levels(
    concurrency: Sequence[str], request_rate: Sequence[str], phases: Sequence[str] = ()
) -> Iterator[Level]:
    """The levels asked for, in order."""
    if concurrency and request_rate:
        raise ConfigError(
            "--concurrency and --request_rate exclude each other: a load is either closed or open"
        )
    if phases and (concurrency or request_rate):
        raise ConfigError("--phases says all of the load: leave --concurrency and --request_rate out")
    if phases:
        yield Level(phases=parse_phases(phases, max_concurrency=MAX_CONCURRENCY))
        return
    if request_rate:
        for text in request_rate:
            rate = parse_value(Kind.DOUBLE, text)
            if not isinstance(rate, float) or not 1e-6 <= rate <= 1e6:
                raise ConfigError(f"--request_rate={text}: allowed: numbers above 0, up to 1000000")
            yield Level(rate_rps=rate)
        return
    for text in concurrency or DEFAULT_CONCURRENCY:
        places = parse_value(Kind.INT32, text)
        if not isinstance(places, int) or not 1 <= places <= MAX_CONCURRENCY:
            raise ConfigError(f"--concurrency={text}: allowed: integers from 1 to {MAX_CONCURRENCY}")
        yield Level(concurrency=places)


def main(argv: Sequence[str]) -> int:
    launch = resolve(merge_urls(argv), COMMAND)
    if isinstance(launch, Info):
        print(launch.text)
        return 0
    if launch.value("kernels"):
        kernel_job = bench_kernels.job_of(launch)
        return bench_kernels.run(kernel_job, launch, begin(launch))
    bench_kernels.refuse_without_kernels(launch)
    job = job_of(launch)
    progress = begin(launch)
    if not job.urls:
        launch = dataclasses.replace(launch, config=adaptive_by_default(launch))
    if job.contest is not None and launch.config.cache.enable_prefix_cache:
        launch = without_prefix_cache(launch)
    return run(job, launch, progress)


def without_prefix_cache(launch: Launch) -> Launch:
    """All policies are asked the same prompts: whoever came first would compute them for the others."""
    if "enable_prefix_cache" in launch.chosen:
        raise ConfigError("--enable_prefix_cache=true: allowed: false with --policies")
    log.info("the prefix cache is off: all policies are asked the same prompts")
    cache = dataclasses.replace(launch.config.cache, enable_prefix_cache=False)
    return dataclasses.replace(launch, config=dataclasses.replace(launch.config, cache=cache))


def run(job: Job, launch: Launch, progress: Progress) -> int:
    """Measure, show and keep. 0, or 1 if any request failed: figures of a run with failures mislead."""
    if any(level.phases for level in job.plan.levels) and job.contest is None:
        log.warning(
            "phases ask %d prompts over and over: a prefix cache may answer for them", len(job.prompts)
        )
    if (needed := job.plan.prompts_needed) > len(job.prompts):
        log.warning(
            "%d prompts serve %d requests: repeated ones may hit a prefix cache", len(job.prompts), needed
        )
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    runs, described = asyncio.run(_measure(job, launch, progress))
    names = [str(entry["name"]) for entry in described]
    comparisons = compare(runs, job.plan, names)
    found = [] if job.contest is None else judged(runs, job, job.contest)
    tables = (
        (policy_tables if job.contest is not None else table)(runs, job.plan, names),
        "" if job.contest is not None else comparison_lines(comparisons),
        acceptance_lines(runs, job.plan, names) if job.contest is not None else "",
        phase_tables(runs, job.plan, names),
        class_tables(runs, job.plan, names) if job.mixed else "",
        verdict_tables(found),
    )
    print("\n\n".join(filter(None, tables)))
    if job.output:
        body = document(
            runs,
            comparisons,
            verdicts=found,
            settings=settings_of(launch, job),
            targets=described,
            machine=machine_facts(),
            started_at=started_at,
        )
        write_document(job.output, body)
        print(f"\nwritten to {job.output}")
    failed = failures(runs)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def judged(runs: Sequence[Run], job: Job, sides: Contest) -> list[Verdict]:
    return verdicts(runs, job.plan.levels, sides, hindsight=job.plan.hindsight, seed=job.plan.seed)


def settings_of(launch: Launch, job: Job) -> dict[str, Any]:
    """Every bench flag in effect; the engine's own settings only matter where there is an engine here."""
    settings: dict[str, Any] = {flag.name: launch.value(flag.name) for flag in BENCH_FLAGS}
    settings["prompts_available"] = len(job.prompts)
    settings["levels"] = [str(level) for level in job.plan.levels]
    if not job.urls:
        settings["engine"] = launch.config.to_flat()
    return settings


async def _measure(job: Job, launch: Launch, progress: Progress) -> tuple[list[Run], list[dict[str, Any]]]:
    async with AsyncExitStack() as stack:
        if job.urls:
            targets, described = await _servers(job, launch, stack)
        else:
            targets, described = await _engine(job, launch, progress, stack)
        return await run_plan(targets, job.prompts, job.plan, progress), described


async def _servers(
    job: Job, launch: Launch, stack: AsyncExitStack
) -> tuple[list[Target], list[dict[str, Any]]]:
    import aiohttp

    from xspec_cli.benchlib.http import HttpTarget

    key = launch.config.service.api_key
    session = await stack.enter_async_context(
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=job.request_timeout_s),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
    )
    targets = [HttpTarget(url, session, job.ask, launch.config.model.model_id) for url in job.urls]
    described = [{"name": target.name, **await target.open()} for target in targets]
    return list(targets), described


async def _engine(
    job: Job, launch: Launch, progress: Progress, stack: AsyncExitStack
) -> tuple[list[Target], list[dict[str, Any]]]:
    # imported late: it loads torch, which has to see the threads that begin() settled
    from xspec.engine.build import build_engine
    from xspec_cli.benchlib.local import EngineTarget

    engine = await build_engine(launch.config, progress=progress)
    stack.push_async_callback(engine.close)
    target = EngineTarget(engine, job.ask)
    if job.contest is not None:
        targets = policy_targets(target, job.contest.names, engine.use_policy)
        about = {"model": engine.model_id, "server_info": engine.server_info()}
        return targets, [{"name": policy.name, **about} for policy in targets]
    return [target], [{"name": target.name, "model": engine.model_id, "server_info": engine.server_info()}]
