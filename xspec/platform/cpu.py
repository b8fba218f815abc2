"""The CPU as a device: work is done when the call returns, so events are always past.

Memory figures respect cgroup limits, because a container's /proc/meminfo shows the whole host.
"""

from __future__ import annotations

import logging
import platform as host
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from xspec.core.shapes import BucketGrid
from xspec.errors import ConfigError, EngineError
from xspec.platform.base import Abilities, Captured, Event
from xspec.threads import usable_cores

if TYPE_CHECKING:
    from xspec.kernels.base import Kernels
    from xspec.kernels.native import NativeLibrary


T = TypeVar("T")

log = logging.getLogger(__name__)

NATIVE = ("amx", "avx512_fma", "avx512", "avx2")
"""Instruction sets whose native kernels are taken unasked: the portable loops are slower than torch."""

DRY_RUN_ROWS = 64
"""Wider passes are prepared without a run: what the first one pays then is little beside its own work."""


class PastEvent:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class PreparedCall(Generic[T]):
    """A bucket's call on padded shapes. Replaying it is calling it."""

    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn = fn

    def replay(self) -> T:
        return self._fn()


class CpuPlatform:
    """`kernels` as --cpu_kernels has it: native, torch, or auto for native where they are there and fast."""

    name = "cpu"

    def __init__(self, kernels: str = "auto") -> None:
        dtypes = {torch.float64, torch.float32, torch.bfloat16}
        if torch.ops.mkldnn._is_mkldnn_fp16_supported():
            dtypes.add(torch.float16)
        self._library = _native_library(kernels)
        self._kernels: Kernels | None = None
        instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        # Few rows are bound by reading weights, so native kernels gain by bf16 without instructions for it.
        fast_bf16 = instructions or (self._library is not None and self._library.isa() in NATIVE)
        self.abilities = Abilities(
            dtypes=frozenset(dtypes),
            default_dtype=torch.bfloat16 if fast_bf16 else torch.float32,
            graph_backends=frozenset({"off", "cpu"}),
            default_graph_backend="cpu",
            ring_slots=2,
            graphs_per_slot=False,
            synchronous=True,
            quantization_gap=""
            if self._library
            else "it needs the native kernels, which are not in use here",
            modest_cache_bytes=2**30,
        )

    def device(self) -> torch.device:
        return torch.device("cpu")

    def device_name(self) -> str:
        model = cpu_model(Path("/proc/cpuinfo")) or host.processor() or host.machine() or "CPU"
        cores = usable_cores()
        return f"{model}, {cores} usable core{'s' if cores > 1 else ''}"

    def event(self) -> Event:
        return PastEvent()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def capture(self, fn: Callable[[], T], rows: int) -> Captured[T]:
        if rows <= DRY_RUN_ROWS:
            fn()  # the first call of a shape makes oneDNN's primitives and touches the memory it needs
        return PreparedCall(fn)

    def bucket_grid(self, max_rows: int) -> BucketGrid:
        return BucketGrid.fine(max_rows)

    def memory_bytes(self) -> tuple[int, int]:
        return memory_bytes(Path("/proc"), Path("/sys/fs/cgroup"))

    def kernels(self) -> Kernels:
        """The same ones every time: target and drafter share their threads."""
        if self._kernels is None:
            self._kernels = self._make_kernels()
        return self._kernels

    def kernels_name(self) -> str:
        return "torch" if self._library is None else f"native {self._library.isa()}"

    def _make_kernels(self) -> Kernels:
        # Loaded by the platform that was chosen.
        if self._library is None:
            from xspec.kernels.cpu import CpuKernels

            return CpuKernels()
        from xspec.kernels.cpu_native import NativeKernels
        from xspec.kernels.native import shared_team

        return NativeKernels(shared_team(self._library, torch.get_num_threads()))


def _native_library(kernels: str) -> NativeLibrary | None:
    """The native library where `kernels` means it, else None and a line in the log that says why."""
    if kernels not in ("auto", "native", "torch"):
        raise ConfigError(f"--cpu_kernels={kernels}: allowed: auto, native, torch")
    if kernels == "torch":
        return None
    from xspec.kernels.native import library_path, load_library

    path = library_path()
    try:
        if path is None:
            raise EngineError("they were not built: the install found no C++ compiler that could")
        library = load_library(path)
    except (OSError, EngineError) as error:
        if kernels == "native":
            raise ConfigError(f"--cpu_kernels=native: the native kernels cannot be used ({error})") from error
        log.warning("torch computes, as the native kernels cannot be used: %s", error)
        return None
    if kernels == "auto" and library.isa() not in NATIVE:
        log.info("torch computes: the native kernels need %s to be faster", " or ".join(NATIVE))
        return None
    log.info("native kernels: %s", library.isa())
    return library


def cpu_model(cpuinfo: Path) -> str:
    """The first core's model, blanks evened out; empty where the kernel does not name one."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    named = (line.partition(":")[2] for line in lines if line.partition(":")[0].strip() == "model name")
    return " ".join(next(named, "").split())


def memory_bytes(proc: Path, cgroup: Path) -> tuple[int, int]:
    """(free, total): the host's figures, narrowed by every cgroup limit that applies to this process."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        fields = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":", 1) for line in lines)}
        free, total = fields["MemAvailable"], fields["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise ConfigError(
            f"cannot tell how much memory is free from {proc / 'meminfo'} ({error!r}): set --max_cache_size"
        ) from error
    for limit, used in _cgroup_limits(proc, cgroup):
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return free, total


def _cgroup_limits(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """(limit, used) of each limited cgroup from this process's own up to the root (v2, else v1)."""
    v2_path, v1_path = "/", "/"
    try:
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                v2_path = path
            elif "memory" in controllers.split(","):
                v1_path = path
    except (OSError, ValueError):
        pass  # no cgroups here: only the roots are looked at
    trees = (
        (cgroup, v2_path, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", v1_path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    limits = []
    for root, path, limit_file, used_file, reclaimable in trees:
        for folder in _up_to_root(root, path):
            limit, used = _read_int(folder / limit_file), _read_int(folder / used_file)
            if limit is not None and used is not None:
                limits.append((limit, max(0, used - _stat(folder / "memory.stat", reclaimable))))
    return limits


def _up_to_root(root: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max": no limit
        return None


def _stat(path: Path, key: str) -> int:
    try:
        pairs = dict(line.split()[:2] for line in path.read_text().splitlines())
        return int(pairs.get(key, 0))
    except (OSError, ValueError):
        return 0
