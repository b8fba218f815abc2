"""What rounds of any (K, d) would have counted on recorded match flags: exact acceptance without running it.

A round takes up to K drafts, accepts those before the first that does not match and commits one token more,
with which the next one begins. Greedy text does not depend on (K, d), so neither do the flags (own
derivation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xspec.cost.settings import Pair


@dataclass(frozen=True, slots=True)
class Counted:
    """Sums over all rounds of some requests. `committed` leaves out each request's first token, which comes
    from its prompt."""

    rounds: int
    proposed: int
    accepted: int
    committed: int

    @property
    def acceptance(self) -> float:
        """Accepted of the proposed drafts; the target's own tokens are none."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.committed / self.rounds if self.rounds else 0.0


def replay(flags: Sequence[np.ndarray], draft_steps: int) -> Counted:
    """Rounds of K = `draft_steps` drafts over requests with these flags of one depth, [n - 1] bool each.

    Near a request's end K is cut: the token that fills it is the target's own whatever was drafted.
    """
    rounds = proposed = accepted = committed = 0
    for request in flags:
        runs = _runs(request)
        at, tokens = 0, len(request)
        while at < tokens:
            width = min(draft_steps, tokens - at - 1)
            good = min(width, runs[at])
            rounds, proposed, accepted = rounds + 1, proposed + width, accepted + good
            committed += good + 1
            at += good + 1
    return Counted(rounds, proposed, accepted, committed)


def replay_grid(
    flags: Sequence[np.ndarray], depths: Sequence[int], pairs: Sequence[Pair]
) -> Mapping[Pair, Counted]:
    """By (K, d), of flags [n - 1, depths] of each request. ValueError for a depth that they do not tell."""
    found: dict[Pair, Counted] = {}
    for steps, depth in pairs:
        if depth is None or depth not in depths:
            raise ValueError(f"flags of depths {tuple(depths)} say nothing of {depth}")
        column = depths.index(depth)
        found[steps, depth] = replay([each[:, column] for each in flags], steps)
    return found


def match_rates(flags: Sequence[np.ndarray]) -> tuple[float, ...]:
    """By depth, over all tokens of all requests."""
    every = np.concatenate(flags)
    return tuple(every.mean(axis=0).tolist()) if len(every) else ()


def _runs(flags: np.ndarray) -> list[int]:
    """[i]: matches in a row from token i on."""
    run, found = 0, []
    for flag in reversed(flags.tolist()):
        run = run + 1 if flag else 0
        found.append(run)
    return found[::-1]
