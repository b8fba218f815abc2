"""The mailbox between the engine and a client: nothing is lost, nobody waits in vain, one reader."""

from __future__ import annotations

import asyncio

import pytest

from xspec.engine.api import TextOutput
from xspec.engine.streams import Mailbox


def output(number: int) -> TextOutput:
    return TextOutput("request", number, "", ())


async def test_outputs_come_in_order_whether_they_are_waited_for_or_not() -> None:
    mail = Mailbox()
    mail.put(output(0))
    mail.put(output(1))
    assert [(await mail.get()).choice for _ in range(2)] == [0, 1]
    reader = asyncio.create_task(mail.get())
    await asyncio.sleep(0)
    assert not reader.done()
    mail.put(output(2))
    mail.put(output(3))  # before the reader had its turn
    assert (await reader).choice == 2 and (await mail.get()).choice == 3


async def test_a_reader_that_leaves_takes_nothing_along() -> None:
    mail = Mailbox()
    for put_first in (False, True):
        reader = asyncio.create_task(mail.get())
        await asyncio.sleep(0)
        if put_first:
            mail.put(output(7))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
    assert (await asyncio.wait_for(mail.get(), 5)).choice == 7


async def test_a_second_reader_is_refused() -> None:
    mail = Mailbox()
    reader = asyncio.create_task(mail.get())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader"):
        await mail.get()
    mail.put(output(1))
    assert (await reader).choice == 1
