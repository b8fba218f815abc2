"""Token ids into text that is safe to show while it is still growing: whole characters, no part of a stop.

Knows nothing about requests or rounds; `engine/text.py` drives both classes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from xspec.text.tokenizer import Tokenizer

_MAX_UTF8_BYTES = 4
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Streams the text of ids that follow `prompt_ids`, at a constant cost per token.

    What is pushed adds up to what a batch decode of prompt and answer has after the prompt's text.
    Bytes that can never become a character turn into U+FFFD at once, incomplete ones wait.
    """

    __slots__ = ("_decoder", "_skip", "_started", "_tokenizer", "_unproven")

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._started = any(map(self._renders, prompt_ids))
        self._unproven = self._open_bytes(prompt_ids)

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        raw = b"".join([self._bytes(token_id) for token_id in ids])
        if self._unproven and raw:
            raw = self._join_prompt(raw)
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """The end of the text: bytes still waiting become U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def _renders(self, token_id: int) -> bool:
        return token_id not in self._skip and self._tokenizer.piece(token_id) is not None

    def _bytes(self, token_id: int) -> bytes:
        pieces = self._tokenizer.pieces
        if self._started and not pieces.joiner:  # an id without a piece has no bytes
            return b"" if token_id in self._skip else self._tokenizer.token_bytes(token_id)
        if not self._renders(token_id):
            return b""
        if self._started:
            return pieces.joiner + self._tokenizer.token_bytes(token_id)
        self._started = True
        return pieces.first_bytes(self._tokenizer.piece(token_id) or "")

    def _open_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """The start of a character that the prompt leaves open at its end."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._skip:
                tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= _MAX_UTF8_BYTES:
                break
        probe = codecs.getincrementaldecoder("utf-8")("replace")
        probe.decode(tail)
        return probe.getstate()[0]

    def _join_prompt(self, raw: bytes) -> bytes:
        """Let the answer finish the prompt's open character, if that is how it goes on."""
        start, self._unproven = self._unproven, b""
        probe = codecs.getincrementaldecoder("utf-8")("replace")
        goes_on = not probe.decode(start + raw[:1]).startswith(_REPLACEMENT)
        return start + raw if goes_on else raw


class StopMatcher:
    """Finds the stop string that is complete first, however the text is cut into pushes.

    Of stops that end on the same character the longest wins. Text that may still turn out to be the
    beginning of a stop is held back. One automaton per stop: linear in the text, whatever the stops.
    """

    __slots__ = ("_failures", "_held", "_include", "_states", "_stops")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._include = include
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text to show, the stop found or None). A stop that ends in text pushed unarmed is ignored.

        After a stop was found the matcher is spent: what follows the stop is gone.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            found = self._advance(char)
            if armed and found is not None:
                self._held = ""
                return buffer[: end if self._include else end - len(found)], found
        shown = len(buffer) - max(self._states)
        self._held = buffer[shown:]
        return buffer[:shown], None

    def flush(self) -> str:
        """The held text, once nothing more can follow."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character to every automaton; the longest stop that it completes."""
        found = None
        for index, stop in enumerate(self._stops):
            failure, state = self._failures[index], self._states[index]
            while state and stop[state] != char:
                state = failure[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                found = found or stop
                state = failure[state - 1]
            self._states[index] = state
        return found


def _failure_table(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper border (Knuth, Morris and Pratt)."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table
