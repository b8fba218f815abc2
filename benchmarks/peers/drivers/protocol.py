"""What a driver and the runner say to each other: JSON, an object a line, over the driver's stdin and stdout.

`load` starts an engine, `run` takes a turn, the end of stdin ends the driver. Between turns the runner stops
the whole process group. Runs in the peers' environments too: it imports only the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO


@dataclass(frozen=True, slots=True)
class Job:
    """One turn: token ids of prompts, requests in flight, and the longest answer in tokens."""

    prompts: tuple[tuple[int, ...], ...]
    concurrency: int
    max_tokens: int


@dataclass(slots=True)
class Answer:
    """Tokens of one prompt, its end of text included; `finished` unless the turn ended before it did."""

    tokens: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn produced, in the order of its prompts; those never begun have no tokens."""

    seconds: float
    answers: tuple[Answer, ...]


class Peer(Protocol):
    """A loaded engine."""

    @property
    def about(self) -> Mapping[str, str]:
        """What the result should say of it: versions, settings."""
        ...

    def run(self, job: Job) -> Turn: ...

    def close(self) -> None: ...


class Stepping(Protocol):
    """An engine that computes one step of all its requests when told to."""

    def add(self, number: int, prompt: Sequence[int], max_tokens: int) -> None: ...

    def step(self) -> Iterable[tuple[int, Sequence[int], bool]]:
        """(request, its new tokens, whether it ended) of a step."""
        ...

    def drop(self, numbers: Sequence[int]) -> None: ...


def closed_loop(engine: Stepping, job: Job, clock: Callable[[], float] = time.perf_counter) -> Turn:
    """A turn with exactly `concurrency` requests in flight: one that ends makes room for the next.

    The clock stops when a place can no longer be filled; what runs then is dropped, its tokens so far count.
    """
    answers = tuple(Answer() for _ in job.prompts)
    waiting = deque(range(len(job.prompts)))
    running: set[int] = set()

    def begin_next() -> None:
        number = waiting.popleft()
        running.add(number)
        engine.add(number, job.prompts[number], job.max_tokens)

    begin_s = clock()
    for _ in range(job.concurrency):
        begin_next()
    while len(running) == job.concurrency:
        for number, tokens, ended in engine.step():
            answers[number].tokens += tokens
            if ended:
                answers[number].finished = True
                running.remove(number)
                if waiting:
                    begin_next()
    seconds = clock() - begin_s
    engine.drop(sorted(running))
    return Turn(seconds, answers)


def parse_job(message: Mapping[str, Any]) -> Job:
    """ValueError where a turn could not be taken as it is asked for."""
    prompts = tuple(tuple(prompt) for prompt in message["prompts"])
    job = Job(prompts, int(message["concurrency"]), int(message["max_tokens"]))
    if job.concurrency < 1 or job.max_tokens < 1 or not all(prompts):
        raise ValueError("concurrency and max_tokens are at least 1, and prompts are not empty")
    if len(prompts) < job.concurrency:
        raise ValueError(f"{job.concurrency} requests in flight need as many prompts, got {len(prompts)}")
    return job


def encode_turn(turn: Turn) -> dict[str, Any]:
    answers = [{"tokens": answer.tokens, "finished": answer.finished} for answer in turn.answers]
    return {"seconds": turn.seconds, "answers": answers}


def decode_turn(reply: Mapping[str, Any]) -> Turn:
    answers = (
        Answer([int(token) for token in one["tokens"]], bool(one["finished"])) for one in reply["answers"]
    )
    return Turn(float(reply["seconds"]), tuple(answers))


def serve(load: Callable[[dict[str, Any]], Peer], requests: TextIO, replies: TextIO) -> None:
    """Answer every request line with one reply line until `requests` ends."""
    peer: Peer | None = None
    try:
        for line in requests:
            try:
                message = json.loads(line)
                if message["command"] == "load":
                    peer = load(message["options"])
                    reply: dict[str, Any] = {"about": dict(peer.about)}
                elif message["command"] == "run" and peer is not None:
                    reply = encode_turn(peer.run(parse_job(message)))
                else:
                    raise ValueError(f"command {message['command']!r}: allowed: load, then run")
            except Exception as error:  # whatever a peer raises: the runner has to hear of it
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    finally:
        if peer is not None:
            peer.close()


def main(load: Callable[[dict[str, Any]], Peer]) -> int:
    """`serve` on stdin and stdout; what libraries print goes to stderr instead of between the replies."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        serve(load, sys.stdin, replies)
    return 0


def options_of(options: Mapping[str, Any], allowed: Mapping[str, Any]) -> dict[str, Any]:
    """Options with their defaults; ValueError names one that is unknown."""
    if unknown := sorted(set(options) - set(allowed)):
        raise ValueError(f"option {unknown[0]}: unknown; allowed: {', '.join(sorted(allowed))}")
    return {**allowed, **options}
