"""Policies that take turns on one engine, what is told of their rounds, and the best one in hindsight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fake import FakeEngine, FakeStream, Script
from virtual_time import run_virtual

from xspec.config import Config
from xspec.core.request import SamplingParams
from xspec.core.round import RoundFeedback, RowFeedback, SpeculationPlan
from xspec.core.shapes import RoundShape
from xspec.errors import ConfigError
from xspec.progress import silent
from xspec_cli import bench
from xspec_cli.benchlib.hindsight import (
    OTHER_HALF,
    SAME_ROUNDS,
    Contest,
    best,
    choices,
    other_half,
    verdicts,
)
from xspec_cli.benchlib.load import AskOptions, Level, Phase
from xspec_cli.benchlib.local import EngineTarget
from xspec_cli.benchlib.phases import PhaseFigures
from xspec_cli.benchlib.plan import PlanOptions, Run, compare, run_plan
from xspec_cli.benchlib.policies import IDLE_TRIES, contest, policy_targets
from xspec_cli.benchlib.prompts import Prompt, halves
from xspec_cli.benchlib.rounds import RoundFigures, RoundLog, round_figures
from xspec_cli.benchlib.samples import Sample, figures
from xspec_cli.benchlib.tables import phase_tables, policy_tables, same_text, verdict_tables
from xspec_cli.flags_resolve import Launch, resolve

ASK = AskOptions(max_tokens=8, temperature=0.0, ignore_eos=False, chat=True)
TEXTS = tuple(Prompt(text=f"question {index}") for index in range(10))
SPEED = {"adaptive": 4, "plain": 1, "fixed:0": 1, "fixed:2": 3, "fixed:4:2": 2}
"""Tokens a step of each policy of the engine below; a step is a second."""


def round_of(
    steps: int = 2,
    *rows: RowFeedback,
    target_rows: int = 12,
    ms: float | None = None,
    predicted_ms: float | None = None,
    prefill: int = 0,
    reason: str = "",
) -> RoundFeedback:
    plan = SpeculationPlan(0, "p", steps, predicted_ms=predicted_ms, reason=reason)
    shape = RoundShape(
        draft_rows=4 if steps else 0, target_rows=target_rows, prefill_tokens=prefill, kv_pages=1
    )
    return RoundFeedback(plan, shape, rows, ms, prefill, sum(row.committed for row in rows))


class PolicyEngine(FakeEngine):
    """Speaks of one round for every request. It is busy while one lives, and for `busy_tries` tries more."""

    def __init__(self) -> None:
        super().__init__(Script(delay_s=1.0), draft_width=4)
        self.used: list[str] = []
        self.configs: list[Config] = []
        self.busy_tries = 0

    def use_policy(self, name: str) -> None:
        if name not in SPEED:
            raise ConfigError(f"policy {name!r}: allowed: {', '.join(SPEED)}")
        if self.live or self.busy_tries:
            self.busy_tries -= 1
            raise RuntimeError("the policy is exchanged while requests run")
        self.used.append(name)
        self.script.step_tokens = SPEED[name]

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> FakeStream:
        tokens = self.script.step_tokens
        row = RowFeedback(1, tokens - 1, tokens - 1, tokens - 1, tokens)
        self.metrics.round_retired(round_of(tokens - 1, row, ms=11.0, predicted_ms=10.0))
        return super().generate(prompt_ids, params, request_id=request_id)


def options(**changes: Any) -> PlanOptions:
    base: dict[str, Any] = {"levels": (Level(concurrency=1),), "num_prompts": 2, "rounds": 1, "warmup": 0}
    return PlanOptions(**{**base, "seed": 0, "rotate": True, **changes})


def plan_runs(engine: PolicyEngine, names: Sequence[str], plan: PlanOptions) -> list[Run]:
    async def work() -> list[Run]:
        targets = policy_targets(EngineTarget(engine, ASK), names, engine.use_policy)
        return await run_plan(targets, TEXTS, plan, silent)

    return run_virtual(work())


# -- taking turns ------------------------------------------------------------------------------


def test_policies_rotate_on_the_same_prompts() -> None:
    engine = PolicyEngine()
    names = ("adaptive", "fixed:0", "fixed:2")
    runs = plan_runs(engine, names, options(rounds=3))
    first, second, third = names
    assert engine.used[:3] == list(names), "all are tried before anything is asked"
    assert engine.used[3:] == [first, second, third, second, third, first, third, first, second]
    assert [run.target for run in runs] == engine.used[3:]
    asked = [engine.text.tokenizer.decode(call.prompt_ids) for call in engine.calls]
    per_round = [[f"[user]question {2 * r + i}[assistant]" for i in range(2)] * 3 for r in range(3)]
    assert asked == sum(per_round, [])
    # answers of 8 tokens: 2 steps at 4 a step, 8 at 1, 3 at 3
    assert {run.target: run.figures.duration_s for run in runs} == pytest.approx(
        {"adaptive": 4.0, "fixed:0": 16.0, "fixed:2": 6.0}
    )
    ratios = {found.target: found.ratio.median for found in compare(runs, options(rounds=3), names)}
    assert ratios == pytest.approx({"fixed:0": 0.25, "fixed:2": 4 / 6})
    assert len({run.samples[0].digest for run in runs[:3]}) == 1, "one text, however it was cut into rounds"


def test_each_run_has_the_rounds_of_its_own_turn() -> None:
    runs = plan_runs(PolicyEngine(), ("adaptive", "fixed:0"), options(warmup=5))
    adaptive, plain = (run.rounds for run in runs)
    assert adaptive == RoundFigures(2, 2, 4.0, 1.0, 3.0, 12.0, 0.0, 0, pytest.approx(1.1), (("3", 2),))
    assert plain is not None and (plain.rounds, plain.acceptance, plain.plain_share) == (2, None, 1.0)


def test_a_turn_waits_until_the_engine_is_idle() -> None:
    engine = PolicyEngine()

    async def begin(tries: int) -> None:
        (target,) = policy_targets(EngineTarget(engine, ASK), ["plain"], engine.use_policy)
        engine.busy_tries = tries
        await target.begin_turn()

    run_virtual(begin(IDLE_TRIES - 1))
    assert engine.used == ["plain"] * 2
    with pytest.raises(RuntimeError, match="while requests run"):
        run_virtual(begin(IDLE_TRIES + 1))


def test_a_policy_the_engine_has_not_is_refused_before_any_request() -> None:
    engine = PolicyEngine()
    with pytest.raises(ConfigError, match="--policies=fixed:9: policy 'fixed:9': allowed: adaptive, plain"):
        policy_targets(EngineTarget(engine, ASK), ["plain", "fixed:9"], engine.use_policy)
    assert engine.calls == []


def test_hindsight_gives_odd_and_even_rounds_different_prompts() -> None:
    engine = PolicyEngine()
    plan_runs(engine, ("plain",), options(rounds=4, hindsight=True))
    asked = [engine.text.tokenizer.decode(call.prompt_ids) for call in engine.calls]
    assert asked == [f"[user]question {index}[assistant]" for index in (0, 2, 1, 3, 4, 6, 5, 7)]


@given(classes=st.lists(st.sampled_from("abc"), max_size=30))
def test_halves_share_no_prompt_and_split_every_class(classes: list[str]) -> None:
    prompts = [Prompt(text=str(index), traffic=name) for index, name in enumerate(classes)]
    if len(set(classes)) == len(classes):
        with pytest.raises(ConfigError, match=f"{len(classes)} prompts are too few"):
            halves(prompts)
        return
    first, second = halves(prompts)
    assert sorted([*first, *second], key=lambda prompt: int(prompt.text or "")) == prompts
    for name in "abc":
        counts = [sum(prompt.traffic == name for prompt in half) for half in (first, second)]
        assert counts[0] - counts[1] in (0, 1)


# -- rounds ------------------------------------------------------------------------------------


def test_figures_of_rounds_by_hand() -> None:
    rounds = [
        round_of(0, prefill=64, target_rows=0),  # nothing but prompts: no figure counts it
        round_of(3, RowFeedback(1, 3, 3, 3, 3), RowFeedback(2, 3, 2, 2, 1), ms=20.0, predicted_ms=25.0),
        round_of(0, RowFeedback(1, 0, 0, 0, 1), RowFeedback(2, 0, 0, 0, 1), target_rows=2, ms=9.0),
        round_of(1, RowFeedback(1, 1, 1, 1, 2), target_rows=4, reason="probe: depth 1"),
        round_of(0, RowFeedback(1, 0, 0, 0, 1), target_rows=2, ms=12.0, predicted_ms=10.0),
        round_of(0, RowFeedback(1, 0, 0, 0, 1), target_rows=2, ms=90.0, predicted_ms=10.0, prefill=32),
        round_of(3, RowFeedback(1, 3, 3, 3, 2, censored=True), ms=None, predicted_ms=25.0),
    ]
    found = round_figures(rounds)
    assert found == RoundFigures(
        rounds=6,
        rows=8,
        tokens_a_row=12 / 8,
        acceptance=(2 + 0 + 1 + 2) / (3 + 2 + 1 + 3),
        draft_steps=pytest.approx(7 / 6),
        target_rows=pytest.approx((12 + 2 + 4 + 2 + 2 + 12) / 6),
        plain_share=0.5,
        switches=2,  # 3 to 0, 0 to 3; the probe is none
        time_ratio=1.0,  # between 20 / 25 and 12 / 10; prompts and unsteady intervals are left out
        choices=(("plain", 3), ("3", 2), ("1", 1)),
    )
    assert round_figures(rounds[:1]) is None


def test_a_log_tells_a_stretch_of_time() -> None:
    async def work() -> list[RoundFigures | None]:
        log = RoundLog()
        for steps in (0, 1, 2, 3):
            log.observe(round_of(steps, RowFeedback(1, steps, steps, steps, 1)))
            await asyncio.sleep(1.0)
        found = [log.figures(0.0, 4.0), log.figures(1.0, 3.0), log.figures(3.5, 4.0)]
        log.clear()
        return [*found, log.figures(0.0, 4.0)]

    every, middle, none, cleared = run_virtual(work())
    assert every is not None and (every.rounds, every.draft_steps) == (4, 1.5)
    assert middle is not None and (middle.rounds, middle.draft_steps) == (2, 1.5), "begin in, end out"
    assert none is cleared is None


# -- in hindsight ------------------------------------------------------------------------------


def test_the_best_of_some_rounds() -> None:
    rates = {"a": [10.0, 20.0, 30.0, 40.0], "b": [15.0, 10.0, 31.0, 10.0], "c": [15.0, 1.0, 31.0, 1.0]}
    assert best(rates, ["a", "b", "c"], range(4)) == "a"
    assert best(rates, ["a", "b", "c"], [0, 2]) == "b", "the first of two equal ones"
    assert [other_half(index, 5) for index in range(3)] == [[1, 3], [0, 2, 4], [1, 3]]
    assert choices(rates, ["a", "b"], across=False) == ["a"] * 4
    # rounds 2 and 4 (by 1) would choose a, rounds 1 and 3 b; each is judged on the others
    assert choices(rates, ["a", "b"], across=True) == ["a", "b", "a", "b"]


def run_of(target: str, rate: float, index: int, level: Level, phases: Sequence[float] = ()) -> Run:
    """One request of a second that yields `rate` tokens, or phases of these rates."""
    sample = Sample(0, 0.0, 1.0, (1.0,), 4, round(rate))
    found = []
    begin_s = 0.0
    for phase, speed in zip(level.phases, phases, strict=False):
        tokens = speed * phase.seconds
        found.append(PhaseFigures(phase.concurrency, begin_s, phase.seconds, tokens, speed, 1))
        begin_s += phase.seconds
    return Run(level, index, target, (sample,), figures([sample]), phases=tuple(found))


EIGHT = Level(concurrency=8)
SIDES = Contest(("adaptive", "fixed:0", "fixed:2"), ("fixed:0", "fixed:2"), "fixed:0")


def level_runs(**rates: Sequence[float]) -> list[Run]:
    names = dict(zip(("adaptive", "zero", "two"), SIDES.names, strict=True))
    return [run_of(names[key], rate, i, EIGHT) for key, row in rates.items() for i, rate in enumerate(row)]


def test_verdicts_at_one_level() -> None:
    runs = level_runs(adaptive=[99, 99, 99, 99], zero=[100, 50, 100, 50], two=[90, 90, 90, 90])
    found = verdicts(runs, [EIGHT], SIDES, hindsight=True, seed=0)
    same, across, plain = found
    assert (same.claim, same.baseline, same.chosen) == ("the best fixed", ("fixed:2",), SAME_ROUNDS)
    assert same.ratio.median == pytest.approx(1.1)
    # even rounds choose fixed:2 (90 over 50), which odd ones judge (1.1); odd ones choose fixed:0 (99 / 50)
    assert (across.baseline, across.chosen, across.ratio.pairs) == (("fixed:2", "fixed:0"), OTHER_HALF, 4)
    assert across.ratio.median == pytest.approx((1.1 + 1.98) / 2)
    assert (plain.claim, plain.baseline, plain.chosen) == ("no speculation", ("fixed:0",), "")
    assert plain.ratio.median == pytest.approx((0.99 + 1.98) / 2)
    assert verdict_tables(found).splitlines() == [
        "concurrency 8: adaptive, 4 pairs",
        "  over            chosen on the same rounds        chosen on the other half",
        "  the best fixed  1.100 (1.100 to 1.100)  fixed:2  1.540 (1.100 to 1.980)  fixed:2, fixed:0",
        "  no speculation  1.485 (0.990 to 1.980)  fixed:0",
    ]
    assert verdict_tables([]) == ""
    assert len(verdicts(runs, [EIGHT], SIDES, hindsight=False, seed=0)) == 2


def test_who_yields_nothing_is_not_judged() -> None:
    runs = level_runs(adaptive=[10, 0], zero=[10, 10], two=[5, 5])
    assert verdicts(runs, [EIGHT], SIDES, hindsight=True, seed=0) == []
    only = Contest(("adaptive",), ())
    assert verdicts(runs, [EIGHT], only, hindsight=False, seed=0) == []


PHASES = Level(phases=(Phase(1, 10.0), Phase(32, 30.0)))


def phase_runs() -> list[Run]:
    """Two rounds: fixed:2 wins the first phase, fixed:0 the second and, as it is longer, the whole."""
    rates = {
        "adaptive": [(38.0, 99.0), (40.0, 103.0)],
        "fixed:0": [(20.0, 100.0), (20.0, 102.0)],
        "fixed:2": [(40.0, 80.0), (40.0, 80.0)],
    }
    return [run_of(name, 1.0, i, PHASES, row) for name, rows in rates.items() for i, row in enumerate(rows)]


def test_verdicts_on_phases() -> None:
    found = verdicts(phase_runs(), [PHASES], SIDES, hindsight=False, seed=0)
    told = {(v.claim, v.phase): v for v in found}
    single = told["the best single fixed", None]
    # whole plans: adaptive (380 + 2970) / 40 and (400 + 3090) / 40, fixed:0 80 and 81.5, fixed:2 70
    assert (single.baseline, single.ratio.pairs) == (("fixed:0",), 2)
    assert single.ratio.median == pytest.approx((83.75 / 80 + 87.25 / 81.5) / 2)
    oracle = told["the oracle of all phases", None]
    # 40 in the first phase, fixed:0's rate in the second: (400 + 3000) / 40 and (400 + 3060) / 40
    assert oracle.baseline == ("fixed:2", "fixed:0")
    assert oracle.ratio.median == pytest.approx((83.75 / 85 + 87.25 / 86.5) / 2)
    assert told["the best fixed of the phase", 0].ratio.median == pytest.approx((0.95 + 1.0) / 2)
    assert told["the best fixed of the phase", 1].baseline == ("fixed:0",)
    assert told["no speculation", 0].ratio.median == pytest.approx(1.95)
    assert {phase for claim, phase in told if claim == "no speculation"} == {None, 0, 1}
    shown = verdict_tables([told["no speculation", 1]]).splitlines()
    assert shown[0] == "phases 1:10,32:30: adaptive, 2 pairs"
    assert shown[2] == "  phase 2 (32:30), no speculation  1.000 (0.990 to 1.010)  fixed:0"
    # the other round chooses: the same policies here, so the same ratios
    both = verdicts(phase_runs(), [PHASES], SIDES, hindsight=True, seed=0)
    across = [v for v in both if v.chosen == OTHER_HALF and v.claim == oracle.claim]
    assert [replace(v, chosen=SAME_ROUNDS) for v in across] == [oracle]


@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(
        st.tuples(*[st.tuples(st.floats(1.0, 100.0), st.floats(1.0, 100.0)) for _ in range(3)]),
        min_size=1,
        max_size=5,
    )
)
def test_nothing_fixed_beats_the_oracle_when_phases_repeat(
    rows: list[tuple[tuple[float, float], ...]],
) -> None:
    """Where every round is like the first, the oracle is at least the best single fixed policy."""
    same = [rows[0]] * len(rows)
    runs = [
        run_of(name, 1.0, index, PHASES, row[place])
        for place, name in enumerate(SIDES.names)
        for index, row in enumerate(same)
    ]
    told = {v.claim: v for v in verdicts(runs, [PHASES], SIDES, hindsight=False, seed=0) if v.phase is None}
    assert told["the oracle of all phases"].ratio.median <= told["the best single fixed"].ratio.median + 1e-9


# -- what is shown -----------------------------------------------------------------------------


def test_the_table_of_policies() -> None:
    seen = RoundFigures(10, 80, 2.5, 0.61, 3.2, 30.25, 0.1, 2, 1.034)
    runs = level_runs(adaptive=[120, 100], zero=[60, 50], two=[90, 90])
    runs = [replace(run, rounds=seen) if run.target == "adaptive" else run for run in runs]
    assert policy_tables(runs, options(levels=(EIGHT,), rounds=2), SIDES.names).splitlines() == [
        "concurrency 8, median of 2 rounds",
        "  policy    tokens/s     ratio (95 % interval)  tokens/row  accepted  drafted  rows  plain"
        "  switches/min  time/cost  same text",
        "  adaptive     110.0                                  2.50      0.61     3.20  30.2    10%"
        "         120.0      1.034          -",
        "  fixed:0       55.0    0.500 (0.500 to 0.500)           -         -        -     -      -"
        "             -          -          -",
        "  fixed:2       90.0    0.825 (0.750 to 0.900)           -         -        -     -      -"
        "             -          -          -",
    ]


def test_the_table_of_phases() -> None:
    runs = phase_runs()
    seen = RoundFigures(10, 80, 2.5, 0.61, 3.25, 30.0, 0.1, 2)
    phases = (replace(runs[0].phases[0], rounds=seen), runs[0].phases[1])
    runs[0] = replace(runs[0], rounds=seen, phases=phases)
    assert phase_tables(runs, options(levels=(PHASES,), rounds=2), SIDES.names).splitlines() == [
        "by phase, median of 2 rounds",
        "  tokens/s       all      1:10     32:30",
        "  adaptive      85.5      39.0     101.0",
        "  fixed:0       80.8      20.0     101.0",
        "  fixed:2       70.0      40.0      80.0",
        "  drafted ",
        "  adaptive      3.25      3.25         -",
    ]
    assert phase_tables(runs, options(levels=(EIGHT,)), SIDES.names) == ""


def test_equal_texts_are_counted_over_all_rounds() -> None:
    def answers(*digests: str) -> Run:
        samples = tuple(Sample(i, 0.0, 1.0, digest=digest) for i, digest in enumerate(digests))
        return Run(EIGHT, 0, "x", samples, figures(samples))

    base = [answers("a", "b"), answers("c", "")]
    assert same_text([answers("a", "x", "y"), answers("c", "d")], base) == 2 / 3
    assert same_text([answers("")], base) is None


# -- whole runs --------------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> PolicyEngine:
    """What `xspec bench` finds in its process; no second of it is waited for."""
    found = PolicyEngine()

    async def build_engine(config: Config, *, progress: Any) -> PolicyEngine:
        found.configs.append(config)
        return found

    monkeypatch.setattr("xspec.engine.build.build_engine", build_engine)
    monkeypatch.setattr("xspec_cli.bench.asyncio.run", run_virtual)
    return found


def test_policies_on_the_command_line(
    engine: PolicyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    words = ["--policies=adaptive,fixed:0,fixed:2", "--concurrency=1,2", "--num_prompts=3", "--rounds=2"]
    words += ["--hindsight", "--warmup=0", "--max_tokens=8", f"--output={output}"]
    assert bench.main(words) == 0
    shown = capsys.readouterr().out
    assert "concurrency 1, median of 2 rounds\n  policy " in shown
    # three answers of 8 tokens, one after the other, in 2, 3 and 8 steps each
    assert "concurrency 1: adaptive, 2 pairs\n" in shown
    ratio = "1.500 (1.500 to 1.500)  fixed:2"
    assert f"  the best fixed  {ratio}  {ratio}\n" in shown
    assert "  no speculation  4.000 (4.000 to 4.000)  fixed:0\n" in shown
    kept = json.loads(output.read_bytes())
    assert [target["name"] for target in kept["targets"]] == ["adaptive", "fixed:0", "fixed:2"]
    assert len(kept["verdicts"]) == 2 * 3 and len(kept["comparisons"]) == 2 * 2
    assert kept["runs"][0]["rounds"]["time_ratio"] == pytest.approx(1.1)
    assert kept["settings"]["engine"]["enable_prefix_cache"] is False
    (config,) = engine.configs
    assert config.cache.enable_prefix_cache is False


def test_phases_on_the_command_line(engine: PolicyEngine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--policies=adaptive,plain", "--phases=1:20.5,3:20.5", "--max_tokens=8", "--warmup=0"]
    assert bench.main(words) == 0
    shown = capsys.readouterr().out
    assert "phases 1:20.5,3:20.5\n  policy" in shown and "by phase\n" in shown
    # a client gets 4 tokens a second, or 1
    table = shown.partition("phases 1:20.5,3:20.5: adaptive, 1 pair")[2].splitlines()
    assert [line.partition("  (")[0].split("  ")[1] for line in table if "4.000 (4.000 to" in line] == [
        "the best single fixed", "the oracle of all phases",
        "phase 1 (1:20.5), the best fixed of the phase", "phase 2 (3:20.5), the best fixed of the phase",
        "no speculation", "phase 1 (1:20.5), no speculation", "phase 2 (3:20.5), no speculation",
    ]  # fmt: skip


def job(*words: str) -> bench.Job:
    launch = resolve(words, bench.COMMAND, environ={})
    assert isinstance(launch, Launch)
    return bench.job_of(launch)


def test_what_the_flags_mean() -> None:
    found = job("--policies=plain,adaptive,fixed:3", "--rounds=4", "--hindsight", "--phases=1:5,2:5")
    assert found.contest == Contest(("plain", "adaptive", "fixed:3"), ("plain", "fixed:3"), "plain")
    assert found.plan.levels == (Level(phases=(Phase(1, 5.0), Phase(2, 5.0))),)
    assert (found.plan.rotate, found.plan.hindsight, found.plan.settle_s) == (True, True, 0.0)
    assert (job().contest, job().plan.rotate, job().plan.hindsight) == (None, False, False)
    looped = ("plain", "fixed:4@2", "acceptance_ema", "goodput")
    assert contest(looped) == Contest(looped, looped[:2], "plain")
    assert contest(looped).candidates == looped[2:]
    assert contest(["fixed:1", "fixed:0:0"]) == Contest(("fixed:1", "fixed:0:0"), ("fixed:1", "fixed:0:0"))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policies=best"], "--policies=best: allowed: adaptive .*, plain, fixed:K .*, fixed:K:V"),
        (["--policies=fixed:"], "--policies=fixed:: allowed"),
        (["--policies=fixed:1:2:3"], "allowed: adaptive"),
        (["--policies=plain,plain"], "--policies=plain,plain: allowed: different policies"),
        (["--policies=plain", "--url=http://a"], "--policies and --url exclude each other"),
        (["--hindsight", "--rounds=2"], "--hindsight: allowed: with --policies that hold adaptive and fixed"),
        (["--hindsight", "--rounds=2", "--policies=plain,fixed:1"], "--hindsight: allowed: with --policies"),
        (
            ["--hindsight", "--policies=plain,adaptive"],
            "--rounds=1: allowed: integers from 2 with --hindsight",
        ),
        (["--phases=1:2", "--concurrency=1"], "--phases says all of the load"),
        (["--phases=1:2", "--request_rate=1"], "--phases says all of the load"),
        (["--phases=1"], "--phases=1: allowed: concurrency:seconds"),
    ],
)
def test_refused_command_lines(words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        job(*words)


def test_hindsight_needs_two_halves(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("only one\n")
    words = ["--policies=plain,adaptive", "--hindsight", "--rounds=2", f"--prompts={tmp_path}/p.txt"]
    with pytest.raises(ConfigError, match="1 prompts are too few"):
        job(*words)


def test_a_prefix_cache_that_was_asked_for_is_refused(engine: PolicyEngine) -> None:
    with pytest.raises(ConfigError, match="--enable_prefix_cache=true: allowed: false with --policies"):
        bench.main(["--policies=plain", "--enable_prefix_cache=true"])
    assert engine.calls == []
