"""What the loaders of all drafters share: the directory, its sizes against the target, the draft vocabulary.

Knows no drafter's architecture. A drafter owns neither embedding nor head: copies of them are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xspec.errors import CheckpointError, UnsupportedError
from xspec.kernels.base import Kernels, PackedLinear
from xspec.kernels.quantised import quantise
from xspec.models.base import Target, TargetSpec
from xspec.models.checkpoint import Checkpoint
from xspec.models.config import DecoderConfig
from xspec.models.registry import FAMILIES, read_config
from xspec.models.safetensors_loader import WEIGHTS, SafetensorsCheckpoint

D2T, T2D = "d2t", "t2d"
ID_MAPS = frozenset({D2T, T2D})


def open_drafter(path: Path, weights: Sequence[str] = (WEIGHTS,)) -> SafetensorsCheckpoint:
    """The directory of --draft_model. `weights`: file names the format uses, each perhaps with an index."""
    check_directory(path)
    return SafetensorsCheckpoint(path, weights, ID_MAPS)


def check_directory(path: Path) -> None:
    """CheckpointError unless `path`, given by --draft_model, is a directory with a config.json."""
    if not path.exists():
        raise CheckpointError(
            f"--draft_model={path}: there is no such file or directory (nothing is downloaded)"
        )
    if not path.is_dir():
        raise CheckpointError(
            f"--draft_model={path} is a file; allowed: a directory with config.json and safetensors"
        )
    if not (path / "config.json").is_file():
        names = sorted(entry.name for entry in path.iterdir())
        holds = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "nothing"
        raise CheckpointError(f"--draft_model={path} has no config.json; the directory holds {holds}")


def layer_config(raw: Mapping[str, Any], family: str, where: str) -> DecoderConfig:
    """`raw` read as the config of a `family` decoder, whose layers a drafter borrows. Errors name `where`."""
    if family not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type {raw.get('model_type')!r} needs a layer of {family!r}, which is not "
            f"implemented; known: {', '.join(sorted(FAMILIES))}"
        )
    try:
        return read_config({**raw, "model_type": family}, where)
    except UnsupportedError as error:
        raise UnsupportedError(f"{where} asks for what is not implemented", error.reasons) from None
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


def check_against_target(where: str, hidden_size: int, vocab_size: int, spec: TargetSpec) -> None:
    """Embedding and head are the target's, so both sizes must be."""
    complaints = [
        f"{key} is {found}, the target ({spec.model_type}) has {wanted}"
        for key, found, wanted in (
            ("hidden_size", hidden_size, spec.hidden_size),
            ("vocab_size", vocab_size, spec.vocab_size),
        )
        if found != wanted
    ]
    if complaints:
        lines = "\n".join(f"  - {line}" for line in complaints)
        raise CheckpointError(f"the drafter {where} was not made for this target:\n{lines}")


def read_draft_vocabulary(checkpoint: Checkpoint, vocab_size: int) -> torch.Tensor | None:
    """Target ids [D] of the draft vocabulary, ascending; None: the whole one.

    A reduced one takes `draft_vocab_size` D in the config and the tensor d2t [D] in offset form, target
    id = i + d2t[i]. A mask t2d [V] may lie beside it and must then say the same.
    """
    where, size = checkpoint.name, checkpoint.config.get("draft_vocab_size")
    if size is None:
        if D2T in checkpoint.shapes:
            raise CheckpointError(f"{where} holds {D2T}, but its config has no draft_vocab_size")
        return None
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= vocab_size:
        raise CheckpointError(
            f"{where}: draft_vocab_size is {size!r}; allowed: integers from 1 to vocab_size ({vocab_size})"
        )
    if D2T not in checkpoint.shapes:
        if size == vocab_size:
            return None
        raise CheckpointError(
            f"{where}: draft_vocab_size is {size} of {vocab_size}, but there is no tensor {D2T} [{size}] "
            "that maps its ids"
        )
    offsets = _integers(checkpoint, D2T, size)
    ids = torch.arange(size) + offsets
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise CheckpointError(
            f"{where}: {D2T} maps draft id {at} to {int(ids[at])}; allowed: 0 to {vocab_size - 1}"
        )
    falls = (ids.diff() <= 0).nonzero()
    if len(falls):
        at = int(falls[0])
        raise CheckpointError(
            f"{where}: {D2T} must map to strictly increasing ids, but maps draft ids {at} and {at + 1} "
            f"to {int(ids[at])} and {int(ids[at + 1])}"
        )
    if T2D in checkpoint.shapes and not torch.equal(
        _integers(checkpoint, T2D, vocab_size).nonzero().view(-1), ids
    ):
        raise CheckpointError(f"{where}: {T2D} and {D2T} select different ids")
    return None if size == vocab_size else ids


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The target's head, whole or cut to the draft vocabulary. `ids` [D] are the columns' target ids."""

    logits: Callable[[torch.Tensor], torch.Tensor]  # [N, hidden] after the drafter's norm -> [N, D]
    ids: torch.Tensor | None = None
    packed: PackedLinear | None = None  # `logits`, where it is a linear and no more

    def tokens(self, columns: torch.Tensor) -> torch.Tensor:
        """Target ids of picked columns."""
        return columns if self.ids is None else self.ids[columns]


def share_head(
    target: Target,
    kernels: Kernels,
    ids: torch.Tensor | None,
    device: torch.device,
    *,
    quantised: bool = False,
) -> DraftHead:
    """A reduced head is a packed copy of the target's rows (`quantised`: in 8 bits); the whole is its own."""
    if ids is None:
        return DraftHead(target.logits, packed=target.head())
    ids = ids.to(device)
    rows = target.head_rows(ids)
    packed = kernels.pack_blocks(quantise(rows, 8)) if quantised else kernels.pack_linear(rows)
    return DraftHead(packed, ids, packed)


def _integers(checkpoint: Checkpoint, name: str, size: int) -> torch.Tensor:
    found = checkpoint.shapes[name]
    if tuple(found) != (size,):
        raise CheckpointError(f"{checkpoint.name}: {name} has shape {list(found)}, the config says [{size}]")
    out = torch.empty(size, dtype=torch.int64)
    checkpoint.read(name, out)
    return out
