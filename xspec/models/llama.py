"""model_type llama: Llama 2 and 3, SmolLM2. Biases are optional; the head may be tied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xspec.models.config import DecoderConfig, read_decoder


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    return read_decoder(
        raw,
        qkv_bias=lambda config: config.flag("attention_bias"),
        output_bias=lambda config: config.flag("attention_bias"),
        mlp_bias=lambda config: config.flag("mlp_bias"),
    )
