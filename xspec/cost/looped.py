"""What a self-speculative round of a looped target costs, and what it must gain, by the RFC's formulas.

D loops in all, d of them draft K tokens, acceptance a = accepted drafts / proposed drafts, c the time of one
loop over some rows. Sources: the RFC "Support Adaptive Speculation for Ouro" (idealized model) and own
derivations from it. Knows nothing about policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xspec.cost.model import Curve
from xspec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoopedCosts:
    """T_spec = d (K + 1) c_shallow(B) + (D - d) c_verify(B (K + 1)) + T_other, all in ms.

    `shallow` and `verify`: ms of one loop by (requests, rows). `head_ms`: what picking one draft token takes
    (K of them a round). `other_ms`: everything once a round. A plain round is D c_shallow(B) + T_other.
    KV lengths are not looked at: measure `shallow` and `verify` at the length that counts.
    """

    loops: int
    shallow: Curve
    verify: Curve
    other_ms: float = 0.0
    head_ms: float = 0.0
    prefill_ms_per_token: float = 0.0

    def __post_init__(self) -> None:
        if self.loops < 2:
            raise ConfigError(f"loops is {self.loops}; allowed: at least 2, or nothing can be left to verify")
        if not (self.other_ms >= 0 and self.head_ms >= 0 and self.prefill_ms_per_token >= 0):
            raise ConfigError("other_ms, head_ms and prefill_ms_per_token must be 0 or more")

    def at(self, kv_lengths: Sequence[int]) -> LoopedCosts:
        return self

    def round_ms(
        self, draft_steps: int, requests: int, target_rows: int, depth: int | None = None
    ) -> float | None:
        """None for rows that no curve covers, and for drafts without a depth of 1 .. D - 1."""
        shallow = self.shallow.ms(requests, requests)
        if shallow is None:
            return None
        if not draft_steps:
            return self.loops * shallow + self.other_ms
        verify = self.verify.ms(requests, target_rows)
        if verify is None or depth is None or not 1 <= depth < self.loops:
            return None
        drafting = depth * (draft_steps + 1) * shallow + draft_steps * self.head_ms
        return drafting + (self.loops - depth) * verify + self.other_ms


@dataclass(frozen=True, slots=True)
class IdealCosts:
    """The RFC's simple case: c is the same for all rows, nothing else takes time, T = D + d K (in loops)."""

    loops: int
    prefill_ms_per_token: float = 0.0

    def at(self, kv_lengths: Sequence[int]) -> IdealCosts:
        return self

    def round_ms(
        self, draft_steps: int, requests: int, target_rows: int, depth: int | None = None
    ) -> float | None:
        if not draft_steps:
            return float(self.loops)
        return None if depth is None else float(self.loops + depth * draft_steps)


# -- the idealized model --------------------------------------------------------------------------


def ideal_speedup(loops: int, draft_steps: int, depth: int, acceptance: float) -> float:
    """S = D (1 + K a) / (D + d K)."""
    return loops * (1.0 + draft_steps * acceptance) / (loops + depth * draft_steps)


def ideal_break_even(loops: int, depth: int) -> float:
    """S > 1 exactly where a > d / D, whatever K is."""
    return depth / loops


# -- measured costs -------------------------------------------------------------------------------


def gain(draft_steps: int, acceptance: float, spec_ms: float, plain_ms: float) -> float:
    """Tokens per ms of a round with drafts over those of a plain one: (1 + K a) T_native / T_spec."""
    return (1.0 + draft_steps * acceptance) * plain_ms / spec_ms


def off_acceptance(draft_steps: int, spec_ms: float, plain_ms: float) -> float:
    """The acceptance at which the gain is 1: (T_spec / T_native - 1) / K. Above 1: it never pays."""
    return (spec_ms / plain_ms - 1.0) / draft_steps


def tokens_per_s(requests: int, draft_steps: int, acceptance: float, round_ms: float) -> float:
    """TPS = B (1 + K a) / T."""
    return 1000.0 * requests * (1.0 + draft_steps * acceptance) / round_ms


# -- acceptance by a rate for each token ----------------------------------------------------------


def acceptance_of(rate: float, draft_steps: int) -> float:
    """a where each draft holds with chance p after those before it: (p + p^2 + ... + p^K) / K."""
    total, survival = 0.0, 1.0
    for _ in range(draft_steps):
        survival *= rate
        total += survival
    return total / draft_steps


def rate_of(acceptance: float, draft_steps: int) -> float:
    """The p of `acceptance_of`, to about 1e-12, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2.0
        if acceptance_of(middle, draft_steps) < acceptance:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0
