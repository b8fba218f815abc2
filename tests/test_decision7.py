"""One verification rule: the target's own draws, whatever decides how many of them a round may use.

A policy that reads the draws of its own round cannot bend the text. Control: accepting drafts with
probability p / q is bent by it, on the counter-example of DSpark's appendix A (arXiv 2607.05147).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from scripted import ScriptedDrafter
from test_engine import model, plain
from test_lossless import Plain, Scheduled, check_load, speculating, texts_of

from xspec.core.request import SamplingParams
from xspec.core.round import RowBind, SpeculationPlan
from xspec.engine.engine import AsyncEngine
from xspec.exec.pick import Picker
from xspec.policy.base import PolicyView
from xspec.verify.accept import accept
from xspec.verify.sampler import draw, needs_of
from xspec.verify.state import SamplingState

__all__ = ["model", "plain"]  # fixtures

A, B, C = range(3)
P = (Fraction(7, 10), Fraction(2, 10), Fraction(1, 10))  # the target, after any prefix
Q = (Fraction(1, 2), Fraction(3, 10), Fraction(1, 5))  # the drafter
STEPS_PER_S = (Fraction(1), Fraction(1, 2), Fraction(9, 20))  # by drafts verified
SURVIVAL = Fraction(4, 5)  # a_1

Rule = Callable[[Sequence[int], Sequence[int]], int]
"""(drafts, the target's draws as far as they agree) -> how many of the two drafts are verified."""


def throughput(drafts: Sequence[int], width: int) -> Fraction:
    """Tokens a second with `width` drafts verified; the second draft is sure only of itself after A."""
    confident = Fraction(9, 10) if drafts[0] == A else Fraction(0)
    tokens = (Fraction(1), 1 + SURVIVAL, 1 + SURVIVAL + SURVIVAL * confident)
    return tokens[width] * STEPS_PER_S[width]


def global_argmax(drafts: Sequence[int], draws: Sequence[int]) -> int:
    """The paper's counter-example: it looks at draft 1 (through c_2) to decide whether to verify draft 1."""
    return max(range(3), key=lambda width: throughput(drafts, width))


def early_stop(drafts: Sequence[int], draws: Sequence[int]) -> int:
    """Algorithm 1 of the paper: the first width that does not improve ends the search."""
    width = 0
    while width < 2 and throughput(drafts, width + 1) > throughput(drafts, width):
        width += 1
    return width


RULES: dict[str, Rule] = {
    "global argmax": global_argmax,
    "early stop": early_stop,
    "only where it is A": lambda drafts, draws: 2 if draws[0] == A else 0,
    "never what is right": lambda drafts, draws: 0 if draws[0] == drafts[0] else 2,
    "cuts before C": lambda drafts, draws: [*draws, C].index(C),
    "cuts after the first": lambda drafts, draws: 1,
}


def test_the_worked_example() -> None:
    assert [throughput((A, A), width) for width in range(3)] == [1, Fraction(9, 10), Fraction(1134, 1000)]
    assert [throughput((B, A), width) for width in range(3)] == [1, Fraction(9, 10), Fraction(81, 100)]
    assert [global_argmax((x, A), ()) for x in (A, B, C)] == [2, 0, 0]
    assert [early_stop((x, A), ()) for x in (A, B, C)] == [0, 0, 0]


def rejection_law(rule: Rule) -> tuple[Fraction, ...]:
    """First token under p / q rejection (Leviathan et al. 2023), by enumeration of the drafts."""
    residual = [max(p - q, Fraction(0)) for p, q in zip(P, Q, strict=True)]
    rejected = [r / sum(residual) for r in residual]
    law = [Fraction(0)] * 3
    for drafts in itertools.product(range(3), repeat=2):
        weight, first = Q[drafts[0]] * Q[drafts[1]], drafts[0]
        if rule(drafts, ()) == 0:
            law = [mass + weight * p for mass, p in zip(law, P, strict=True)]
            continue
        kept = min(Fraction(1), P[first] / Q[first])
        law[first] += weight * kept
        law = [mass + weight * (1 - kept) * r for mass, r in zip(law, rejected, strict=True)]
    return tuple(law)


def coupling(kind: str) -> dict[tuple[int, int], Fraction]:
    """A joint law of (draft, draw) with margins Q and P: how noise may tie them together."""
    if kind == "independent":
        return {(x, y): Q[x] * P[y] for x in range(3) for y in range(3)}
    shared = {(x, x): min(P[x], Q[x]) for x in range(3)}
    short = [p - min(p, q) for p, q in zip(P, Q, strict=True)]
    spare = [q - min(p, q) for p, q in zip(P, Q, strict=True)]
    rest = {(x, y): spare[x] * short[y] / sum(short) for x in range(3) for y in range(3)}
    return {pair: rest[pair] + shared.get(pair, Fraction(0)) for pair in rest}


Draws = Callable[[tuple[int, ...]], int]


def emitted(rule: Rule, drafts: Sequence[int], draws: Draws) -> tuple[int, ...]:
    """First two tokens of the text: rounds of `accept` as the runner calls it, until there are two."""
    text: tuple[int, ...] = ()
    while len(text) < 2:
        row = [draws((*text, *drafts[:offset])) for offset in range(3)]
        width = rule(drafts, row)
        verified = torch.tensor([[*row[: width + 1], *[-1] * (2 - width)]])
        accepted = accept(verified, torch.tensor([list(drafts)]), torch.tensor([8]))
        text += tuple(accepted.tokens[0, : int(accepted.counts[0])].tolist())
    return text[:2]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["independent", "maximal"])
def test_our_law_is_exact_under_any_rule(rule: str, kind: str) -> None:
    """In exact rationals. A draw belongs to its prefix: it is the same in whatever round it is made."""
    joint = coupling(kind)
    law: Counter[tuple[int, ...]] = Counter()
    for (x, y), second, after in itertools.product(joint, range(3), itertools.product(range(3), repeat=3)):

        def draws(prefix: tuple[int, ...], y: int = y, after: Sequence[int] = after) -> int:
            return (y, after[prefix[0]] if prefix else B, B)[min(len(prefix), 2)]

        chance = joint[x, y] * Q[second] * P[after[0]] * P[after[1]] * P[after[2]]
        law[emitted(RULES[rule], (x, second), draws)] += chance
    assert law == {(a, b): P[a] * P[b] for a in range(3) for b in range(3)}


def test_rejection_is_bent_by_the_same_rule() -> None:
    assert rejection_law(global_argmax)[A] == Fraction(85, 100), "not 0.70"
    assert rejection_law(early_stop) == P
    assert rejection_law(RULES["cuts after the first"]) == P


def noise_of(seed: int) -> SamplingState:
    """Row 1 samples over three tokens, in fp64."""
    state = SamplingState(2, 3, torch.device("cpu"), dtype=torch.float64)
    state.bind(1, RowBind(1, 1, SamplingParams(), seed, 0, 1, (0,), (), 8))
    return state


@pytest.mark.parametrize("coupled", [True, False])
def test_drawn_with_the_noise_itself(coupled: bool) -> None:
    """First tokens under the global argmax, from sampler, picker and accept. What p / q rejection makes of
    the same drafts misses by 40 standard deviations."""
    count, state = 20_000, noise_of(3)
    rows, positions = torch.ones(count, dtype=torch.int64), torch.arange(count)
    p, q = (torch.tensor([float(x) for x in law]).double().log().expand(count, 3) for law in (P, Q))
    drawn = draw(p, rows, positions, state, needs_of([SamplingParams()] * count)).tokens
    drafts = Picker(state if coupled else noise_of(4), probabilistic=True)(q, rows, positions, None)
    widths = torch.tensor([global_argmax((draft, A), ()) for draft in drafts.tolist()])
    draws = torch.stack((drawn, torch.where(widths > 0, drawn.roll(1), -1)), 1)
    accepted = accept(draws, drafts[:, None], torch.full((count,), 8))
    deviation = (0.7 * 0.3 / count) ** 0.5
    assert abs(float((accepted.tokens[:, 0] == A).double().mean()) - 0.7) < 4 * deviation
    if not coupled:  # only an A is verified, and as p(A) > q(A) it is always kept
        rejection = torch.where(widths > 0, drafts, drawn)
        assert abs(float((rejection == A).double().mean()) - 0.85) < 4 * deviation


class Spiteful(Scheduled):
    """Sees the text before it is drawn, and verifies as much as suits it: here, never an even token last."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        super().__init__([7])
        self._texts = texts
        self.engine: AsyncEngine | None = None

    def plan(self, view: PolicyView) -> SpeculationPlan:
        assert self.engine is not None
        widths = [7]
        for sequence_id in view.sequence_ids:
            tokens = self.engine._scheduler.live[sequence_id].tokens
            text = next(text for text in self._texts if list(text[: len(tokens)]) == tokens)
            ahead = text[len(tokens) : len(tokens) + 8]
            widths.append(next((i for i, token in enumerate(ahead) if token % 2), 0))
        return SpeculationPlan(view.plan_id, self.name, 7, min(widths))


async def test_a_policy_that_knows_the_draws_cannot_bend_the_text(
    model: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Spiteful(texts_of(plain))
    drafter = ScriptedDrafter(texts_of(plain), right=0.9)
    flags = {"enable_schedule_overlap": False, "max_seqs_per_batch": 2}  # so that it sees every draw
    async with speculating(model, policy, drafter, monkeypatch, **flags) as engine:
        policy.engine = engine
        await check_load(engine, plain, rounds=1)
    widths = {feedback.plan.verify_steps for feedback in policy.told}
    assert len(widths) > 2 and policy.accepted > 20
