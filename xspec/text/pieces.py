"""Which bytes a vocabulary token stands for, from the tokenizer's own decoder description.

Working on bytes makes streaming exact and constant-time: no window of ids is ever decoded twice.
Knows nothing about sequences of tokens beyond what happens at the very start of a text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from xspec.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = "ByteLevel, Metaspace, none, or a sequence of Replace, ByteFallback, Fuse, Strip"


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE: itself where visible, else from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rules from token string to bytes, and for the first piece of a text."""

    alphabet: dict[str, int] | None = None  # byte-level BPE
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    joiner: bytes = b""  # between tokens, where the tokenizer has no decoder
    strip_start: str = ""  # one of these goes from the start of the text
    first_drops: str = ""  # all of these go from the first token

    def to_bytes(self, token: str) -> bytes:
        """The bytes of a token inside a text (the rules for the first piece not applied)."""
        if self.alphabet is not None:
            try:
                return bytes([self.alphabet[char] for char in token])
            except KeyError:
                return token.encode()  # an added token with characters outside the alphabet
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()

    def first_bytes(self, token: str) -> bytes:
        """The bytes of a token that begins the text."""
        for char in self.first_drops:
            token = token.replace(char, "")
        raw = self.to_bytes(token)
        return raw.removeprefix(self.strip_start.encode()) if self.strip_start else raw


def pieces_of(backend: tokenizers.Tokenizer) -> Pieces:
    """Read the decoder of a tokenizer; one whose pieces depend on their neighbours is refused by name."""
    if backend.decoder is None:
        return Pieces(joiner=b" ")
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Pieces(alphabet=_byte_alphabet())
    pieces, fused = Pieces(), False
    for step in steps:
        fused = fused or step["type"] == "Fuse"
        pieces = _with_step(pieces, step, fused)
    return pieces


def _with_step(pieces: Pieces, step: dict[str, Any], fused: bool) -> Pieces:
    match step:
        case {"type": "Fuse"}:
            return pieces
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
            return replace(pieces, replacements=(*pieces.replacements, (old, new)))
        case {"type": "ByteFallback"} if not fused:
            return replace(pieces, byte_fallback=True)
        case {"type": "Strip", "content": str(char), "start": 0 | 1 as start, "stop": 0} if fused:
            return replace(pieces, strip_start=char * start)
        case {"type": "Metaspace", "replacement": str(char)} if not fused:
            drops = "" if step.get("prepend_scheme") == "never" else char
            return replace(pieces, replacements=((char, " "),), first_drops=drops)
    raise CheckpointError(f"the tokenizer's decoder has the step {step}; supported: {_SUPPORTED}")
