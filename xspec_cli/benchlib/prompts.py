"""Where benchmark prompts come from: a text file, a JSONL file or a small built-in set.

A prompt is either one text or a list of chat messages. Knows nothing about tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from xspec.errors import ConfigError
from xspec_cli.benchlib.questions import QUESTIONS

TEXT_FIELDS = ("question", "prompt", "text")
JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of `text` and `messages` is set."""

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None

    def as_messages(self) -> list[dict[str, Any]]:
        if self.messages is not None:
            return [dict(message) for message in self.messages]
        return [{"role": "user", "content": self.text}]


def load_prompts(path: str, *, chat: bool) -> list[Prompt]:
    """The prompts of `path`, the built-in questions if it is empty; ConfigError names the line that is wrong.

    JSONL records hold messages, turns (the first turn is used) or question / prompt / text. Any other file is
    plain text: every non-empty line is a prompt.
    """
    if not path:
        return [Prompt(text=question) for question in QUESTIONS]
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts={path} cannot be read: {error}") from error
    jsonl = path.endswith(JSONL_SUFFIXES)
    prompts = [
        _from_json(line, f"--prompts={path} line {number}", chat=chat) if jsonl else Prompt(text=line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"--prompts={path} holds no prompts")
    return prompts


def take(prompts: Sequence[Prompt], first: int, count: int) -> list[Prompt]:
    """`count` prompts from position `first` on, starting over at the end of the set."""
    return [prompts[(first + index) % len(prompts)] for index in range(count)]


def _from_json(line: str, where: str, *, chat: bool) -> Prompt:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if isinstance(record, str) and record.strip():
        return Prompt(text=record)
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is {type(record).__name__}; expected an object or a non-empty string")
    if "messages" in record:
        return _from_messages(record["messages"], where, chat=chat)
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise ConfigError(f"{where}: turns must be a non-empty list of strings")
        return _from_text(turns[0], f"{where}: turns[0]")
    for name in TEXT_FIELDS:
        if name in record:
            return _from_text(record[name], f"{where}: {name}")
    allowed = ", ".join(("messages", "turns", *TEXT_FIELDS))
    raise ConfigError(f"{where} has the fields {', '.join(record) or 'none'}; one of {allowed} is needed")


def _from_text(value: Any, where: str) -> Prompt:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where} must be a non-empty string, found {value!r:.60}")
    return Prompt(text=value)


def _from_messages(value: Any, where: str, *, chat: bool) -> Prompt:
    if not chat:
        raise ConfigError(f"{where} holds messages, which need --chat")
    well_formed = (
        isinstance(value, list)
        and value
        and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
            for message in value
        )
    )
    if not well_formed:
        raise ConfigError(f"{where}: messages must be a non-empty list of objects with role and content")
    return Prompt(messages=tuple(value))
