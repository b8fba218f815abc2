"""The text side of a GGUF file: a `tokenizers` tokenizer built from tokenizer.ggml.* metadata.

Vocabularies are of two kinds: "gpt2" (byte-level BPE, one of several pre-tokenizers) and "llama"
(SentencePiece BPE, merges implied by scores). Any other kind is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from xspec.errors import CheckpointError
from xspec.text.gguf_file import read_gguf_metadata
from xspec.text.source import TextSource, add_ends

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"  # SentencePiece's visible space
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPECIAL_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING = {
    "temperature": ("general.sampling.temp", float),
    "top_k": ("general.sampling.top_k", int),
    "top_p": ("general.sampling.top_p", float),
    "min_p": ("general.sampling.min_p", float),
    "repetition_penalty": ("general.sampling.penalty_repeat", float),
}


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """`splits` are applied one after the other, each match (and each gap) becoming a piece."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is in the vocabulary is taken whole
    add_bos: bool = False  # where the file does not say
    nfc: bool = False


_LLAMA3 = _PreTokenizer((rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_TAIL}",), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer((rf"{_CONTRACTIONS}|\p{{N}}|{_TAIL}",), nfc=True)
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def read_gguf_text(path: Path) -> TextSource:
    """Tokenizer, end ids and chat template of a GGUF file."""
    fields = _Fields(read_gguf_metadata(path), path)
    kind = fields.required("tokenizer.ggml.model", str)
    builder = _BUILDERS.get(kind)
    if builder is None:
        raise CheckpointError(f"{path}: tokenizer.ggml.model is {kind!r}; supported: {', '.join(_BUILDERS)}")
    try:
        backend, add_bos = builder(fields)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: the tokenizer cannot be built: {error}") from error
    tokens = fields.tokens
    ids = {name: fields.token_id(key) for name, key in _SPECIAL_NAMES.items()}
    add_ends(
        backend,
        bos_id=_end_id(fields, "bos_token", ids["bos_token"], add_bos),
        eos_id=_end_id(fields, "eos_token", ids["eos_token"], default=False),
    )
    return TextSource(
        backend=backend,
        bos_id=ids["bos_token"],
        eos_id=ids["eos_token"],
        eos_ids=frozenset(i for key in _END_KEYS if (i := fields.token_id(key)) is not None),
        templates=_templates(fields),
        special_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
        generation_defaults=_generation_defaults(fields),
    )


class _Fields:
    """Metadata with typed access; every refusal names the file and the key."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path
        self.tokens = self.list_of("tokenizer.ggml.tokens", str)
        self.types = self.per_token("tokenizer.ggml.token_type", int)
        self.vocab = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.vocab) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.vocab[t] != i)
            raise self.bad("tokenizer.ggml.tokens", f"lists {twice!r} more than once")

    def bad(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {key} {what}")

    def get(self, key: str, kind: type) -> Any:
        """The value or None; of the wrong type it is refused."""
        value = self._metadata.get(key)
        if value is not None and type(value) is not kind:
            raise self.bad(key, f"is a {type(value).__name__}; allowed: {kind.__name__}")
        return value

    def required(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise self.bad(key, "is missing")
        return value

    def list_of(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        values = self.required(key, list) if default is None else self.get(key, list)
        if values is None:
            return default or []
        if not all(type(value) is kind for value in values):
            raise self.bad(key, f"must be an array of {kind.__name__}")
        return list(values)

    def per_token(self, key: str, kind: type) -> list[Any]:
        values = self.list_of(key, kind)
        if len(values) != len(self.tokens):
            raise self.bad(key, f"has {len(values)} entries for {len(self.tokens)} tokens")
        return values

    def token_id(self, name: str) -> int | None:
        token_id: int | None = self.get(f"tokenizer.ggml.{name}", int)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise self.bad(f"tokenizer.ggml.{name}", f"is {token_id}; allowed: 0 to {len(self.tokens) - 1}")
        return token_id

    def of_type(self, kind: int) -> list[str]:
        return [token for token, found in zip(self.tokens, self.types, strict=True) if found == kind]


def _byte_level(fields: _Fields) -> tuple[tokenizers.Tokenizer, bool]:
    name = fields.get("tokenizer.ggml.pre", str) or "default"
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise fields.bad("tokenizer.ggml.pre", f"is {name!r}; supported: {', '.join(_PRE_TOKENIZERS)}")
    merges = []
    for merge in fields.list_of("tokenizer.ggml.merges", str):
        cut = merge.find(" ", 1)  # a token may begin with a space, never hold one further on
        if cut < 0:
            raise fields.bad("tokenizer.ggml.merges", f"holds {merge!r}, which is not a pair")
        merges.append((merge[:cut], merge[cut + 1 :]))
    model = models.BPE(fields.vocab, merges, fuse_unk=False, ignore_merges=pre.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    _mark_special(backend, fields)
    return backend, pre.add_bos


def _sentencepiece(fields: _Fields) -> tuple[tokenizers.Tokenizer, bool]:
    if fields.get("tokenizer.ggml.remove_extra_whitespaces", bool):
        raise fields.bad("tokenizer.ggml.remove_extra_whitespaces", "is true; supported: false")
    prefix = fields.get("tokenizer.ggml.add_space_prefix", bool)
    unknown = fields.token_id("unknown_token_id")
    model = models.BPE(
        fields.vocab,
        _merges_of_scores(fields),
        unk_token=None if unknown is None else fields.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = [normalizers.Replace(" ", _SPACE)]
    prepend = [] if prefix is False else [normalizers.Prepend(_SPACE)]
    backend.normalizer = normalizers.Sequence([*prepend, *spaces])
    strip = [] if prefix is False else [decoders.Strip(" ", 1, 0)]
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    _mark_special(backend, fields)
    return backend, True


def _merges_of_scores(fields: _Fields) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose union scores highest: every way to cut a piece is a merge."""
    scores = fields.per_token("tokenizer.ggml.scores", float)
    parts = {token: scores[i] for i, token in enumerate(fields.tokens) if fields.types[i] == _NORMAL}
    merges = []
    for piece in sorted(parts, key=parts.__getitem__, reverse=True):
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [(left, right) for left, right in cuts if left in parts and right in parts]
    return merges


def _mark_special(backend: tokenizers.Tokenizer, fields: _Fields) -> None:
    """Control and user-defined tokens are found in text before anything else; only the former are special."""
    control, plain = fields.of_type(_CONTROL), fields.of_type(_USER_DEFINED)
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in plain])


def _end_id(fields: _Fields, name: str, token_id: int | None, default: bool) -> int | None:
    """The id that encode() adds at this end, if it adds one."""
    stated = fields.get(f"tokenizer.ggml.add_{name}", bool)
    if stated and token_id is None:
        raise fields.bad(f"tokenizer.ggml.{name}_id", f"is missing, but add_{name} is true")
    return token_id if (default if stated is None else stated) else None


def _templates(fields: _Fields) -> dict[str, str]:
    names = fields.list_of("tokenizer.chat_templates", str, default=[])
    named = {name: fields.required(f"tokenizer.chat_template.{name}", str) for name in names}
    default = fields.get("tokenizer.chat_template", str)
    return named if default is None else named | {"default": default}


def _generation_defaults(fields: _Fields) -> dict[str, Any]:
    found = {name: fields.get(key, kind) for name, (key, kind) in _SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}


_BUILDERS: Mapping[str, Callable[[_Fields], tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
