"""A sequence: one choice of a request on its way through the engine, as the host knows it.

The host is always up to two rounds behind the device. `tokens` are facts (committed), `reserved` is
what the rounds in flight may at most have written; page grants and length limits use the latter.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from xspec.core.request import FinishReason, Request, TokenLogprob


class Status(enum.Enum):
    WAITING = "waiting"  # holds no row and no pages
    RUNNING = "running"  # planned into rounds
    DRAINING = "draining"  # no longer planned; holds row and pages until its rounds retire
    FINISHED = "finished"


class AfterDrain(enum.Enum):
    """What becomes of a draining sequence once nothing of it is in flight."""

    FINISH = "finish"
    REQUEUE = "requeue"  # preempted: recompute later


@dataclass(slots=True, eq=False)
class Sequence:
    """`id` is unique in the life of the engine: rows and results are guarded by it.

    A residence is the time a sequence holds a device row. It starts by prefilling every token known
    then (`prefill_end`); the last of those chunks samples one token, and decode rounds follow.
    """

    id: int
    request: Request
    choice: int
    seed: int
    max_len: int  # prompt and answer together never exceed this
    stop_ids: frozenset[int]  # stop_token_ids and, unless ignored, the model's EOS ids
    tokens: list[int] = field(default_factory=list)  # prompt + committed answer
    status: Status = Status.WAITING
    after_drain: AfterDrain = AfterDrain.FINISH
    finish_reason: FinishReason | None = None
    row: int | None = None
    pages: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading pages already published
    known_hashes: list[bytes] = field(default_factory=list)  # of leading blocks, hashed once while it waits
    tainted: bool = False  # its pages may hold what is not finite
    computed: int = 0  # tokens whose KV is in the cache, by retired rounds or a prefix hit
    submitted: int = 0  # prefill frontier: prompt tokens whose KV is computed or in flight
    prefill_end: int = 0  # tokens to prefill in this residence
    unseen: int = 0  # most tokens that the rounds in flight may still commit
    sure: int = 0  # least tokens that they will, unless the sequence ends before
    in_flight: int = 0  # rounds in flight that this sequence takes part in
    cached_tokens: int = 0  # prompt tokens that the request found cached: on its first choice only
    started_s: float = 0.0  # when its first round was submitted (0: not yet); for metrics only
    preemptions: int = 0
    scores: list[TokenLogprob] = field(default_factory=list)  # prompt logprobs of prompt_ids[1:]

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def answer_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def scored_top(self) -> int | None:
        """Likeliest alternatives to report with each prompt token; None: no scores. One choice is enough."""
        return self.request.params.prompt_logprobs if self.choice == 0 else None

    @property
    def reserved(self) -> int:
        """Most tokens (prompt and answer) it may have once every round in flight has retired."""
        return len(self.tokens) + self.unseen

    @property
    def prefilling(self) -> bool:
        return self.submitted < self.prefill_end

    @property
    def at_limit(self) -> bool:
        """Whether the rounds in flight fill the sequence for sure. Where they only may, one more is planned:
        the device commits nothing past `max_len`."""
        return len(self.tokens) + self.sure >= self.max_len
