"""The made-up requests that a calibration runs: random prompts, greedy, without an end of their own.

Owns who they are and how long they may still get; knows nothing about rounds or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from xspec.core.request import FinishReason, Request, SamplingParams
from xspec.core.sequence import Sequence, Status
from xspec.sched.scheduler import Scheduler


class Crew:
    """Requests in a scheduler that has no prefix cache and that nobody else uses."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        token_seed: int,
        vocab_size: int,
        max_model_len: int,
        draft_block: int,
    ) -> None:
        """`draft_block`: positions from the last token on that drafting writes to, whatever is verified."""
        self._scheduler = scheduler
        self._token_seed = token_seed
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._draft_block = draft_block
        self._born = 0
        self.members: tuple[Sequence, ...] = ()

    def gather(self, count: int, prefill_tokens: int) -> None:
        """`count` new requests with a prompt each that was never used before; the former must have left."""
        self.members = tuple(self._add(prefill_tokens, self._max_model_len) for _ in range(count))

    def pass_by(self, prefill_tokens: int) -> None:
        """A request that leaves by itself once its prompt is read."""
        self._add(prefill_tokens, prefill_tokens + 1)

    def shrink(self, count: int) -> None:
        """Only the first `count` stay. Nothing may be in flight."""
        for member in self.members[count:]:
            self._scheduler.cancel(member, FinishReason.ABORT)
        self.members = self.members[:count]

    @property
    def prefilled(self) -> bool:
        """Whether all prompts are read or on their way."""
        return all(s.status is Status.RUNNING and not s.prefilling for s in self.members)

    @property
    def mean_length(self) -> float:
        """Tokens of a request, as far as rounds have retired."""
        return sum(len(s.tokens) for s in self.members) / len(self.members)

    @property
    def length_now(self) -> int:
        """Least tokens that the longest request has once all in flight has retired."""
        return max(len(s.tokens) + s.sure for s in self.members)

    def longest_after(self, rounds: int, draft_steps: int) -> int:
        """Most tokens a request may have once `rounds` more and those in flight have retired."""
        return max(s.reserved for s in self.members) + rounds * (draft_steps + 1)

    def pages_after(self, rounds: int, draft_steps: int) -> int:
        """Most KV pages that all of them may hold while the last of those rounds runs."""
        step = draft_steps + 1
        written = max(step, self._draft_block) if draft_steps else 1
        grown = (rounds - 1) * step + written - 1
        bounds = (min(s.reserved + grown, s.max_len) for s in self.members)
        return sum(self._scheduler.pages.pages_for(bound) for bound in bounds)

    def _add(self, prefill_tokens: int, max_len: int) -> Sequence:
        self._born += 1
        params = SamplingParams(max_tokens=max_len - prefill_tokens, temperature=0.0, ignore_eos=True, seed=0)
        sequence = Sequence(
            id=self._born,
            request=Request(f"calibration-{self._born}", self._prompt(prefill_tokens), params),
            choice=0,
            seed=0,
            max_len=max_len,
            stop_ids=frozenset(),
        )
        self._scheduler.add(sequence)
        return sequence

    def _prompt(self, length: int) -> tuple[int, ...]:
        rng = np.random.default_rng([self._token_seed, self._born])
        drawn: Items[int] = rng.integers(self._vocab_size, size=length).tolist()
        return tuple(drawn)
