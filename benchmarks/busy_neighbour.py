"""What a busy neighbour costs: plain rounds alone, then with another process spinning on one core, and again.

    python benchmarks/busy_neighbour.py
    python benchmarks/busy_neighbour.py --requests 8 --kernels native

One engine at a time, without speculation, greedy. Each alternation times the same answers alone, beside the
neighbour, and alone again; its ratio is the middle one over the mean of the outer two. Prints ms per token
and the median ratio with its range. Exit code 1 if the native kernels slow down more than --allowed.

A neighbour takes half of the core it shares. Work split in halves beforehand then takes twice as long at
best, work dealt out as it goes 4/3; a round lies above that, depending on how threads wait for each other:

- The native team (xspec/kernels/csrc/team.cpp) spins for about 20 us at a barrier, then sleeps on a futex. A
  thread out of work thus leaves its core idle, and the kernel moves the thread that waits behind the
  neighbour there at once, not at its next turn. Work is dealt by ticket, in shares that shrink towards the
  end of an operation: who has a core takes more of it.
- torch's kernels wait in libgomp at the end of every parallel region. How long they spin before they sleep is
  settled in xspec/threads.py; while they do, their core looks busy and nobody is moved there.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from xspec.llm import LLM
from xspec.threads import usable_cores
from xspec_cli.benchlib.stats import median

SPIN = """
import os, sys
if int(sys.argv[1]) >= 0:
    os.sched_setaffinity(0, {int(sys.argv[1])})
print("spinning", flush=True)
while True:
    pass
"""

SETTLE_S = 0.2
"""After the neighbour has come or gone: the scheduler moves threads for a moment."""


@dataclass(frozen=True, slots=True)
class Alternation:
    """ms per token of each request."""

    before_ms: float
    beside_ms: float
    after_ms: float

    @property
    def alone_ms(self) -> float:
        return (self.before_ms + self.after_ms) / 2

    @property
    def ratio(self) -> float:
        return self.beside_ms / self.alone_ms


@contextmanager
def neighbour(core: int) -> Iterator[None]:
    """A process that spins on `core`, or wherever the scheduler puts it (-1)."""
    spinner = subprocess.Popen(
        [sys.executable, "-c", SPIN, str(core)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        assert spinner.stdout is not None
        if not spinner.stdout.readline():
            raise SystemExit(f"--core {core}: the neighbour could not start there")
        time.sleep(SETTLE_S)
        yield
    finally:
        spinner.kill()
        spinner.wait()
        time.sleep(SETTLE_S)


def ms_per_token(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    """Of each request: all of them decode together, a token a round; their short prompts are included."""
    params = llm.params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    began_s = time.perf_counter()
    llm.generate(prompts, params)
    return (time.perf_counter() - began_s) * 1e3 / max_tokens


def alternations(kernels: str, args: argparse.Namespace) -> list[Alternation]:
    with LLM(
        args.model or None,
        cpu_kernels=kernels,
        dtype=args.dtype,
        num_speculative_tokens=0,
        enable_prefix_cache=False,
        max_seqs_per_batch=args.requests,
        max_model_len=args.max_tokens + 64,
    ) as llm:
        rng = random.Random(0)
        prompts = [[rng.randrange(100, 300) for _ in range(16)] for _ in range(args.requests)]
        ms_per_token(llm, prompts, args.max_tokens)
        found = []
        for _ in range(args.alternations):
            before = ms_per_token(llm, prompts, args.max_tokens)
            with neighbour(args.core):
                beside = ms_per_token(llm, prompts, args.max_tokens)
            found.append(Alternation(before, beside, ms_per_token(llm, prompts, args.max_tokens)))
        return found


def main(args: argparse.Namespace) -> int:
    print(f"{usable_cores()} usable cores, {args.requests} requests, neighbour on core {args.core}")
    slowed = 0
    for kernels in args.kernels.split(","):
        found = alternations(kernels, args)
        ratios = [each.ratio for each in found]
        ratio = median(ratios)
        print(
            f"{kernels}: alone {median([each.alone_ms for each in found]):.1f} ms a token, "
            f"beside a neighbour {median([each.beside_ms for each in found]):.1f} ms, {ratio:.2f}-fold "
            f"({min(ratios):.2f} to {max(ratios):.2f}, {len(found)} alternations)",
            flush=True,
        )
        slowed += kernels == "native" and ratio > args.allowed
    return int(slowed > 0)


if __name__ == "__main__":
    plain_text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain_text)
    parser.add_argument("--model", default="", help="empty: the embedded one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", default="native,torch", help="values of --cpu_kernels, in turn")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument(
        "--core", type=int, default=max(os.sched_getaffinity(0)), help="-1: wherever the scheduler puts it"
    )
    parser.add_argument("--allowed", type=float, default=2.2, help="slow-down of the native kernels")
    sys.exit(main(parser.parse_args()))
