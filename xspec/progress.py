"""How long work tells how far it is. Renderers live in the command line; libraries pass `silent`."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called from any thread, at most a few hundred times a stage. `total` 0: length unknown.

    A stage begins with its first call and ends with the call where done == total (or the next stage).
    """

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def silent(stage: str, done: int, total: int) -> None:
    """The Progress of callers that show none."""


def duration(seconds: float) -> str:
    """3.2 s, 1 min 5 s, 2 h 3 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
