"""Loads that change while they run, on a virtual clock: every number below is worked out by hand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import run_virtual

from xspec.core.drafts import DraftTotals
from xspec.errors import ConfigError
from xspec.progress import silent
from xspec_cli.benchlib.load import Answer, Clock, Level, Phase, TargetError, stopwatch
from xspec_cli.benchlib.phases import FAILURE_PAUSE_S, parse_phases, phase_figures, run_phases
from xspec_cli.benchlib.plan import MAX_PHASE_PROMPTS, PlanOptions, Run, run_plan
from xspec_cli.benchlib.prompts import Prompt
from xspec_cli.benchlib.rounds import RoundFigures
from xspec_cli.benchlib.samples import Sample

TEXTS = tuple(Prompt(text=f"q{index}") for index in range(5))


@dataclass
class Metronome:
    """An answer is `chunks` chunks of two tokens, `beat_s` apart, the first after half a beat; it ends half a
    beat after the last."""

    name: str = "metronome"
    chunks: int = 3
    beat_s: float = 1.0
    fails: bool = False
    live: int = 0
    most: int = 0
    asked: list[tuple[str | None, int]] = field(default_factory=list)
    windows: list[tuple[float, float]] = field(default_factory=list)

    async def begin_turn(self) -> None:
        return None

    async def draft_totals(self) -> DraftTotals | None:
        return None

    def round_figures(self, begin_s: float, end_s: float) -> RoundFigures | None:
        self.windows.append((begin_s, end_s))
        return None

    async def ask(self, prompt: Prompt, seed: int, clock: Clock) -> Answer:
        self.asked.append((prompt.text, seed))
        if self.fails:
            raise TargetError("no")
        self.live += 1
        self.most = max(self.most, self.live)
        times = []
        await asyncio.sleep(self.beat_s / 2)
        for _ in range(self.chunks):
            times.append(clock())
            await asyncio.sleep(self.beat_s if len(times) < self.chunks else self.beat_s / 2)
        self.live -= 1
        return Answer(tuple(times), 4, 2 * self.chunks, "length", chunk_tokens=(2,) * self.chunks)


def drive(target: Metronome, *phases: Phase, seed: int = 0) -> list[Sample]:
    async def work() -> list[Sample]:
        return await run_phases(target, TEXTS, phases, seed=seed, clock=stopwatch())

    return run_virtual(work())


def test_three_phases_by_hand() -> None:
    """One client, three, one again, ten seconds each; requests of three seconds.

    The first client's requests end at 3, 6, ... 21, those of the two who come at 10 end at 13, 16, 19, 22. At
    20 two are too many: whoever ends first leaves, at 21 and 22; the third goes on to 25, 28 and 31.
    """
    target = Metronome()
    phases = (Phase(1, 10.0), Phase(3, 10.0), Phase(1, 10.0))
    samples = drive(target, *phases, seed=100)
    found = phase_figures(phases, samples)
    # chunks: 10, then 3 x 10, then 1 + 2 + 2 of those who end and 8 of who stays; the one at 30.5 is too late
    assert [phase.tokens for phase in found] == [20.0, 60.0, 26.0]
    assert [phase.tokens_per_s for phase in found] == [2.0, 6.0, 2.6]
    assert [phase.finished for phase in found] == [3, 9, 5]
    assert [(phase.concurrency, phase.begin_s, phase.seconds) for phase in found] == [
        (1, 0.0, 10.0), (3, 10.0, 10.0), (1, 20.0, 10.0),
    ]  # fmt: skip
    assert (target.most, target.live, len(samples)) == (3, 0, 18)
    assert sorted(sample.end_s for sample in samples)[-6:] == [21.0, 22.0, 22.0, 25.0, 28.0, 31.0]
    # requests go round in the prompts, each with a seed of its own
    assert target.asked == [(f"q{index % 5}", 100 + index) for index in range(18)]
    assert [sample.prompt_index for sample in samples] == list(range(18))


def test_clients_that_were_to_leave_stay_when_they_are_wanted_again() -> None:
    target = Metronome(chunks=10)  # requests of ten seconds
    samples = drive(target, Phase(3, 2.0), Phase(1, 2.0), Phase(3, 10.0))
    assert target.most == 3 and [sample.start_s for sample in samples] == [0.0] * 3 + [10.0] * 3


def test_a_chunk_on_the_edge_belongs_to_the_phase_that_begins() -> None:
    sample = Sample(0, 0.0, 3.0, (1.0, 2.0, 3.0), 4, 9, chunk_tokens=(2, 3, 4))
    found = phase_figures((Phase(1, 2.0), Phase(1, 1.0)), [sample])
    assert [(phase.tokens, phase.finished) for phase in found] == [(2.0, 0), (3.0, 0)]


def test_a_target_that_refuses_everything_is_not_flooded() -> None:
    target = Metronome(fails=True)
    phases = (Phase(2, 1.0),)
    samples = drive(target, *phases)
    assert len(samples) == pytest.approx(2 * 1.0 / FAILURE_PAUSE_S, abs=2)
    (found,) = phase_figures(phases, samples)
    assert (found.tokens, found.finished) == (0.0, 0)


def test_what_is_no_answer_has_no_tokens() -> None:
    lost = Sample(0, 0.0, 1.0, error="no")
    assert lost.tokens_within(0.0, 2.0) == 0.0
    silent_answer = Sample(0, 0.0, 1.5, completion_tokens=3)  # all of it was held back or special
    assert [silent_answer.tokens_within(*span) for span in ((0.0, 1.5), (1.5, 2.0))] == [0.0, 3.0]


def test_untold_tokens_are_shared_among_the_chunks() -> None:
    sample = Sample(0, 0.0, 5.0, (1.0, 2.0, 3.0, 4.0), 4, completion_tokens=10)
    assert sample.tokens_within(0.0, 2.5) == 5.0


@given(
    times=st.lists(st.floats(0.0, 50.0), min_size=1, max_size=20).map(sorted),
    cuts=st.lists(st.floats(0.0, 50.0), max_size=6).map(sorted),
    tokens=st.integers(1, 100),
)
def test_every_token_belongs_to_exactly_one_phase(times: list[float], cuts: list[float], tokens: int) -> None:
    edges = [0.0, *cuts, 51.0]
    told = Sample(0, 0.0, 50.0, tuple(times), 1, 3 * len(times), chunk_tokens=(3,) * len(times))
    untold = replace(told, chunk_tokens=(), completion_tokens=tokens)
    for sample in (told, untold):
        parts = [sample.tokens_within(begin, end) for begin, end in pairwise(edges)]
        assert sum(parts) == pytest.approx(sample.completion_tokens)


def options(*phases: Phase, **changes: int) -> PlanOptions:
    base = {"num_prompts": 3, "rounds": 2, "warmup": None, "seed": 7} | changes
    return PlanOptions(levels=(Level(phases=phases),), **base)


def test_a_plan_of_phases() -> None:
    """The warm-up fills the fullest phase; the second round goes on where the first stopped."""
    target = Metronome()
    phases = (Phase(1, 9.0), Phase(2, 3.0))
    runs = run_virtual(run_plan([target], TEXTS, options(*phases), silent))
    assert target.asked[:2] == [("q0", 7), ("q1", 8)], "the warm-up: two clients, two requests"
    # the first client asks at 0, 3, 6 and 9, the second at 9: q2, q3, q4, q0 and q1
    assert target.asked[2:7] == [(f"q{index % 5}", 7 + number) for number, index in enumerate(range(2, 7))]
    assert target.asked[7:] == [(f"q{index % 5}", 8 + number) for number, index in enumerate(range(7, 12))]
    assert [run.round_index for run in runs] == [0, 1]
    for run in runs:
        assert [phase.tokens for phase in run.phases] == [18.0, 12.0]
        assert (run.seconds, run.tokens_per_s) == (12.0, 2.5)
        assert str(run.level) == "phases 1:9,2:3"
    assert options(*phases).prompts_needed == 2
    # figures of rounds: each phase, then all of them; the warm-up took three seconds
    assert target.windows[1:4] == [(3.0, 12.0), (12.0, 15.0), (3.0, 15.0)]


def test_requests_that_outlast_the_plan_do_not_count() -> None:
    target = Metronome(chunks=8)
    (run,) = run_virtual(run_plan([target], TEXTS, options(Phase(1, 4.0), rounds=1, warmup=0), silent))
    assert (run.tokens_per_s, run.figures.output_tokens, run.samples[0].end_s) == (2.0, 16, 8.0)


def test_progress_is_told_in_seconds() -> None:
    told: list[tuple[str, int, int]] = []
    plan = options(Phase(1, 3.0), rounds=1, warmup=0)
    run_virtual(run_plan([Metronome()], TEXTS, plan, lambda *step: told.append(step)))
    what = "metronome, phases 1:3, round 1 of 1"
    assert told == [(what, 0, 3), (what, 1, 3), (what, 2, 3), (what, 3, 3)]


def test_phases_go_round_in_a_bounded_part_of_a_long_file() -> None:
    many = [Prompt(text=f"q{index}") for index in range(MAX_PHASE_PROMPTS + 10)]
    runs: list[Run] = run_virtual(
        run_plan([Metronome()], many, options(Phase(1, 3.5), rounds=2, warmup=0), silent)
    )
    assert [len(run.samples) for run in runs] == [2, 2]


def test_phases_as_they_are_written() -> None:
    found = parse_phases(["1:30", "8:0.5"], max_concurrency=8)
    assert found == (Phase(1, 30.0), Phase(8, 0.5))
    assert [str(phase) for phase in found] == ["1:30", "8:0.5"]


@pytest.mark.parametrize(
    "word", ["", "8", "8:", ":30", "0:30", "9:30", "8:0", "8:-1", "8:x", "1.5:2", "8:nan", "8:inf", "8:1:2"]
)
def test_phases_that_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=f"--phases={word}: allowed: concurrency:seconds, as in 8:30"):
        parse_phases([word], max_concurrency=8)
