"""Looped targets in the simulator: flag streams, and what the (K, d) policies lose against hindsight.

Every number is deterministic. The oracle is an engine that runs each phase at that phase's best fixed pair.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from looped_world import (
    CODE,
    DEPTHS,
    LAST_LOOP_ONLY,
    NOTHING,
    PROSE,
    config,
    costs,
    engine,
    geometry,
    replay,
)
from sim_costs import CpuCosts
from sim_costs import engine as cpu_engine

from xspec.errors import ConfigError, UnsupportedError
from xspec.policy.fixed import FixedPolicy
from xspec.sim.compare import Comparison, Contender, compare, figures_of, rate_of
from xspec.sim.loads import ClosedLoad, Phase
from xspec.sim.looped import (
    FlagStream,
    LoopedSynthetic,
    LoopedText,
    fixed_pair,
    fixed_pairs,
    looped_request,
    read_flags,
    speculation_contender,
    write_flags,
)
from xspec.sim.simulate import RoundRecord, simulate
from xspec.sim.world import Difficulty, Synthetic, World

EMA, GOODPUT = "acceptance_ema", "goodput"
PAIRS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (1, 3), (2, 3))
"""Fixed pairs that can be best somewhere here; the others were seen not to be."""


def contest(
    texts: tuple[LoopedText, ...],
    phases: tuple[tuple[int, float, int], ...],
    seed: int = 1,
    answers: tuple[int, int] = (96, 192),
    pairs: tuple[tuple[int, int], ...] = PAIRS,
) -> Comparison:
    """`phases`: (clients, seconds, text)."""
    table, given = costs(), config()
    population = LoopedSynthetic(texts, DEPTHS, 8, prompt_tokens=(16, 16), answer_tokens=answers)
    load = ClosedLoad(tuple(Phase(clients, seconds, (text,)) for clients, seconds, text in phases))
    contenders = [
        Contender("plain", lambda device: FixedPolicy(), fixed=True),
        *(fixed_pair(*pair) for pair in pairs),
        speculation_contender(EMA, given, table, geometry()),
        speculation_contender(GOODPUT, given, table, geometry()),
    ]
    return compare(World(population, load, seed), table, engine(), contenders)


def rounds(found: Comparison, name: str, phase: int) -> list[RoundRecord]:
    run = found.of(name).run
    assert run is not None
    return [r for r in run.rounds if r.phase == phase and r.requests]


def against_plain(found: Comparison, name: str, phase: int | None) -> float:
    return rate_of(found.of(name), phase) / rate_of(found.of("plain"), phase)


# -- the load -------------------------------------------------------------------------------------


@cache
def changing(seed: int) -> Comparison:
    return contest((CODE,), tuple((clients, 0.8, 0) for clients in (1, 8, 32, 8, 1)), seed)


@pytest.mark.parametrize("seed", [1, 2])
def test_on_a_changing_load(seed: int) -> None:
    found = changing(seed)
    oracle = found.per_phase_best()
    goodput, ema = (rate_of(found.of(name), None) for name in (GOODPUT, EMA))
    assert goodput >= 0.98 * oracle
    assert ema >= 0.95 * oracle
    best_fixed = rate_of(found.best_fixed(), None)
    assert goodput > best_fixed and ema > best_fixed
    assert best_fixed < 0.96 * oracle  # or there would be nothing to adapt to
    for phase in range(5):
        for name in (GOODPUT, EMA):
            assert against_plain(found, name, phase) >= 0.98


def test_the_best_pair_depends_on_the_load() -> None:
    found = changing(1)
    best = [found.best_fixed(phase).contender.name for phase in range(5)]
    assert best[0] == best[4] != best[2] and best[1] == best[3]


@pytest.mark.parametrize("text", [PROSE, LAST_LOOP_ONLY], ids=lambda text: text.name)
@pytest.mark.parametrize("clients", [1, 8, 32])
def test_hard_text_never_costs_more_than_two_per_cent_against_plain_rounds(
    text: LoopedText, clients: int
) -> None:
    """After a first phase in which a config made for other text is found out."""
    found = contest((text,), ((clients, 0.4, 0), (clients, 0.8, 0)), pairs=PAIRS[4:])
    for name in (GOODPUT, EMA):
        assert against_plain(found, name, 1) >= 0.98


# -- acceptance that changes ----------------------------------------------------------------------


def since_text(found: Comparison, name: str, phase: int, text: str) -> list[RoundRecord]:
    """Rounds of a phase from the first one in which most requests are of its text."""
    of = rounds(found, name, phase)
    first = next(i for i, r in enumerate(of) if 2 * sum(t.difficulty == text for t in r.rows) > len(r.rows))
    return of[first:]


@pytest.mark.parametrize("clients", [1, 8])
def test_a_spell_without_any_acceptance(clients: int) -> None:
    """Off, probed with backoff, and on again within 64 feedback rounds once the text is back."""
    phases = ((clients, 0.6, 0), (clients, 0.9, 1), (clients, 0.6, 0))
    found = contest((CODE, NOTHING), phases, answers=(24, 40), pairs=((4, 1),))
    for name in (GOODPUT, EMA):
        spell = rounds(found, name, 1)[120:]
        assert figures_of("", spell).plain_share > 0.9
        probes = [i for i, r in enumerate(spell) if r.probe or r.shadow]
        assert probes and len(probes) < 0.12 * len(spell)
        # all of the batch is code again once each request has been answered: 40 rounds at most
        back = since_text(found, name, 2, "code")[40:]
        on = next(i for i, r in enumerate(back) if r.draft_steps and not r.probe)
        assert on <= 64
    assert all(not r.probe for r in rounds(found, GOODPUT, 1))  # shadow rounds of plain ones do


@pytest.mark.parametrize("clients", [1, 8])
def test_acceptance_that_shifts_is_followed(clients: int) -> None:
    phases = ((clients, 0.8, 0), (clients, 0.8, 1), (clients, 0.8, 0))
    contests = [contest((CODE, PROSE), phases, seed, answers=(32, 64)) for seed in range(1, 5)]
    for name, share in ((GOODPUT, 0.97), (EMA, 0.93)):
        assert fmean(rate_of(one.of(name), None) / one.per_phase_best() for one in contests) >= share


@pytest.mark.parametrize("clients", [1, 8])
def test_where_the_first_loop_cannot_draft_its_depth_is_left(clients: int) -> None:
    """From a config that was made for a model whose first loop can: within 64 rounds, and near the best."""
    phases = ((clients, 0.3, 0), (clients, 1.2, 0))
    contests = [contest((LAST_LOOP_ONLY,), phases, seed) for seed in range(1, 5)]
    for name, share in ((GOODPUT, 0.98), (EMA, 0.95)):
        for found in contests:
            late = [*rounds(found, name, 0)[64:], *rounds(found, name, 1)]
            assert sum(r.depth == 1 for r in late) <= 0.02 * len(late)
        reached = [rate_of(one.of(name), 1) / rate_of(one.best_fixed(1), 1) for one in contests]
        assert fmean(reached) >= share


# -- the world itself -----------------------------------------------------------------------------


def test_tokens_of_a_fixed_pair_are_those_of_the_replay() -> None:
    """The engine's counters against the flags, for one request that is long enough."""
    flags = CODE.flags(3000, np.random.default_rng(8))
    request = looped_request((0, 0, 0), "code", 4, DEPTHS, flags)
    for steps, depth in ((1, 1), (4, 2), (8, 3)):
        column = flags[:, DEPTHS.index(depth)].astype(int).tolist()
        run = request.loops.runs[depth] if request.loops else ()
        place = rounds_run = 0
        while place + steps < len(column):
            place += min(run[place], steps) + 1
            rounds_run += 1
        proposed, accepted, tokens = replay(column, steps)
        assert (place, rounds_run) == (tokens, proposed // steps)
        assert tokens == accepted + rounds_run


def test_match_rates_depth_order_and_persistence_are_as_asked() -> None:
    text = LoopedText("x", (0.5, 0.8, 0.95), depth_correlation=0.9, persistence=0.6)
    flags = text.flags(40_000, np.random.default_rng(1)).astype(int)
    assert flags.mean(axis=0) == pytest.approx(np.array(text.rates), abs=0.02)
    deeper = flags[flags[:, 0] == 1]
    assert deeper[:, 1].mean() > 0.97  # who matches early nearly always matches later too
    again = flags[1:, 0][flags[:-1, 0] == 1].mean()
    assert again > 0.6
    assert not LoopedText("never", (0.0,)).flags(100, np.random.default_rng(1)).any()
    assert LoopedText("always", (1.0,)).flags(100, np.random.default_rng(1)).all()


def test_all_contenders_meet_the_same_text_and_a_run_repeats() -> None:
    table = costs()
    population = LoopedSynthetic((CODE,), DEPTHS, 8, answer_tokens=(20, 30))
    runs = []
    for _ in range(2):
        world = World(population, ClosedLoad((Phase(4, 0.1),)), 3)
        made = speculation_contender(GOODPUT, config(), table, geometry()).make
        runs.append(simulate(world, table, engine(), made).rounds)
    assert runs[0] == runs[1] and len(runs[0]) > 20
    one, two = (population.request(3, (0, 1, 2), None).loops for _ in range(2))
    assert one is not None and two is not None and (one.flags == two.flags).all()


def test_shadow_rounds_cost_what_is_said_and_are_told() -> None:
    table = costs()
    population = LoopedSynthetic((CODE,), DEPTHS, 8)

    def first_ms(shadow_cost: float) -> float:
        world = World(population, ClosedLoad((Phase(1, 0.1),)), 3)
        made = speculation_contender(GOODPUT, config(), table, geometry()).make
        told = simulate(world, table, engine(shadow_cost), made).rounds
        return next(r.decode_ms for r in told if r.shadow)

    assert first_ms(0.5) == pytest.approx(1.5 * first_ms(0.0))


def test_every_fixed_pair_is_a_contender() -> None:
    assert [one.name for one in fixed_pairs(geometry((1, 4)))] == [
        "plain", "1@1", "1@2", "1@3", "4@1", "4@2", "4@3",
    ]  # fmt: skip


def test_requests_without_flags_cannot_run_looped_rounds() -> None:
    world = World(Synthetic((Difficulty("all", (0.5,) * 8),)), ClosedLoad((Phase(1, 1.0),)), 1)
    with pytest.raises(ConfigError, match="no match flags"):
        simulate(world, costs(), engine(), fixed_pair(4, 1).make)
    # and the simulator of other drafters is not changed by any of this
    plain = simulate(world, CpuCosts(), cpu_engine(), lambda device: FixedPolicy(2)).rounds
    assert all(r.depth is None and not r.shadow for r in plain)


@pytest.mark.parametrize("wrong", [{"rates": (1.5,)}, {"rates": ()}, {"persistence": 1.0}])
def test_texts_and_populations_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        LoopedText(**{"name": "x", "rates": (0.5,), **wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="3 depths need as many match rates: x"):
        LoopedSynthetic((LoopedText("x", (0.5,)),), DEPTHS, 4)


# -- recorded flags -------------------------------------------------------------------------------


def stream(name: str, tokens: int, seed: int) -> FlagStream:
    return FlagStream(16, CODE.flags(tokens, np.random.default_rng(seed)), name)


def test_flag_files_are_read_back_and_simulated(tmp_path: Path) -> None:
    file = tmp_path / "flags.json"
    streams = [stream("code", 40, 1), stream("prose", 30, 2), stream("code", 50, 3)]
    write_flags(file, DEPTHS, streams)
    found = read_flags(file, 8)
    assert found.depths == DEPTHS and found.names == ("code", "prose") and found.most_tokens == 66
    for one, two in zip(found.streams, streams, strict=True):
        assert (one.flags == two.flags).all() and one.text_class == two.text_class
    assert found.request(1, (0, 0, 0), (1,)).answer_tokens == 30
    world = World(found, ClosedLoad((Phase(2, 0.05, (0,)),)), 1)
    assert simulate(world, costs(), engine(), fixed_pair(4, 1).make).rounds
    with pytest.raises(ConfigError, match="cannot be written"):
        write_flags(file, DEPTHS, streams)


def test_bad_flag_files_say_everything_at_once(tmp_path: Path) -> None:
    file = tmp_path / "flags.json"
    good = {"prompt_tokens": 1, "text_class": "x", "flags": ["01", "10"]}
    document = {"format": "xspec match flags", "version": 1, "depths": [1, 2], "requests": [good]}
    file.write_text(json.dumps(document))
    assert len(read_flags(file, 4).streams) == 1
    bad = [{**good, "flags": ["01"]}, {**good, "flags": ["01", "1"]}, {**good, "flags": ["0x", "10"]}]
    file.write_text(json.dumps({**document, "requests": bad}))
    with pytest.raises(UnsupportedError) as caught:
        read_flags(file, 4)
    assert len(caught.value.reasons) == 3
    file.write_text(json.dumps({**document, "version": 2, "extra": 1, "requests": [{"flags": []}]}))
    with pytest.raises(UnsupportedError) as caught:
        read_flags(file, 4)
    assert len(caught.value.reasons) == 5
    with pytest.raises(ConfigError, match="cannot be read"):
        read_flags(tmp_path / "none.json", 4)
