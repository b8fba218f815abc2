"""A driver like those of benchmarks/peers, around an engine that only counts; runs in a process of its own.

Its answers are as long as the last token of their prompt says. `journal` is a file that gets a line for
every turn; `noise` prints on stdout; `helper` starts a process that is left behind; `fail` is where it fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.drivers.protocol import Answer, Job, Peer, Turn, closed_loop, main


class CountingEngine:
    """Gives every request its next token a step, 1, 2, 3, ...; keeps what was in flight at each step."""

    def __init__(self) -> None:
        self.flying: dict[int, list[int]] = {}  # request: given so far, in all
        self.begun: list[int] = []
        self.in_flight: list[int] = []
        self.dropped: list[int] = []

    def add(self, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        self.begun.append(number)
        self.flying[number] = [0, min(prompt[-1], max_tokens)]

    def step(self) -> Iterator[tuple[int, Sequence[int], bool]]:
        self.in_flight.append(len(self.flying))
        for number, state in list(self.flying.items()):
            state[0] += 1
            if state[0] == state[1]:
                del self.flying[number]
            yield number, [state[0]], state[0] == state[1]

    def drop(self, numbers: Sequence[int]) -> None:
        self.dropped = list(numbers)
        for number in numbers:
            del self.flying[number]


class FakePeer:
    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        if options.get("fail") == "load":
            raise ValueError("no such model")
        if options.get("fail") == "exit":
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        if options.get("noise"):
            print("a library says hello", flush=True)
        self.about = {"pid": str(os.getpid())}
        if options.get("helper"):
            self.about["helper"] = str(subprocess.Popen([sys.executable, "-c", HELPER]).pid)

    def run(self, job: Job) -> Turn:
        if self._options.get("noise"):
            os.write(1, b"{}\n")
        if self._options.get("journal"):
            with Path(self._options["journal"]).open("a") as journal:
                firsts = [prompt[0] for prompt in job.prompts]
                journal.write(f"{self._options['name']} {job.concurrency} {job.max_tokens} {firsts}\n")
        if self._options.get("fail") == "run":
            raise RuntimeError("out of memory")
        turn = closed_loop(CountingEngine(), job)
        seconds = self._options.get("seconds", 1.0)
        return Turn(seconds, tuple(Answer(one.tokens, one.finished) for one in turn.answers))

    def close(self) -> None:
        if self._options.get("journal"):
            with Path(self._options["journal"]).open("a") as journal:
                journal.write(f"{self._options['name']} closed\n")


HELPER = "import time; time.sleep(600)"


def load(options: dict[str, Any]) -> Peer:
    return FakePeer(options)


if __name__ == "__main__":
    sys.exit(main(load))
