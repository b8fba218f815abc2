"""What a device offers the engine: streams, events, pinned memory, captured calls, kernels.

Device names appear only below `platform/` and `kernels/`; everything else asks these protocols.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from xspec.core.shapes import BucketGrid
    from xspec.kernels.base import Kernels


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this platform can do; build checks demands against it and reports every gap at once."""

    dtypes: frozenset[torch.dtype]
    default_dtype: torch.dtype  # what --dtype=auto means here
    graph_backends: frozenset[str]
    default_graph_backend: str
    ring_slots: int  # rounds in flight with --enable_task_pipeline; measured per platform
    graphs_per_slot: bool  # a captured call may still be running when the next slot wants to aim it
    synchronous: bool  # results are there when a call returns: reading them waits for nothing
    quantization_gap: str = ""  # why linears cannot be quantised here; empty: they can
    modest_cache_bytes: int | None = None  # KV cache taken unasked where its memory is everybody's


class Event(Protocol):
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Block the calling (host) thread until the device has passed the event."""


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Captured(Protocol[T_co]):
    """A prepared call on fixed buffers. Replaying reads and writes only the buffers it was made with."""

    def replay(self) -> T_co:
        """What the call returned; on a device with graphs the same tensors every time, rewritten."""


class Platform(Protocol):
    name: str
    abilities: Abilities

    def device(self) -> torch.device: ...

    def device_name(self) -> str:
        """What computes, as its maker calls it, and how much of it may be used: costs hold for that alone."""

    def event(self) -> Event:
        """Record an event after everything submitted so far."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that device copies may target asynchronously."""

    def capture(self, fn: Callable[[], T], rows: int) -> Captured[T]:
        """Prepare `fn`, a pass over `rows` rows that only touches buffers that outlive it, for replay."""

    def bucket_grid(self, max_rows: int) -> BucketGrid:
        """The decode buckets that pay on this platform."""

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the memory the KV cache lives in."""

    def kernels(self) -> Kernels:
        """One set for all that runs on this platform."""

    def kernels_name(self) -> str:
        """Which kernels these are: what they cost holds for them alone."""
