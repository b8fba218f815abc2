"""`xspec calibrate --candidates_output`: offline sampling of a looped model, for --adaptive_spec_config.

Turns flags into prompts, settings and files; the sampling is in `xspec.calib`.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xspec.cost.bundle import check_output
from xspec.cost.schema import Control
from xspec.errors import ConfigError
from xspec.models.locate import SHIPPED, locate_model
from xspec.policy.requirements import control_of, files_of
from xspec.progress import Progress
from xspec.setting import Kind
from xspec_cli.benchlib.prompts import Prompt, halves, load_prompts
from xspec_cli.flags_resolve import Launch
from xspec_cli.flags_types import Flag, command
from xspec_cli.gflags import parse_value

if TYPE_CHECKING:
    from xspec.calib.sampling import Group, Sampled, SamplingSettings
    from xspec.engine.build import Built
    from xspec.policy.spec_config import AdaptiveSpecConfig

OUTPUT = "candidates_output"
SAMPLING = "Offline sampling"

FLAGS: tuple[Flag, ...] = (
    command(
        OUTPUT,
        SAMPLING,
        Kind.STRING,
        "",
        "new JSON file for the candidates (K, d) of a looped model, as --adaptive_spec_config reads them: "
        "runs offline sampling after the costs are measured or loaded",
    ),
    command(
        "prompts",
        SAMPLING,
        Kind.LIST,
        (),
        "files of prompts as xspec bench takes them, several separated by commas; empty: held-out library "
        "text for the models that ship with xspec, short questions for others",
    ),
    command("chat", SAMPLING, Kind.BOOL, False, "send chat messages instead of the bare text"),
    command("prompt_tokens", SAMPLING, Kind.INT32, 64, "longest prompt; longer ones are cut", low=1),
    command("requests", SAMPLING, Kind.LIST, ("1", "8", "32"), "batch sizes that candidates are sampled at"),
    command(
        "screen_tokens", SAMPLING, Kind.INT32, 64, "tokens of an answer that pairs are screened by", low=8
    ),
    command("confirm_tokens", SAMPLING, Kind.INT32, 256, "tokens of an answer in confirming trials", low=8),
    command(
        "confirm", SAMPLING, Kind.INT32, 3, "pairs of each batch size that are confirmed", low=1, high=64
    ),
    command("confirm_runs", SAMPLING, Kind.INT32, 2, "trials of each of them", low=1, high=100),
    command(
        "match_flags_output",
        SAMPLING,
        Kind.STRING,
        "",
        "new file for the match flags of the evaluation prompts' answers, which the simulator replays",
    ),
)


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the results go; None: nowhere."""

    candidates: Path
    flags: Path | None
    report: Path | None


def mistakes_of(launch: Launch, report: Path | None) -> Iterator[str]:
    """What these flags get wrong, before anything is loaded."""
    if not launch.value(OUTPUT):
        stray = [flag.name for flag in FLAGS if flag.name in launch.given]
        yield from (f"--{name} is only read with --{OUTPUT}" for name in stray)
        return
    speculation = launch.config.speculation
    if control_of(speculation) is not Control.SPEC:
        yield f"--{OUTPUT}: allowed: with --speculation_policy=acceptance_ema or goodput"
    paths = _paths(launch, report)
    table = files_of(speculation, Control.SPEC).output
    named = [("--" + OUTPUT, paths.candidates)]
    if paths.flags is not None:
        named.append(("--match_flags_output", paths.flags))
    if table.path:
        named.append((f"--{table.flag}", Path(table.path).expanduser()))
    if report is not None:
        named.append(("--report", report))
    for (one, first), (two, second) in zip(named, named[1:], strict=False):
        if first.resolve() == second.resolve():
            yield f"{one}={first}: is the file of {two} too; allowed: two files"
    for flag, path in named[: 2 if paths.flags is not None else 1]:
        try:
            check_output(path, flag=flag)
        except ConfigError as error:
            yield str(error)
    screen, confirm = launch.value("screen_tokens"), launch.value("confirm_tokens")
    if screen > confirm:
        yield f"--screen_tokens={screen}: allowed: up to --confirm_tokens ({confirm})"
    try:
        requests_of(launch)
    except ConfigError as error:
        yield str(error)


def requests_of(launch: Launch) -> tuple[int, ...]:
    """--requests, ascending. ConfigError for what is no batch of this engine."""
    most = launch.config.scheduler.max_seqs_per_batch
    found = []
    for word in launch.value("requests"):
        count = parse_value(Kind.INT32, word)
        if not isinstance(count, int) or not 1 <= count <= most:
            raise ConfigError(f"--requests={word}: allowed: integers from 1 to --max_seqs_per_batch ({most})")
        found.append(count)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"--requests={','.join(map(str, found))}: allowed: different batch sizes")
    return tuple(sorted(found))


def run(launch: Launch, report: Path | None, progress: Progress) -> int:
    """Sample, write what was asked for and print a summary."""
    from xspec_cli.spec_report import summary, write_report

    paths = _paths(launch, report)
    sampled, config = asyncio.run(_sample(launch, progress))
    from xspec.calib.preset import write_config

    write_config(paths.candidates, config, flag=OUTPUT)
    if paths.flags is not None:
        _write_flags(paths.flags, sampled)
    print(summary(sampled, config))
    print(f"\nwritten to {paths.candidates}")
    if report is not None:
        write_report(sampled, config, report)
    return 0


async def _sample(launch: Launch, progress: Progress) -> tuple[Sampled, AdaptiveSpecConfig]:
    from xspec.calib.preset import make_config
    from xspec.engine.build import build_parts, choose

    choices = choose(launch.config, whole_grid=not launch.config.speculation.adaptive_spec_config)
    if choices.drafter is None or not choices.drafter.loops:
        found = "none" if choices.drafter is None else choices.drafter.algorithm
        raise ConfigError(
            f"--{OUTPUT}: match flags are those of a looped model that drafts for itself; the drafter is "
            f"{found}; allowed: --speculative_algorithm=Looped"
        )
    selection, evaluation = groups_of(launch, choices.model)
    built = await build_parts(choices, progress=progress)
    try:
        sampled = await asyncio.to_thread(_on_engine, built, launch, selection, evaluation, progress)
    finally:
        await asyncio.to_thread(built.threads.close)
    assert built.costs is not None
    bundle = built.costs.bundle
    config = make_config(
        sampled,
        model=choices.model.resolve().name,
        loops=built.parts.target.spec.loops,
        most_requests=built.parts.grid.max_rows,
        fingerprint={} if bundle is None else bundle.fingerprint,
        source=f"xspec calibrate, {_source(launch, choices.model)}",
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    return sampled, config


def _on_engine(
    built: Built, launch: Launch, selection: Group, evaluation: Group, progress: Progress
) -> Sampled:
    """Off the event loop: everything here waits for rounds."""
    from xspec.calib.calibrate import pairs_of
    from xspec.calib.match_flags import FlagReader
    from xspec.calib.sampling import Sampler
    from xspec.calib.service import service_of
    from xspec.exec.assemble import ring_slots
    from xspec.exec.pipeline import Pipeline

    choices, parts = built.choices, built.parts
    assert built.costs is not None and choices.adaptation is not None and choices.drafter is not None
    slots = ring_slots(choices.config, choices.platform)
    pipeline = Pipeline(parts.runner, built.threads, slots)
    service = service_of(choices.config, choices.platform, parts, pipeline, time.monotonic)
    reader = FlagReader(parts)
    sampler = Sampler(
        service,
        lambda prompt, answer: built.threads.submit(partial(reader.read, prompt, answer)).result(),
        reader.depths,
        built.costs.table,
        parts.grid,
        pairs_of(choices.adaptation, choices.drafter),
        settings_of(launch),
        progress,
    )
    return sampler.sample(selection, evaluation)


def settings_of(launch: Launch) -> SamplingSettings:
    from xspec.calib.sampling import SamplingSettings

    return SamplingSettings(
        requests=requests_of(launch),
        screen_tokens=launch.value("screen_tokens"),
        confirm_tokens=launch.value("confirm_tokens"),
        confirm=launch.value("confirm"),
        repeats=launch.value("confirm_runs"),
    )


# -- prompts --------------------------------------------------------------------------------------


def groups_of(launch: Launch, model: Path) -> tuple[Group, Group]:
    """Prompts to choose by and prompts to judge by; no prompt is in both."""
    from xspec.calib.sampling import Group

    if _shipped(model) and not launch.value("prompts"):
        windows = _library_windows(model, 2 * requests_of(launch)[-1], launch.value("prompt_tokens"))
        parts = [windows[0::2], windows[1::2]]
        classes = [["code"] * len(part) for part in parts]
    else:
        from xspec.text.tokenizer import load_text

        text, chat = load_text(model), launch.value("chat")
        if chat and text.chat is None:
            raise ConfigError("--chat: the model has no chat template; use --nochat")
        prompts = _halves(_prompts(launch))
        parts = [[p.ids(text, chat=chat)[: launch.value("prompt_tokens")] for p in part] for part in prompts]
        classes = [[p.traffic for p in part] for part in prompts]
    groups = []
    for part, names in zip(parts, classes, strict=True):
        kept = [(tuple(ids), name) for ids, name in zip(part, names, strict=True) if ids]
        groups.append(Group(tuple(ids for ids, _ in kept), tuple(name for _, name in kept)))
    return groups[0], groups[1]


def _prompts(launch: Launch) -> list[Prompt]:
    """Of all files, each prompt of the class that its file's name says."""
    chat = launch.value("chat")
    if not launch.value("prompts"):
        return [Prompt(text=p.text, traffic="questions") for p in load_prompts("", chat=chat)]
    return [
        Prompt(text=p.text, messages=p.messages, traffic=Path(file).stem)
        for file in launch.value("prompts")
        for p in load_prompts(file, chat=chat)
    ]


def _halves(prompts: list[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    try:
        return halves(prompts)
    except ConfigError as error:
        raise ConfigError(
            f"--prompts: {len(prompts)} are too few to choose by one half of them and judge by the other"
        ) from error


def _library_windows(model: Path, count: int, tokens: int) -> list[list[int]]:
    """Held-out sources of the interpreter's library, as the shipped models have never seen them."""
    import tokenizers

    from xspec.train.ouro_corpus import CODE, TOKENIZER, CorpusOptions, held_out_corpus

    corpus = held_out_corpus(CorpusOptions(), tokenizers.Tokenizer.from_file(str(model / TOKENIZER)))
    return [window.tolist() for window in corpus.windows(CODE, count, tokens)]


def _shipped(model: Path) -> bool:
    return any(model.resolve() == locate_model(name).resolve() for name in SHIPPED)


def _source(launch: Launch, model: Path) -> str:
    files = launch.value("prompts")
    if files:
        return "prompts of " + ", ".join(Path(file).name for file in files)
    return "held-out library text" if _shipped(model) else "built-in questions"


# -- files ----------------------------------------------------------------------------------------


def _paths(launch: Launch, report: Path | None) -> Paths:
    flags = launch.value("match_flags_output")
    return Paths(Path(launch.value(OUTPUT)).expanduser(), Path(flags).expanduser() if flags else None, report)


def _write_flags(path: Path, sampled: Sampled) -> None:
    from xspec.sim.looped import FlagStream, write_flags

    answers = sampled.evaluation
    streams = [
        FlagStream(tokens, flags, name)
        for tokens, flags, name in zip(answers.prompt_tokens, answers.flags, answers.classes, strict=True)
    ]
    write_flags(path, sampled.depths, streams)
