"""A ring of slots: rounds are submitted in order, complete in order and retire in order.

Knows nothing about asyncio: `Ticket.launched` is a plain future of the launch thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from xspec.core.round import RoundPlan, RoundResult
from xspec.exec.slots import Slot
from xspec.platform.base import Event


class Executor(Protocol):
    """What runs a plan on the device side and fills a slot with its results (`runner.Runner`)."""

    def execute(self, plan: RoundPlan, slot: Slot) -> Event: ...

    def make_slots(self, count: int) -> list[Slot]: ...


class Launcher(Protocol):
    """One thread that makes all device calls, first come first served."""

    def submit(self, fn: Callable[[], Event], /) -> Future[Event]: ...


@dataclass(frozen=True, slots=True)
class Ticket:
    plan: RoundPlan
    slot: Slot
    launched: Future[Event]  # host side done; the event says when the device is

    @property
    def complete(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        if not self.launched.done():
            return False
        return self.launched.exception() is not None or self.launched.result().done()

    def wait(self) -> None:
        """Block until the round is complete. Raises what its execution raised."""
        self.launched.result().wait()


class Pipeline:
    """`slots` rounds may be in flight. The slot of a round is free again once it has retired."""

    def __init__(self, executor: Executor, launcher: Launcher, slots: int) -> None:
        self._executor = executor
        self._launcher = launcher
        self._free = deque(executor.make_slots(slots))
        self._ring: deque[Ticket] = deque()

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def empty(self) -> bool:
        return not self._ring

    @property
    def oldest(self) -> Ticket:
        return self._ring[0]

    @property
    def newest(self) -> Ticket:
        return self._ring[-1]

    def submit(self, plan: RoundPlan) -> None:
        slot = self._free.popleft()
        launched = self._launcher.submit(lambda: self._executor.execute(plan, slot))
        self._ring.append(Ticket(plan, slot, launched))

    def retire(self) -> tuple[RoundPlan, RoundResult | BaseException]:
        """Take the oldest round out of the ring: its result, or what broke it. Blocks until complete."""
        ticket = self._ring.popleft()
        try:
            ticket.wait()
            return ticket.plan, ticket.slot.read(ticket.plan)
        except Exception as error:
            return ticket.plan, error
        finally:
            self._free.append(ticket.slot)
