"""Thread counts, waiting and caches of the math libraries, settled before torch is imported.

The OpenMP runtime reads its environment once, when it is loaded, so this has to come first. Knows
nothing about torch beyond whether it is too late.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from xspec.errors import ConfigError

LIBGOMP_SPIN_COUNT = 10_000
"""Spins of an idle OpenMP thread before it sleeps: enough to bridge two neighbouring parallel regions, far
less than a scheduler tick. Measured on 2 cores, ms per token at one request, idle / one core taken: no
spinning 40 / 36, 1,000 spins 30 / 49, 10,000 spins 25 / 130; a million spins gain nothing more (24)."""

KERNEL_CACHE_ENTRIES = 256
"""Compiled oneDNN kernels kept per cache. Every prompt length is a shape of its own; at their default of
1024 entries the caches grow by hundreds of MB over the first hours of mixed traffic."""

SWITCH_INTERVAL_S = 0.0001
"""How long a thread that wants the interpreter lock waits for it. Python's 5 ms would let the event
loop delay the launch thread by a good part of a round."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """What was settled. `environment` holds the variables set here, `unsettled` what came too late."""

    compute_threads: int
    usable_cores: int
    environment: dict[str, str] = field(default_factory=dict)
    unsettled: tuple[str, ...] = ()


def settle_threads(
    num_compute_threads: int,
    environ: MutableMapping[str, str] | None = None,
    *,
    torch_loaded: bool | None = None,
) -> ThreadSettings:
    """Choose the compute threads and tell the math libraries. 0: OMP_NUM_THREADS, else the usable cores.

    A flag given by the user wins over OMP_NUM_THREADS; every other variable already set is left alone.
    """
    environ = os.environ if environ is None else environ
    cores = usable_cores()
    threads = num_compute_threads or _threads_from(environ.get("OMP_NUM_THREADS")) or cores
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",  # numpy only does bookkeeping here; its threads would be neighbours
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": str(LIBGOMP_SPIN_COUNT),
        "LRU_CACHE_CAPACITY": str(KERNEL_CACHE_ENTRIES),  # torch's cache in front of oneDNN's
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KERNEL_CACHE_ENTRIES),
    }
    kept = {name for name in wanted if name in environ}
    if num_compute_threads:
        kept.discard("OMP_NUM_THREADS")
        kept.discard("MKL_NUM_THREADS")
    wanted = {name: value for name, value in wanted.items() if name not in kept}
    changed = {name: value for name, value in wanted.items() if environ.get(name) != value}
    environ.update(changed)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    unsettled: tuple[str, ...] = ()
    if "torch" in sys.modules if torch_loaded is None else torch_loaded:
        unsettled = tuple(f"{name}={value}" for name, value in changed.items())
    if unsettled:
        names = ", ".join(unsettled)
        log.warning("torch was imported before xspec could set %s; these have no effect now", names)
    return ThreadSettings(threads, cores, changed, unsettled)


def usable_cores() -> int:
    """Cores this process may use: its CPU affinity, cut by the cgroup's CPU quota."""
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def cgroup_cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """CPUs' worth of time per period that the control groups grant (v2 and v1), None without a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = [quota for folder in _cgroup_folders(root, lines) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _cgroup_folders(root: Path, lines: list[str]) -> Iterator[Path]:
    """The process's groups and all their ancestors, in whichever hierarchy limits CPU."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        if controllers and not base.is_dir():
            base = root / "cpu"
        folder = base / path.lstrip("/")
        # inside a container the path may be the host's: then only the mounted root is visible
        yield from (candidate for candidate in (folder, *folder.parents) if candidate.is_relative_to(base))


def _quota_of(folder: Path) -> float | None:
    v2 = _words(folder / "cpu.max")
    if len(v2) == 2:
        quota, period = v2
    else:
        quota, period = (" ".join(_words(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    if not (re.fullmatch(r"\d+", quota) and re.fullmatch(r"[1-9]\d*", period)):
        return None  # "max", "-1" or no such file
    return int(quota) / int(period)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _threads_from(text: str | None) -> int | None:
    """OMP_NUM_THREADS as OpenMP defines it: a list by nesting level, of which ours is the first."""
    if text is None or not text.strip():
        return None
    first = text.split(",")[0].strip()
    if not re.fullmatch(r"[1-9]\d{0,4}", first, re.ASCII):
        raise ConfigError(f"OMP_NUM_THREADS={text}: allowed: integers from 1")
    return int(first)
