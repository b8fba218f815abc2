"""The asyncio clothing of the driver: submit while the ring has room, retire when it is full, sleep
only when nothing is in flight and nothing waits. It never polls and never touches the device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from xspec.engine.threads import Threads
from xspec.errors import EngineDeadError
from xspec.exec.driver import Driver, Retirement

MAX_LOST_ROUNDS = 3
"""So many rounds lost in a row mean that the device or the model is broken, not one request."""


class EngineLoop:
    """`deliver` takes each retirement to the clients; it runs after the next round was submitted."""

    def __init__(self, driver: Driver, threads: Threads, deliver: Callable[[Retirement], None]) -> None:
        self._driver = driver
        self._threads = threads
        self._deliver = deliver
        self._wake = asyncio.Event()
        self._closing = False
        self._lost_rounds = 0

    def wake(self) -> None:
        """Something changed: a request came or went, or a round is complete."""
        self._wake.set()

    def close(self) -> None:
        """Stop after the rounds in flight. Whoever still runs is the caller's to fail."""
        self._closing = True
        self.wake()

    async def run(self) -> None:
        """Serve until `close`. Raises EngineDeadError when the engine cannot go on."""
        driver, pipeline = self._driver, self._driver.pipeline
        undelivered: Retirement | None = None
        while True:
            self._wake.clear()
            submitted = not self._closing and not pipeline.full and driver.step()
            if submitted:
                self._threads.when_complete(pipeline.newest, self.wake)
            if undelivered is not None:
                self._deliver(undelivered)
                undelivered = None
                await asyncio.sleep(0)  # writers of the clients' streams get their turn
            elif submitted:
                continue
            elif not pipeline.empty and pipeline.oldest.complete:
                undelivered = driver.retire()
                self._count_losses(undelivered)
            elif pipeline.empty and self._closing:
                held = [sequence.pages for sequence in driver.scheduler.live.values()]
                driver.scheduler.pages.check_integrity(held)  # too slow for a pause, right for the end
                return
            else:
                await self._sleep()

    async def _sleep(self) -> None:
        driver = self._driver
        if driver.pipeline.empty:
            scheduler = driver.scheduler
            if not scheduler.idle:
                raise EngineDeadError(f"{len(scheduler.live)} sequences wait but no round can be planned")
            scheduler.pages.check_idle()
            driver.paused()
        await self._wake.wait()

    def _count_losses(self, retirement: Retirement) -> None:
        self._lost_rounds = self._lost_rounds + 1 if retirement.error is not None else 0
        if self._lost_rounds >= MAX_LOST_ROUNDS:
            self._deliver(retirement)
            raise EngineDeadError(f"{self._lost_rounds} rounds in a row failed") from retirement.error
