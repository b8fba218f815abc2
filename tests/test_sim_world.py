"""Simulated requests and load: the same for every contender, with the statistics asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xspec.errors import ConfigError
from xspec.sim.loads import ClosedLoad, OpenLoad, Phase
from xspec.sim.world import Difficulty, SignalModel, Synthetic, World

EASY = Difficulty("easy", (0.9, 0.8, 0.7))
HARD = Difficulty("hard", (0.4, 0.3, 0.2))


def keys(count: int) -> list[tuple[int, int, int]]:
    return [(0, index % 7, index // 7) for index in range(count)]


def conditional(population: Synthetic, count: int = 300) -> list[float]:
    """Acceptance of each draft where those before it were accepted, over the places of many requests."""
    runs = np.concatenate([population.request(3, key, None).runs for key in keys(count)])
    return [float((runs > k).sum() / (runs >= k).sum()) for k in range(population.draft_width)]


def test_a_request_is_a_function_of_seed_and_key() -> None:
    population = Synthetic((EASY, HARD), SignalModel(0.5, 1.0))
    forward = {key: population.request(1, key, None) for key in keys(40)}
    for key in reversed(keys(40)):
        again = population.request(1, key, None)
        assert again.runs == forward[key].runs and again.difficulty == forward[key].difficulty
        assert np.array_equal(again.signals, forward[key].signals)
    assert population.request(2, (0, 0, 0), None).runs != forward[0, 0, 0].runs
    assert len({request.runs for request in forward.values()}) == 40


def test_a_world_gives_every_contender_the_same_object() -> None:
    world = World(Synthetic((EASY,)), ClosedLoad((Phase(1, 1.0),)), 0)
    assert world.request((0, 0, 0), None) is world.request((0, 0, 0), None)


def test_lengths_and_shapes() -> None:
    population = Synthetic((EASY,), prompt_tokens=(3, 5), answer_tokens=(7, 7))
    made = [population.request(0, key, None) for key in keys(60)]
    assert {request.prompt_tokens for request in made} == {3, 4, 5}
    assert {request.answer_tokens for request in made} == {7}
    assert all(len(r.runs) == 7 and r.chances.shape == r.signals.shape == (7, 3) for r in made)
    assert population.most_tokens == 12 and made[0].total_tokens == made[0].prompt_tokens + 7


def test_drafts_are_accepted_at_the_rates_given() -> None:
    assert conditional(Synthetic((EASY,))) == pytest.approx([0.9, 0.8, 0.7], abs=0.01)


def test_spread_keeps_the_mean_and_has_the_variance_asked_for() -> None:
    population = Synthetic((Difficulty("all", (0.6, 0.3), spread=0.25),))
    chances = np.concatenate([population.request(0, key, None).chances for key in keys(300)])
    assert chances.mean(axis=0) == pytest.approx([0.6, 0.3], abs=0.01)
    assert chances.var(axis=0) == pytest.approx([0.25 * 0.24, 0.25 * 0.21], rel=0.05)
    assert conditional(population) == pytest.approx([0.6, 0.3], abs=0.01)


def test_certain_rates_stay_certain_with_spread() -> None:
    request = Synthetic((Difficulty("all", (1.0, 0.0), spread=0.5),)).request(0, (0, 0, 0), None)
    assert set(request.runs) == {1}


def test_signals_tell_the_truth_unless_told_otherwise() -> None:
    request = Synthetic((EASY,)).request(0, (0, 0, 0), None)
    assert request.signals == pytest.approx(request.chances, abs=1e-6)
    assert request.signals.dtype == np.float32
    wrong = Synthetic((EASY,), SignalModel(calibration_error=1.0)).request(0, (0, 0, 0), None)
    # 0.9 is a logit of 2.1972; one more gives 1 / (1 + e^-3.1972)
    assert wrong.signals[0, 0] == pytest.approx(1.0 / (1.0 + math.exp(-3.1972)), abs=1e-4)
    noisy = Synthetic((EASY,), SignalModel(noise=0.5), answer_tokens=(4000, 4000)).request(0, (0, 0, 0), None)
    logits = np.log(noisy.signals[:, 1] / (1.0 - noisy.signals[:, 1]))
    assert logits.mean() == pytest.approx(math.log(4.0), abs=0.05) and logits.std() == pytest.approx(
        0.5, rel=0.05
    )


def test_noise_of_signals_does_not_touch_acceptance() -> None:
    quiet = Synthetic((EASY,)).request(0, (0, 1, 2), None)
    assert Synthetic((EASY,), SignalModel(0.7)).request(0, (0, 1, 2), None).runs == quiet.runs


def test_classes_are_equally_frequent_and_can_be_chosen() -> None:
    population = Synthetic((EASY, HARD))
    names = [population.request(0, key, None).difficulty for key in keys(600)]
    assert names.count("easy") / 600 == pytest.approx(0.5, abs=0.06)
    assert {population.request(0, key, (1,)).difficulty for key in keys(20)} == {"hard"}


def test_bursts_are_spells_of_the_length_asked_for() -> None:
    never, always = Difficulty("never", (0.0,)), Difficulty("always", (1.0,))
    population = Synthetic((never, always), answer_tokens=(20_000, 20_000), burst_tokens=12.0)
    request = population.request(0, (0, 0, 0), None)
    changes = int(np.abs(np.diff(request.chances[:, 0])).sum())
    assert 20_000 / changes == pytest.approx(12.0, rel=0.06)
    assert request.difficulty == "bursty" and 0.4 < request.chances.mean() < 0.6


def test_a_spell_belongs_to_the_token_not_to_the_round() -> None:
    population = Synthetic(
        (Difficulty("never", (0.0, 0.0)), Difficulty("always", (1.0, 1.0))),
        answer_tokens=(500, 500),
        burst_tokens=5.0,
    )
    chances = population.request(0, (0, 0, 0), None).chances
    assert np.array_equal(chances[1:, 0], chances[:-1, 1])


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Difficulty("odd", (0.5, 1.5)), "odd is .*allowed: numbers from 0 to 1"),
        (lambda: Difficulty("odd", ()), "allowed: numbers from 0 to 1"),
        (lambda: Difficulty("odd", (math.nan,)), "allowed: numbers from 0 to 1"),
        (lambda: Difficulty("odd", (0.5,), spread=1.0), "spread of odd is 1.0"),
        (lambda: Synthetic(()), "same number"),
        (lambda: Synthetic((EASY, Difficulty("short", (0.5,)))), "same number"),
        (lambda: Synthetic((EASY,), answer_tokens=(9, 3)), "answer tokens 9 to 3"),
        (lambda: Synthetic((EASY,), prompt_tokens=(0, 3)), "prompt tokens 0 to 3"),
        (lambda: Synthetic((EASY,), burst_tokens=9.0), "two classes"),
        (lambda: Phase(0, 1.0), "0 clients"),
        (lambda: Phase(1, 0.0), "0 s"),
        (lambda: Phase(1, math.inf), "inf s"),
        (lambda: OpenLoad(()), "at least one time"),
        (lambda: OpenLoad((2.0, 1.0)), "in order"),
        (lambda: OpenLoad.poisson(0.0, 1.0, 0), "numbers above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(make, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()


# -- load -----------------------------------------------------------------------------------------


def test_clients_ask_again_when_answered_and_leave_when_a_phase_has_no_place() -> None:
    load = ClosedLoad((Phase(1, 10.0), Phase(3, 5.0, (0,)), Phase(1, 5.0)))
    assert [end for _, end in load.phases] == [10.0, 15.0, 20.0] and load.most_requests == 3
    clients = load.arrivals()
    assert clients.due(0.0) == [((0, 0, 0), None)]
    assert clients.due(1.0) == []
    clients.finished((0, 0, 0))
    assert clients.due(2.0) == [((0, 0, 1), None)]
    assert clients.due(10.0) == [((1, 1, 0), (0,)), ((1, 2, 0), (0,))]  # client 0 is still at its second
    clients.finished((0, 0, 1))
    assert clients.due(12.0) == [((1, 0, 0), (0,))]
    for client in (0, 1, 2):
        clients.finished((1, client, 0))
    assert clients.due(14.0) == [((1, 0, 1), (0,)), ((1, 1, 1), (0,)), ((1, 2, 1), (0,))]
    assert clients.leaving(14.9) == []
    assert clients.leaving(15.0) == [(1, 1, 1), (1, 2, 1)] and clients.leaving(15.0) == []
    assert clients.due(15.0) == []  # client 0 keeps what it asked for
    clients.finished((1, 0, 1))
    assert clients.due(16.0) == [((2, 0, 0), None)]
    assert clients.due(20.0) == () and clients.next_s() is None


def test_arrivals_are_told_once() -> None:
    arrivals = OpenLoad((0.0, 0.5, 0.5, 2.0)).arrivals()
    assert [key for key, _ in arrivals.due(0.6)] == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    assert arrivals.due(0.6) == [] and arrivals.next_s() == 2.0
    assert [key for key, _ in arrivals.due(2.0)] == [(0, 0, 3)]
    assert arrivals.next_s() is None


@given(seed=st.integers(0, 2**32), rate=st.floats(0.5, 20.0))
def test_poisson_arrivals(seed: int, rate: float) -> None:
    load = OpenLoad.poisson(rate, 10.0, seed)
    assert load.times_s[0] == 0.0 and load.times_s[-1] < 10.0
    assert load.times_s == OpenLoad.poisson(rate, 10.0, seed).times_s


def test_poisson_rate() -> None:
    gaps = np.diff(OpenLoad.poisson(5.0, 2000.0, 0).times_s)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03) and gaps.std() == pytest.approx(0.2, rel=0.05)
