"""The target's files as training uses them: what they are, a digest of them, and the weights drafters share.

Nothing is run here; `offline.py` runs targets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from xspec.errors import ConfigError
from xspec.models.blocks import EMBEDDING, FINAL_NORM, HEAD
from xspec.models.config import DecoderConfig
from xspec.models.loader import decoder_config, open_checkpoint
from xspec.models.locate import is_gguf, locate_model
from xspec.text.tokenizer import TextAssets, load_text
from xspec.train.layers import LayerSizes, TargetWeights

TAPS = 5


@dataclass(frozen=True, slots=True)
class TargetFiles:
    path: Path
    name: str
    config: DecoderConfig
    text: TextAssets

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, as far as the model has rows for them."""
        return tuple(sorted(i for i in self.text.eos_ids if i < self.config.vocab_size))


def read_target(model: str) -> TargetFiles:
    """`model` as --model has it. Reads headers and the tokenizer, no weights."""
    path = locate_model(model or None)
    checkpoint = open_checkpoint(path)
    try:
        config = decoder_config(checkpoint)
    finally:
        checkpoint.close()
    name = path.stem if is_gguf(path) else path.resolve().name
    return TargetFiles(path, name, config, load_text(path))


def digest_of(path: Path) -> str:
    """sha256 of a GGUF file, or over config.json and all safetensors of a directory with their names."""
    if not path.is_dir():
        return _file_digest(path)
    whole = hashlib.sha256()
    for file in [path / "config.json", *sorted(path.glob("*.safetensors"))]:
        whole.update(f"{file.name} {_file_digest(file)}\n".encode())
    return whole.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_weights(target: TargetFiles, dtype: torch.dtype) -> TargetWeights:
    """Embedding, head and final norm in the type the target computes in, and the sizes of its layers."""
    config = target.config
    checkpoint = open_checkpoint(target.path)
    try:
        embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        checkpoint.read(EMBEDDING, embedding)
        head = embedding
        if not config.tied_head:
            head = torch.empty_like(embedding)
            checkpoint.read(HEAD, head)
        norm = torch.empty(config.hidden_size, dtype=dtype)
        checkpoint.read(FINAL_NORM, norm)
    finally:
        checkpoint.close()
    sizes = LayerSizes(
        hidden=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        inner=config.inner_size,
        norm_eps=config.norm_eps,
        rope_theta=config.rope.theta,
    )
    return TargetWeights(embedding, head, norm, sizes, config.max_position)


def spread_taps(layers: int) -> tuple[int, ...]:
    """Residual streams to feed a drafter with, spread over the depth; i is the one after i layers.

    From the second to the last but one in equal strides, as published drafters have them (DSpark,
    arXiv 2607.05147), never the last. ConfigError for a target too shallow to tap.
    """
    if layers < 2:
        raise ConfigError(f"--algorithm=DSpark needs a target of at least 2 layers, this one has {layers}")
    first, last = min(2, layers - 1), max(1, layers - 2)
    if layers - 1 <= TAPS:
        return tuple(range(1, layers))
    stride = -(-(last - first) // (TAPS - 1))
    return tuple(sorted({min(first + stride * index, last) for index in range(TAPS)}))
