"""A looped target for policy and simulator tests: match rates and loop costs as measured on a small model.

Rates: 0.46 M parameters, bytes, 32 held-out prompts. Costs: ms of one loop over rows, hidden 128 x 2 layers,
one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from policy_world import feedback, row, view

from xspec.core.round import RoundFeedback, SpeculationPlan
from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.cost.looped import LoopedCosts
from xspec.cost.model import Costs, Sps
from xspec.policy.base import Policy
from xspec.policy.derive import Pair, derive_candidates
from xspec.policy.geometry import CandidateGeometry, PolicyGeometry
from xspec.policy.spec_config import AdaptiveSpecConfig, BatchRange, EmaSettings, ModelFacts, Provenance
from xspec.sched.scheduler import Limits
from xspec.sim.looped import LoopedText
from xspec.sim.simulate import EngineShape

LOOPS = 4
STEPS = (1, 2, 4, 8)
DEPTHS = (1, 2, 3)

CODE = LoopedText("code", (0.83, 0.93, 0.97), persistence=0.3)
PROSE = LoopedText("prose", (0.55, 0.72, 0.84), persistence=0.3)
LAST_LOOP_ONLY = LoopedText("last loop only", (0.33, 0.79, 0.89), persistence=0.3)
NOTHING = LoopedText("nothing", (0.0, 0.0, 0.0))


def loop_ms(rows: tuple[int, ...], ms: tuple[float, ...]) -> Sps:
    return Sps(rows, tuple(1000.0 / each for each in ms))


SMALL = loop_ms(
    (1, 2, 3, 5, 9, 16, 24, 40, 72, 96, 160, 288),
    (0.25, 0.29, 0.33, 0.34, 0.39, 0.63, 0.84, 0.98, 1.7, 2.9, 5.3, 11.5),
)
"""One loop, whoever the rows belong to; in between, where bucket and row counts meet, made to be monotone."""


def costs(curve: Sps = SMALL, other_ms: float = 0.2, head_ms: float = 0.02) -> LoopedCosts:
    return LoopedCosts(LOOPS, curve, curve, other_ms, head_ms, prefill_ms_per_token=0.01)


LANES = BucketGrid([1, 2, 4, 8, 16, 24, 32])


def geometry(steps: tuple[int, ...] = STEPS) -> CandidateGeometry:
    return CandidateGeometry(LANES, steps, DEPTHS, LOOPS)


def engine(shadow_cost: float = 0.03) -> EngineShape:
    limits = Limits(
        max_tokens_per_batch=512,
        max_seqs_per_batch=LANES.max_rows,
        max_tokens_per_chunk=512,
        admission_memory_threshold=1.0,
    )
    shape = PolicyGeometry(LANES, TargetTiers(), STEPS[-1], "plain")
    return EngineShape(shape, limits, shadow_cost=shadow_cost)


def replay(flags: Sequence[int], steps: int) -> tuple[int, int, int]:
    """(drafts proposed, drafts accepted, tokens committed) by rounds of `steps` drafts over a stream of match
    flags, as an engine would run them: a round's drafts end at the first that does not match, and the target
    adds its own token. What does not fill a whole round at the end is left out."""
    proposed = accepted = place = 0
    while place + steps < len(flags):
        run = 0
        while run < steps and flags[place + run]:
            run += 1
        proposed, accepted, place = proposed + steps, accepted + run, place + run + 1
    return proposed, accepted, place


@cache
def offline(text: LoopedText = CODE) -> dict[Pair, float]:
    """Acceptance of every pair, as one teacher-forced pass over text of the same kind gives it."""
    flags = text.flags(4000, np.random.default_rng(77)).astype(int)
    found = {}
    for x, depth in enumerate(DEPTHS):
        for steps in STEPS:
            proposed, accepted, _ = replay(flags[:, x].tolist(), steps)
            found[steps, depth] = accepted / proposed
    return found


def config(table: LoopedCosts | None = None, text: LoopedText = CODE) -> AdaptiveSpecConfig:
    """Ranges for 1-3, 4-15 and 16-32 requests, derived at 1, 8 and 32 requests from `text` offline."""
    table = table or costs()
    ranges = []
    for low, high, requests, beta in ((1, 3, 1, 0.05), (4, 15, 8, 0.1), (16, 32, 32, 0.2)):
        plain_ms = table.round_ms(0, requests, requests)
        assert plain_ms is not None

        def of(pair: Pair, requests: int = requests) -> float | None:
            return table.round_ms(pair[0], requests, requests * (pair[0] + 1), pair[1])

        candidates, best, off = derive_candidates(offline(text), of, plain_ms)
        ranges.append(BatchRange(low, high, candidates, best, off, EmaSettings(beta=beta)))
    return AdaptiveSpecConfig(
        model=ModelFacts("small", LOOPS),
        provenance=Provenance("measured", "tests/looped_world.py"),
        ranges=tuple(ranges),
    )


@dataclass
class Played:
    """One round of `Streams`."""

    plan: SpeculationPlan
    rows: int
    tokens: int
    ms: float


class Streams:
    """Endless answers whose match rates may change from one round to the next, for all at once.

    Rounds retire two behind, as in the engine. `rates(n)`: match rate of each depth in round n; `rows(n)`:
    decode rows of it.
    """

    def __init__(self, policy: Policy, table: Costs, seed: int = 0, shadow_cost: float = 0.03) -> None:
        self.policy, self.table, self.shadow_cost = policy, table, shadow_cost
        self.played: list[Played] = []
        self._rng = np.random.default_rng(seed)
        self._flying: deque[RoundFeedback] = deque()

    def run(
        self, count: int, rows: Callable[[int], int], rates: Callable[[int], Sequence[float]]
    ) -> list[Played]:
        first = len(self.played)
        for number in range(first, first + count):
            if len(self._flying) == 2:
                self.policy.observe(self._flying.popleft())
            self._round(number, rows(number), rates(number))
        return self.played[first:]

    def _round(self, number: int, rows: int, rates: Sequence[float]) -> None:
        plan = self.policy.plan(view(number, rows))
        text = LoopedText("now", tuple(rates))
        told = [text.flags(plan.draft_steps + 1, self._rng) for _ in range(rows)]
        made = []
        for index, flags in enumerate(told):
            accepted = 0
            if plan.depth is not None:
                column = flags[: plan.draft_steps, DEPTHS.index(plan.depth)]
                accepted = int(np.cumprod(column).sum())
            made.append(row(index + 1, plan.draft_steps, accepted))
        lanes = LANES.fit(rows).rows
        result = replace_matches(feedback(plan, made, lanes=lanes), told if plan.shadow else None)
        at = self.table.at([100])
        assert at is not None
        ms = at.round_ms(plan.draft_steps, lanes, lanes * (plan.draft_steps + 1), plan.depth)
        assert ms is not None
        self._flying.append(result)
        spent = ms * (1.0 + self.shadow_cost) if plan.shadow else ms
        self.played.append(Played(plan, rows, result.committed_tokens, spent))


def replace_matches(told: RoundFeedback, matches: Sequence[np.ndarray] | None) -> RoundFeedback:
    return told if matches is None else replace(told, matches=np.stack(matches))


def tokens_per_ms(played: Sequence[Played]) -> float:
    return sum(one.tokens for one in played) / sum(one.ms for one in played)
