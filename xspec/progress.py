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
