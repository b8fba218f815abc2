"""The container format of a GGUF file: metadata values and where each tensor lies.

Reads the header only, in milliseconds; arrays (tokenizer tables) are stepped over, not built. Every
read is bounds-checked: a cut or damaged file is an error, never a crash or an endless loop.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from xspec.errors import CheckpointError

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_MAX_DIMS = 8
_DEFAULT_ALIGNMENT = 32

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is outermost first, as torch has it; `start` is an absolute file offset."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, Value]  # an array's value is None
    tensors: dict[str, GgufTensor]


def read_header(data: mmap.mmap, path: Path) -> GgufHeader:
    return _Cursor(data, path).header()


class _Cursor:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0

    def header(self) -> GgufHeader:
        magic = self._bytes(4)
        if magic != b"GGUF":
            raise CheckpointError(f"{self._path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise CheckpointError(f"{self._path} is GGUF version {version}; known: little-endian 2 and 3")
        tensor_count, field_count = self._count(), self._count()
        metadata: dict[str, Value] = {}
        for _ in range(field_count):
            key = self._string()
            metadata[key] = self._value(self._count("<I"))
        found = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}, not a positive integer")
        base = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in found:
            if name in tensors:
                raise CheckpointError(f"{self._path}: tensor {name} appears twice")
            tensors[name] = self._place(name, shape, kind, base + offset)
        return GgufHeader(metadata, tensors)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._count("<I")
        if not 1 <= dims <= _MAX_DIMS:
            raise CheckpointError(f"{self._path}: tensor {name!r} has {dims} dimensions")
        shape = tuple(reversed([self._count() for _ in range(dims)]))
        return name, shape, self._count("<I"), self._count()

    def _place(self, name: str, shape: tuple[int, ...], kind_id: int, start: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(kind_id)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise CheckpointError(f"{self._path}: tensor {name} has unknown type {kind_id}") from None
        if shape[-1] % block:
            raise CheckpointError(
                f"{self._path}: rows of {name} have {shape[-1]} weights, {kind.name} packs them by {block}"
            )
        size_bytes = math.prod(shape) // block * block_bytes
        if start + size_bytes > len(self._data):
            raise CheckpointError(
                f"{self._path} is cut short: tensor {name} ends at byte {start + size_bytes}, "
                f"the file has {len(self._data)}"
            )
        return GgufTensor(name, shape, kind, start, size_bytes)

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            self._skip_array()
            return None
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: unknown metadata type {kind} at byte {self._at}")
        return self._scalar(_SCALARS[kind])

    def _skip_array(self) -> None:
        kind, count = self._count("<I"), self._count()
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._count())
        elif kind in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[kind]))
        else:
            raise CheckpointError(f"{self._path}: unknown array type {kind} at byte {self._at}")

    def _string(self) -> str:
        raw = self._bytes(self._count())
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._path}: text before byte {self._at} is not UTF-8") from error

    def _count(self, layout: str = "<Q") -> int:
        return int(self._scalar(layout))

    def _scalar(self, layout: str) -> int | float | bool:
        value: int | float | bool
        (value,) = struct.unpack(layout, self._bytes(struct.calcsize(layout)))
        return value

    def _bytes(self, count: int) -> bytes:
        start = self._at
        self._skip(count)
        return self._data[start : self._at]

    def _skip(self, count: int) -> None:
        if self._at + count > len(self._data):
            raise CheckpointError(
                f"{self._path} is cut short: its header goes on to byte {self._at + count}, "
                f"the file has {len(self._data)}"
            )
        self._at += count
