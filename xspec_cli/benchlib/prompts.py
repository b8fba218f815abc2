"""Where benchmark prompts come from: a file (xspec/text/prompts.py) or a small built-in set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xspec.errors import ConfigError
from xspec.text import prompts as files
from xspec_cli.benchlib.questions import QUESTIONS

__all__ = ["Prompt", "halves", "load_prompts", "take"]


@dataclass(frozen=True, slots=True)
class Prompt(files.Prompt):
    """A prompt and what a mixed load says of it: its class of traffic, and a temperature of its own."""

    traffic: str = ""
    temperature: float | None = None  # None: that of the run


def load_prompts(path: str, *, chat: bool, flag: str = "prompts") -> list[Prompt]:
    """The prompts of `path`, the built-in questions if it is empty; ConfigError names what is wrong."""
    if not path:
        return [Prompt(text=question) for question in QUESTIONS]
    found = files.read_prompts(path, flag=flag, chat=chat)
    return [Prompt(text=prompt.text, messages=prompt.messages) for prompt in found]


def take(prompts: Sequence[Prompt], first: int, count: int) -> list[Prompt]:
    """`count` prompts from position `first` on, starting over at the end of the set."""
    return [prompts[(first + index) % len(prompts)] for index in range(count)]


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Two sets without a common place, every other prompt of each class of traffic in either.

    ConfigError where there are too few prompts for two.
    """
    seen: dict[str, int] = {}
    parts: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in prompts:
        seen[prompt.traffic] = seen.get(prompt.traffic, -1) + 1
        parts[seen[prompt.traffic] % 2].append(prompt)
    if not parts[1]:
        raise ConfigError(
            f"{len(prompts)} prompts are too few to choose the best fixed policy by one half of them and "
            "compare by the other"
        )
    return parts
