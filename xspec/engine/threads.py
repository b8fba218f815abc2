"""The two threads beside the event loop: one makes every device call, one waits for device events.

libgomp keeps a worker team per calling thread, so a second thread that calls torch would cost a
second team; the event loop must never block, so it learns of completed rounds by a callback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from xspec.exec.pipeline import Ticket
from xspec.platform.base import Event

T = TypeVar("T")


class Threads:
    """`submit` makes this the Launcher of a Pipeline."""

    def __init__(self) -> None:
        self._launch = ThreadPoolExecutor(1, thread_name_prefix="xspec-launch")
        self._wait = ThreadPoolExecutor(1, thread_name_prefix="xspec-wait")

    def submit(self, fn: Callable[[], T], /) -> Future[T]:
        return self._launch.submit(fn)

    async def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` on the launch thread (loading, warm-up) and await its result."""
        return await asyncio.wrap_future(self.submit(fn))

    def when_complete(self, ticket: Ticket, wake: Callable[[], None]) -> None:
        """Call `wake` on the current event loop once the round is complete or broken."""
        loop = asyncio.get_running_loop()

        def wake_loop(_: object = None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        def launched(future: Future[Event]) -> None:
            if future.exception() is None and not future.result().done():
                self._wait.submit(future.result().wait).add_done_callback(wake_loop)
            else:
                wake_loop()

        ticket.launched.add_done_callback(launched)

    def close(self) -> None:
        self._launch.shutdown(wait=True)
        self._wait.shutdown(wait=True)
