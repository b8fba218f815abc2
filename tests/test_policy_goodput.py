"""The goodput policy: choices by measured costs and flags, shadow bursts, plain rounds as a candidate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from looped_world import (
    CODE,
    DEPTHS,
    LANES,
    LAST_LOOP_ONLY,
    PROSE,
    STEPS,
    Streams,
    config,
    costs,
    geometry,
    replay,
    tokens_per_ms,
)
from policy_world import FakeCosts, feedback, row, view

from xspec.core.round import SpeculationPlan
from xspec.core.shapes import TargetTiers
from xspec.cost.looped import IdealCosts, LoopedCosts
from xspec.errors import ConfigError, UnsupportedError
from xspec.policy.fixed import FixedPolicy
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.goodput import GoodputPolicy, priors_of
from xspec.policy.loop_candidates import AdaptiveController
from xspec.policy.make_spec import make_speculation_policy
from xspec.policy.named import Policies, Selection

NOTHING = (0.0, 0.0, 0.0)


def pair(plan: SpeculationPlan) -> tuple[int, int | None]:
    return plan.draft_steps, plan.depth


def fresh(table: LoopedCosts | None = None) -> GoodputPolicy:
    return GoodputPolicy(None, table or costs(), geometry())


def worth(rates: Sequence[float], rows: int, table: LoopedCosts, text: object = CODE) -> dict[object, float]:
    """Tokens per ms of every pair at these match rates, independent from token to token."""
    lanes = LANES.fit(rows).rows
    flags = np.random.default_rng(5).random((20_000, 3)) < np.array(rates)
    found: dict[object, float] = {(0, None): rows / (table.round_ms(0, lanes, lanes) or 0.0)}
    for x, depth in enumerate(DEPTHS):
        for steps in STEPS:
            _, accepted, tokens = replay(flags[:, x].astype(int).tolist(), steps)
            ms = table.round_ms(steps, lanes, lanes * (steps + 1), depth)
            assert ms is not None
            found[steps, depth] = rows * tokens / (tokens - accepted) / ms
    return found


# -- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [CODE, PROSE, LAST_LOOP_ONLY], ids=lambda text: text.name)
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_it_settles_within_two_per_cent_of_the_best_pair(text: object, rows: int) -> None:
    table = costs()
    value = worth(text.rates, rows, table)  # type: ignore[attr-defined]
    ran = []
    for seed in range(4):
        world = Streams(fresh(table), table, seed=seed)
        world.run(300, lambda n: rows, lambda n: text.rates)  # type: ignore[attr-defined]
        ran += [value[pair(one.plan)] for one in world.played[150:]]
    assert float(np.mean(ran)) >= 0.98 * max(value.values())


@pytest.mark.parametrize("rows", [1, 8])
def test_last_loop_only_leaves_the_first_loop_within_64_rounds(rows: int) -> None:
    table = costs()
    world = Streams(GoodputPolicy(config(table), table, geometry()), table, seed=4)
    world.run(200, lambda n: rows, lambda n: CODE.rates)
    after = world.run(300, lambda n: rows, lambda n: LAST_LOOP_ONLY.rates)
    assert all(one.plan.depth != 1 for one in after[64:])


def test_a_new_batch_size_is_met_by_its_own_best_at_once() -> None:
    table = costs()
    world = Streams(fresh(table), table)
    world.run(200, lambda n: 1, lambda n: CODE.rates)
    first = world.run(1, lambda n: 32, lambda n: CODE.rates)[0]
    value = worth(CODE.rates, 32, table)
    assert value[pair(first.plan)] >= 0.97 * max(value.values())
    back = world.run(1, lambda n: 1, lambda n: CODE.rates)[0]
    assert pair(back.plan) == pair(world.played[199].plan)


def test_no_switch_below_the_margin_nor_for_one_look() -> None:
    """1@1 and 2@1 within a hair of each other: flags are noise, the choice stays."""
    table = IdealCosts(4)
    geo = CandidateGeometry(LANES, (1, 2), (1,), 4)
    policy = GoodputPolicy(None, table, geo)
    rng = np.random.default_rng(0)
    ran = []
    for number in range(400):
        plan = policy.plan(view(number, 16))
        accepted = [int(np.cumprod(rng.random(plan.draft_steps) < 0.506).sum()) for _ in range(16)]
        policy.observe(feedback(plan, [row(i, plan.draft_steps, a) for i, a in enumerate(accepted)]))
        ran.append(plan.draft_steps)
    assert sum(a != b for a, b in zip(ran[50:], ran[51:], strict=False)) <= 3


def test_choices_without_a_cost_are_none() -> None:
    def ms(steps: int, requests: int, rows: int) -> float | None:
        return {0: 4.0, 1: 5.0}.get(steps)

    policy = GoodputPolicy(None, FakeCosts(ms), geometry())
    for number in range(30):
        plan = policy.plan(view(number, 8))
        assert plan.draft_steps in (0, 1)
        policy.observe(feedback(plan, [row(i, plan.draft_steps, plan.draft_steps) for i in range(8)]))


def test_without_any_cost_the_config_says_what_runs() -> None:
    nothing = FakeCosts(lambda steps, requests, rows: None)
    assert pair(GoodputPolicy(None, nothing, geometry()).plan(view(0, 8))) == (0, None)
    given = config()
    plan = GoodputPolicy(given, nothing, geometry()).plan(view(0, 8))
    one = given.ranges[1].candidates[given.ranges[1].initial]
    assert (pair(plan), plan.reason) == ((one.draft_steps, one.draft_loops), "uncovered")
    far = GoodputPolicy(given, FakeCosts(lambda s, b, g: 1.0, covers=lambda kv: kv < 10), geometry())
    assert far.plan(view(0, 1)).reason == "uncovered"


def test_rounds_that_cannot_draft_are_plain() -> None:
    policy = fresh()
    assert policy.plan(view(0, ())).reason == "prefill_only"
    assert policy.plan(view(1, 2, rooms=(1, 1))).reason == "nothing_to_draft"
    # room for one draft each: no pair of more is worth its cost
    assert policy.plan(view(2, 2, rooms=(2, 2))).draft_steps <= 1


def test_asking_again_changes_nothing() -> None:
    once, often = fresh(), fresh()
    rng = np.random.default_rng(3)
    for number in range(120):
        rows = (1, 8, 8, 32)[number // 10 % 4]
        often.plan(view(number, 2))
        often.plan(view(number, rows))
        one, two = once.plan(view(number, rows)), often.plan(view(number, rows))
        assert one == two
        rows_told = [row(i, one.draft_steps, int(rng.integers(0, one.draft_steps + 1))) for i in range(rows)]
        once.observe(feedback(one, rows_told))
        often.observe(feedback(two, rows_told))
    assert once.status() | {"held": 0} == often.status() | {"held": 0}


def test_a_run_repeats_exactly() -> None:
    runs = []
    for _ in range(2):
        table = costs()
        world = Streams(fresh(table), table, seed=9)
        world.run(150, lambda n: (1, 8, 32)[n // 50], lambda n: CODE.rates)
        runs.append([one.plan for one in world.played])
    assert runs[0] == runs[1]


# -- looking --------------------------------------------------------------------------------------


def shadows(world: Streams) -> list[int]:
    return [n for n, one in enumerate(world.played) if one.plan.shadow]


def test_bursts_are_consecutive_and_about_a_sixteenth_of_rounds_or_less() -> None:
    table = costs()
    world = Streams(fresh(table), table)
    world.run(2000, lambda n: 8, lambda n: CODE.rates)
    told = shadows(world)
    assert told[:8] == list(range(8))  # at once, or nothing would be known of other depths
    runs = [n for n in told if n - 1 not in told]
    assert all({n + k for k in range(8)} <= set(told) for n in runs)
    assert 0.01 < len(told) / 2000 <= 1 / 16
    # a stable state is looked at less often
    gaps = np.diff(runs)
    assert gaps[-1] > 2 * 128 > gaps[0]


def test_a_shift_is_looked_at_at_once() -> None:
    table = costs()
    world = Streams(fresh(table), table)
    world.run(600, lambda n: 8, lambda n: CODE.rates)
    before = len(shadows(world))
    world.run(24, lambda n: 8, lambda n: NOTHING)
    assert len(shadows(world)) > before


@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_a_spell_without_acceptance(rows: int) -> None:
    """Off soon, no speculative round in it, next to nothing lost, and on again within 64 rounds."""
    table = costs()
    lanes = LANES.fit(rows).rows
    plain = rows / (table.round_ms(0, lanes, lanes) or 0.0)
    world = Streams(fresh(table), table, seed=6)
    world.run(200, lambda n: rows, lambda n: CODE.rates)
    spell = world.run(500, lambda n: rows, lambda n: NOTHING)
    off = next(n for n, one in enumerate(spell) if not one.plan.draft_steps)
    assert off <= 32
    assert all(not one.plan.draft_steps for one in spell[off + 40 :])
    assert tokens_per_ms(spell[off + 40 :]) >= 0.99 * plain
    quiet = [n for n in shadows(world) if n >= 200 + off + 100]
    assert 0 < len(quiet) <= (400 - off) / 8  # 4 of 52 rounds at the longest backoff
    back = world.run(200, lambda n: rows, lambda n: CODE.rates)
    assert next(n for n, one in enumerate(back) if one.plan.draft_steps) <= 64
    assert tokens_per_ms(back[64:]) > 1.03 * plain


# -- drafters that only choose K ------------------------------------------------------------------


def mtp(
    rates: Callable[[int], float], rounds: int, rows: int = 4
) -> tuple[GoodputPolicy, list[SpeculationPlan]]:
    """K of 1 to 5 with draft k accepted where all before it were at rate `rates(round)`."""
    table = FakeCosts(lambda steps, requests, target_rows: 10.0 + 1.5 * steps)
    policy = GoodputPolicy(None, table, CandidateGeometry(LANES, (1, 2, 3, 4, 5)))
    rng, plans = np.random.default_rng(1), []
    for number in range(rounds):
        plan = policy.plan(view(number, rows))
        made = []
        for i in range(rows):
            held = rng.random(plan.draft_steps) < rates(number)
            made.append(row(i, plan.draft_steps, int(np.cumprod(held).sum())))
        policy.observe(feedback(plan, made))
        plans.append(plan)
    return policy, plans


@pytest.mark.parametrize(("rate", "best"), [(0.95, {5}), (0.6, {2, 3, 4}), (0.02, {0})])
def test_it_chooses_k_for_drafters_without_loops(rate: float, best: set[int]) -> None:
    _, plans = mtp(lambda n: rate, 400)
    settled = [plan.draft_steps for plan in plans[200:] if plan.reason != "probe"]
    assert set(settled) <= best
    assert all(plan.depth is None and not plan.shadow for plan in plans)


def test_such_drafters_are_probed_while_off_and_come_back() -> None:
    policy, plans = mtp(lambda n: 0.0 if n < 1500 else 0.9, 2200)
    spell = plans[300:1500]
    probes = [plan for plan in spell if plan.reason == "probe"]
    assert probes and all(plan.draft_steps == 0 for plan in spell if plan.reason != "probe")
    extra = sum((plan.predicted_ms or 0.0) - 10.0 for plan in probes)
    assert extra <= 0.01 * sum(plan.predicted_ms or 0.0 for plan in spell) + 7.5
    assert plans[-1].draft_steps == 5 or plans[-1].reason == "probe"
    assert policy.status()["probes"] > 0


# -- made by name ---------------------------------------------------------------------------------


def test_policies_by_name() -> None:
    given, table = config(), costs()
    fixed = make_speculation_policy("fixed", None, None, geometry(), draft_steps=4, depth=2)
    assert pair(fixed.plan(view(0, 8))) == (4, 2)
    assert pair(fixed.plan(view(1, ()))) == (0, None)
    assert isinstance(make_speculation_policy("acceptance_ema", given, None, geometry()), AdaptiveController)
    assert isinstance(make_speculation_policy("goodput", None, table, geometry()), GoodputPolicy)
    with pytest.raises(ConfigError, match="allowed: fixed, acceptance_ema, goodput"):
        make_speculation_policy("best", given, table, geometry())
    with pytest.raises(ConfigError, match="needs --adaptive_spec_config=FILE"):
        make_speculation_policy("acceptance_ema", None, table, geometry())
    with pytest.raises(ConfigError, match="needs costs"):
        make_speculation_policy("goodput", given, None, geometry())
    with pytest.raises(UnsupportedError, match="does not fit this engine"):
        make_speculation_policy("goodput", given, table, CandidateGeometry(LANES, (1,), DEPTHS, 4))


def policies(selection: Selection | None) -> Policies:
    return Policies(
        LANES,
        TargetTiers(),
        STEPS,
        draft_width=4,
        verify_width=4,
        depths=DEPTHS,
        loops=4,
        selection=selection,
    )


def test_a_bench_names_looped_policies() -> None:
    ours = policies(Selection("goodput", config(), costs()))
    assert ours.default().name == ours.named("goodput").name == ours.named("adaptive").name == "goodput"
    assert ours.named("acceptance_ema").name == "acceptance_ema"
    assert pair(ours.named("fixed:8@3").plan(view(0, 8))) == (8, 3)
    assert pair(ours.named("plain").plan(view(0, 8))) == (0, None)
    for name in ("fixed:3@1", "fixed:8@4", "fixed:8", "fixed:8@", "fixed:8@1:2", "fixed:@1", "fast"):
        with pytest.raises(ConfigError, match=r"fixed:K@d with K of 1, 2, 4, 8 and d of 1, 2, 3"):
            ours.named(name)


def test_a_fixed_looped_engine_says_so() -> None:
    ours = policies(Selection("fixed", depth=2))
    assert isinstance(ours.default(), FixedPolicy)
    assert pair(ours.default().plan(view(0, 1))) == (4, 2)
    assert ours.default().status() == {"draft_steps": 4, "verify_steps": None, "draft_loops": 2}
    with pytest.raises(ConfigError):
        ours.named("adaptive")
    with pytest.raises(ConfigError, match="needs costs"):
        ours.named("goodput")


def test_priors_are_the_match_rates_behind_the_acceptance_of_the_config() -> None:
    rates = priors_of(config())
    assert priors_of(None) == {}
    # a mean over candidates of different K; rounds begin at harder places than the average
    for depth, rate in rates.items():
        assert depth is not None
        assert rate == pytest.approx(CODE.rates[depth - 1], abs=0.06)
