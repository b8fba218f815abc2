"""Retirement: tokens of a completed round become facts, one by one and in order.

What follows a stop leaves no trace: not in text, cache, usage, logprobs or counters.
"""

from __future__ import annotations

from dataclasses import dataclass

from xspec.core.drafts import DraftCounts
from xspec.core.request import FinishReason, Output
from xspec.core.round import DecodeRow, PrefillChunk, RoundPlan, RoundResult, RowFeedback, RowTokens
from xspec.core.sequence import AfterDrain, Sequence
from xspec.sched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Retired:
    """Outputs for the clients and counts for policy and metrics."""

    outputs: tuple[Output, ...]
    rows: tuple[RowFeedback, ...]
    committed_tokens: int
    told: tuple[int, ...] = ()  # which rows of the round's batch `rows` speak of, ascending


def retire(scheduler: Scheduler, result: RoundResult) -> Retired:
    """Commit a completed round. Sequences that left meanwhile only give back what they hold."""
    plan = result.plan
    outputs: list[Output] = []
    feedback: list[RowFeedback] = []
    told: list[int] = []
    drafted = plan.spec.draft_steps if plan.batch.verify else 0
    for chunk, tokens in zip(plan.batch.chunks, result.chunks, strict=True):
        sequence = scheduler.live[chunk.sequence_id]
        _leave_round(sequence, tokens, reserved=1 if chunk.samples else 0)
        if sequence.finish_reason is None:
            sequence.computed = chunk.end
            _keep_scores(sequence, tokens, chunk)
            if (output := _commit(scheduler, sequence, tokens)) is not None:
                outputs.append(output)
        scheduler.settle(sequence)
    for index, (row, tokens) in enumerate(zip(plan.batch.rows, result.rows, strict=True)):
        sequence = scheduler.live[row.sequence_id]
        _leave_round(sequence, tokens, reserved=row.verify + 1)
        if sequence.finish_reason is None:
            drafts = _drafts(drafted, row, sequence, tokens)
            if (output := _commit(scheduler, sequence, tokens, drafts)) is not None:
                outputs.append(output)
                if not tokens.bad:  # of a row that failed nothing is known
                    feedback.append(_feedback(row, drafts, output, len(tokens.token_ids)))
                    told.append(index)
        scheduler.settle(sequence)
    committed = sum(len(output.token_ids) for output in outputs)
    return Retired(tuple(outputs), tuple(feedback), committed, tuple(told))


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
    sequence.sure -= 1 if reserved else 0
    sequence.tainted |= tokens.bad  # also of who has left meanwhile: the pages go to somebody else


def _keep_scores(sequence: Sequence, tokens: RowTokens, chunk: PrefillChunk) -> None:
    # A preempted request prefills its prompt again: scores already kept are not kept twice.
    kept = len(sequence.scores)
    sequence.scores.extend(tokens.scored[max(0, kept - chunk.start) :])


def _drafts(drafted: int, row: DecodeRow, sequence: Sequence, tokens: RowTokens) -> DraftCounts | None:
    """What was drafted for a row, as far as its sequence has room for it; None where nothing was."""
    if not drafted or not sequence.request.params.speculative or tokens.bad or not tokens.token_ids:
        return None
    room = sequence.max_len - len(sequence.tokens)
    if room < 2:
        return None
    verify = row.verify if tokens.admitted is None else tokens.admitted
    return DraftCounts.of_row(drafted=drafted, verify=verify, room=room, returned=len(tokens.token_ids))


def _feedback(row: DecodeRow, drafts: DraftCounts | None, output: Output, returned: int) -> RowFeedback:
    counted = output.drafts or DraftCounts(0, 0, 0)
    return RowFeedback(
        sequence_id=row.sequence_id,
        proposed=counted.proposed,
        admitted=0 if drafts is None else drafts.verified,
        verified=counted.verified,
        committed=len(output.token_ids),
        censored=len(output.token_ids) < returned,
    )


def _commit(
    scheduler: Scheduler, sequence: Sequence, tokens: RowTokens, drafts: DraftCounts | None = None
) -> Output | None:
    """Append tokens up to the first that ends the sequence; None when there is nothing to tell."""
    seen = len(sequence.tokens)
    kept, finish, stop_token = _append(sequence, tokens.token_ids)
    if tokens.bad and finish is None:  # a stop before the bad draw stands: plain decoding would not get there
        scheduler.cancel(sequence, FinishReason.ERROR)
        return _failure(sequence, tokens, "the model produced logits that are not finite")
    if kept:
        sequence.computed = len(sequence.tokens) - 1  # the last token's KV is written by the next round
    # A stop string is found only once the tokens are text: until then they stay out of the prefix cache.
    findable = min(sequence.computed, seen) if sequence.request.params.stop else sequence.computed
    _publish(scheduler, sequence, findable)
    if finish is not None:
        sequence.finish_reason = finish
        scheduler.drain(sequence, AfterDrain.FINISH)
    if not kept:
        return None
    scored = sequence.scored_top is not None and seen == sequence.prompt_len
    return Output(
        request_id=sequence.request.id,
        choice=sequence.choice,
        token_ids=tokens.token_ids[:kept],
        logprobs=tokens.logprobs[:kept],
        prompt_logprobs=(None, *sequence.scores) if scored else None,
        finish_reason=finish,
        stop_token=stop_token,
        cached_tokens=sequence.cached_tokens,
        drafts=drafts if drafts is None or finish is None else drafts.until(kept),
    )


def _append(sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None, int | None]:
    """One token after the other until one ends it: (tokens kept, why it ended, by which stop id)."""
    for kept, token in enumerate(token_ids, start=1):
        sequence.tokens.append(token)
        if token in sequence.stop_ids:
            return kept, FinishReason.STOP, token
        if len(sequence.tokens) >= sequence.max_len:
            return kept, FinishReason.LENGTH, None
    return len(token_ids), None, None


def _failure(sequence: Sequence, tokens: RowTokens, error: str) -> Output:
    """The end of a sequence that went wrong after `tokens`, which were right."""
    return Output(
        request_id=sequence.request.id,
        choice=sequence.choice,
        token_ids=tokens.token_ids,
        logprobs=tokens.logprobs,
        finish_reason=FinishReason.ERROR,
        error=error,
    )


def _publish(scheduler: Scheduler, sequence: Sequence, findable: int) -> None:
    """Make full blocks of the first `findable` tokens, whose KV is computed, findable."""
    pages = scheduler.pages
    if not pages.prefix_cache:
        return
    size = pages.block_size
    hashes = sequence.block_hashes
    while (len(hashes) + 1) * size <= findable:
        start = len(hashes) * size
        parent = hashes[-1] if hashes else b""
        hashes.append(pages.block_hash(parent, sequence.tokens[start : start + size]))
        pages.publish(sequence.pages[len(hashes) - 1], hashes[-1])
