"""What any model format must say about text: the hand-over from its reader to `tokenizer.load_text`.

Knows no file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import processors


@dataclass(frozen=True, slots=True)
class TextSource:
    """`templates` maps a template's name to its source ("default", "tool_use"); empty: no chat.

    `special_tokens` are the named ones a template may print (bos_token, eos_token, ...).
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)


def add_ends(backend: tokenizers.Tokenizer, *, bos_id: int | None, eos_id: int | None) -> None:
    """Make `encode(add_special_tokens=True)` put these ids around a text."""
    ends = {"BOS": bos_id, "EOS": eos_id}
    known = {name: token_id for name, token_id in ends.items() if token_id is not None}
    if not known:
        return
    # Tokens enter under a plain name: one that holds ":" or "$" would be read as template syntax.
    backend.post_processor = processors.TemplateProcessing(
        single=[name for name in ("BOS", "$A", "EOS") if name == "$A" or name in known],
        pair=None,
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [backend.id_to_token(token_id)]}
            for name, token_id in known.items()
        ],
    )
