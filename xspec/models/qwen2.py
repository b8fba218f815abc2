"""model_type qwen2: a llama whose query, key and value projections always have biases, the others never."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xspec.models.config import DecoderConfig, read_decoder


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    return read_decoder(raw, qkv_bias=lambda config: True)
