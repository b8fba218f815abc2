"""xspec and other engines side by side: one process an engine, taking turns on the same prompts, greedy.

    python benchmarks/peers/run.py --config xspec-plain,xspec-adaptive,vllm,vllm-ngram --concurrency 1,8 \
        --prompts gsm8k_test_first660.jsonl

Processes whose turn it is not are stopped. A turn keeps exactly so many requests in flight and ends when a
place can no longer be filled; answers end by themselves or at --max_tokens. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a script inside the package that it imports

from benchmarks.peers.child import Child
from benchmarks.peers.drivers.protocol import Turn, decode_turn
from benchmarks.peers.setups import (
    REPO,
    Limits,
    Places,
    Setup,
    command,
    environment,
    load_options,
    parse_setups,
)
from benchmarks.peers.turns import Sample, prompts_of, rotated, table
from xspec.errors import ConfigError, XspecError
from xspec.models.locate import locate_model
from xspec.text.tokenizer import load_text
from xspec_cli.benchlib.facts import machine_facts
from xspec_cli.benchlib.prompts import load_prompts
from xspec_cli.benchlib.report import check_output, write_document

PLACES_PER_TURN = 3
"""Prompts of a turn per request in flight, at least: the window then covers two answers a place or more."""


def prompt_ids(args: argparse.Namespace) -> list[list[int]]:
    """Token ids of all prompts under the chat template, in the order of --seed: the same for every engine."""
    text = load_text(locate_model(args.gguf))
    if text.chat is None:
        raise ConfigError(f"--gguf={args.gguf}: the model has no chat template")
    prompts = load_prompts(args.prompts, chat=True)
    random.Random(args.seed).shuffle(prompts)
    return [prompt.ids(text, chat=True) for prompt in prompts]


class Contest:
    """Loaded engines, of which one at a time is awake."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._children: dict[str, Child] = {}
        self.about: dict[str, Any] = {}

    def load(self, setups: Sequence[Setup], places: Places, limits: Limits, logs: Path) -> None:
        """One after the other, so that none measures or compiles beside another."""
        starts = [(setup, command(setup, places), load_options(setup, places, limits)) for setup in setups]
        for setup, line, options in starts:
            begin_s = time.monotonic()
            child = Child(setup.name, line, environment(limits.threads), logs / f"{setup.name}.log")
            self._children[setup.name] = child
            reply = child.ask({"command": "load", "options": options}, self._args.timeout_s)
            child.pause()
            seconds = time.monotonic() - begin_s
            self.about[setup.name] = {**reply["about"], "load_s": seconds}
            note(f"{setup.name}: ready after {seconds:.1f} s")

    def turn(self, name: str, prompts: Sequence[Sequence[int]], concurrency: int, max_tokens: int) -> Turn:
        child = self._children[name]
        job = {"prompts": prompts, "concurrency": concurrency, "max_tokens": max_tokens}
        child.resume()
        try:
            reply = child.ask({"command": "run", **job}, self._args.timeout_s)
            time.sleep(self._args.settle_s)  # what was dropped at the end of the turn still winds down
        finally:
            child.pause()
        return decode_turn(reply)

    def close(self) -> None:
        for child in self._children.values():
            child.close()


def measure(contest: Contest, names: Sequence[str], args: argparse.Namespace, samples: list[Sample]) -> None:
    """Fills `samples`, level by level; each engine is warmed up at each level before its first round."""
    prompts = prompt_ids(args)
    for concurrency in args.concurrency:
        count = max(args.num_prompts, PLACES_PER_TURN * concurrency)
        for name in names:
            contest.turn(
                name, prompts_of(0, count, prompts)[: 2 * concurrency], concurrency, args.warmup_tokens
            )
        for number in range(args.rounds):
            chosen = prompts_of(1 + number, count, prompts)
            for name in rotated(names, number):
                sample = Sample(
                    name, concurrency, number, contest.turn(name, chosen, concurrency, args.max_tokens)
                )
                samples.append(sample)
                note(
                    f"concurrency {concurrency}, round {number + 1}/{args.rounds}, {name}: {sample.tokens} "
                    f"tokens in {sample.turn.seconds:.1f} s, {sample.tokens_per_s:.1f} a second"
                )


def report(samples: Sequence[Sample], setups: Sequence[Setup], args: argparse.Namespace) -> str:
    names = [setup.name for setup in setups]
    bases = args.over or [setup.name for setup in setups if setup.kind != "xspec"] or names[:1]
    blocks = [
        f"concurrency {level}, answers of at most {args.max_tokens} tokens\n"
        + table(samples, names, bases, level)
        for level in args.concurrency
        if any(sample.concurrency == level for sample in samples)
    ]
    return "\n\n".join(blocks)


def document(
    samples: Sequence[Sample], contest: Contest, args: argparse.Namespace, started_at: str
) -> dict[str, Any]:
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    turns = [
        {**dataclasses.asdict(sample), "tokens": sample.tokens, "tokens_per_s": sample.tokens_per_s}
        for sample in samples
    ]
    return {
        "settings": settings,
        "started_at": started_at,
        "machine": machine_facts(),
        "engines": contest.about,
        "turns": turns,
    }


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def end(number: int, frame: FrameType | None) -> None:
    """A terminated run ends its engines, too: those that are stopped could not by themselves."""
    raise SystemExit(128 + number)


def main(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, end)
    started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    samples: list[Sample] = []
    contest = Contest(args)
    try:
        check_output(args.output)
        setups = parse_setups(args.config)
        if unknown := sorted(set(args.over) - {setup.name for setup in setups}):
            raise ConfigError(f"--over {unknown[0]}: allowed: a configuration of this run")
        pythons = dict(part.partition("=")[::2] for part in args.python)
        hf, openvino = (
            Path(given) if given else args.peers / name
            for given, name in ((args.hf_model, "smollm2-hf"), (args.openvino_model, "smollm2-ov"))
        )
        places = Places(
            args.peers, args.gguf, hf, openvino, Path(args.tables or args.peers / "tables"), pythons
        )
        limits = Limits(args.threads, max(args.concurrency), args.max_model_len)
        logs = Path(args.logs or tempfile.mkdtemp(prefix="peers-"))
        logs.mkdir(parents=True, exist_ok=True)
        try:
            contest.load(setups, places, limits, logs)
            measure(contest, [setup.name for setup in setups], args, samples)
        finally:
            contest.close()
            if samples:
                print(report(samples, setups, args))
        if args.output:
            write_document(args.output, document(samples, contest, args, started_at))
    except XspecError as error:
        raise SystemExit(str(error)) from error
    return 0


def levels(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--config", action="append", required=True, help="NAME,... or NAME=KIND:option=value,..."
    )
    parser.add_argument("--concurrency", type=levels, default=[1])
    parser.add_argument("--prompts", default="", help="as in xspec bench; empty: its built-in questions")
    parser.add_argument("--num_prompts", type=at_least_one, default=4, help="a turn, at least 3 a place")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--max_tokens", type=at_least_one, default=128)
    parser.add_argument("--warmup_tokens", type=at_least_one, default=32, help="of every warm-up answer")
    parser.add_argument("--threads", type=at_least_one, default=2)
    parser.add_argument("--max_model_len", type=at_least_one, default=2048)
    parser.add_argument("--over", action="append", default=[], help="base of ratios; default: all but xspec")
    parser.add_argument("--peers", type=Path, default=REPO / "build" / "peers", help="folder of environments")
    parser.add_argument("--python", action="append", default=[], metavar="KIND=PATH")
    parser.add_argument("--gguf", default="", help="empty: the embedded model")
    parser.add_argument("--hf_model", default="", help="same weights in bf16; default: smollm2-hf in --peers")
    parser.add_argument("--openvino_model", default="", help="exported; default: smollm2-ov in --peers")
    parser.add_argument("--tables", default="", help="cost tables of xspec; default: tables in --peers")
    parser.add_argument("--logs", default="", help="folder of the drivers' logs; default: a temporary one")
    parser.add_argument(
        "--settle_s", type=float, default=0.5, help="from an answer to the stop of its engine"
    )
    parser.add_argument("--timeout_s", type=float, default=600.0, help="for a load or a turn")
    parser.add_argument("--seed", type=int, default=0, help="order of the prompts")
    parser.add_argument("--output", default="", help="JSON with every turn; must not exist")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(arguments(sys.argv[1:])))
