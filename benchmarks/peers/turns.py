"""The order of turns and what comes of them: pure functions of numbers, no processes and no clocks.

Every round gives each configuration one turn on the same prompts, so a round is what ratios are taken over: a
machine that drifts treats both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.peers.drivers.protocol import Turn
from xspec_cli.benchlib.stats import median

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one configuration."""

    name: str
    concurrency: int
    round: int
    turn: Turn

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.turn.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.turn.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def rotated(items: Sequence[T], round_number: int) -> list[T]:
    """Each round begins with the next one, so that nobody always follows the same neighbour at the start."""
    first = round_number % len(items)
    return [*items[first:], *items[:first]]


def prompts_of(turn: int, count: int, prompts: Sequence[T]) -> list[T]:
    """`count` prompts for a turn; other turns get others, until the set starts over."""
    return [prompts[(turn * count + index) % len(prompts)] for index in range(count)]


def speeds(samples: Sequence[Sample], name: str, concurrency: int) -> list[float]:
    """Output tokens/s by round."""
    found = [one for one in samples if (one.name, one.concurrency) == (name, concurrency)]
    return [one.tokens_per_s for one in sorted(found, key=lambda one: one.round)]


def ratio(samples: Sequence[Sample], name: str, base: str, concurrency: int) -> Spread | None:
    """Of a configuration over another, round by round; None before both have had the same turns."""
    tops, bottoms = (speeds(samples, one, concurrency) for one in (name, base))
    if not tops or len(tops) != len(bottoms):
        return None
    return Spread.of([top / bottom for top, bottom in zip(tops, bottoms, strict=True)])


def same_answers(samples: Sequence[Sample], name: str, base: str, concurrency: int) -> float | None:
    """Share of answers with the same tokens, of those that both finished; None where there are none."""
    equal = compared = 0
    turns = {(one.name, one.round): one.turn for one in samples if one.concurrency == concurrency}
    for (of, number), turn in turns.items():
        if of == name and (other := turns.get((base, number))) is not None:
            for ours, theirs in zip(turn.answers, other.answers, strict=True):
                if ours.finished and theirs.finished:
                    compared += 1
                    equal += ours.tokens == theirs.tokens
    return equal / compared if compared else None


def table(samples: Sequence[Sample], names: Sequence[str], bases: Sequence[str], concurrency: int) -> str:
    """One line a configuration: tokens/s, and how it compares with each of `bases` (median, low to high)."""
    width = max(map(len, names))
    columns = "".join(f"{'x ' + base:>26}" for base in bases)
    lines = [f"{'':{width}}{'tokens/s':>10}{'low':>9}{'high':>9}{'rounds':>8}{columns}{'same text':>11}"]
    for name in names:
        found = speeds(samples, name, concurrency)
        if not found:
            continue
        speed = Spread.of(found)
        cells = "".join(f"{_ratio(ratio(samples, name, base, concurrency)):>26}" for base in bases)
        same = same_answers(samples, name, names[0], concurrency)
        lines.append(
            f"{name:{width}}{speed.median:10.1f}{speed.low:9.1f}{speed.high:9.1f}{len(found):8d}{cells}"
            + (f"{'-':>11}" if same is None else f"{100 * same:10.0f}%")
        )
    return "\n".join(lines)


def _ratio(found: Spread | None) -> str:
    return "-" if found is None else f"{found.median:.2f} ({found.low:.2f} .. {found.high:.2f})"
