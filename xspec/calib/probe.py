"""Measures rounds the way serving runs them: driver, scheduler, pipeline and device on made-up prompts.

What is run, and in which order, follows from the settings and the model's answers; the clock only decides
which windows are measured again, or more often. Knows nothing about curves, files or asyncio.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from xspec.calib.bar import Bar, work_of
from xspec.calib.crew import Crew
from xspec.calib.quality import DISTURBED
from xspec.calib.service import ProbePolicy, Service
from xspec.core.request import FinishReason
from xspec.core.round import RoundFeedback
from xspec.cost.model import Sample
from xspec.cost.schema import MOST_ADDED
from xspec.cost.settings import Effective, Point
from xspec.errors import ConfigError, EngineError
from xspec.exec.driver import Driver, Retirement
from xspec.progress import Progress

PROMPT_ROUNDS = 3
"""Rounds of prompts run on purpose where filling the contexts took no two in a row."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a calibration saw: a sample for every point, in the order of the points."""

    samples: tuple[Sample, ...]
    prefill_ms_per_token: float


@dataclass(slots=True)
class _Window:
    """Intervals that count, and the mean KV length of the requests when each ended."""

    intervals_ms: list[float] = field(default_factory=list)
    kv_lengths: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A round in flight: of a point (None: prompts only), and the window it counts for, if it does."""

    where: str
    work: int
    point: Point | None = None
    window: _Window | None = None


def probe(service: Service, effective: Effective, progress: Progress) -> Measured:
    """Measure the points of `effective`. EngineError names the point at which a round was lost or ran as
    something else; ConfigError says that a window does not fit the model or the cache.

    Of every context the largest request bucket comes first; its prompts are read once, and requests leave
    until the next bucket's number is there. Inside a bucket all points get their first window, then all
    their second, and so on, so that growing KV and a noisy machine meet all of them alike. Not counted are
    `warmup_steps` rounds before a point's first window and half as many before each later one (at least one),
    and rounds that end with nothing submitted behind them. A window is the median of `window_steps` intervals
    between retirements. Points whose windows took less than `least_point_ms` together get more, at most
    MOST_ADDED times as many. Where the median window of a point lies over 20 % above its fastest, the
    slowest is measured again, at most as often as there are windows. Prompts are read afresh before a
    window that would surely leave the context's KV lengths, or that model or cache might not hold if every
    draft were accepted.

    `prefill_ms_per_token` is that of rounds of nothing but prompts that followed another such round, all
    tokens of a filling together; the median of the fillings.
    """
    run = _Run(service, effective, Bar(progress, _work(service, effective)))
    try:
        measured = run.measure()
    except Exception:
        run.abandon()
        raise
    service.scheduler.pages.check_idle()
    return measured


class _Run:
    """One calibration in progress."""

    def __init__(self, service: Service, effective: Effective, bar: Bar) -> None:
        self._service, self._effective, self._bar = service, effective, bar
        self._policy = ProbePolicy(service.thinker)
        self._driver = Driver(service.scheduler, self._policy, service.pipeline, service.clock_s)
        self._crew = Crew(
            service.scheduler,
            token_seed=effective.token_seed,
            vocab_size=service.vocab_size,
            max_model_len=service.max_model_len,
            draft_block=service.draft_block,
        )
        self._sent: deque[_Sent] = deque()
        self._undelivered: list[Retirement] = []
        self._last: Point | None = None  # what the newest round decodes
        self._foreseen = {*range(len(effective.contexts))}  # contexts whose filling the bar has counted
        self._prefills: list[list[tuple[int, float]]] = []  # by filling: (tokens, ms) of steady rounds

    def measure(self) -> Measured:
        points = self._effective.points
        windows: dict[Point, list[_Window]] = {point: [] for point in points}
        ordered = sorted(windows, key=lambda p: (p.context, -p.requests))
        for context, of_context in groupby(ordered, key=lambda p: p.context):
            self._empty()
            for requests, of_bucket in groupby(of_context, key=lambda p: p.requests):
                self._staff(context, requests)
                self._take_turns({point: windows[point] for point in of_bucket})
        self._empty()
        per_token = self._prefill_ms_per_token()
        self._bar.finish()
        return Measured(tuple(_sample(point, windows[point]) for point in points), per_token)

    def abandon(self) -> None:
        """Give back all rows and pages after an error; what the rounds in flight still bring is dropped."""
        scheduler = self._service.scheduler
        for sequence in list(scheduler.live.values()):
            scheduler.cancel(sequence, FinishReason.ABORT)
        while not self._service.pipeline.empty:
            self._driver.retire()

    # -- windows -------------------------------------------------------------------------------

    def _take_turns(self, windows: dict[Point, list[_Window]]) -> None:
        """All windows of a bucket's points."""
        first, later = _skipped(self._effective)
        for turn in range(self._effective.windows_per_point):
            for point, taken in windows.items():
                taken.append(_Window())
                self._take(point, taken[-1], later if turn else first)
        for _ in range(MOST_ADDED * self._effective.windows_per_point):
            self._drain()
            short = [point for point, taken in windows.items() if self._too_short(taken)]
            if not short:
                break
            for point in short:
                self._add_window(point, windows[point])
        for _ in range(self._effective.windows_per_point):
            self._drain()
            for point, taken in windows.items():
                if _sample(point, taken).spread > DISTURBED:
                    taken.remove(max(taken, key=lambda window: statistics.median(window.intervals_ms)))
                    self._add_window(point, taken)

    def _too_short(self, taken: Sequence[_Window]) -> bool:
        least_ms = self._effective.least_point_ms
        return least_ms is not None and sum(sum(window.intervals_ms) for window in taken) < least_ms

    def _add_window(self, point: Point, taken: list[_Window]) -> None:
        taken.append(_Window())
        _, skipped = _skipped(self._effective)
        self._bar.extend((skipped + self._effective.window_steps) * work_of(1, point.target_rows))
        self._take(point, taken[-1], skipped)

    def _take(self, point: Point, window: _Window, skipped: int) -> None:
        rounds = skipped + self._effective.window_steps
        behind = self._service.slots - 1  # rounds that `_drain` may add
        if self._leaves_context(point, rounds) or self._misfit(point, rounds + behind):
            self._empty()
            self._staff(point.context, point.requests)
            if misfit := self._misfit(point, rounds + behind):
                raise ConfigError(f"calibrating {_describe(point)}: {misfit}")
        for index in range(rounds):
            self._decode(point, window if index >= skipped else None)

    def _leaves_context(self, point: Point, rounds: int) -> bool:
        """Whether the requests will surely outgrow the context's KV lengths, or what they may grow by, though
        new ones would not."""
        context, growth = self._effective.contexts[point.context], self._effective.kv_growth
        fresh, most = context.prefill_tokens + 1 + rounds, context.max_kv_length
        if growth is not None:
            most = min(most, context.prefill_tokens + growth)
        return fresh <= most < self._crew.length_now + rounds

    def _misfit(self, point: Point, rounds: int) -> str:
        """How model or cache might not hold all that so many rounds may commit; empty if they surely do."""
        pages, longest = self._service.scheduler.pages, self._service.max_model_len - 1
        length = self._crew.longest_after(rounds, point.draft_steps)
        needed = self._crew.pages_after(rounds, point.draft_steps)
        if length <= longest and needed <= pages.pages:
            return ""
        prefill = self._effective.contexts[point.context].prefill_tokens
        return (
            f"{rounds} rounds after {prefill} prefill tokens may reach a KV length of {length} and take "
            f"{needed} pages; max_model_len is {longest + 1} and the cache has {pages.pages} pages: give "
            "smaller window_steps, warmup_steps, prefill_tokens or request_buckets"
        )

    def _decode(self, point: Point, window: _Window | None) -> None:
        self._last = point
        self._submit(_Sent(_describe(point), work_of(1, point.target_rows), point, window))

    # -- requests ------------------------------------------------------------------------------

    def _staff(self, context: int, requests: int) -> None:
        """Have exactly so many requests: some of those that run if there are enough, else new ones."""
        if len(self._crew.members) < requests:
            self._empty()
            self._fill(context, requests)
        elif len(self._crew.members) > requests:
            self._drain()
            self._crew.shrink(requests)

    def _fill(self, context: int, requests: int) -> None:
        tokens, pages = self._effective.contexts[context].prefill_tokens, self._service.scheduler.pages
        sent = _Sent(f"{requests} prompts of {tokens} tokens", self._prompt_work)
        if requests * pages.pages_for(tokens + 1) > pages.pages:
            raise ConfigError(
                f"calibrating {sent.where}: the cache has {pages.pages} pages of {pages.block_size} tokens: "
                "give smaller prefill_tokens or request_buckets"
            )
        if context not in self._foreseen:
            self._bar.extend(_prompt_rounds(self._service, requests * tokens) * sent.work)
        self._foreseen.discard(context)
        self._prefills.append([])
        self._crew.gather(requests, tokens)
        while not self._crew.prefilled:
            self._submit(sent)

    def _empty(self) -> None:
        self._drain()
        self._crew.shrink(0)

    def _drain(self) -> None:
        """Let everything in flight retire, what counts with other rounds behind it."""
        if self._last is not None:
            for _ in range(self._service.slots - 1):
                self._decode(self._last, None)
            self._last = None
        while self._sent:
            self._retire()
        self._deliver()
        self._driver.paused()

    # -- rounds --------------------------------------------------------------------------------

    def _submit(self, sent: _Sent) -> None:
        """One more round, once the ring has room for it."""
        while self._service.pipeline.full:
            self._retire()
        self._policy.point = sent.point
        while not self._driver.step():
            if sent.point is not None or not self._sent:
                raise EngineError(f"calibrating {sent.where}: no round can be planned")
            self._retire()
        self._sent.append(sent)
        self._deliver()

    def _deliver(self) -> None:
        """As the engine's loop does it: after the next round was submitted."""
        retirements, self._undelivered = self._undelivered, []
        for retirement in retirements:
            self._service.deliver(retirement)

    def _retire(self) -> None:
        sent = self._sent.popleft()
        retirement = self._driver.retire()
        if retirement.error is not None:
            raise EngineError(
                f"calibrating {sent.where}: a round was lost: {retirement.error}"
            ) from retirement.error
        for output in retirement.outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise EngineError(f"calibrating {sent.where}: {output.error}")
        self._undelivered.append(retirement)
        assert retirement.feedback is not None
        self._bar.advance(sent.work)
        _check(sent, retirement.feedback)
        round_ms = retirement.feedback.round_ms
        if sent.point is None:
            # The ring was empty before the first round of prompts: whatever has an interval followed another.
            if round_ms is not None:
                self._prefills[-1].append((retirement.feedback.prefill_tokens, round_ms))
        elif sent.window is not None:
            assert round_ms is not None  # a round before it was skipped
            sent.window.intervals_ms.append(round_ms)
            sent.window.kv_lengths.append(self._crew.mean_length)

    # -- prompts -------------------------------------------------------------------------------

    @property
    def _prompt_work(self) -> int:
        return work_of(1, self._service.scheduler.limits.max_tokens_per_batch)

    def _prefill_ms_per_token(self) -> float:
        if not any(self._prefills):
            self._pass_prompts()
        return statistics.median(
            sum(ms for _, ms in filling) / sum(tokens for tokens, _ in filling)
            for filling in self._prefills
            if filling
        )

    def _pass_prompts(self) -> None:
        """Rounds of prompts alone, several in a row."""
        tokens, scheduler = self._effective.contexts[0].prefill_tokens, self._service.scheduler
        self._prefills.append([])
        for _ in range(-(-PROMPT_ROUNDS * scheduler.limits.max_tokens_per_batch // tokens)):
            self._crew.pass_by(tokens)
        while scheduler.waiting or any(s.prefilling for s in scheduler.running):
            self._submit(_Sent(f"prompts of {tokens} tokens", self._prompt_work))
        self._drain()


def _check(sent: _Sent, feedback: RoundFeedback) -> None:
    """EngineError if a round was not what it was submitted as."""
    shape, point = feedback.shape, sent.point
    ran = (len(feedback.rows), shape.draft_rows, shape.target_rows, shape.prefill_tokens)
    if point is None:
        expected = (0, 0, shape.target_rows, shape.prefill_tokens)
    else:
        expected = (point.requests, point.requests if point.draft_steps else 0, point.target_rows, 0)
    plan, wanted = feedback.plan, (0, None) if point is None else (point.draft_steps, point.depth)
    if ran != expected or (plan.draft_steps, plan.depth) != wanted:
        loops = "" if plan.depth is None else f" with {plan.depth} loops"
        raise EngineError(
            f"calibrating {sent.where}: a round drafted {plan.draft_steps} steps{loops} for {ran[0]} "
            f"requests on {ran[1]} draft rows, {ran[2]} target rows and {ran[3]} prefill tokens"
        )


def _sample(point: Point, windows: Sequence[_Window]) -> Sample:
    return Sample(
        draft_steps=point.draft_steps,
        requests=point.requests,
        target_rows=point.target_rows,
        context=point.context,
        kv_length=statistics.fmean(length for window in windows for length in window.kv_lengths),
        windows_ms=tuple(statistics.median(window.intervals_ms) for window in windows),
        depth=point.depth,
    )


def _describe(point: Point) -> str:
    loops = "" if point.depth is None else f" with {point.depth} loops"
    return (
        f"draft steps {point.draft_steps}{loops}, {point.requests} requests, "
        f"{point.target_rows} target rows, context {point.context}"
    )


def _work(service: Service, effective: Effective) -> int:
    """What is surely run, in the bar's units."""
    first, later = _skipped(effective)
    rounds = first + effective.windows_per_point * (effective.window_steps + later) - later
    prompts = 0
    for index, context in enumerate(effective.contexts):
        requests = max((point.requests for point in effective.points if point.context == index), default=0)
        prompts += _prompt_rounds(service, requests * context.prefill_tokens)
    decode = sum(work_of(rounds, point.target_rows) for point in effective.points)
    return decode + work_of(prompts, service.scheduler.limits.max_tokens_per_batch)


def _prompt_rounds(service: Service, tokens: int) -> int:
    return -(-tokens // service.scheduler.limits.max_tokens_per_batch)


def _skipped(effective: Effective) -> tuple[int, int]:
    """Rounds that do not count, before a point's first window and before each later one."""
    return max(1, effective.warmup_steps), max(1, effective.warmup_steps // 2)
