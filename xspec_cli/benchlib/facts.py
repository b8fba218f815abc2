"""What machine and software a result was measured with. What cannot be read is left out, never guessed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

PACKAGES = ("xspec", "torch", "numpy", "tokenizers", "aiohttp")
ENVIRONMENT_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_")


def machine_facts(environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    facts: dict[str, object] = {
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "packages": _versions(),
        "environment": {
            name: environ[name] for name in sorted(environ) if name.startswith(ENVIRONMENT_PREFIXES)
        },
    }
    if (model := _value_after("/proc/cpuinfo", "model name")) is not None:
        facts["cpu_model"] = model
    if (memory := _value_after("/proc/meminfo", "MemTotal")) is not None:
        facts["memory_bytes"] = int(memory.split()[0]) * 1024
    return facts


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _value_after(path: str, key: str) -> str | None:
    """The value of the first `key : value` line of a /proc file; None off Linux."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, colon, value = line.partition(":")
        if colon and name.strip() == key:
            return value.strip()
    return None
