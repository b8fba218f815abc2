"""model_type qwen3: qk-norm before rotation, and a head size of its own that must be in the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xspec.models.config import DecoderConfig, explicit_head_dim, read_decoder


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    return read_decoder(
        raw,
        head_dim=explicit_head_dim,
        qkv_bias=lambda config: config.flag("attention_bias"),
        output_bias=lambda config: config.flag("attention_bias"),
        head_norm=lambda config: True,
    )
