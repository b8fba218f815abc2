"""What serving does with the outcome of a round, for requests whose clients are made up.

A calibration runs rounds without clients. Text, counters and the turn of the event loop in which clients
read are part of what a round costs all the same: all of it happens while the next round is computed, on the
same cores and under the same interpreter lock. Where rounds take a millisecond it is a tenth of them.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from xspec.core.request import Output, Request, SamplingParams
from xspec.engine.streams import Mailbox
from xspec.engine.text import ChoiceText
from xspec.exec.driver import Retirement
from xspec.metrics import Metrics
from xspec.text.tokenizer import TextAssets


@dataclass(slots=True)
class _Client:
    text: ChoiceText
    mail: Mailbox
    reader: asyncio.Task[None]
    last_token_s: float


class Rehearsal:
    """Called with each retirement, once the next round was submitted; on one thread, without a loop of its
    own that runs. `metrics`: that nobody looks at. `close` when no more will come."""

    def __init__(self, assets: TextAssets, metrics: Metrics) -> None:
        self._tokenizer, self._metrics = assets.tokenizer, metrics
        self._prompt = tuple(assets.tokenizer.encode("."))
        self._clients: dict[str, _Client] = {}
        self._loop = asyncio.new_event_loop()

    def __call__(self, retirement: Retirement) -> None:
        if retirement.feedback is not None:
            self._metrics.round_retired(retirement.feedback)
        now = time.monotonic()
        for output in retirement.outputs:
            self._push(output, now)
        self._metrics.gauges(len(self._clients), 0, 0.0)
        self._turn()

    def close(self) -> None:
        for client in self._clients.values():
            client.reader.cancel()
        self._turn()
        self._clients.clear()
        self._loop.close()

    def _turn(self) -> None:
        """One turn of the loop: who was woken reads."""
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()

    def _push(self, output: Output, now: float) -> None:
        client = self._clients.get(output.request_id)
        if client is None:
            client = self._clients[output.request_id] = self._connect(output.request_id, now)
        out = client.text.push(output)
        self._metrics.delivered(len(out.token_ids), out.drafts)
        self._metrics.inter_token(now - client.last_token_s, len(out.token_ids))
        client.last_token_s = now
        client.mail.put(out)
        if output.finish_reason is not None:
            del self._clients[output.request_id]

    def _connect(self, request_id: str, now: float) -> _Client:
        request = Request(request_id, self._prompt, SamplingParams(ignore_eos=True))
        mail = Mailbox()
        reader = self._loop.create_task(_read(mail))
        return _Client(ChoiceText(self._tokenizer, request, 0, ()), mail, reader, now)


async def _read(mail: Mailbox) -> None:
    while (await mail.get()).finish_reason is None:
        pass
