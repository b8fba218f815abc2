"""The virtual device and the loop around it, against timelines worked by hand and the device's own rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sim_costs import CpuCosts, engine

from xspec.core.round import DecodeRow, RoundFeedback, SpeculationPlan
from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.errors import ConfigError
from xspec.policy.base import PolicyView
from xspec.policy.fixed import FixedPolicy
from xspec.sim.device import UncoveredError, VirtualDevice, allocate
from xspec.sim.loads import ClosedLoad, OpenLoad, Phase
from xspec.sim.simulate import Run, simulate
from xspec.sim.world import Difficulty, SimRequest, Synthetic, World
from xspec.verify.admit import admit


@dataclass(frozen=True)
class FlatCosts:
    """Plain 10 ms, 5 ms more a draft step, 1 ms a prompt token, whatever the load."""

    prefill_ms_per_token: float = 1.0

    def at(self, kv_lengths: Sequence[int]) -> FlatCosts:
        return self

    def round_ms(
        self, draft_steps: int, requests: int, target_rows: int, depth: int | None = None
    ) -> float | None:
        return 10.0 + 5.0 * draft_steps


class Spy(FixedPolicy):
    """A fixed policy that writes down what it is asked and told."""

    def __init__(self, draft_steps: int) -> None:
        super().__init__(draft_steps)
        self.log: list[str] = []
        self.views: list[PolicyView] = []
        self.feedback: list[RoundFeedback] = []

    def plan(self, view: PolicyView) -> SpeculationPlan:
        self.log.append(f"plan {view.plan_id}")
        self.views.append(view)
        return super().plan(view)

    def observe(self, feedback: RoundFeedback) -> None:
        self.log.append(f"observe {feedback.plan.plan_id}")
        self.feedback.append(feedback)


def one_client(
    rate: float, *, prompt: int = 4, answer: int = 7, seconds: float = 0.06, width: int = 2
) -> World:
    kind = Difficulty("all", (rate,) * width)
    population = Synthetic((kind,), prompt_tokens=(prompt, prompt), answer_tokens=(answer, answer))
    return World(population, ClosedLoad((Phase(1, seconds),)), 0)


def run_spy(world: World, draft_steps: int, slots: int = 2) -> tuple[Spy, Run]:
    spy = Spy(draft_steps)
    return spy, simulate(world, FlatCosts(), engine(width=2, slots=slots), lambda device: spy)


def test_a_timeline_worked_by_hand() -> None:
    """Prompt 4 ms, then rounds of 20 ms with 3 tokens each: 1 + 3 + 3 = 7.

    The fourth round was planned before the host could know that the third fills the answer, as in an engine;
    the next prompt waits for it.
    """
    spy, run = run_spy(one_client(1.0, seconds=0.08), draft_steps=2)
    ends = [round(record.end_s * 1e3, 6) for record in run.rounds]
    assert ends[:5] == [4.0, 24.0, 44.0, 64.0, 68.0]
    assert [record.tokens for record in run.rounds[:4]] == [1, 3, 3, 0]
    assert [record.requests for record in run.rounds[:4]] == [0, 1, 1, 1]
    assert [record.draft_steps for record in run.rounds[:4]] == [0, 2, 2, 2]
    assert run.latencies_s[0] == pytest.approx(0.044)
    assert [record.decode_ms for record in run.rounds[:4]] == [0.0, 20.0, 20.0, 20.0]


def test_refused_drafts_cost_their_time_and_bring_one_token() -> None:
    _, run = run_spy(one_client(0.0), draft_steps=2)
    assert [record.tokens for record in run.rounds[:4]] == [1, 1, 1, 1]
    assert [(told.verified, told.committed) for r in run.rounds[1:3] for told in r.rows] == [(2, 1), (2, 1)]


def test_the_policy_plans_round_n_with_feedback_through_n_minus_2() -> None:
    spy, _ = run_spy(one_client(0.5, answer=50, seconds=0.5), draft_steps=1)
    steady = [f"plan {n}" if half else f"observe {n - 2}" for n in range(2, 9) for half in (0, 1)]
    assert spy.log[:2] == ["plan 0", "plan 1"] and spy.log[2:16] == steady


def test_one_slot_is_an_engine_without_overlap() -> None:
    spy, _ = run_spy(one_client(0.5, answer=50, seconds=0.5), draft_steps=1, slots=1)
    assert spy.log[:6] == ["plan 0", "observe 0", "plan 1", "observe 1", "plan 2", "observe 2"]


def test_round_times_are_the_intervals_between_retirements() -> None:
    spy, _ = run_spy(one_client(1.0), draft_steps=2)
    times = [told.round_ms for told in spy.feedback]
    assert times[0] is None and times[1:4] == pytest.approx([20.0, 20.0, 20.0])


def test_an_idle_engine_waits_for_the_next_arrival() -> None:
    population = Synthetic((Difficulty("all", (1.0,)),), prompt_tokens=(2, 2), answer_tokens=(2, 2))
    spy = Spy(0)
    run = simulate(
        World(population, OpenLoad((0.0, 1.0)), 0), FlatCosts(), engine(width=1), lambda device: spy
    )
    assert run.latencies_s == pytest.approx((0.012, 0.012))
    after = [told for told in spy.feedback if told.round_ms is None]
    assert len(after) == 2  # the first of each request: nothing was in flight before
    assert sum(record.interval_s for record in run.rounds) < 0.1 < run.rounds[-1].end_s


def test_feedback_speaks_of_the_rows_that_signals_speak_of() -> None:
    kinds = (Difficulty("easy", (0.9, 0.8)), Difficulty("hard", (0.2, 0.1)))
    world = World(Synthetic(kinds, answer_tokens=(5, 40)), ClosedLoad((Phase(6, 3.0),)), 1)
    spy, _ = run_spy(world, draft_steps=2)
    told = [f for f in spy.feedback if f.signals is not None]
    assert len(told) > 50
    for feedback in told:
        assert feedback.signals is not None and feedback.signals.shape == (len(feedback.rows), 2)
    assert any(len(f.rows) < f.shape.draft_rows - 2 for f in told)  # rows of full answers are not told of


def test_rooms_end_with_the_answer() -> None:
    spy, _ = run_spy(one_client(0.0, answer=5), draft_steps=2)
    decoding = [view.rooms[0] for view in spy.views if view.rooms]
    # 5 answer tokens: the prompt's is in flight at the first plan, then one more is sure with each round
    assert decoding[:3] == [4, 3, 2]


# -- row budgets ----------------------------------------------------------------------------------


def test_a_budget_goes_to_the_likeliest_drafts() -> None:
    """Survivals: row 0 .9 .72 .36, row 1 .5 .45 .405, row 2 .8 .08 .008. Three anchors of seven rows leave
    four drafts: .9 .8 .72 .5."""
    signals = np.array([[0.9, 0.8, 0.5], [0.5, 0.9, 0.9], [0.8, 0.1, 0.1]], dtype=np.float32)
    assert allocate(signals, [3, 3, 3], 3, 7) == [2, 1, 1]
    assert allocate(signals, [1, 3, 3], 3, 7) == [1, 2, 1]  # its second draft has no room: .45 is next
    assert allocate(signals, [0, 0, 0], 3, 7) == [0, 0, 0]
    assert allocate(signals, [3, 3, 3], 3, 3) == [0, 0, 0]
    assert allocate(signals, [3, 3, 3], 3, 99) == [3, 3, 3]


def test_ties_go_to_the_earlier_position_then_the_earlier_row() -> None:
    signals = np.ones((3, 2), dtype=np.float32)
    assert [allocate(signals, [2, 2, 2], 3, rows) for rows in (4, 5, 6, 7, 8)] == [
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
    ]


@given(data=st.data())
def test_the_simulator_allocates_as_the_device_does(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    value = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0.0, 1.0, width=32)
    signals = np.array(
        data.draw(st.lists(st.lists(value, min_size=width, max_size=width), min_size=rows, max_size=rows)),
        dtype=np.float32,
    )
    caps = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    target_rows = data.draw(st.integers(0, rows * (width + 1)))
    admitted = admit(torch.from_numpy(signals), torch.tensor(caps), rows, target_rows)
    assert allocate(signals, caps, rows, target_rows) == admitted.tolist()


class Budget:
    """All K drafted, always the same padded rows."""

    name = "budget"

    def __init__(self, draft_steps: int, target_rows: int) -> None:
        self.draft_steps, self.target_rows = draft_steps, target_rows
        self.feedback: list[RoundFeedback] = []

    def plan(self, view: PolicyView) -> SpeculationPlan:
        steps = self.draft_steps if view.sequence_ids else 0
        return SpeculationPlan(
            view.plan_id, self.name, steps, target_rows=self.target_rows if steps else None
        )

    def observe(self, feedback: RoundFeedback) -> None:
        self.feedback.append(feedback)

    def status(self) -> dict[str, Any]:
        return {}


def test_budgeted_rounds_verify_what_fits_and_prefer_the_easy() -> None:
    kinds = (Difficulty("easy", (0.9, 0.9)), Difficulty("hard", (0.2, 0.2)))
    world = World(Synthetic(kinds, answer_tokens=(300, 400)), ClosedLoad((Phase(4, 4.0),)), 0)
    tiers = TargetTiers({(4, 2): [8]})
    policy = Budget(2, 8)
    run = simulate(world, FlatCosts(), engine(width=2, tiers=tiers), lambda device: policy)
    full = [f for f in policy.feedback if len(f.rows) == 4]
    assert len(full) > 100
    # four drafts for four rows that all have room for two
    assert all(sum(row.verified for row in f.rows) == 4 for f in full)
    told = [row for record in run.rounds if len(record.rows) == 4 for row in record.rows]
    easy = [row.verified for row in told if row.difficulty == "easy"]
    hard = [row.verified for row in told if row.difficulty == "hard"]
    assert easy and hard and np.mean(easy) > np.mean(hard) + 0.5
    assert {record.target_rows for record in run.rounds if record.requests} == {8}


def test_the_last_tokens_room_caps_a_budget() -> None:
    device = VirtualDevice(FlatCosts(), BucketGrid([1]))
    chances = np.ones((3, 2))
    device.take(7, SimRequest((0, 0, 0), "all", 4, 3, (2, 2, 2), chances, chances.astype(np.float32)))
    device.residents[7].tokens = 5  # 1 of 3 answered: room for 2, so one draft
    row = DecodeRow(row=1, sequence_id=7, kv_bound=8, verify=2)
    assert device.caps([row]) == [1]
    device.residents[7].tokens = 7
    assert device.caps([row]) == [0]


# -- what is not covered --------------------------------------------------------------------------


def test_rounds_that_were_not_measured_are_refused_with_their_size() -> None:
    costs = CpuCosts(most_rows=20)
    world = World(Synthetic((Difficulty("all", (0.5,) * 5),)), ClosedLoad((Phase(8, 2.0),)), 0)
    with pytest.raises(UncoveredError, match=r"[5-8] requests in bucket 8 with 5 drafts on 48 rows"):
        simulate(world, costs, engine(), lambda device: FixedPolicy(5))
    assert simulate(world, costs, engine(), lambda device: FixedPolicy(1)).rounds


def test_requests_longer_than_the_table_are_refused() -> None:
    population = Synthetic((Difficulty("all", (0.5,) * 5),), prompt_tokens=(5000, 5000))
    world = World(population, ClosedLoad((Phase(1, 60.0),)), 0)
    with pytest.raises(UncoveredError, match=r"covers no requests of 5001 to 5001 tokens"):
        simulate(world, CpuCosts(), engine(), lambda device: FixedPolicy(1))


def test_a_world_that_does_not_fit_the_engine_is_refused() -> None:
    population = Synthetic((Difficulty("all", (0.5, 0.5)),))
    world = World(population, ClosedLoad((Phase(33, 1.0),)), 0)
    with pytest.raises(ConfigError, match="33 requests at once; the costs allow 32"):
        simulate(world, CpuCosts(), engine(width=2), lambda device: FixedPolicy(1))
    with pytest.raises(ConfigError, match="5 tokens are drafted, but acceptance is given for 2"):
        simulate(world, CpuCosts(), engine(width=5), lambda device: FixedPolicy(1))


def test_a_prompt_that_can_never_be_planned_is_refused() -> None:
    population = Synthetic((Difficulty("all", (0.5, 0.5)),), prompt_tokens=(600, 600))
    world, shape = World(population, ClosedLoad((Phase(1, 1.0),)), 0), engine(width=2)
    limits = dataclasses.replace(shape.limits, chunked_prefill=False)
    with pytest.raises(ConfigError, match="a prompt must fit into one batch"):
        simulate(world, CpuCosts(), dataclasses.replace(shape, limits=limits), lambda device: FixedPolicy(1))


def test_more_arrivals_than_seats_wait_and_are_all_answered() -> None:
    population = Synthetic((Difficulty("all", (0.5, 0.5)),), prompt_tokens=(1, 80), answer_tokens=(1, 30))
    world = World(population, OpenLoad(tuple(i / 100 for i in range(90))), 0)
    run = simulate(world, CpuCosts(), engine(width=2), lambda device: FixedPolicy(2))
    assert len(run.latencies_s) == 90
    answers = sum(world.request((0, 0, i), None).answer_tokens for i in range(90))
    assert sum(record.tokens for record in run.rounds) == answers
    assert max(record.requests for record in run.rounds) == 32


@pytest.mark.parametrize("draft_steps", [0, 3])
def test_runs_repeat_exactly(draft_steps: int) -> None:
    def once() -> Run:
        population = Synthetic((Difficulty("all", (0.6, 0.5, 0.4)),))
        world = World(population, ClosedLoad((Phase(4, 3.0), Phase(2, 2.0))), 5)
        return simulate(world, CpuCosts(), engine(width=3), lambda device: FixedPolicy(draft_steps))

    assert once() == once()
