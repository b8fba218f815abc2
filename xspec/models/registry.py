"""Which module knows a model_type. A family is one function: config.json to DecoderConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xspec.errors import CheckpointError
from xspec.models import llama, qwen2, qwen3
from xspec.models.config import DecoderConfig

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "llama": llama.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
}


def read_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"{where}: model_type {model_type!r} is not supported; known: {', '.join(sorted(FAMILIES))}"
        )
    return family(raw)
