"""One policy on an idle engine: prompts answered greedily, so many at a time, and what came of it.

The engine is driven as a calibration drives it (`service.py`); nobody else may use it meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from xspec.calib.service import Service
from xspec.core.request import FinishReason, Request, SamplingParams
from xspec.core.round import RoundFeedback
from xspec.core.sequence import Sequence as LiveSequence
from xspec.errors import EngineError
from xspec.exec.driver import Driver
from xspec.policy.base import Policy


@dataclass(frozen=True, slots=True)
class Trial:
    """`seconds` and `tokens`: of everything, prompts too. `steady_*`: of rounds that had all the requests
    and no prompt, of which `steady_rounds` were seen. `answers`: in the order of the prompts."""

    requests: int
    seconds: float
    tokens: int
    rounds: int
    proposed: int
    accepted: int
    steady_ms: float
    steady_tokens: int
    steady_rounds: int
    answers: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float | None:
        """What T and TPS of the RFC mean: decode rounds alone. None where no round was steady."""
        return 1e3 * self.steady_tokens / self.steady_ms if self.steady_rounds else None

    @property
    def round_ms(self) -> float | None:
        """Mean of the steady rounds."""
        return self.steady_ms / self.steady_rounds if self.steady_rounds else None

    @property
    def acceptance(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(slots=True)
class _Sums:
    """What rounds add up to."""

    requests: int
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    steady_ms: float = 0.0
    steady_tokens: int = 0
    steady_rounds: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def add(self, feedback: RoundFeedback) -> None:
        if not feedback.rows:
            return
        self.rounds += 1
        self.proposed += sum(row.verified for row in feedback.rows)
        self.accepted += sum(min(row.accepted, row.verified) for row in feedback.rows)
        full = len(feedback.rows) == self.requests and not feedback.prefill_tokens
        if full and feedback.round_ms is not None:
            self.steady_rounds += 1
            self.steady_ms += feedback.round_ms
            self.steady_tokens += feedback.committed_tokens


def run_trial(
    service: Service,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    answer_tokens: int,
    requests: int,
    told: Callable[[int], None] = lambda done: None,
) -> Trial:
    """Answer every prompt once with `answer_tokens` tokens, an end token being one like any other.

    Closed loop: `requests` are in flight while there are prompts, a finished one is replaced. `told` hears
    how many are done. EngineError if a round is lost or a prompt has no room for its answer.
    """
    short = [len(p) for p in prompts if not p or len(p) + answer_tokens > service.max_model_len]
    if short:
        raise EngineError(
            f"prompts of {min(short)} to {max(short)} tokens with answers of {answer_tokens} do not fit into "
            f"a context of {service.max_model_len}"
        )
    driver = Driver(service.scheduler, policy, service.pipeline, service.clock_s)
    left = deque(enumerate(prompts))
    sums = _Sums(requests, answers=[[] for _ in prompts])
    began_s, done = service.clock_s(), 0
    try:
        for _ in range(min(requests, len(left))):
            _ask(service, *left.popleft(), answer_tokens)
        while done < len(prompts):
            finished = _round(service, driver, sums)
            done += finished
            for _ in range(min(finished, len(left))):
                _ask(service, *left.popleft(), answer_tokens)
            if finished:
                told(done)
        while not service.pipeline.empty:
            driver.retire()
    except BaseException:
        _abandon(service, driver)
        raise
    service.scheduler.pages.check_idle()
    return Trial(
        requests=requests,
        seconds=service.clock_s() - began_s,
        tokens=sum(map(len, sums.answers)),
        rounds=sums.rounds,
        proposed=sums.proposed,
        accepted=sums.accepted,
        steady_ms=sums.steady_ms,
        steady_tokens=sums.steady_tokens,
        steady_rounds=sums.steady_rounds,
        answers=tuple(map(tuple, sums.answers)),
    )


def _round(service: Service, driver: Driver, sums: _Sums) -> int:
    """Retires the oldest round, the ring filled up first; how many answers it completed."""
    while not service.pipeline.full and driver.step():
        pass
    if service.pipeline.empty:
        raise EngineError(f"{len(service.scheduler.live)} sequences wait but no round can be planned")
    retirement = driver.retire()
    if retirement.error is not None:
        raise EngineError(f"a round was lost: {retirement.error}") from retirement.error
    finished = 0
    for output in retirement.outputs:
        if output.finish_reason is FinishReason.ERROR:
            raise EngineError(output.error or "the engine failed")
        sums.answers[int(output.request_id)].extend(output.token_ids)
        finished += output.finish_reason is not None
    if retirement.feedback is not None:
        sums.add(retirement.feedback)
    return finished


def _ask(service: Service, index: int, prompt: Sequence[int], answer_tokens: int) -> None:
    params = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True, seed=0)
    service.scheduler.add(
        LiveSequence(
            id=index + 1,
            request=Request(str(index), tuple(prompt), params),
            choice=0,
            seed=0,
            max_len=len(prompt) + answer_tokens,
            stop_ids=frozenset(),
        )
    )


def _abandon(service: Service, driver: Driver) -> None:
    """Give back all rows and pages; what the rounds in flight still bring is dropped."""
    for sequence in list(service.scheduler.live.values()):
        service.scheduler.cancel(sequence, FinishReason.ABORT)
    while not service.pipeline.empty:
        driver.retire()
