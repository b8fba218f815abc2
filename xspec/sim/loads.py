"""When requests come: clients that wait for their answers (closed), or arrivals at given times (open).

Knows nothing about what the requests are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from xspec.errors import ConfigError

RequestKey = tuple[int, int, int]
"""Names a request: (phase it starts in, client, how many that client had before), or (0, 0, arrival)."""

Arrival = tuple[RequestKey, tuple[int, ...] | None]
"""A request and the difficulty classes it may be of; None: all."""


@dataclass(frozen=True, slots=True)
class Phase:
    """`concurrency` clients for `seconds`, each with one request at a time. `classes`: what they ask for."""

    concurrency: int
    seconds: float
    classes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1 or not 0.0 < self.seconds < math.inf:
            raise ConfigError(
                f"a phase of {self.concurrency} clients for {self.seconds:g} s; allowed: 1 client or more, "
                "above 0 s"
            )

    @property
    def label(self) -> str:
        of = "" if self.classes is None else " of class " + ",".join(str(index + 1) for index in self.classes)
        return f"{self.concurrency} clients{of}"


class Arrivals(Protocol):
    """The load of one run, as it unfolds."""

    def due(self, now_s: float) -> Sequence[Arrival]:
        """Requests that arrived by now and were not told before, with the classes they may be of."""

    def finished(self, key: RequestKey) -> None:
        """A request is answered."""

    def leaving(self, now_s: float) -> Sequence[RequestKey]:
        """Requests given up by now, told once: their answers are wanted no more."""

    def next_s(self) -> float | None:
        """When the next request comes if none finishes before; None: never."""


class Load(Protocol):
    """When requests come. Phases are those that results are told by."""

    @property
    def phases(self) -> tuple[tuple[str, float], ...]:
        """Label and end (s) of each phase, in order. An open load ends with its last answer."""

    @property
    def most_requests(self) -> int | None:
        """Most requests at once; None: no bound."""

    def arrivals(self) -> Arrivals: ...


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """Clients that send the next request when the last is answered. Those that the next phase has no place
    for leave and give up what they asked for, so that no phase works off the load of another."""

    steps: tuple[Phase, ...]

    @property
    def phases(self) -> tuple[tuple[str, float], ...]:
        ends = np.cumsum([phase.seconds for phase in self.steps])
        return tuple((phase.label, float(end)) for phase, end in zip(self.steps, ends, strict=True))

    @property
    def most_requests(self) -> int | None:
        return max(phase.concurrency for phase in self.steps)

    def arrivals(self) -> Arrivals:
        return _Clients(self)


class _Clients:
    def __init__(self, load: ClosedLoad) -> None:
        self._load = load
        self._ends = [end for _, end in load.phases]
        self._asked: dict[int, RequestKey] = {}  # by client
        self._sent: dict[tuple[int, int], int] = {}

    def due(self, now_s: float) -> Sequence[Arrival]:
        index = self._phase(now_s)
        if index == len(self._ends):
            return ()
        phase = self._load.steps[index]
        new = []
        for client in range(phase.concurrency):
            if client not in self._asked:
                before = self._sent.get((index, client), 0)
                self._sent[index, client] = before + 1
                self._asked[client] = (index, client, before)
                new.append((self._asked[client], phase.classes))
        return new

    def finished(self, key: RequestKey) -> None:
        del self._asked[key[1]]

    def leaving(self, now_s: float) -> Sequence[RequestKey]:
        index = self._phase(now_s)
        places = self._load.steps[index].concurrency if index < len(self._ends) else 0
        return [self._asked.pop(client) for client in sorted(self._asked) if client >= places]

    def _phase(self, now_s: float) -> int:
        return bisect_right(self._ends, now_s)

    def next_s(self) -> float | None:
        return None  # clients that wait for nothing have sent already


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Requests at given times (s), whoever waits. The run ends when all are answered."""

    times_s: tuple[float, ...]
    label: str = "arrivals"

    def __post_init__(self) -> None:
        if not self.times_s or list(self.times_s) != sorted(self.times_s) or self.times_s[0] < 0.0:
            raise ConfigError("arrivals need at least one time, from 0 and in order")

    @staticmethod
    def poisson(rate_rps: float, seconds: float, seed: int) -> OpenLoad:
        """`rate_rps` requests a second on average for `seconds`; the first one comes at once."""
        if not (0.0 < rate_rps < math.inf and 0.0 < seconds < math.inf):
            raise ConfigError(f"{rate_rps:g} requests a second for {seconds:g} s; allowed: numbers above 0")
        rng = np.random.default_rng((seed, 1))
        times = [0.0]
        while (later := times[-1] + float(rng.exponential(1.0 / rate_rps))) < seconds:
            times.append(later)
        return OpenLoad(tuple(times), f"{rate_rps:g} requests/s")

    @property
    def phases(self) -> tuple[tuple[str, float], ...]:
        return ((self.label, math.inf),)

    @property
    def most_requests(self) -> int | None:
        return None

    def arrivals(self) -> Arrivals:
        return _Times(self.times_s)


class _Times:
    def __init__(self, times_s: tuple[float, ...]) -> None:
        self._times_s = times_s
        self._told = 0

    def due(self, now_s: float) -> Sequence[Arrival]:
        new: list[Arrival] = []
        while self._told < len(self._times_s) and self._times_s[self._told] <= now_s:
            new.append(((0, 0, self._told), None))
            self._told += 1
        return new

    def finished(self, key: RequestKey) -> None:
        """Open: nobody waits for an answer before asking."""

    def leaving(self, now_s: float) -> Sequence[RequestKey]:
        return ()

    def next_s(self) -> float | None:
        return self._times_s[self._told] if self._told < len(self._times_s) else None
