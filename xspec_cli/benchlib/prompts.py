"""Where benchmark prompts come from: a file (xspec/text/prompts.py) or a small built-in set."""

from __future__ import annotations

from collections.abc import Sequence

from xspec.text.prompts import Prompt, read_prompts
from xspec_cli.benchlib.questions import QUESTIONS

__all__ = ["Prompt", "load_prompts", "take"]


def load_prompts(path: str, *, chat: bool) -> list[Prompt]:
    """The prompts of `path`, the built-in questions if it is empty; ConfigError names what is wrong."""
    if not path:
        return [Prompt(text=question) for question in QUESTIONS]
    return read_prompts(path, flag="prompts", chat=chat)


def take(prompts: Sequence[Prompt], first: int, count: int) -> list[Prompt]:
    """`count` prompts from position `first` on, starting over at the end of the set."""
    return [prompts[(first + index) % len(prompts)] for index in range(count)]
