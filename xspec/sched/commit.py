"""Retirement: tokens of a completed round become facts, one by one and in order.

What follows a stop leaves no trace: not in text, cache, usage, logprobs or counters.
"""

from __future__ import annotations

from dataclasses import dataclass

from xspec.core.request import FinishReason, Output
from xspec.core.round import PrefillChunk, RoundPlan, RoundResult, RowFeedback, RowTokens
from xspec.core.sequence import AfterDrain, Sequence
from xspec.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Retired:
    """Outputs for the clients and counts for policy and metrics."""

    outputs: tuple[Output, ...]
    rows: tuple[RowFeedback, ...]
    committed_tokens: int


def retire(scheduler: Scheduler, result: RoundResult) -> Retired:
    """Commit a completed round. Sequences that left meanwhile only give back what they hold."""
    plan = result.plan
    outputs: list[Output] = []
    feedback: list[RowFeedback] = []
    committed = 0
    for chunk, tokens in zip(plan.batch.chunks, result.chunks, strict=True):
        sequence = scheduler.live[chunk.sequence_id]
        _leave_round(sequence, tokens, reserved=1 if chunk.samples else 0)
        if sequence.finish_reason is None:
            sequence.computed = chunk.end
            _keep_scores(sequence, tokens, chunk)
            committed += _commit(scheduler, sequence, tokens, outputs)
        scheduler.settle(sequence)
    for row, tokens in zip(plan.batch.rows, result.rows, strict=True):
        sequence = scheduler.live[row.sequence_id]
        _leave_round(sequence, tokens, reserved=plan.spec.draft_steps + 1)
        if sequence.finish_reason is None:
            count = _commit(scheduler, sequence, tokens, outputs)
            committed += count
            feedback.append(
                RowFeedback(
                    sequence_id=row.sequence_id,
                    proposed=plan.spec.draft_steps,
                    admitted=plan.spec.draft_steps,
                    verified=plan.spec.draft_steps,
                    committed=count,
                    censored=count < len(tokens.token_ids),
                )
            )
        scheduler.settle(sequence)
    return Retired(outputs=tuple(outputs), rows=tuple(feedback), committed_tokens=committed)


def fail(scheduler: Scheduler, plan: RoundPlan) -> set[str]:
    """A round was lost: its sequences end with an error. Returns the requests that lost something by it."""
    touched: set[str] = set()
    for sequence_id in plan.batch.sequence_ids:
        sequence = scheduler.live[sequence_id]
        sequence.in_flight -= 1
        sequence.tainted = True
        if sequence.finish_reason is None:
            touched.add(sequence.request.id)
        scheduler.cancel(sequence, FinishReason.ERROR)
        scheduler.settle(sequence)
    return touched


def _leave_round(sequence: Sequence, tokens: RowTokens, reserved: int) -> None:
    sequence.in_flight -= 1
    sequence.unseen -= reserved
    sequence.tainted |= tokens.bad  # also of who has left meanwhile: the pages go to somebody else


def _keep_scores(sequence: Sequence, tokens: RowTokens, chunk: PrefillChunk) -> None:
    # A preempted request prefills its prompt again: scores already kept are not kept twice.
    kept = len(sequence.scores)
    sequence.scores.extend(tokens.scored[max(0, kept - chunk.start) :])


def _commit(scheduler: Scheduler, sequence: Sequence, tokens: RowTokens, outputs: list[Output]) -> int:
    """Append tokens up to the first that ends the sequence; returns how many were kept."""
    if tokens.bad:
        scheduler.cancel(sequence, FinishReason.ERROR)
        outputs.append(_failure(sequence, "the model produced logits that are not finite"))
        return 0
    first_output = sequence.answer_len == 0
    kept = 0
    finish: FinishReason | None = None
    stop_token: int | None = None
    for token in tokens.token_ids:
        sequence.tokens.append(token)
        kept += 1
        if token in sequence.stop_ids:
            finish, stop_token = FinishReason.STOP, token
        elif len(sequence.tokens) >= sequence.max_len:
            finish = FinishReason.LENGTH
        if finish is not None:
            break
    if kept:
        sequence.computed = len(sequence.tokens) - 1  # the last token's KV is written by the next round
    _publish(scheduler, sequence)
    if kept:
        scored = sequence.scored_top is not None and first_output
        outputs.append(
            Output(
                request_id=sequence.request.id,
                choice=sequence.choice,
                token_ids=tokens.token_ids[:kept],
                logprobs=tokens.logprobs[:kept],
                prompt_logprobs=(None, *sequence.scores) if scored else None,
                finish_reason=finish,
                stop_token=stop_token,
                cached_tokens=sequence.cached_tokens,
            )
        )
    if finish is not None:
        sequence.finish_reason = finish
        scheduler.drain(sequence, AfterDrain.FINISH)
    return kept


def _failure(sequence: Sequence, error: str) -> Output:
    return Output(
        request_id=sequence.request.id,
        choice=sequence.choice,
        token_ids=(),
        finish_reason=FinishReason.ERROR,
        error=error,
    )


def _publish(scheduler: Scheduler, sequence: Sequence) -> None:
    """Make full blocks of computed tokens findable."""
    pages = scheduler.pages
    if not pages.prefix_cache:
        return
    size = pages.block_size
    hashes = sequence.block_hashes
    while (len(hashes) + 1) * size <= sequence.computed:
        start = len(hashes) * size
        parent = hashes[-1] if hashes else b""
        hashes.append(pages.block_hash(parent, sequence.tokens[start : start + size]))
        pages.publish(sequence.pages[len(hashes) - 1], hashes[-1])
