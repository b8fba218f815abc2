"""How many rows to verify: the tier of a round whose expected tokens are the most per measured time.

Pure functions of survivals and costs; ties go to the smaller tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tier:
    """A row budget with what it is expected to bring and to cost."""

    target_rows: int
    tokens: float
    ms: float

    @property
    def score(self) -> float:
        return self.tokens / self.ms


def expected_tokens(survivals: Floats, target_rows: Sequence[int]) -> Floats:
    """For each budget G: B requests get a token each, and the best G - B of their drafts what they promise.

    `survivals` [B, K] must not grow along a row, so that the best always are prefixes; 0 where a draft cannot
    matter. [tiers]
    """
    rows = len(survivals)
    promised = np.concatenate(([0.0], np.cumsum(-np.sort(-survivals, axis=None))))
    drafts = np.minimum(np.array(target_rows) - rows, survivals.size)
    return np.asarray(rows + promised[drafts])


def best_tier(survivals: Floats, measured: Sequence[tuple[int, float]]) -> Tier:
    """The best of the (target rows, ms) that were measured, ascending and at least one."""
    tokens = expected_tokens(survivals, [target_rows for target_rows, _ in measured])
    best = int(np.argmax(tokens / np.array([ms for _, ms in measured])))
    target_rows, ms = measured[best]
    return Tier(target_rows=target_rows, tokens=float(tokens[best]), ms=ms)
