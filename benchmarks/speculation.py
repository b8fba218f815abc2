"""Speculation as flags set it up, against plain decoding and each other: alternating, one process an engine.

    python benchmarks/speculation.py --prompts gsm8k.jsonl --concurrency 1,4,8,32 \
        --config none --config mtp:3 --config dspark:5:2 --config mtp:adaptive:4 --config mtp:adaptive:4:0.02

A config is `none` (no drafter loaded); fixed: `mtp:K` or `dspark:B:W` (B drafted, W verified; 0: plain rounds
with the drafter loaded); or it adapts: `mtp:adaptive:K[:gain]` (draft steps up to K, switch_min_gain), and
`mtp:verify:K` or `dspark:verify:B` (target verify). Every round runs every config on the same prompts, in an
order that rotates. Costs are measured at the first start and kept in --tables for later ones.
Prints per load: throughput, ratio to the first config with its bootstrap interval over rounds, what became of
drafts, the share of texts equal to the first config's (bf16 near ties may differ), and how each config that
adapts compares with the best of those that do not, chosen on the same rounds and on the other half of them.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xspec.errors import XspecError
from xspec_cli.bench import MAX_CONCURRENCY
from xspec_cli.benchlib.facts import machine_facts
from xspec_cli.benchlib.hindsight import Contest, verdicts
from xspec_cli.benchlib.load import AskOptions, Level
from xspec_cli.benchlib.mix import load_mix, parse_mix
from xspec_cli.benchlib.phases import parse_phases
from xspec_cli.benchlib.plan import PlanOptions, Run, Turn, compare, run_turns, warm_level
from xspec_cli.benchlib.prompts import Prompt, halves, load_prompts
from xspec_cli.benchlib.report import check_output, document, failures, write_document
from xspec_cli.benchlib.tables import (
    acceptance_lines,
    class_tables,
    phase_tables,
    policy_tables,
    verdict_tables,
)
from xspec_cli.benchlib.worker import Worker
from xspec_cli.progress import set_up_output

ALGORITHMS = {"mtp": "MTP", "dspark": "DSpark"}
CONTROLS = {"adaptive": "draft_step", "verify": "target_verify"}
ALLOWED = "none, mtp:K, dspark:B:W, mtp:adaptive:K[:gain], mtp:verify:K, dspark:verify:B"


@dataclass(frozen=True, slots=True)
class Setup:
    """One line of the table. `control` None: a fixed width; then `verify` None verifies all."""

    name: str
    algorithm: str | None = None  # None: no drafter loaded
    steps: int = 0
    verify: int | None = None
    control: str | None = None
    min_gain: float | None = None

    @property
    def plain(self) -> bool:
        """Whether it never drafts."""
        return self.control is None and (self.steps == 0 or self.verify == 0)


def parse_setup(text: str) -> Setup:
    kind, *rest = text.lower().split(":")
    try:
        if kind == "none" and not rest:
            return Setup(text)
        algorithm = ALGORITHMS.get(kind)
        control = CONTROLS.get(rest[0]) if rest else None
        if algorithm is not None and control is None:
            widths = [int(number) for number in rest]
            if len(widths) == 1 + (kind == "dspark") and min(widths) >= 0 and widths[-1] <= widths[0]:
                return Setup(text, algorithm, widths[0], widths[1] if len(widths) == 2 else None)
        elif algorithm is not None and (kind == "mtp" or control == "target_verify"):
            steps, *gain = rest[1:]
            if int(steps) >= 1 and len(gain) <= (control == "draft_step"):
                return Setup(text, algorithm, int(steps), None, control, *map(float, gain))
    except ValueError:
        pass
    raise SystemExit(f"--config {text}: allowed: {ALLOWED}")


class Files:
    """Cost tables that outlive a run (in `folder`, where one is given), and config files that do not."""

    def __init__(self, folder: str, scratch: str, tag: str) -> None:
        self._folder = Path(folder) if folder else None
        self._scratch = Path(scratch)
        self._tag = tag
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def flags(self, setup: Setup) -> dict[str, str]:
        """The flags that read a table, or write the one that is missing, and that name the policy's settings.

        A table does not depend on the policy, so setups that differ in it alone share one.
        """
        flags: dict[str, str] = {}
        if self._folder is not None:
            table = self._folder / f"{setup.algorithm}-{setup.control}-{setup.steps}-{self._tag}.json"
            action = "cost_table" if table.exists() else "cost_table_output"
            flags[f"adaptive_{setup.control}_{action}"] = str(table)
        if setup.min_gain is not None:
            path = self._scratch / f"gain-{setup.min_gain:g}.json"
            path.write_text(json.dumps({"version": 1, "policy": {"switch_min_gain": setup.min_gain}}))
            flags["adaptive_draft_step_config"] = str(path)
        return flags


def flags_of(
    setup: Setup, args: argparse.Namespace, clients: int, files: Files, width: int = -1
) -> dict[str, Any]:
    """Flags of the engine of one setup.

    `clients`: most requests at once; `width`: drafts that a drafter is loaded for which never drafts.
    """
    flags: dict[str, Any] = {
        "model": args.model,
        "max_seqs_per_batch": clients,
        "enable_prefix_cache": False,
        "max_model_len": args.max_model_len,
        "max_cache_size": args.max_cache_mb * 2**20,
        "random_seed": 1,
        "dtype": args.dtype,
        "num_speculative_tokens": 0,
    }
    if setup.algorithm is None:
        return flags
    drafter = args.mtp if setup.algorithm == "MTP" else args.dspark
    flags |= {"speculative_algorithm": setup.algorithm, "draft_model": drafter}
    flags["num_speculative_tokens"] = setup.steps or width
    if setup.control is not None:
        return flags | {f"enable_adaptive_{setup.control}": True} | files.flags(setup)
    if setup.plain or setup.verify is not None:
        flags["target_verify_width"] = 0 if setup.plain else setup.verify
    return flags


@dataclass(frozen=True, slots=True)
class Contender:
    """A setup at work."""

    name: str
    worker: Worker


async def turn(
    contender: Contender,
    prompts: Sequence[Prompt],
    level: Level,
    seed: int,
    report: Callable[[int, int], None],
) -> Turn:
    return await contender.worker.turn(prompts, level, seed, report)


def plan_of(args: argparse.Namespace) -> PlanOptions:
    levels = [Level(concurrency=places) for places in args.concurrency]
    if args.phases:
        levels = [Level(phases=parse_phases(args.phases.split(","), max_concurrency=MAX_CONCURRENCY))]
    return PlanOptions(
        levels=tuple(levels),
        num_prompts=args.num_prompts,
        rounds=args.rounds,
        warmup=None,
        seed=args.seed,
        settle_s=args.pause_s,
        rotate=True,
        hindsight=args.rounds > 1,
        least_per_client=2,
    )


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    """A mix keeps its order, which is what its shares come from; other prompts are shuffled."""
    if args.mix:
        return load_mix(parse_mix(args.mix.split(",")), chat=args.chat)
    prompts = load_prompts(args.prompts, chat=args.chat)
    random.Random(args.seed).shuffle(prompts)
    return prompts


def contest_of(setups: Sequence[Setup]) -> Contest:
    plain = next((setup.name for setup in setups if setup.plain), None)
    fixed = tuple(setup.name for setup in setups if setup.control is None)
    return Contest(tuple(setup.name for setup in setups), fixed, plain)


def measure(setups: Sequence[Setup], plan: PlanOptions, args: argparse.Namespace) -> list[Run]:
    clients = max(warm_level(level).concurrency or 1 for level in plan.levels)
    ask = AskOptions(args.max_tokens, args.temperature, args.ignore_eos, args.chat)
    prompts = prompts_of(args)
    if plan.hindsight:
        halves(prompts)  # refused before any engine is built
    progress = set_up_output(args.log_level, sys.stderr)
    contenders: list[Contender] = []
    with tempfile.TemporaryDirectory() as scratch:
        files = Files(args.tables, scratch, f"{clients}-{args.dtype}")
        try:
            for number, setup in enumerate(setups):  # one after the other: costs are measured in quiet
                progress("engines", number, len(setups))
                width = max(other.steps for other in setups if other.algorithm == setup.algorithm) or -1
                flags = flags_of(setup, args, clients, files, width)
                worker = Worker(flags, ask, log_level=args.log_level)
                contenders.append(Contender(setup.name, worker))
            progress("engines", len(setups), len(setups))
            return asyncio.run(run_turns(contenders, prompts, plan, progress, turn))
        finally:
            for contender in contenders:
                contender.worker.close()


def main(args: argparse.Namespace) -> int:
    setups = [parse_setup(text) for text in args.config]
    names = [setup.name for setup in setups]
    if len(set(names)) < len(names):
        raise SystemExit(f"--config {' '.join(names)}: allowed: different ones")
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        check_output(args.output)
        plan = plan_of(args)
        runs = measure(setups, plan, args)
    except XspecError as error:
        raise SystemExit(str(error)) from error
    found = verdicts(runs, plan.levels, contest_of(setups), hindsight=plan.hindsight, seed=plan.seed)
    tables = (
        policy_tables(runs, plan, names),
        acceptance_lines(runs, plan, names),
        phase_tables(runs, plan, names),
        class_tables(runs, plan, names) if args.mix else "",
        verdict_tables(found),
    )
    print("\n\n".join(filter(None, tables)))
    if args.output:
        body = document(
            runs,
            compare(runs, plan, names),
            verdicts=found,
            settings={**vars(args), "levels": [str(level) for level in plan.levels]},
            targets=[{"name": name} for name in names],
            machine=machine_facts(),
            started_at=started_at,
        )
        write_document(args.output, body)
    failed = failures(runs)
    print("".join(f"failed: {line}\n" for line in failed), end="", file=sys.stderr)
    return 1 if failed else 0


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", default="", help="as in xspec bench")
    parser.add_argument("--mix", default="", help="as in xspec bench, instead of --prompts")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--config", action="append", required=True, help="the first is the base")
    parser.add_argument("--model", default="", help="empty: the embedded one")
    parser.add_argument("--mtp", default="", help="MTP drafter; empty: the shipped one")
    parser.add_argument("--dspark", default="", help="DSpark drafter; empty: the shipped one")
    parser.add_argument("--tables", default="", help="folder of cost tables; empty: measured anew every time")
    parser.add_argument("--concurrency", type=lambda s: [int(part) for part in s.split(",")], default=[1])
    parser.add_argument("--phases", default="", help="as in xspec bench, instead of --concurrency")
    parser.add_argument("--num_prompts", type=int, default=8, help="a round and config, at least 2 a client")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore_eos", action="store_true")
    parser.add_argument("--max_model_len", type=int, default=2048)
    parser.add_argument("--max_cache_mb", type=int, default=400, help="KV cache of each engine, MiB")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pause_s", type=float, default=0.5, help="between turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log_level", default="warning")
    parser.add_argument("--output", default="", help="JSON with every sample; must not exist")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(arguments(sys.argv[1:])))
