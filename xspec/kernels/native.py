"""The native library beside this package: finding it, its C prototypes, its team of threads, its memory.

The other side of csrc/api.cpp. A build without a compiler has no library, and nothing here is needed then.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from xspec.errors import EngineError

VERSION = 5
"""Of the C interface; a library of another version was built from other sources."""

ISAS = ("amx", "avx512_fma", "avx512", "avx2", "portable")
"""Instruction sets by preference; AMD's CPUs take avx512 before avx512_fma."""


ALIGNMENT, HUGE_PAGE_BYTES = 64, 2 << 20
CHUNK_BYTES = 64 << 20


class Format(enum.IntEnum):
    """How a linear's weights lie (xs::Format)."""

    BF16 = 0
    INT8 = 1
    INT4 = 2
    INT8_WIDE = 3
    INT4_WIDE = 4


class Status(enum.IntEnum):
    OK = 0
    INVALID = 1
    NO_MEMORY = 2
    FORKED = 3
    FAILED = 4


_I64, _F32, _PTR = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class CLinear(ctypes.Structure):
    _fields_ = [
        ("format", ctypes.c_int32),
        ("gated", ctypes.c_bool),
        ("outs", _I64),
        ("ins", _I64),
        ("weights", _PTR),
        ("scales", _PTR),
        ("bias", _PTR),
    ]


class CCache(ctypes.Structure):
    _fields_ = [("slab", _PTR), ("pages", _I64), ("block", _I64), ("kv_heads", _I64), ("dim", _I64)]


class CRopeStore(ctypes.Structure):
    _fields_ = [
        ("qkv", _PTR),
        ("stride", _I64),
        ("rows", _I64),
        ("heads", _I64),
        ("cos", _PTR),
        ("sin", _PTR),
        ("head_norm", _PTR),
        ("eps", _F32),
        ("slots", _PTR),
        ("finite", ctypes.c_bool),
        ("store_queries", ctypes.c_bool),
        ("cache", CCache),
    ]


class CAttend(ctypes.Structure):
    _fields_ = [
        ("q", _PTR),
        ("q_stride", _I64),
        ("rows", _I64),
        ("heads", _I64),
        ("sequences", _PTR),
        ("kv_lens", _PTR),
        ("page_table", _PTR),
        ("table_stride", _I64),
        ("first_key", _I64),
        ("scale", _F32),
        ("out", _PTR),
        ("cache", CCache),
    ]


class CStackShape(ctypes.Structure):
    _fields_ = [
        ("hidden", _I64),
        ("inner", _I64),
        ("heads", _I64),
        ("kv_heads", _I64),
        ("dim", _I64),
        ("first_key", _I64),
        ("scale", _F32),
        ("norm_eps", _F32),
        ("final_norm", _PTR),
        ("frequencies", _PTR),
        ("cos", _PTR),
        ("sin", _PTR),
        ("positions", _I64),
    ]


class CLayer(ctypes.Structure):
    _fields_ = [
        ("qkv", CLinear),
        ("output", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("input_norm", _PTR),
        ("mlp_norm", _PTR),
        ("head_norm", _PTR),
        ("attention_out_norm", _PTR),
        ("mlp_out_norm", _PTR),
        ("of_sums", ctypes.c_bool),
        ("eps", _F32),
    ]


class CPass(ctypes.Structure):
    _fields_ = [
        ("rows", _I64),
        ("loops", _I64),
        ("residual", _PTR),
        ("outputs", _PTR),
        ("normed", _PTR),
        ("positions", _PTR),
        ("slots", _PTR),
        ("sequences", _PTR),
        ("kv_lens", _PTR),
        ("page_table", _PTR),
        ("table_stride", _I64),
        ("slabs", _PTR),
        ("pages", _I64),
        ("block", _I64),
        ("finite", _I64),
    ]


STRUCTS = (CLinear, CCache, CRopeStore, CAttend, CStackShape, CLayer, CPass)
"""In the order in which xs_struct_sizes reports them."""

_I32 = ctypes.c_int32
_LINEAR, _SHAPE = ctypes.POINTER(CLinear), ctypes.POINTER(CStackShape)
_PROTOTYPES: dict[str, tuple[type | None, Sequence[type]]] = {
    "xs_team_create": (_I32, (_I32, ctypes.c_char_p, ctypes.POINTER(_PTR))),
    "xs_team_destroy": (None, (_PTR,)),
    "xs_isa": (ctypes.c_char_p, (ctypes.c_char_p,)),
    "xs_advise_huge": (None, (_PTR, _I64)),
    "xs_packed_bytes": (_I64, (_I32, _I64, _I64, _I32)),
    "xs_scale_bytes": (_I64, (_I32, _I64, _I64, _I32)),
    "xs_pack_int": (_I32, (_I32, _PTR, _PTR, _PTR, _PTR, _I64, _I64, _I32, _PTR, _PTR, _PTR)),
    "xs_pack_bf16": (_I32, (_PTR, _PTR, _I64, _I64, _I32, _PTR, _PTR)),
    "xs_linear": (_I32, (_PTR, _LINEAR, _PTR, _I64, _I64, _PTR, _I64, _PTR, _I64)),
    "xs_rms_norm": (_I32, (_PTR, _PTR, _PTR, _F32, _PTR, _I64, _I64, _I64)),
    "xs_rope_store": (_I32, (_PTR, ctypes.POINTER(CRopeStore))),
    "xs_store_kv": (_I32, (_PTR, ctypes.POINTER(CCache), _PTR, _I64, _PTR, _I32)),
    "xs_attend": (_I32, (_PTR, ctypes.POINTER(CAttend))),
    "xs_argmax": (_I32, (_PTR, _PTR, _I64, _I64, _I64, _PTR, _PTR)),
    "xs_logsumexp": (_I32, (_PTR, _PTR, _I64, _I64, _I64, _PTR)),
    "xs_stack_create": (_I32, (_SHAPE, ctypes.POINTER(CLayer), _I64, ctypes.POINTER(_PTR))),
    "xs_stack_destroy": (None, (_PTR,)),
    "xs_stack_forward": (_I32, (_PTR, _PTR, ctypes.POINTER(CPass))),
    "xs_stack_publish": (_I32, (_PTR, _PTR, ctypes.POINTER(CPass))),
}


class NativeLibrary:
    """The loaded library. EngineError if it was built from other sources than these."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.c = ctypes.CDLL(str(path))
        found = int(self.c.xs_version()) if hasattr(self.c, "xs_version") else 0
        if found != VERSION:
            raise EngineError(f"{path} has interface {found}, this xspec needs {VERSION}: install it again")
        sizes = (ctypes.c_int64 * len(STRUCTS))()
        self.c.xs_struct_sizes(sizes)
        if list(sizes) != [ctypes.sizeof(struct) for struct in STRUCTS]:
            raise EngineError(f"{path} was built from other sources than this xspec: install it again")
        for name, (result, arguments) in _PROTOTYPES.items():
            try:
                function = getattr(self.c, name)
            except AttributeError as error:
                raise EngineError(f"{path} lacks {name}, this xspec needs it: install it again") from error
            function.restype, function.argtypes = result, list(arguments)

    def isa(self, name: str = "") -> str | None:
        """The instruction set that `name` means here (empty: the best); None where it is not available."""
        found: bytes | None = self.c.xs_isa(name.encode() or None)
        return None if found is None else found.decode()


class Memory:
    """Buffers side by side in huge pages, for what is read from end to end again and again.

    Measured on SmolLM2 (265 MB of weights, one thread, a virtual machine): a pass of one row takes 7.0 ms
    with them, 11.6 without. A buffer is freed with its last neighbour.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._left = torch.empty(0, dtype=torch.uint8)
        self._taking = threading.Lock()  # engines of one process may load their models at the same time

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], 64-byte aligned, what is in it undefined."""
        unit = -(-size // ALIGNMENT) * ALIGNMENT
        with self._taking:
            if unit > len(self._left):
                self._left = self._chunk(max(unit, CHUNK_BYTES))
            taken, self._left = self._left[:size], self._left[unit:]
        return taken

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """On its own, zeroed."""
        size = math.prod(shape) * dtype.itemsize
        return self._chunk(size)[:size].view(dtype).view(*shape).zero_()

    def _chunk(self, size: int) -> torch.Tensor:
        """At the beginning of a huge page; memory that is never touched costs nothing."""
        whole = torch.empty(size + HUGE_PAGE_BYTES, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE_BYTES
        chunk = whole[start : start + size]
        self._library.c.xs_advise_huge(chunk.data_ptr(), -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        return chunk


def declare(
    library: NativeLibrary,
    part: str,
    structs: Sequence[type[ctypes.Structure]],
    prototypes: Mapping[str, Sequence[type]],
) -> ctypes.CDLL:
    """The library with the calls of a part of it, and its `_destroy`.

    EngineError if it was built from sources whose structs have other sizes.
    """
    sizes = (_I64 * len(structs))()
    getattr(library.c, f"{part}_struct_sizes")(sizes)
    if list(sizes) != [ctypes.sizeof(struct) for struct in structs]:
        raise EngineError(f"{library.path} was built from other sources than this xspec: install it again")
    for name, arguments in prototypes.items():
        call = getattr(library.c, name)
        call.restype, call.argtypes = ctypes.c_int32, list(arguments)
    destroy = getattr(library.c, f"{part}_destroy")
    destroy.restype, destroy.argtypes = None, [_PTR]
    return library.c


def addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """For native code that wants an array of them; the tensors must outlive its call."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


class Team:
    """`threads` threads that compute together, one call at a time. Their memory lives as long as this."""

    def __init__(self, library: NativeLibrary, threads: int, isa: str = "") -> None:
        self.library, self.threads = library, threads
        self.memory = Memory(library)
        handle = ctypes.c_void_p()
        check(library.c.xs_team_create(threads, isa.encode() or None, ctypes.byref(handle)), "xs_team_create")
        self.handle = handle.value
        self.isa = isa or library.isa() or ""
        # Not at exit: threads of ours may still be inside a call then, and the process ends anyway.
        weakref.finalize(self, library.c.xs_team_destroy, self.handle).atexit = False


def check(status: int, call: str) -> None:
    """Raise what a status stands for: MemoryError, else EngineError (a fault of this package)."""
    if status == Status.OK:
        return
    if status == Status.NO_MEMORY:
        raise MemoryError(f"{call}: out of memory")
    if status == Status.FORKED:
        raise EngineError(f"{call}: compute threads do not survive a fork; start processes afresh (spawn)")
    raise EngineError(f"{call} refused its arguments or failed ({Status(status).name.lower()})")


def library_path(folder: Path | None = None) -> Path | None:
    """The library beside this package (or in `folder`), if one was built."""
    found = sorted((folder or Path(__file__).parent).glob("_native*.so"))
    return found[0] if found else None


@functools.cache
def load_library(path: Path) -> NativeLibrary:
    """Loaded once a process; OSError if it cannot be."""
    return NativeLibrary(path)


@functools.cache
def shared_team(library: NativeLibrary, threads: int, isa: str = "") -> Team:
    """The process's team of so many threads: two of them would fight for the cores."""
    return Team(library, threads, isa)
