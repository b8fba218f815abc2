"""A checkpoint as loaders see it: a config, named shapes, and one tensor at a time into a given buffer.

Knows nothing about file formats or model families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from xspec.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


class Checkpoint(Protocol):
    """Names and config keys are those of Hugging Face, whatever the file format."""

    @property
    def name(self) -> str:
        """Where it lies, for messages."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def shapes(self) -> Shapes: ...

    def read(self, name: str, out: torch.Tensor) -> None:
        """Copy one tensor into `out` (same shape, any float dtype)."""

    def close(self) -> None: ...


def check_tensors(checkpoint: Checkpoint, expected: Shapes, optional: frozenset[str]) -> None:
    """Demand exactly the expected names and shapes; one error lists everything that differs.

    `optional` names may be present and are then ignored.
    """
    found = checkpoint.shapes
    complaints = [
        *(f"missing: {name} {_shape(expected[name])}" for name in expected if name not in found),
        *(
            f"extra: {name} {_shape(found[name])}"
            for name in found
            if name not in expected and name not in optional and not name.endswith("rotary_emb.inv_freq")
        ),
        *(
            f"wrong shape: {name} is {_shape(found[name])}, the config says {_shape(shape)}"
            for name, shape in expected.items()
            if name in found and tuple(found[name]) != tuple(shape)
        ),
    ]
    if complaints:
        lines = "\n".join(f"  - {line}" for line in complaints)
        raise CheckpointError(f"the tensors of {checkpoint.name} do not match its config:\n{lines}")


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
