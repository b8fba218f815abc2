"""Text to token ids and back, and everything a checkpoint says about text (`load_text`).

Wraps the `tokenizers` library behind a small immutable face that any thread may use. Knows nothing
about streaming (`detokenize.py`) or about how chats are laid out (`chat.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from xspec.errors import CheckpointError, RequestError
from xspec.text.chat import ChatTemplate
from xspec.text.gguf_tokenizer import read_gguf_text
from xspec.text.hf_text import read_hf_text
from xspec.text.pieces import pieces_of

_MAX_ID = 2**32 - 1

LONG_TEXT = 2048
"""Characters or ids from which on the library's batch calls are used: only those let go of the interpreter
lock, and a worker thread that keeps it stops the event loop and the launch thread for seconds."""


class Tokenizer:
    """Never changed after construction. `vocab_size` is the highest id + 1: ids below it may be sent in."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, bos_id: int | None = None, eos_id: int | None = None
    ) -> None:
        # A tokenizer.json may carry its training set-up: cut or padded prompts would be silent damage.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}
        self.pieces = pieces_of(backend)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written out in `text` become their ids, as everywhere."""
        try:
            if len(text) < LONG_TEXT:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            ids: list[int] = encoding.ids
        except (TypeError, UnicodeError):
            # The library cannot take a lone surrogate, which JSON can carry; anything else is a bug.
            if not any("\ud800" <= char <= "\udfff" for char in text):
                raise
            raise RequestError("the text holds a lone surrogate, which is not Unicode text") from None
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Ids that the vocabulary lacks (a model's padded rows) have no text."""
        known = list(ids)
        for token_id in known:
            if not 0 <= token_id <= _MAX_ID:
                raise RequestError(f"{token_id} is not a token id; allowed: 0 to {self.vocab_size - 1}")
        if len(known) < LONG_TEXT:
            text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        else:
            text = self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)[0]
        return text

    def piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id it lacks."""
        if token_id not in self._pieces:
            known = 0 <= token_id < self.vocab_size
            self._pieces[token_id] = self._backend.id_to_token(token_id) if known else None
        return self._pieces[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds inside a text; often not whole characters."""
        raw = self._bytes.get(token_id)
        if raw is None:
            piece = self.piece(token_id)
            raw = self._bytes[token_id] = b"" if piece is None else self.pieces.to_bytes(piece)
        return raw

    def token_text(self, token_id: int) -> str:
        """`token_bytes` for people: parts of characters show as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TextAssets:
    """All that a checkpoint says about text. `eos_ids` end an answer; `generation_defaults` are its
    recommended SamplingParams fields (temperature, top_k, top_p, min_p, repetition_penalty)."""

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    eos_ids: frozenset[int]
    generation_defaults: Mapping[str, Any]


def load_text(path: Path) -> TextAssets:
    """Read a Hugging Face directory or a `.gguf` file."""
    if path.is_dir():
        source = read_hf_text(path)
    elif path.is_file() and path.suffix == ".gguf":
        source = read_gguf_text(path)
    elif path.exists():
        raise CheckpointError(f"{path} is neither a .gguf file nor a directory with a tokenizer.json")
    else:
        raise CheckpointError(f"{path} does not exist")
    try:
        tokenizer = Tokenizer(source.backend, bos_id=source.bos_id, eos_id=source.eos_id)
        chat = ChatTemplate(source.templates, source.special_tokens) if source.templates else None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return TextAssets(tokenizer, chat, source.eos_ids, source.generation_defaults)
