"""Log-probabilities in the two shapes OpenAI gives them: completions' parallel lists, chat's records.

Token text comes from the vocabulary's bytes; nothing here knows requests or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xspec.core.request import TokenLogprob
from xspec.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""JSON has no -inf; OpenAI's clients expect this for a token that cannot occur."""


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)


class CompletionLogprobs:
    """Collects one choice's tokens, from the prompt on when it is echoed."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> None:
        for token_id, entry in zip(ids, entries, strict=True):
            self._add(token_id, entry)

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        for entry in entries:
            self._add(entry.token_id, entry)

    def _add(self, token_id: int, entry: TokenLogprob | None) -> None:
        text = self._tokenizer.token_text(token_id)
        self._tokens.append(text)
        self._offsets.append(self._offset)
        self._offset += len(text)
        if entry is None:  # nothing comes before the first prompt token
            self._logprobs.append(None)
            self._tops.append(None)
            return
        self._logprobs.append(_finite(entry.logprob))
        tops: dict[str, float] = {}
        for other, logprob in entry.top[: self._top]:
            # Two ids may read the same; the likelier one, which comes first, stands.
            tops.setdefault(self._tokenizer.token_text(other), _finite(logprob))
        tops.setdefault(text, _finite(entry.logprob))
        self._tops.append(tops)

    def take(self) -> dict[str, Any]:
        """What was added since the last call; offsets go on counting."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }
        self._clear()
        return taken


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    return {
        "content": [
            _record(tokenizer, entry.token_id, entry.logprob)
            | {"top_logprobs": [_record(tokenizer, *likely) for likely in entry.top[:top]]}
            for entry in entries
        ],
        "refusal": None,
    }


def _record(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
