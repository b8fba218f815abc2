"""Looped targets in the simulator: requests as streams of match flags, made up or recorded, and contenders.

A flag says whether a draft after d loops is the token that the target commits there. So rounds of any (K, d)
have their true outcome, and all contenders meet the same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from xspec.cost.model import Costs
from xspec.cost.read import Reader, choice, count, counts, listing, read_json, read_object, record, text
from xspec.errors import ConfigError, UnsupportedError
from xspec.policy.fixed import FixedPolicy
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.make_spec import make_speculation_policy
from xspec.policy.spec_config import AdaptiveSpecConfig
from xspec.sim.compare import Contender
from xspec.sim.loads import RequestKey
from xspec.sim.world import LoopFlags, SimRequest

FORMAT, VERSION = "xspec match flags", 1
CLIENT_STRIDE = 7919
"""Clients walk through recorded streams in order, each from a place of its own."""


@dataclass(frozen=True, slots=True)
class LoopedText:
    """A kind of text. `rates`: how often each depth matches, ascending depths.

    `depth_correlation` in [0, 1): how much depths agree on which tokens are hard; `persistence` in [0, 1):
    how much neighbouring tokens are alike.
    """

    name: str
    rates: tuple[float, ...]
    depth_correlation: float = 0.8
    persistence: float = 0.0

    def __post_init__(self) -> None:
        if not self.rates or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise ConfigError(f"match rates of {self.name} are {self.rates}; allowed: numbers from 0 to 1")
        for name, value in (
            ("depth_correlation", self.depth_correlation),
            ("persistence", self.persistence),
        ):
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"{name} of {self.name} is {value}; allowed: from 0 to below 1")

    def flags(self, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """[tokens, depths]: a normal score for each, below the quantile of its rate where it matches."""
        shared = rng.standard_normal(tokens)
        rho = self.persistence
        for i in range(1, tokens if rho else 0):
            shared[i] = rho * shared[i - 1] + (1.0 - rho * rho) ** 0.5 * shared[i]
        own = rng.standard_normal((tokens, len(self.rates)))
        c = self.depth_correlation
        scores = c**0.5 * shared[:, None] + (1.0 - c) ** 0.5 * own
        below = NormalDist().inv_cdf
        limits = [below(p) if 0.0 < p < 1.0 else (-np.inf if p == 0.0 else np.inf) for p in self.rates]
        return np.asarray(scores < np.array(limits))


def looped_request(
    key: RequestKey, name: str, prompt_tokens: int, depths: tuple[int, ...], flags: np.ndarray
) -> SimRequest:
    """A request with these flags [answer_tokens, depths]."""
    runs: dict[int, tuple[int, ...]] = {}
    for x, depth in enumerate(depths):
        run, found = 0, []
        for flag in reversed(flags[:, x].tolist()):
            run = run + 1 if flag else 0
            found.append(run)
        runs[depth] = tuple(reversed(found))
    nothing = np.zeros((len(flags), 0), dtype=np.float32)
    loops = LoopFlags(depths, flags, runs)
    return SimRequest(key, name, prompt_tokens, len(flags), (), nothing, nothing, loops)


@dataclass(frozen=True, slots=True)
class LoopedSynthetic:
    """Made-up requests of some kinds of text. Lengths are uniform over their (lowest, highest)."""

    texts: tuple[LoopedText, ...]
    depths: tuple[int, ...]
    draft_width: int
    prompt_tokens: tuple[int, int] = (64, 64)
    answer_tokens: tuple[int, int] = (128, 256)

    def __post_init__(self) -> None:
        wrong = [one.name for one in self.texts if len(one.rates) != len(self.depths)]
        if not self.texts or wrong:
            raise ConfigError(
                f"{len(self.depths)} depths need as many match rates: {', '.join(wrong) or 'none'}"
            )
        for name, (low, high) in (("prompt", self.prompt_tokens), ("answer", self.answer_tokens)):
            if not 1 <= low <= high:
                raise ConfigError(f"{name} tokens {low} to {high}; allowed: from 1, the lower number first")

    @property
    def most_tokens(self) -> int:
        return self.prompt_tokens[1] + self.answer_tokens[1]

    def request(self, seed: int, key: RequestKey, classes: tuple[int, ...] | None) -> SimRequest:
        rng = np.random.default_rng((seed, *key))
        prompt = int(rng.integers(self.prompt_tokens[0], self.prompt_tokens[1] + 1))
        answer = int(rng.integers(self.answer_tokens[0], self.answer_tokens[1] + 1))
        kinds = self.texts if classes is None else [self.texts[index] for index in classes]
        kind = kinds[int(rng.integers(len(kinds)))]
        return looped_request(key, kind.name, prompt, self.depths, kind.flags(answer, rng))


# -- recorded flags -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlagStream:
    """One recorded answer. `flags` [tokens, depths] bool; `text_class`: a name of the text it is of."""

    prompt_tokens: int
    flags: np.ndarray
    text_class: str = "recorded"


@dataclass(frozen=True, slots=True)
class LoopedRecorded:
    """Recorded answers as a population; classes are their text classes in alphabetical order."""

    streams: tuple[FlagStream, ...]
    depths: tuple[int, ...]
    draft_width: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({stream.text_class for stream in self.streams}))

    @property
    def most_tokens(self) -> int:
        return max(stream.prompt_tokens + len(stream.flags) for stream in self.streams)

    def request(self, seed: int, key: RequestKey, classes: tuple[int, ...] | None) -> SimRequest:
        names = self.names
        wanted = names if classes is None else [names[index] for index in classes]
        streams = [stream for stream in self.streams if stream.text_class in wanted]
        phase, client, ordinal = key
        found = streams[(ordinal + CLIENT_STRIDE * (client + 31 * phase) + seed) % len(streams)]
        return looped_request(key, found.text_class, found.prompt_tokens, self.depths, found.flags)


def write_flags(path: Path, depths: Sequence[int], streams: Sequence[FlagStream]) -> None:
    """A flag file. ConfigError if it exists or cannot be written."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "depths": list(depths),
        "requests": [
            {
                "prompt_tokens": stream.prompt_tokens,
                "text_class": stream.text_class,
                "flags": ["".join("01"[int(flag)] for flag in column) for column in stream.flags.T],
            }
            for stream in streams
        ],
    }
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(document, file)
            file.write("\n")
    except OSError as error:
        raise ConfigError(f"{path}: match flags cannot be written: {error.strerror or error}") from error


def read_flags(path: Path, draft_width: int) -> LoopedRecorded:
    """The inverse of `write_flags`, as a population for up to `draft_width` drafts. ConfigError."""
    try:
        raw = read_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: match flags cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    mistakes: list[str] = []
    held = read_object(raw, _FLAGS, "", mistakes, needed=_FLAGS)
    streams = [] if mistakes else list(_streams(held["requests"], held["depths"], mistakes))
    if mistakes:
        raise UnsupportedError(f"{path} is no valid file of match flags", mistakes)
    return LoopedRecorded(tuple(streams), held["depths"], draft_width)


def _streams(
    requests: Sequence[Mapping[str, Any]], depths: tuple[int, ...], mistakes: list[str]
) -> Iterator[FlagStream]:
    for index, one in enumerate(requests):
        columns = one["flags"]
        good = len(columns) == len(depths) and len({len(column) for column in columns}) == 1
        if not good or not all(set(column) <= {"0", "1"} for column in columns):
            mistakes.append(f"requests[{index}].flags: allowed: {len(depths)} texts of 0 and 1, equally long")
            continue
        flags = np.array([[digit == "1" for digit in column] for column in columns]).T
        yield FlagStream(one["prompt_tokens"], flags, one["text_class"])


_REQUEST: Mapping[str, Reader] = {
    "prompt_tokens": count(1),
    "text_class": text,
    "flags": listing(text, "texts of 0 and 1"),
}

_FLAGS: Mapping[str, Reader] = {
    "format": choice((FORMAT,)),
    "version": count(VERSION, VERSION),
    "depths": counts,
    "requests": listing(record(dict, _REQUEST, _REQUEST), "requests"),
}


# -- contenders -----------------------------------------------------------------------------------


def fixed_pairs(geometry: CandidateGeometry) -> Iterator[Contender]:
    """Plain rounds and every prepared (K, d)."""
    yield Contender("plain", lambda device: FixedPolicy(), fixed=True)
    for steps in geometry.steps:
        for depth in geometry.depths:
            yield fixed_pair(steps, depth)


def fixed_pair(steps: int, depth: int) -> Contender:
    return Contender(f"{steps}@{depth}", lambda device: FixedPolicy(steps, depth=depth), fixed=True)


def speculation_contender(
    policy: str, config: AdaptiveSpecConfig | None, costs: Costs | None, geometry: CandidateGeometry
) -> Contender:
    """The policy of that name, see `make_speculation_policy`."""
    return Contender(policy, lambda device: make_speculation_policy(policy, config, costs, geometry))
