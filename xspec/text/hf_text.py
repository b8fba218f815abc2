"""The text side of a Hugging Face directory: tokenizer.json and the JSON files around it.

Knows where each fact may be written and which place wins; builds nothing that runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from xspec.errors import CheckpointError
from xspec.text.source import TextSource, add_ends

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_FIELDS = frozenset({"content", "single_word", "lstrip", "rstrip", "normalized", "special"})
_LISTED_FILES = 20
# field: (type, lowest allowed, highest allowed); the exclusive bounds are a tiny number
_DEFAULTS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, float("inf")),
    "top_k": (int, 0, float("inf")),
    "top_p": (float, 1e-300, 1.0),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 1e-300, float("inf")),
}


def read_hf_text(directory: Path) -> TextSource:
    """Read everything; CheckpointError names the file that is missing or malformed."""
    backend = _backend(directory)
    config = _json_object(directory / "tokenizer_config.json")
    special = _special_tokens(directory, config)
    _add_missing_tokens(backend, config, special, directory / "tokenizer_config.json")
    bos_id = _named_id(backend, special, "bos_token", directory)
    eos_id = _named_id(backend, special, "eos_token", directory)
    if backend.post_processor is None:
        # Where tokenizer.json says how a text begins and ends, it wins, as in transformers.
        add_ends(
            backend,
            bos_id=bos_id if config.get("add_bos_token") is True else None,
            eos_id=eos_id if config.get("add_eos_token") is True else None,
        )
    model = _json_object(directory / "config.json")
    generation = _json_object(directory / "generation_config.json")
    eos_ids = _ids(model, directory / "config.json") | _ids(generation, directory / "generation_config.json")
    return TextSource(
        backend=backend,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=eos_ids if eos_id is None else eos_ids | {eos_id},
        templates=_templates(directory, config),
        special_tokens=special,
        generation_defaults=_generation_defaults(generation, directory / "generation_config.json"),
    )


def _backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        found = sorted(entry.name for entry in directory.iterdir())
        more = f" and {len(found) - _LISTED_FILES} more" if len(found) > _LISTED_FILES else ""
        listed = ", ".join(found[:_LISTED_FILES]) or "nothing"
        raise CheckpointError(f"{directory} has no tokenizer.json; found: {listed}{more}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise CheckpointError(f"{path} is not readable as a tokenizer: {error}") from error


def _json_object(path: Path) -> dict[str, Any]:
    """The file's object; empty where there is no such file, since each of them is optional here."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens, each a string or {"content": string}; special_tokens_map.json is older."""
    merged = {**_json_object(directory / "special_tokens_map.json"), **config}
    special: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = merged.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            special[name] = content
        elif value is not None:
            raise CheckpointError(
                f"{directory / 'tokenizer_config.json'}: {name} is {value!r}; "
                'allowed: a string, {"content": string} or null'
            )
    return special


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str], path: Path
) -> None:
    """Tokens that only tokenizer_config.json declares, and special ones that tokenizer.json has as plain."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in _declared_tokens(config, path):
        if token.content in added:
            continue
        if token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{path}: added token {token.content!r} should have id {token_id}, but after tokenizer.json "
                f"it gets {backend.token_to_id(token.content)}"
            )
        added.add(token.content)
    plain = [t for t in special.values() if t not in added and backend.token_to_id(t) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in plain])


def _declared_tokens(config: Mapping[str, Any], path: Path) -> list[tuple[int, tokenizers.AddedToken]]:
    """added_tokens_decoder: {"id": {"content": ..., flags}}, by id."""
    declared = config.get("added_tokens_decoder") or {}
    try:
        specs = [(int(key), declared[key]) for key in sorted(declared, key=int)]
        return [
            (key, tokenizers.AddedToken(**{name: spec[name] for name in _TOKEN_FIELDS & spec.keys()}))
            for key, spec in specs
        ]
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: added_tokens_decoder is malformed: {error}") from error


def _named_id(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], name: str, directory: Path
) -> int | None:
    if name not in special:
        return None
    token_id: int | None = backend.token_to_id(special[name])
    if token_id is None:
        raise CheckpointError(f"{directory}/tokenizer.json has no token {special[name]!r}, the {name}")
    return token_id


def _ids(config: Mapping[str, Any], path: Path) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(f"{path}: eos_token_id is {value!r}; allowed: an id, a list of ids or null")
    return frozenset(ids)


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja wins over tokenizer_config.json, which wins over chat_template.json."""
    found = _named_templates(_json_object(directory / "chat_template.json"), directory / "chat_template.json")
    found |= _named_templates(config, directory / "tokenizer_config.json")
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        try:
            found["default"] = jinja.read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{jinja} is not readable UTF-8 text: {error}") from error
    return found


def _named_templates(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f'{path}: chat_template must be a string or a list of {{"name", "template"}} objects'
        ) from error
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise CheckpointError(f"{path}: chat_template names and templates must be strings")
    return named


def _generation_defaults(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for name, (kind, lowest, highest) in _DEFAULTS.items():
        value = config.get(name)
        if value is None:
            continue
        if name == "top_k" and value == -1:  # another spelling of "off"
            value = 0
        numeric = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or not lowest <= value <= highest:
            raise CheckpointError(
                f"{path}: {name} is {value!r}; allowed: {kind.__name__} from {lowest:g} to {highest:g}"
            )
        defaults[name] = kind(value)
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults
