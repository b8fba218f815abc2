"""The container format of a GGUF file: its key-value header and where each tensor lies, read once and fast.

The `gguf` package's reader makes two numpy views per array element, seconds for a real vocabulary.
Knows the format only, nothing about what any key means. Every read is bounds-checked: a cut or damaged
file is an error, never a crash or an endless loop.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from xspec.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 8
_DEFAULT_ALIGNMENT = 32
_LENGTH = struct.Struct("<Q")
_TYPE = struct.Struct("<I")


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
    """Metadata as plain Python: str, int, float, bool or a list of one of them."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(data: mmap.mmap, path: Path) -> GgufHeader:
    return _Header(data, path).read()


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Every metadata key of the file with its value."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read_header(data, path).metadata
    except ValueError as error:  # mmap of an empty file
        raise CheckpointError(f"{path} is not a GGUF file: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


class _Header:
    """A cursor over the header. Every read is bounds-checked: a cut file is an error, not a crash."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0
        self._key = "its header"

    def read(self) -> GgufHeader:
        magic = self._take(4)
        if magic != _MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it begins with {magic!r}")
        version = self._scalar(_TYPE)
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._path} is GGUF version {version}; allowed: {_VERSIONS}, little-endian"
            )
        tensor_count, count = self._scalar(_LENGTH), self._scalar(_LENGTH)
        fields: dict[str, Any] = {}
        for index in range(count):
            self._key = f"metadata entry {index}"
            key = self._key = self._string()
            if key in fields:
                raise self._bad("appears twice")
            fields[key] = self._value(self._scalar(_TYPE))
        return GgufHeader(fields, self._tensors(tensor_count, fields))

    def _tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}, not a positive integer")
        found = []
        for index in range(count):
            self._key = f"tensor entry {index}"
            found.append(self._tensor_info())
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in found:
            self._key = f"tensor {name}"
            if name in tensors:
                raise self._bad("appears twice")
            tensors[name] = self._place(name, shape, kind, base + offset)
        return tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._scalar(_TYPE)
        if not 1 <= dims <= _MAX_DIMS:
            raise self._bad(f"({name!r}) has {dims} dimensions")
        shape = tuple(reversed([self._scalar(_LENGTH) for _ in range(dims)]))
        return name, shape, self._scalar(_TYPE), self._scalar(_LENGTH)

    def _place(self, name: str, shape: tuple[int, ...], kind_id: int, start: int) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(kind_id)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self._bad(f"has unknown type {kind_id}") from None
        if shape[-1] % block:
            raise self._bad(f"has rows of {shape[-1]} weights; {kind.name} packs them by {block}")
        size_bytes = math.prod(shape) // block * block_bytes
        if start + size_bytes > len(self._data):
            raise self._bad(f"ends at byte {start + size_bytes}, but the file has {len(self._data)}")
        return GgufTensor(name, shape, kind, start, size_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar(_TYPE), self._scalar(_LENGTH))
        return self._numbers(kind, 1)[0]

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind == _ARRAY:
            raise self._bad("is an array of arrays, which is not supported")
        if kind != _STRING:
            return list(self._numbers(kind, length))
        data, at, end = self._data, self._at, len(self._data)
        unpack, strings = _LENGTH.unpack_from, []
        try:
            for _ in range(length):
                (size,) = unpack(data, at)
                at += 8 + size
                if at > end:
                    raise self._bad("runs past the end of the file")
                strings.append(data[at - size : at].decode())
        except struct.error:
            raise self._bad("runs past the end of the file") from None
        except UnicodeDecodeError as error:
            raise self._bad(f"holds a string that is not UTF-8: {error}") from None
        self._at = at
        return strings

    def _numbers(self, kind: int, length: int) -> tuple[Any, ...]:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._bad(f"has value type {kind}; allowed: 0 to 12")
        data = self._take(length * struct.calcsize(code))
        return struct.unpack(f"<{length}{code}", data)

    def _string(self) -> str:
        raw = self._take(self._scalar(_LENGTH))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._bad(f"is not UTF-8: {error}") from None

    def _scalar(self, layout: struct.Struct) -> int:
        value: int = layout.unpack(self._take(layout.size))[0]
        return value

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise self._bad("runs past the end of the file")
        self._at += size
        return self._data[self._at - size : self._at]

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {self._key} {what}")
