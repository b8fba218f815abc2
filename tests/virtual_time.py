"""An event loop without waiting: where nothing is ready, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at second 0. A wait that no timer ends is a deadlock and raises."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everybody waits and no timer runs")
        self._loop.now_s += max(0.0, timeout)
        return super().select(0)


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
