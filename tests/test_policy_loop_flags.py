"""Match flags of rounds, and what any (K, d) would make of them: against rounds that are really run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from looped_world import CODE, DEPTHS, STEPS, LoopedText, replay
from policy_world import feedback, row

from xspec.core.round import RoundFeedback, RowFeedback, SpeculationPlan
from xspec.policy import loop_flags
from xspec.policy.loop_flags import DepthFlags, FlagStreams, row_flags, walk, walk_own

BURSTY = LoopedText("bursty", (0.7, 0.85, 0.95), depth_correlation=0.9, persistence=0.8)


def shadow_round(plan_id: int, flags: np.ndarray, steps: int, depth: int | None) -> RoundFeedback:
    """A shadow round of one sequence at the start of `flags` [tokens, depths]."""
    accepted = 0
    if depth is not None:
        accepted = int(np.cumprod(flags[:steps, DEPTHS.index(depth)]).sum())
    plan = SpeculationPlan(plan_id, "p", steps, depth=depth, shadow=True)
    told = feedback(plan, [row(1, steps, accepted)])
    return RoundFeedback(**{**as_fields(told), "matches": flags[None, : steps + 1]})


def as_fields(told: RoundFeedback) -> dict[str, object]:
    return {name: getattr(told, name) for name in RoundFeedback.__dataclass_fields__}


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever forgotten, so that counts can be compared."""
    monkeypatch.setattr(DepthFlags, "shifted", lambda self, rows: False)


def streams(window: float = math.inf, steps: Sequence[int] = STEPS) -> FlagStreams:
    return FlagStreams(steps, DEPTHS, window)


def run_all(flags: np.ndarray, found: FlagStreams, plans: Sequence[tuple[int, int | None]]) -> int:
    """Rounds of `plans`, again and again, to the end of the stream; tokens that were committed."""
    place = number = 0
    while True:
        steps, depth = plans[number % len(plans)]
        if place + steps + 1 > len(flags):
            return place
        told = shadow_round(number, flags[place:], steps, depth)
        found.observe([told])
        place += told.committed_tokens
        number += 1


def hazards_by_force(flags: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """(trials, hits) of each draft of rounds with `steps` drafts, one round after the other over a stream."""
    trials, hits, place = [0] * steps, [0] * steps, 0
    while place < len(flags):
        k = 0
        while k < steps and place < len(flags):
            trials[k] += 1
            hits[k] += flags[place]
            place += 1
            if not flags[place - 1]:
                break
            k += 1
        else:
            place += 1  # the bonus
    return list(zip(trials, hits, strict=True))


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("text", [CODE, BURSTY], ids=lambda text: text.name)
@pytest.mark.parametrize("plans", [[(4, 1)], [(0, None)], [(8, 2), (1, 3), (0, None), (2, 1)]])
def test_hazards_equal_those_of_rounds_that_are_run(
    text: LoopedText, plans: list[tuple[int, int | None]]
) -> None:
    """Whatever ran, over a long stream that is told in full, for every (K, d)."""
    flags = text.flags(6000, np.random.default_rng(11))
    found = streams()
    end = run_all(flags, found, plans)
    for x, evidence in enumerate(found.evidence):
        column = flags[:end, x].astype(int).tolist()
        for n, steps in enumerate(STEPS):
            by_force = hazards_by_force(column, steps)
            assert [*zip(evidence.trials[n], evidence.hits[n], strict=True)] == by_force
            # and so are tokens a round: the product of hazards is the share of rounds that got so far
            _, accepted, tokens = replay(column, steps)
            rounds = tokens - accepted
            expected = 1.0 + sum(evidence.survivals()[n])
            assert expected == pytest.approx(tokens / rounds, rel=0.02)


@pytest.mark.usefixtures("steady")
def test_uniform_positions_would_promise_too_much() -> None:
    """Why rounds are replayed: behind a rejection text is harder than elsewhere."""
    flags = BURSTY.flags(6000, np.random.default_rng(12))
    found = streams()
    run_all(flags, found, [(0, None)])
    uniform = flags[:, 0].mean()
    assert found.evidence[0].survivals()[2][0] < uniform - 0.05


@pytest.mark.usefixtures("steady")
def test_rounds_without_shadow_tell_their_own_depth_exactly() -> None:
    flags = BURSTY.flags(6000, np.random.default_rng(13))
    found = streams()
    place = 0
    counted: list[tuple[int, int]] = []
    while place + 5 < len(flags):
        told = shadow_round(place, flags[place:], 4, 1)
        found.observe([RoundFeedback(**{**as_fields(told), "matches": None})])
        counted.append((4, told.rows[0].accepted))
        place += told.committed_tokens
    evidence = found.evidence[0]
    for k in range(4):
        assert evidence.trials[2][k] == sum(accepted >= k for _, accepted in counted)
        assert evidence.hits[2][k] == sum(accepted > k for _, accepted in counted)
    assert all(not any(map(any, other.trials)) for other in found.evidence[1:])
    # other K follow within what the unknown bonus flags leave open
    full = streams()
    run_all(flags, full, [(0, None)])
    for n in (0, 1, 2):
        mine, true = sum(evidence.survivals()[n]), sum(full.evidence[0].survivals()[n])
        assert mine == pytest.approx(true, abs=0.06 * (1 + true))


# -- flags of one row -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "known"),
    [
        (row(1, 3, 1), [1, 0]),
        (row(1, 3, 0), [0]),
        (row(1, 3, 3), [1, 1, 1, None]),  # the bonus has no draft
        (row(1, 3, 2, censored=True), [1, 1]),
        (row(1, 0, 0), [None]),  # it took no part in drafting
        (row(1, 2, 2), [1, 1, None]),  # cut short by room
    ],
)
@pytest.mark.parametrize("run", [0, 2])
def test_what_drafts_say_themselves(told: RowFeedback, known: list[int | None], run: int) -> None:
    counts: dict[int, list[int]] = {1: [3, 4]}
    expected: dict[int, list[int]] = {1: [3, 4]}
    assert walk_own(told, run, counts) == walk(known, run, expected)
    assert counts == expected


def test_a_shadow_round_tells_the_rest_and_every_other_depth() -> None:
    told = np.array([[1, 0], [1, 1], [0, 1]], dtype=bool)
    assert row_flags(row(1, 2, 2), told, 0, True) == [1, 1, 0]
    assert row_flags(row(1, 2, 2), told, 1, False) == [0, 1, 1]
    # only what is on the text: the rejected draft's row is the last
    assert row_flags(row(1, 2, 0), told, 1, False) == [0]
    # what drafts said goes before what the head would pick: a sampled draft is no pick
    assert row_flags(row(1, 2, 0), told, 0, True) == [0]


def test_a_gap_ends_the_replayed_round_and_one_begins_behind_it() -> None:
    found = streams(steps=(2,))
    flags = np.array([[1], [1], [0], [1], [1]], dtype=bool).repeat(3, axis=1)
    found.observe([shadow_round(0, flags[:1], 0, None)])
    assert found.evidence[1].trials == [[1.0, 0.0]]
    plain = feedback(SpeculationPlan(1, "p", 0), [row(1, 0, 0)])
    found.observe([plain])  # nothing is known of this token
    found.observe([shadow_round(2, flags[1:2], 0, None)])
    assert found.evidence[1].trials == [[2.0, 0.0]]  # a first draft again, not a second one
    found.observe([shadow_round(3, flags[2:3], 0, None)])
    assert (found.evidence[1].trials, found.evidence[1].hits) == ([[2.0, 1.0]], [[2.0, 0.0]])


def test_sequences_do_not_mix_and_are_forgotten_when_they_left() -> None:
    found = streams(steps=(2,))
    plan = SpeculationPlan(0, "p", 2, depth=1)
    found.observe([feedback(plan, [row(1, 2, 1), row(2, 2, 2)])])
    assert found.evidence[0].trials == [[2.0, 2.0]]
    assert len(found) == 2
    found.keep([2, 5])
    assert len(found) == 1


def test_rounds_of_another_policy_teach_nothing() -> None:
    found = streams()
    found.observe([feedback(SpeculationPlan(0, "q", 2, depth=7), [row(1, 2, 1)])])
    assert not any(evidence.total for evidence in found.evidence)


# -- memory ---------------------------------------------------------------------------------------


def test_without_evidence_rates_are_the_prior_and_lean_on_the_position_before() -> None:
    evidence = DepthFlags((1, 3), 1024.0, 0.8)
    assert evidence.survivals()[1] == pytest.approx([0.8, 0.64, 0.512])
    evidence.add({0: [0, 400]})
    one, three = evidence.survivals()
    assert one[0] > 0.99 and three[2] > 0.95


@pytest.mark.usefixtures("steady")
def test_positions_hardly_tried_any_more_lean_on_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an odd answer, of which half of all drafts hold, rounds of two drafts see 95 of 100 hold."""
    odd, usual = np.random.default_rng(1), np.random.default_rng(2)
    found = streams(window=512.0, steps=(2, 4))
    run_all(odd.random((600, len(DEPTHS))) < 0.5, found, [(4, 1)])
    evidence = found.evidence[0]
    assert evidence.survivals()[1][3] < 0.15
    for number in range(400):  # drafts tell no more than themselves
        held = usual.random(2) < 0.95
        told = feedback(SpeculationPlan(number, "p", 2, depth=1), [row(1, 2, int(np.cumprod(held).sum()))])
        found.observe([told])
    tried, told_now = evidence.trials[1], evidence.survivals()[1]
    assert 0.01 * tried[0] < tried[3] < 0.1 * tried[0]  # what the odd answer left
    monkeypatch.setattr(loop_flags, "FRESH_SHARE", 0.0)
    evidence.pause()
    evidence._found = None
    stale = evidence.survivals()[1]
    assert told_now[:2] == stale[:2]
    assert told_now[3] > 0.45 > stale[3] + 0.1


def test_evidence_decays_with_what_is_added() -> None:
    evidence = DepthFlags((1,), 100.0, 0.5)
    for _ in range(50):
        evidence.add({0: [0, 20]})
    assert evidence.total == pytest.approx(20 / (1 - 0.99**20), rel=1e-3)
    for _ in range(50):
        evidence.add({0: [20, 0]})
    assert evidence.survivals()[0][0] < 0.05


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.02, 0.8), (0.5, 1.0)])
def test_a_jump_is_noticed_within_a_few_dozen_flags_and_soon_believed(before: float, after: float) -> None:
    rng = np.random.default_rng(1)
    evidence = DepthFlags((1,), 1024.0, 0.6)

    def flag(rate: float) -> bool:
        evidence.add({0: [0, 1] if rng.random() < rate else [1, 0]})
        return evidence.shifted(1)

    alarms = 0
    for _ in range(1000):
        if flag(before):
            alarms += 1
            evidence.forget()
    assert alarms <= 2
    noticed = next(n for n in range(200) if flag(after))
    assert noticed <= 40
    evidence.forget()
    assert evidence.total == 0.0
    for _ in range(16):
        flag(after)
    assert abs(evidence.rate - after) < 0.25


def test_a_steady_rate_is_no_shift() -> None:
    for rate in (0.0, 0.3, 0.8, 1.0):
        rng = np.random.default_rng(int(10 * rate))
        evidence = DepthFlags((1,), 1024.0, 0.6)
        alarms = 0
        for _ in range(3000):
            evidence.add({0: [0, 1] if rng.random() < rate else [1, 0]})
            if evidence.shifted(1):
                alarms += 1
                evidence.forget()
        assert alarms <= 3


@pytest.mark.parametrize(("rows", "seen"), [(1, False), (8, True), (32, True)])
def test_a_smaller_step_is_a_shift_where_many_answers_show_it(rows: int, seen: bool) -> None:
    """.93 -> .72: one answer goes through such passages, the mean of eight does not."""
    evidence = DepthFlags((1,), 1024.0, 0.6)
    for _ in range(20):
        evidence.add({0: [7, 93]})
        assert not evidence.shifted(rows)
    evidence.add({0: [28, 72]})
    assert evidence.shifted(rows) == seen
