"""Traces as populations: worked examples, and a recorded simulation that is simulated again."""

from __future__ import annotations

import numpy as np
import pytest
from sim_costs import CpuCosts, engine

from xspec.core.round import RoundFeedback, RowFeedback, SpeculationPlan
from xspec.core.shapes import RoundShape
from xspec.cost.settings import Control
from xspec.errors import ConfigError
from xspec.policy.base import Policy, PolicyView
from xspec.policy.fixed import FixedPolicy
from xspec.policy.make import make_policy
from xspec.sim.compare import Contender, compare
from xspec.sim.loads import ClosedLoad, Phase
from xspec.sim.recorded import Recorded
from xspec.sim.simulate import simulate
from xspec.sim.world import Difficulty, SignalModel, Synthetic, World
from xspec.trace import Trace, TracedRound, replay


def traced(
    plan_id: int,
    rows: list[RowFeedback],
    bounds: list[int],
    signals: list[list[float]] | None,
    ms: float | None,
) -> TracedRound:
    plan = SpeculationPlan(plan_id, "fixed", 0 if signals is None else len(signals[0]))
    view = PolicyView(plan_id, tuple(row.sequence_id for row in rows), tuple(bounds), 0, 0)
    told = None if signals is None else np.array(signals, dtype=np.float32)
    shape = RoundShape(len(rows), len(rows), 0, 1)
    feedback = RoundFeedback(plan, shape, tuple(rows), ms, 0, sum(r.committed for r in rows), told)
    return TracedRound(view, plan, max(0, plan_id - 1), feedback)


def two_rounds() -> Trace:
    """One request, prompt of 9. Round 0 drafts 3 and has 2 accepted of 3; round 1 has 0 accepted of 2
    verified; round 2 is plain; round 3 accepts all 3, its last one censored by the end of the answer."""
    return Trace(
        {},
        (
            traced(0, [RowFeedback(5, 3, 3, 3, 3)], [10], [[0.9, 0.8, 0.3]], None),
            traced(1, [RowFeedback(5, 3, 2, 2, 1)], [17], [[0.4, 0.5, 0.6]], 30.0),
            traced(2, [RowFeedback(5, 0, 0, 0, 1)], [18], None, 20.0),
            traced(3, [RowFeedback(5, 3, 3, 3, 2, censored=True)], [19], [[0.7, 0.7, 0.7]], 30.0),
        ),
    )


def test_lengths_rates_and_flags_of_a_worked_example() -> None:
    found = Recorded.of(two_rounds(), 3)
    assert len(found.requests) == 1 and found.notes == ()
    # 10 - 1 for the prompt; one answer token of the prompt's chunk, then 3 + 1 + 1 + 2
    assert (found.requests[0].prompt_tokens, found.requests[0].answer_tokens) == (9, 8)
    # position 1: held in rounds 0 and 3, refused in 1; position 2: held in both; position 3: refused in round
    # 0 and unknown in round 3, where the answer ended
    assert found.rates == pytest.approx((2 / 3, 1.0, 0.0))
    request = found.request(0, (0, 0, 0), None)
    # tokens 1, 2 held, 3 was refused, 4 was refused, 5 came of a plain round, 6 and 7 held
    flags, signals, _ = found._tables(found.requests[0])
    assert flags[:, 0].tolist() == [-1, 1, 1, 0, 0, -1, 1, 1]
    assert flags[1].tolist() == [1, 1, 0] and request.runs[1] == 2
    assert request.runs[3] == 0 and request.runs[4] == 0
    assert signals[1] == pytest.approx([0.9, 0.8, 0.3]) and signals[4] == pytest.approx([0.4, 0.5, 0.6])
    # token 2 as seen from a round that begins there: what was said of it when it was second
    assert signals[2, 0] == pytest.approx(0.8)
    # nothing was ever said of token 5: the trace's rate
    assert signals[5, 0] == pytest.approx(2 / 3)


def test_chances_are_signals_moved_to_the_trace_rates() -> None:
    rows = [RowFeedback(1, 1, 1, 1, 2) if hit else RowFeedback(1, 1, 1, 1, 1) for hit in [True, False] * 40]
    said = [[0.9], [0.7]] * 40
    trace = Trace(
        {}, tuple(traced(i, [row], [9], [s], 1.0) for i, (row, s) in enumerate(zip(rows, said, strict=True)))
    )
    found = Recorded.of(trace, 1)
    assert found.rates == (0.5,)
    _, signals, chances = found._tables(found.requests[0])
    place = [1 + 3 * (i // 2) + 2 * (i % 2) for i in range(80)]
    assert signals[place[:2], 0] == pytest.approx([0.9, 0.7])
    assert chances[place, 0].mean() == pytest.approx(0.5, abs=1e-4)
    assert chances[place[0], 0] > 0.5 > chances[place[1], 0]


def test_what_was_never_verified_is_said_and_taken_from_the_deepest_that_was() -> None:
    trace = Trace({}, (traced(0, [RowFeedback(5, 2, 1, 1, 2)], [10], [[0.9, 0.8]], None),))
    found = Recorded.of(trace, 4)
    assert found.rates == (1.0, 1.0, 1.0, 1.0)
    assert found.notes == (
        "no draft beyond position 1 was verified in the trace: deeper ones are taken to be accepted as often "
        "as that one",
    )


@pytest.mark.parametrize(
    ("rounds", "complaint"),
    [
        ((), "no request that decoded"),
        ((traced(0, [RowFeedback(5, 0, 0, 0, 1)], [10], None, None),), "no verified draft"),
    ],
)
def test_traces_without_what_is_needed_are_refused(rounds: tuple[TracedRound, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Recorded.of(Trace({}, rounds), 2)


def test_lost_rounds_and_requests_that_left_are_tolerated() -> None:
    kept = two_rounds().rounds
    lost = TracedRound(kept[0].view, kept[0].plan, 0, None, "EngineError: lost")
    assert Recorded.of(Trace({}, (lost, *kept)), 3).requests[0].answer_tokens == 8


# -- recording a simulation -----------------------------------------------------------------------


class Recorder:
    """A policy that keeps a trace of itself, as the engine does."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.name = policy, policy.name
        self.planned: dict[int, tuple[PolicyView, SpeculationPlan, int]] = {}
        self.observed: dict[int, RoundFeedback] = {}

    def plan(self, view: PolicyView) -> SpeculationPlan:
        plan = self.policy.plan(view)
        self.planned[view.plan_id] = (view, plan, len(self.observed))
        return plan

    def observe(self, feedback: RoundFeedback) -> None:
        self.observed[feedback.plan.plan_id] = feedback
        self.policy.observe(feedback)

    def status(self) -> dict[str, object]:
        return self.policy.status()

    def trace(self) -> Trace:
        return Trace(
            {},
            tuple(
                TracedRound(view, plan, observed, self.observed.get(plan_id))
                for plan_id, (view, plan, observed) in sorted(self.planned.items())
            ),
        )


WORLD = World(
    Synthetic((Difficulty("all", (0.7, 0.6, 0.5), spread=0.2),), SignalModel(0.5, 0.3)),
    ClosedLoad((Phase(2, 15.0), Phase(6, 15.0), Phase(1, 10.0))),
    4,
)


def test_a_simulated_trace_replays_to_the_same_decisions() -> None:
    for control in Control:
        shape = engine(width=3)
        recorder = Recorder(make_policy(control, CpuCosts(), shape.geometry))
        simulate(WORLD, CpuCosts(), shape, lambda device, recorder=recorder: recorder)
        assert replay(make_policy(control, CpuCosts(), shape.geometry), recorder.trace()) == []
        assert len(recorder.planned) > 500


def test_a_recorded_world_is_like_the_one_that_was_recorded() -> None:
    recorder = Recorder(FixedPolicy(3))
    shape = engine(width=3)
    simulate(WORLD, CpuCosts(), shape, lambda device: recorder)
    trace = recorder.trace()
    found = Recorded.of(trace, 3)
    assert found.rates == pytest.approx((0.7, 0.6, 0.5), abs=0.04)
    assert found.shifts == pytest.approx((-0.5, -0.5, -0.5), abs=0.25)  # the calibration error, undone
    first = WORLD.request((0, 0, 0), None)
    assert found.requests[0].prompt_tokens == first.prompt_tokens
    assert found.requests[0].answer_tokens == first.answer_tokens
    again = World(found, WORLD.load, 4)
    contenders = [Contender(f"depth {k}", lambda device, k=k: FixedPolicy(k), fixed=True) for k in (1, 3)]
    for name in ("depth 1", "depth 3"):
        one = compare(WORLD, CpuCosts(), shape, contenders).of(name).total
        two = compare(again, CpuCosts(), shape, contenders).of(name).total
        assert one is not None and two is not None
        assert two.tokens_per_round == pytest.approx(one.tokens_per_round, rel=0.04)


def test_arrivals_of_a_trace_are_in_its_time() -> None:
    recorder = Recorder(FixedPolicy(1))
    simulate(WORLD, CpuCosts(), engine(width=3), lambda device: recorder)
    found = Recorded.of(recorder.trace(), 3)
    times = found.arrivals().times_s
    assert times[0] == 0.0 and len(times) == len(found.requests)
    assert 25.0 < times[-1] < 41.0
    run = simulate(
        World(found, found.arrivals(), 0), CpuCosts(), engine(width=3), lambda device: FixedPolicy(1)
    )
    assert len(run.latencies_s) == len(times)
