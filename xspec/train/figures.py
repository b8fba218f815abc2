"""Figures of a drafter's rollouts: what they are, evaluation.json, and the table for people.

Pure data; `evaluate.py` makes them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xspec.train.journal import write_atomically

FORMAT = "xspec drafter evaluation"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Figures:
    """Rollouts of one prompt set at one temperature. `acceptance[k]`: share of the rounds that verified draft
    k + 1 after accepting those before it in which it was accepted too; None: there was no such round."""

    prompts: str
    temperature: float
    sequences: int
    answer_tokens: int
    rounds: int
    mean_accepted_length: float | None  # tokens a round, the target's own included
    acceptance: tuple[float | None, ...]


class FiguresFile:
    """evaluation.json: figures under the facts they hold for. With other facts it starts anew."""

    def __init__(self, path: Path, facts: Mapping[str, Any], *, anew: bool = False) -> None:
        self._path = path
        self._head = {"format": FORMAT, "version": VERSION, **json.loads(json.dumps(facts))}
        self.figures: list[Figures] = [] if anew else self._read()

    def add(self, figures: Figures) -> None:
        self.figures.append(figures)
        results = [dataclasses.asdict(found) for found in self.figures]
        write_atomically(self._path, json.dumps({**self._head, "results": results}, indent=1) + "\n")

    def _read(self) -> list[Figures]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            results = content.pop("results")
            if content != self._head:
                return []
            return [Figures(**{**result, "acceptance": tuple(result["acceptance"])}) for result in results]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []  # none yet, or not ours to read: it is made again


def table(figures: Sequence[Figures]) -> str:
    """A line per prompt set and temperature; columns 1, 2, .. are `acceptance`."""
    width = max((len(found.prompts) for found in figures), default=0)
    places = max((len(found.acceptance) for found in figures), default=0)
    numbers = "".join(f"{place:>6}" for place in range(1, places + 1))
    lines = [f"{'':<{width}}  temperature   rounds  tokens/round  accepted, given those before:"]
    lines.append(f"{'':<{width}}  {'':<11}  {'':>7}  {'':>12}  {numbers}")
    for found in figures:
        rates = "".join(f"{_shown(rate):>6}" for rate in found.acceptance)
        length = _shown(found.mean_accepted_length)
        lines.append(
            f"{found.prompts:<{width}}  {found.temperature:>11g}  {found.rounds:>7}  {length:>12}  {rates}"
        )
    return "\n".join(line.rstrip() for line in lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
