"""Fixed speculation widths against plain decoding, alternating in one process.

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

    @property
    def engine(self) -> str:
        return self.algorithm or "none"


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


async def build(setups: Sequence[Setup], args: argparse.Namespace) -> dict[str, Any]:
    """One engine per drafter; the policy is exchanged between turns, while nothing runs."""
    from xspec.engine.build import build_engine

    engines = {}
    for algorithm in dict.fromkeys(setup.algorithm for setup in setups):
        flags: dict[str, Any] = {
            "max_seqs_per_batch": max(args.concurrency),
            "enable_prefix_cache": False,
            "max_model_len": args.max_model_len,
            "random_seed": 1,
            "num_speculative_tokens": 0,
        }
        if algorithm is not None:
            steps = max(setup.steps for setup in setups if setup.algorithm == algorithm)
            flags |= {"speculative_algorithm": algorithm, "num_speculative_tokens": steps}
            flags["draft_model"] = {"MTP": args.mtp, "DSpark": args.dspark}[algorithm]
        engines[algorithm or "none"] = await build_engine(Config.from_mapping(flags))
    return engines


async def turn(engine: Any, setup: Setup, prompts: Sequence[Prompt], concurrency: int, args: Any) -> Turn:
    from xspec.policy.fixed import FixedPolicy

    engine._driver.policy = FixedPolicy(setup.steps, setup.verify)
    before = engine.metrics.draft_totals()
    texts: list[tuple[int, ...]] = [()] * len(prompts)
    todo = iter(enumerate(prompts))

    async def worker() -> None:
        for index, prompt in todo:
            params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=index)
            ids = prompt.ids(engine.text, chat=args.chat)
            async for output in engine.generate(ids, params):
                texts[index] += output.token_ids

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds = time.perf_counter() - start
    after = engine.metrics.draft_totals()
    totals = None if after is None or before is None else after.since(before)
    return Turn(sum(map(len, texts)), seconds, texts, totals)


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


async def main(args: argparse.Namespace) -> None:
    setups = [parse_setup(text) for text in args.config]
    prompts = load_prompts(args.prompts, chat=args.chat)
    random.Random(args.seed).shuffle(prompts)
    engines = await build(setups, args)
    results: dict[str, Any] = {}
    for concurrency in args.concurrency:
        count = max(args.num_prompts, 2 * concurrency if concurrency > 1 else 0)
        turns: dict[str, list[Turn]] = defaultdict(list)
        for number in range(-1, args.rounds):  # round -1 warms up and is not counted
            first = (number * count) % max(1, len(prompts) - count)
            part = prompts[: 2 * concurrency] if number < 0 else prompts[first : first + count]
            for place in range(len(setups)):
                setup = setups[(place + number) % len(setups)]
                done = await turn(engines[setup.engine], setup, part, concurrency, args)
                if number >= 0:
                    turns[setup.name].append(done)
        print(f"concurrency {concurrency}, {count} prompts a round, {args.rounds} rounds", flush=True)
        for setup in setups:
            print(line(setup, turns[setup.name], turns[setups[0].name]), flush=True)
        results[str(concurrency)] = {
            name: [{"tokens": t.tokens, "seconds": t.seconds} for t in done] for name, done in turns.items()
        }
    for engine in engines.values():
        await engine.close()
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="", help="JSON with every turn's tokens and seconds")
    return parser.parse_args(argv)


if __name__ == "__main__":
    settle_threads(0)
    asyncio.run(main(arguments(sys.argv[1:])))
