"""Which platform --device means. Only the chosen one is imported."""

from __future__ import annotations

from xspec.errors import ConfigError
from xspec.platform.base import Platform

DEVICES = ("auto", "cpu")
LATER_DEVICES = ("cuda", "npu")


def select_platform(device: str = "auto", cpu_kernels: str = "auto") -> Platform:
    """`auto` is the CPU while it is the only platform there is. `cpu_kernels`: as the flag of that name."""
    name = device.split(":", 1)[0]
    if name in LATER_DEVICES:
        raise ConfigError(f"--device={device}: {name} is not supported yet; allowed: {', '.join(DEVICES)}")
    if device not in DEVICES:
        raise ConfigError(f"--device={device} is not a device; allowed: {', '.join(DEVICES)}")
    from xspec.platform.cpu import CpuPlatform

    return CpuPlatform(cpu_kernels)
