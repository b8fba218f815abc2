"""A Hugging Face directory as a Checkpoint: config.json and memory-mapped safetensors, single or sharded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from xspec.errors import CheckpointError

WEIGHTS = "model.safetensors"
FLOATS = ("F64", "F32", "BF16", "F16")
INTEGERS = ("I64", "I32", "I16", "U8", "I8", "BOOL")


class SafetensorsCheckpoint:
    """`weights`: file names looked for, the first found is read. `id_maps`: tensors that hold integers."""

    def __init__(
        self, path: Path, weights: Sequence[str] = (WEIGHTS,), id_maps: frozenset[str] = frozenset()
    ) -> None:
        self.name = str(path)
        self.config: Mapping[str, Any] = read_json(path / "config.json")
        self._files: dict[str, Any] = {}  # tensor name -> the open file that holds it
        self.shapes: dict[str, tuple[int, ...]] = {}
        wrong = []
        for file in _weight_files(path, weights):
            handle = _open(path / file)
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in self._files:
                    raise CheckpointError(f"{path}: tensor {name} lies in more than one file")
                part = handle.get_slice(name)
                self._files[name] = handle
                self.shapes[name] = tuple(part.get_shape())
                kind, allowed = part.get_dtype(), INTEGERS if name in id_maps else FLOATS
                if kind not in allowed and not name.endswith("inv_freq"):
                    wrong.append(f"{name} is {kind}{' (an id map: integers)' if name in id_maps else ''}")
        if wrong:
            lines = "\n".join(f"  - {line}" for line in wrong)
            raise CheckpointError(f"{path}: only {', '.join(FLOATS)} weights are read:\n{lines}")

    def read(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self._files[name].get_tensor(name))

    def close(self) -> None:
        self._files.clear()


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _weight_files(path: Path, weights: Sequence[str]) -> list[str]:
    """The index decides where there is one, so that leftover files beside it do not matter."""
    for single in weights:
        if (path / _index_of(single)).is_file():
            return _indexed_files(path, _index_of(single))
        if (path / single).is_file():
            return [single]
    kinds = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    found = sorted(entry.name for entry in path.iterdir() if entry.suffix in kinds)
    names = [name for single in weights for name in (single, _index_of(single))]
    raise CheckpointError(
        f"{path} has neither {' nor '.join(names)}; weight files found: {', '.join(found) or 'none'}"
    )


def _index_of(single: str) -> str:
    return f"{single}.index.json"


def _indexed_files(path: Path, index: str) -> list[str]:
    weight_map = read_json(path / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / index} has no weight_map")
    files = sorted({str(file) for file in weight_map.values()})
    outside = [file for file in files if Path(file).name != file]
    if outside:
        raise CheckpointError(f"{path / index} names files outside its directory: {', '.join(outside)}")
    absent = [file for file in files if not (path / file).is_file()]
    if absent:
        raise CheckpointError(f"{path / index} names files that are not there: {', '.join(absent)}")
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path} ({path.stat().st_size} bytes): {error}") from error
