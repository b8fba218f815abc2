"""How many rows to verify: the tier of a round whose expected tokens are the most per measured time.

Pure functions of survivals and costs; ties go to the smaller tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import truediv


@dataclass(slots=True)
class Tier:
    """A row budget with what it is expected to bring and to cost."""

    target_rows: int
    tokens: float
    ms: float


def expected_tokens(survivals: Sequence[Sequence[float]], target_rows: Sequence[int]) -> list[float]:
    """For each budget G: B requests get a token each, and the best G - B of their drafts what they promise.

    `survivals`: of each request those of the drafts that can matter; they must not grow, so that the best
    always are prefixes.
    """
    rows = len(survivals)
    best = sorted(chain.from_iterable(survivals), reverse=True)
    promised = list(accumulate(best, initial=0.0))
    return [rows + promised[min(size - rows, len(best))] for size in target_rows]


def best_tier(
    survivals: Sequence[Sequence[float]], target_rows: Sequence[int], tiers_ms: Sequence[float]
) -> Tier:
    """The best of the budgets that were measured, `target_rows` ascending, aligned, and at least one."""
    tokens = expected_tokens(survivals, target_rows)
    scores = list(map(truediv, tokens, tiers_ms))
    best = scores.index(max(scores))
    return Tier(target_rows=target_rows[best], tokens=tokens[best], ms=tiers_ms[best])
