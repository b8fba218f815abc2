"""Files of prompts: JSONL records or lines of text, and their token ids under the model's chat template.

A prompt is either one text or a list of chat messages. Knows nothing about what the prompts are for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from xspec.errors import ConfigError

if TYPE_CHECKING:
    from xspec.text.tokenizer import TextAssets

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

    def ids(self, text: TextAssets, *, chat: bool) -> list[int]:
        """Token ids: the turn(s) of a chat up to where the answer begins, or with `chat` off the bare text.

        RequestError if the text or its template cannot be used; `chat` needs `text.chat`.
        """
        if chat:
            assert text.chat is not None
            return text.tokenizer.encode(text.chat.render(self.as_messages()), add_special_tokens=False)
        assert self.text is not None
        return text.tokenizer.encode(self.text)


def read_prompts(path: str, *, flag: str, chat: bool) -> list[Prompt]:
    """The prompts of the file that --`flag` names; ConfigError tells the line that is wrong.

    JSONL records hold messages, turns (the first turn is used) or question / prompt / text. Any other file is
    plain text: every non-empty line is a prompt. Without `chat` no record may hold messages.
    """
    where = f"--{flag}={path}"
    jsonl = path.endswith(JSONL_SUFFIXES)
    prompts = [
        _from_json(line, f"{where} line {number}", chat=chat) if jsonl else Prompt(text=line.strip())
        for number, line in enumerate(read_lines(path, flag=flag), 1)
        if line.strip()
    ]
    if not prompts:
        raise ConfigError(f"{where} holds no prompts")
    return prompts


def read_lines(path: str, *, flag: str) -> list[str]:
    """The lines of a UTF-8 file, empty ones included; ConfigError names the flag."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--{flag}={path} cannot be read: {error}") from error


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
