"""The requests of a simulation: how long they are, and which drafts the target would accept at each position.

Everything random is drawn from (seed, request key) alone, so all contenders meet identical requests whatever
they did before (common random numbers). Knows nothing about policies, costs or the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from xspec.errors import ConfigError
from xspec.sim.loads import Load, RequestKey

CERTAIN = 1e-6
"""Signals keep this distance from 0 and 1, where a logit would be infinite."""


@dataclass(frozen=True, slots=True, eq=False)
class LoopFlags:
    """What a looped drafter would pick. `flags` [answer_tokens, depths]: whether d loops pick that token;
    `runs[d][a]`: matches in a row of depth d after `a` answer tokens."""

    depths: tuple[int, ...]
    flags: np.ndarray
    runs: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """One request with everything that will ever be random about it.

    `runs[a]` is the number of drafts in a row the target would accept after `a` answer tokens (K at most);
    `chances` and `signals` [answer_tokens, K] are the true probability that draft k is accepted if all before
    it were, and what the drafter says of it. `loops`: of a looped drafter, which has none of these.
    """

    key: RequestKey
    difficulty: str
    prompt_tokens: int
    answer_tokens: int
    runs: tuple[int, ...]
    chances: np.ndarray
    signals: np.ndarray
    loops: LoopFlags | None = None

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


class Population(Protocol):
    """Where requests come from."""

    @property
    def draft_width(self) -> int:
        """K: drafts whose fate is known at every position."""

    @property
    def most_tokens(self) -> int:
        """Prompt and answer of the longest request."""

    def request(self, seed: int, key: RequestKey, classes: tuple[int, ...] | None) -> SimRequest:
        """The request of that name. `classes`: difficulty classes it may be of (None: all)."""


@dataclass(frozen=True, slots=True)
class Difficulty:
    """A kind of text. `rates[k]`: how often draft k is accepted where all before it were.

    `spread` in [0, 1): how much that chance differs from position to position around its mean r, as the
    variance over r (1 - r) of a beta distribution. With 0 all positions are alike.
    """

    name: str
    rates: tuple[float, ...]
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not self.rates or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise ConfigError(f"acceptance of {self.name} is {self.rates}; allowed: numbers from 0 to 1")
        if not 0.0 <= self.spread < 1.0:
            raise ConfigError(f"spread of {self.name} is {self.spread}; allowed: numbers from 0 to below 1")


@dataclass(frozen=True, slots=True)
class SignalModel:
    """How a drafter's estimate differs from the truth, in logits: a constant error and noise."""

    calibration_error: float = 0.0
    noise: float = 0.0

    def of(self, chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        inside = np.clip(chances, CERTAIN, 1.0 - CERTAIN)
        logits = np.log(inside / (1.0 - inside)) + self.calibration_error
        if self.noise:
            logits = logits + self.noise * rng.standard_normal(chances.shape)
        signals: np.ndarray = (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)
        return signals


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Made-up requests. Lengths are uniform over their (lowest, highest).

    `burst_tokens`: with a number, no request keeps one class; its text changes class after spells of that
    many tokens on average (a Markov chain over the classes along the answer): acceptance comes in bursts.
    """

    difficulties: tuple[Difficulty, ...]
    signals: SignalModel = SignalModel()
    prompt_tokens: tuple[int, int] = (16, 96)
    answer_tokens: tuple[int, int] = (64, 192)
    burst_tokens: float | None = None

    def __post_init__(self) -> None:
        if not self.difficulties or len({len(kind.rates) for kind in self.difficulties}) != 1:
            raise ConfigError("every difficulty class needs the same number of acceptance rates")
        for name, (low, high) in (("prompt", self.prompt_tokens), ("answer", self.answer_tokens)):
            if not 1 <= low <= high:
                raise ConfigError(f"{name} tokens {low} to {high}; allowed: from 1, the lower number first")
        if self.burst_tokens is not None and (self.burst_tokens < 1.0 or len(self.difficulties) < 2):
            raise ConfigError("spells need two classes to alternate between and last 1 token or more")

    @property
    def draft_width(self) -> int:
        return len(self.difficulties[0].rates)

    @property
    def most_tokens(self) -> int:
        return self.prompt_tokens[1] + self.answer_tokens[1]

    def request(self, seed: int, key: RequestKey, classes: tuple[int, ...] | None) -> SimRequest:
        rng = np.random.default_rng((seed, *key))
        prompt = int(rng.integers(self.prompt_tokens[0], self.prompt_tokens[1] + 1))
        answer = int(rng.integers(self.answer_tokens[0], self.answer_tokens[1] + 1))
        kinds = self.difficulties if classes is None else [self.difficulties[index] for index in classes]
        start = int(rng.integers(len(kinds)))
        kind = kinds[start]
        name = kind.name if self.burst_tokens is None else "bursty"
        rates = np.array([k.rates for k in kinds])
        spreads = np.array([k.spread for k in kinds])
        states = self._states(rng, start, len(kinds), answer + self.draft_width)
        # draft k after a answer tokens is answer token a + k
        anchored = np.lib.stride_tricks.sliding_window_view(states, self.draft_width)[:answer]
        means = rates[anchored, np.arange(self.draft_width)]
        chances = _spread(means, spreads[anchored], rng)
        return drawn(key, name, prompt, chances, self.signals.of(chances, rng), rng)

    def _states(self, rng: np.random.Generator, start: int, classes: int, tokens: int) -> np.ndarray:
        """Class of each answer token [tokens]."""
        if self.burst_tokens is None or classes == 1:
            return np.full(tokens, start)
        leaves = rng.random(tokens) < 1.0 / self.burst_tokens
        leaves[0] = False
        moves = np.where(leaves, rng.integers(1, classes, tokens), 0)
        return (start + np.cumsum(moves)) % classes


def _spread(means: np.ndarray, spreads: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Chances with these means, beta distributed where there is any spread."""
    varies = (spreads > 0.0) & (means > 0.0) & (means < 1.0)
    if not varies.any():
        return means
    weight = np.where(varies, 1.0 / np.where(varies, spreads, 0.5) - 1.0, 1.0)
    inside = np.where(varies, means, 0.5)
    return np.where(varies, rng.beta(inside * weight, (1.0 - inside) * weight), means)


def drawn(
    key: RequestKey,
    difficulty: str,
    prompt_tokens: int,
    chances: np.ndarray,
    signals: np.ndarray,
    rng: np.random.Generator,
    known: np.ndarray | None = None,
) -> SimRequest:
    """A request whose drafts are accepted by these chances [answer, K].

    `known` [answer, K] settles some of them: 1 accepted, 0 refused, -1 not known.
    """
    flags = rng.random(chances.shape) < chances
    if known is not None:
        flags = np.where(known >= 0, known > 0, flags)
    runs = flags.cumprod(axis=1).sum(axis=1)
    return SimRequest(key, difficulty, prompt_tokens, len(chances), tuple(map(int, runs)), chances, signals)


class World:
    """A population under a load. Requests are made once and kept: every contender meets the same objects."""

    def __init__(self, population: Population, load: Load, seed: int) -> None:
        self.population = population
        self.load = load
        self._seed = seed
        self._made: dict[tuple[RequestKey, tuple[int, ...] | None], SimRequest] = {}

    def request(self, key: RequestKey, classes: tuple[int, ...] | None) -> SimRequest:
        found = self._made.get((key, classes))
        if found is None:
            found = self._made[key, classes] = self.population.request(self._seed, key, classes)
        return found
