"""Which module knows a model_type.

A family of FAMILIES is one function: config.json to DecoderConfig. One of LOOPED is a LoopedFamily.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xspec.errors import CheckpointError
from xspec.models import huginn, llama, nanbeige, ouro, qwen2, qwen3
from xspec.models.config import DecoderConfig
from xspec.models.looped import LoopedFamily

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "llama": llama.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
}

LOOPED: Mapping[str, LoopedFamily] = {
    "huginn_raven": huginn.FAMILY,
    "nanbeige": nanbeige.FAMILY,
    "ouro": ouro.FAMILY,
}


def read_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    model_type = raw.get("model_type")
    if isinstance(model_type, str) and model_type in LOOPED:
        return LOOPED[model_type].read_config(raw)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted((*FAMILIES, *LOOPED)))
        raise CheckpointError(f"{where}: model_type {model_type!r} is not supported; known: {known}")
    return family(raw)
