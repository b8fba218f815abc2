"""The asyncio engine: admission, one record per request, delivery of text to its stream.

Everything here runs on the event loop thread. `build.py` assembles it; `loop.py` drives it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xspec.core.request import FinishReason, Output, Request, SamplingParams
from xspec.core.sequence import Sequence as LiveSequence
from xspec.core.sequence import Status
from xspec.engine.api import Phase, TextStream
from xspec.engine.loop import EngineLoop
from xspec.engine.streams import Live, Stream, last_output
from xspec.engine.text import ChoiceText
from xspec.engine.threads import Threads
from xspec.errors import EngineDeadError, OverloadedError, PromptTooLongError, RequestError
from xspec.exec.driver import Driver, Retirement
from xspec.metrics import Metrics
from xspec.policy.base import Policy
from xspec.text.tokenizer import TextAssets
from xspec.trace import RoundTrace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request must fit into."""

    max_model_len: int
    vocab_size: int
    max_concurrent_requests: int  # 0: no cap
    random_seed: int | None  # where seeds of requests without one come from; None: the system


class AsyncEngine:
    """Implements `engine.api.Engine`."""

    def __init__(
        self,
        *,
        model_id: str,
        text: TextAssets,
        driver: Driver,
        threads: Threads,
        metrics: Metrics,
        admission: Admission,
        info: dict[str, Any],
        policies: Callable[[str], Policy],
        trace: RoundTrace | None = None,
    ) -> None:
        """`policies`: makes the policy of a name, see `use_policy`. `trace`: closed with the engine."""
        self.model_id = model_id
        self.max_model_len = admission.max_model_len
        self.text = text
        self.metrics = metrics
        self.draft_width = metrics.draft_width
        self._admission = admission
        self._driver = driver
        self._scheduler = driver.scheduler
        self._threads = threads
        self._info = info
        self._policies = policies
        self._used_policies: dict[str, Policy] = {}
        self._trace = trace
        self._seeds = random.Random(admission.random_seed)
        self._live: dict[str, Live] = {}
        self._sequences = 0
        self._draining = False
        self._death: BaseException | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._seen_counters = (0, 0, 0)
        self._loop = EngineLoop(driver, threads, self._deliver)
        self._task = asyncio.create_task(self._run(), name="xspec-engine")

    # -- the surface ---------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        if self._death is not None:
            return Phase.DEAD
        return Phase.DRAINING if self._draining else Phase.READY

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> TextStream:
        """See `engine.api.Engine.generate`."""
        try:
            live = self._admit(tuple(prompt_ids), params, request_id or uuid.uuid4().hex)
        except OverloadedError as error:
            self.metrics.rejected("draining" if error.draining else "queue_full")
            raise
        except RequestError:
            self.metrics.rejected("invalid")
            raise
        return Stream(live, self._abort)

    def server_info(self) -> dict[str, Any]:
        scheduler = self._scheduler
        return {
            **self._info,
            "phase": str(self.phase),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_used_fraction": scheduler.pages.used_fraction,
            "preemptions": scheduler.counters.preemptions,
            "policy": self._driver.policy.name,
            "adaptive": self._adaptive(),
        }

    def _adaptive(self) -> dict[str, Any] | None:
        """What the policy says it does and what came of it; None where no policy adapts."""
        measured = self.metrics.adaptive_summary()
        return None if measured is None else {**self._driver.policy.status(), "measured": measured}

    def use_policy(self, name: str) -> None:
        """Speculate from now on as `name` says: "adaptive" (what the flags enabled), "plain", "fixed:K" or
        "fixed:K:V" (K drafted, V verified). For comparisons on one engine, while nothing runs. A policy that
        comes back goes on with what it has learnt.

        ConfigError where the name asks for what this engine has not prepared.
        """
        if self._live or not self._driver.pipeline.empty:
            raise RuntimeError("the policy is exchanged while requests run")
        if name not in self._used_policies:
            self._used_policies[name] = self._policies(name)
        self._driver.policy = self._used_policies[name]

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and let running ones finish; False if time ran out and they were aborted."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except TimeoutError:
            for live in list(self._live.values()):
                self._abort(live)
            return False

    async def close(self) -> None:
        """Stop the loop, fail what still runs and end both threads."""
        self._draining = True
        self._loop.close()
        await self._task
        await asyncio.to_thread(self._threads.close)
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, prompt_ids: tuple[int, ...], params: SamplingParams, request_id: str) -> Live:
        self._check_open()
        params.check()
        self._check_prompt(prompt_ids)
        if request_id in self._live:
            raise RequestError(f"a request with id {request_id!r} is already running", param="request_id")
        if bad := [i for i in (*params.logit_bias, *params.stop_token_ids) if not self._is_token(i)]:
            raise RequestError(
                f"token id {bad[0]} is outside the vocabulary of {self._admission.vocab_size} ids",
                param="logit_bias" if bad[0] in params.logit_bias else "stop_token_ids",
            )
        request = Request(request_id, prompt_ids, params, arrival_s=time.monotonic())
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        live = Live(request, [], [], open_choices=params.n)
        for choice in range(params.n):
            sequence = self._sequence(request, choice, seed)
            live.sequences.append(sequence)
            live.texts.append(ChoiceText(self.text.tokenizer, request, choice, eos_ids=self.text.eos_ids))
        live.last_token_s = [None] * params.n
        self._live[request_id] = live
        self._idle.clear()
        for sequence in live.sequences:
            self._scheduler.add(sequence)
        self.metrics.admitted(len(prompt_ids))
        self._gauges()
        self._loop.wake()
        return live

    def _check_open(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine has failed: {self._death}")
        if self._draining:
            raise OverloadedError("the server is shutting down", draining=True)
        cap = self._admission.max_concurrent_requests
        if cap and len(self._live) >= cap:
            raise OverloadedError(f"{cap} requests are running (max_concurrent_requests={cap})")

    def _check_prompt(self, prompt_ids: tuple[int, ...]) -> None:
        if not prompt_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if len(prompt_ids) >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(prompt_ids)} tokens; with a context of {self.max_model_len} "
                f"at most {self.max_model_len - 1} leave room for an answer",
                param="prompt",
            )
        if bad := [i for i in (min(prompt_ids), max(prompt_ids)) if not self._is_token(i)]:
            raise RequestError(
                f"token id {bad[0]} is outside the vocabulary of {self._admission.vocab_size} ids",
                param="prompt",
            )

    def _is_token(self, token_id: int) -> bool:
        return 0 <= token_id < self._admission.vocab_size

    def _sequence(self, request: Request, choice: int, seed: int) -> LiveSequence:
        params = request.params
        room = self.max_model_len - len(request.prompt_ids)
        answer = room if params.max_tokens is None else min(room, params.max_tokens)
        eos = frozenset() if params.ignore_eos else self.text.eos_ids
        self._sequences += 1
        return LiveSequence(
            id=self._sequences,
            request=request,
            choice=choice,
            seed=seed,
            max_len=len(request.prompt_ids) + max(1, answer),
            stop_ids=eos | frozenset(params.stop_token_ids),
        )

    # -- delivery ------------------------------------------------------------------------------

    def _deliver(self, retirement: Retirement) -> None:
        if retirement.feedback is not None:
            self.metrics.round_retired(retirement.feedback)
        if retirement.error is not None:
            logger.error("a round failed", exc_info=retirement.error)
        now = time.monotonic()
        for output in retirement.outputs:
            live = self._live.get(output.request_id)
            if live is not None:
                self._push(live, output, now)
        for request_id in retirement.failed_requests:
            live = self._live.get(request_id)
            if live is not None:
                self._fail(live, f"the engine failed while serving this request: {retirement.error}")
        self._gauges()

    def _push(self, live: Live, output: Output, now: float) -> None:
        text = live.texts[output.choice]
        sequence = live.sequences[output.choice]
        if text.finished:  # a stop string ended it while further rounds were in flight
            return
        try:
            out = text.push(output)
        except Exception as error:  # its text is broken, the engine and everybody else are not
            logger.exception("the text of request %s failed", live.request.id)
            self._fail(live, f"the engine failed on the text of this request: {error}")
            self._loop.wake()
            return
        if text.stopped and sequence.status is not Status.FINISHED:
            self._scheduler.cancel(sequence, FinishReason.STOP)
            self._loop.wake()
        self.metrics.delivered(len(out.token_ids), out.drafts)
        self._time(live, output.choice, len(out.token_ids), now)
        live.mail.put(out)
        if out.finish_reason is not None:
            self._close_choice(live, out.finish_reason, now)

    def _time(self, live: Live, choice: int, tokens: int, now: float) -> None:
        arrival = live.request.arrival_s
        if live.first_token_s is None:
            live.first_token_s = now
            self.metrics.first_token(now - arrival, live.sequences[choice].started_s - arrival)
        elif tokens and (last := live.last_token_s[choice]) is not None:
            self.metrics.inter_token(now - last, tokens)
        live.last_token_s[choice] = now
        live.generated_tokens += tokens

    def _close_choice(self, live: Live, reason: FinishReason, now: float) -> None:
        live.open_choices -= 1
        if live.open_choices:
            return
        arrival = live.request.arrival_s
        started = min(sequence.started_s for sequence in live.sequences) or now
        first = live.first_token_s or now
        self.metrics.finished(
            reason,
            now - arrival,
            first - started,
            now - first,
            len(live.request.prompt_ids),
            live.generated_tokens,
        )
        self._forget(live)

    def _abort(self, live: Live) -> None:
        """The client is gone, or all is delivered. Idempotent."""
        if self._live.get(live.request.id) is not live:
            return
        for sequence in live.sequences:
            self._scheduler.cancel(sequence, FinishReason.ABORT)
        self._end_all(live, FinishReason.ABORT, None)
        self._loop.wake()

    def _fail(self, live: Live, error: str) -> None:
        for sequence in live.sequences:
            self._scheduler.cancel(sequence, FinishReason.ERROR)
        self._end_all(live, FinishReason.ERROR, error)

    def _end_all(self, live: Live, reason: FinishReason, error: str | None) -> None:
        """End every open choice with `reason`; the request is forgotten with the last one."""
        now = time.monotonic()
        for text in live.texts:
            if not text.finished:
                live.mail.put(last_output(text, live.request.id, reason, error))
                self._close_choice(live, reason, now)

    def _forget(self, live: Live) -> None:
        self._live.pop(live.request.id, None)
        if not self._live:
            self._idle.set()

    def _gauges(self) -> None:
        scheduler = self._scheduler
        counters = scheduler.counters
        self.metrics.gauges(len(scheduler.running), len(scheduler.waiting), scheduler.pages.used_fraction)
        preempted, queried, hits = self._seen_counters
        for _ in range(counters.preemptions - preempted):
            self.metrics.preempted()
        if counters.prefix_queried_tokens != queried:
            self.metrics.prefix(counters.prefix_queried_tokens - queried, counters.prefix_hit_tokens - hits)
        self._seen_counters = (
            counters.preemptions,
            counters.prefix_queried_tokens,
            counters.prefix_hit_tokens,
        )

    # -- life ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        error = "the engine was closed"
        try:
            await self._loop.run()
        except Exception as death:
            logger.critical("the engine cannot go on", exc_info=death)
            self._death = death
            error = f"the engine has failed: {death}"
        for live in list(self._live.values()):
            if self._death is None:
                self._fail(live, error)
            else:  # the scheduler's books may be what broke
                self._end_all(live, FinishReason.ERROR, error)
