"""Fixed speculation widths against plain decoding, alternating, one process an engine.

    python benchmarks/speculation.py --prompts gsm8k.jsonl --concurrency 1,4,8,32 \
        --config none --config mtp:0 --config mtp:3 --config dspark:5:2

A config is `none` (no drafter loaded), `mtp:K` or `dspark:B:W` (B drafted, W verified; both 0: plain rounds
with the drafter loaded). Every round runs every config on the same prompts, in an order that rotates.
Prints per concurrency and config: median tokens/s, ratio to the first config with its bootstrap interval
over rounds, tokens a round commits, acceptance per position given the one before.
Texts are compared with the first config's: in bf16 near ties may differ, the share is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xspec.config import Config
from xspec.core.drafts import DraftTotals
from xspec.core.request import SamplingParams
from xspec.text.prompts import Prompt
from xspec.threads import settle_threads
from xspec_cli.benchlib.prompts import load_prompts
from xspec_cli.benchlib.stats import bootstrap_interval, median


@dataclass(frozen=True, slots=True)
class Setup:
    """One line of the table."""

    name: str
    algorithm: str | None  # None: no drafter loaded
    steps: int = 0
    verify: int | None = None


@dataclass(slots=True)
class Turn:
    tokens: int
    seconds: float
    texts: list[tuple[int, ...]]
    totals: DraftTotals | None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def parse_setup(text: str) -> Setup:
    kind, *numbers = text.lower().split(":")
    values = [int(number) for number in numbers]
    if kind == "none" and not values:
        return Setup(text, None)
    if kind == "mtp" and len(values) == 1:
        return Setup(text, "MTP", values[0])
    if kind == "dspark" and len(values) == 2:
        return Setup(text, "DSpark", values[0], values[1])
    raise SystemExit(f"--config {text}: allowed: none, mtp:K, dspark:B:W")


def flags_of(setups: Sequence[Setup], algorithm: str | None, args: argparse.Namespace) -> dict[str, Any]:
    """Flags of the engine that runs all setups of `algorithm`."""
    flags: dict[str, Any] = {
        "max_seqs_per_batch": max(args.concurrency),
        "enable_prefix_cache": False,
        "max_model_len": args.max_model_len,
        "random_seed": 1,
        "dtype": args.dtype,
        "num_speculative_tokens": 0,
    }
    if algorithm is not None:
        steps = max(setup.steps for setup in setups if setup.algorithm == algorithm)
        flags |= {"speculative_algorithm": algorithm, "num_speculative_tokens": steps}
        flags["draft_model"] = {"MTP": args.mtp, "DSpark": args.dspark}[algorithm]
    return flags


class Worker:
    """An engine in a process of its own: two engines' compute threads in one would slow each other down.

    It sleeps while another one has its turn. Jobs and results are lines of JSON.
    """

    def __init__(self, flags: dict[str, Any]) -> None:
        command = [sys.executable, __file__, "--worker", json.dumps(flags)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ask({})  # returns once the engine is ready

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("a worker ended early; its message stands above")
        found: dict[str, Any] = json.loads(answer)
        return found

    def turn(self, setup: Setup, first: int, count: int, concurrency: int, args: argparse.Namespace) -> Turn:
        job = {"steps": setup.steps, "verify": setup.verify, "first": first, "count": count}
        job |= {"concurrency": concurrency, "prompts": args.prompts, "chat": args.chat, "seed": args.seed}
        job |= {"max_tokens": args.max_tokens, "temperature": args.temperature}
        found = self.ask(job)
        totals = found.pop("totals")
        if totals is not None:
            drafts, drafted, accepted, per_position = totals
            totals = DraftTotals(drafts, drafted, accepted, tuple(per_position))
        return Turn(found["tokens"], found["seconds"], [tuple(text) for text in found["texts"]], totals)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


async def work(flags: dict[str, Any]) -> None:
    """The worker's side. The policy is exchanged between turns, while nothing runs."""
    from xspec.engine.build import build_engine

    engine = await build_engine(Config.from_mapping(flags))
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        print(json.dumps(await run(engine, job) if job else {}), flush=True)
    await engine.close()


async def run(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    from xspec.policy.fixed import FixedPolicy

    prompts = shuffled(job["prompts"], job["chat"], job["seed"])[job["first"] : job["first"] + job["count"]]
    engine._driver.policy = FixedPolicy(job["steps"], job["verify"])
    before = engine.metrics.draft_totals()
    texts: list[tuple[int, ...]] = [()] * len(prompts)
    todo = iter(enumerate(prompts))

    async def client() -> None:
        for index, prompt in todo:
            params = SamplingParams(max_tokens=job["max_tokens"], temperature=job["temperature"], seed=index)
            async for output in engine.generate(prompt.ids(engine.text, chat=job["chat"]), params):
                texts[index] += output.token_ids

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(job["concurrency"])))
    seconds = time.perf_counter() - start
    after, totals = engine.metrics.draft_totals(), None
    if after is not None and before is not None:
        new = after.since(before)
        totals = [new.drafts, new.draft_tokens, new.accepted_tokens, new.accepted_per_position]
    return {"tokens": sum(map(len, texts)), "seconds": seconds, "texts": texts, "totals": totals}


def shuffled(path: str, chat: bool, seed: int) -> list[Prompt]:
    prompts = load_prompts(path, chat=chat)
    random.Random(seed).shuffle(prompts)
    return prompts


def line(setup: Setup, turns: Sequence[Turn], base: Sequence[Turn]) -> str:
    ratios = [a.rate / b.rate for a, b in zip(turns, base, strict=True)]
    low, high = bootstrap_interval(ratios, seed=0) if len(ratios) > 1 else (ratios[0], ratios[0])
    same = sum(a == b for a, b in zip(turns[0].texts, base[0].texts, strict=True)) / len(base[0].texts)
    text = f"  {setup.name:12s} {median([t.rate for t in turns]):7.1f} tok/s  x{median(ratios):.3f}"
    text += f" ({low:.3f} - {high:.3f})  same text {same:.0%}"
    totals = turns[0].totals
    if totals is not None and totals.drafts:
        text += f"  {totals.mean_acceptance_length:.2f} tokens a round  acceptance "
        text += " ".join(f"{rate:.2f}" for rate in totals.conditional_rates if rate)
    return text


def main(args: argparse.Namespace) -> None:
    setups = [parse_setup(text) for text in args.config]
    known = len(shuffled(args.prompts, args.chat, args.seed))
    algorithms = dict.fromkeys(setup.algorithm for setup in setups)
    workers = {algorithm: Worker(flags_of(setups, algorithm, args)) for algorithm in algorithms}
    results: dict[str, Any] = {}
    for concurrency in args.concurrency:
        count = max(args.num_prompts, 2 * concurrency if concurrency > 1 else 0)
        turns: dict[str, list[Turn]] = defaultdict(list)
        for number in range(-1, args.rounds):  # round -1 warms up and is not counted
            first = max(0, number) * count % max(1, known - count)
            for place in range(len(setups)):
                setup = setups[(place + number) % len(setups)]
                size = count if number >= 0 else min(count, concurrency)
                done = workers[setup.algorithm].turn(setup, first, size, concurrency, args)
                if number >= 0:
                    turns[setup.name].append(done)
                time.sleep(args.pause_s)
        print(f"concurrency {concurrency}, {count} prompts a round, {args.rounds} rounds", flush=True)
        for setup in setups:
            print(line(setup, turns[setup.name], turns[setups[0].name]), flush=True)
        results[str(concurrency)] = {
            name: [{"tokens": t.tokens, "seconds": t.seconds} for t in done] for name, done in turns.items()
        }
    for worker in workers.values():
        worker.close()
    if args.output:
        Path(args.output).write_text(json.dumps(results, indent=1) + "\n")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", default="", help="as in xspec bench")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--config", action="append", required=True, help="the first is the base")
    parser.add_argument("--mtp", default="", help="MTP drafter; empty: the shipped one")
    parser.add_argument("--dspark", default="", help="DSpark drafter; empty: the shipped one")
    parser.add_argument("--concurrency", type=lambda s: [int(part) for part in s.split(",")], default=[1])
    parser.add_argument("--num_prompts", type=int, default=8, help="a round and config, at least 2 a client")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max_tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max_model_len", type=int, default=2048)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pause_s", type=float, default=0.5, help="between turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="", help="JSON with every turn's tokens and seconds")
    return parser.parse_args(argv)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        settle_threads(0)
        asyncio.run(work(json.loads(sys.argv[2])))
    else:
        main(arguments(sys.argv[1:]))
