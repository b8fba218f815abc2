"""Offline sampling on a tiny engine whose rounds take what a law says: what it predicts is what it then
measures, and the candidates it writes are those that the law favours.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calib_fake import Rig, make_looped_rig
from test_engine import prompt_of
from test_spec_costs import spec

from xspec.calib.match_flags import FlagReader, Told
from xspec.calib.preset import make_config, write_config
from xspec.calib.replay import replay
from xspec.calib.sampling import Group, Sampled, Sampler, SamplingSettings, batch_ranges
from xspec.core.round import RoundPlan
from xspec.core.shapes import BucketGrid
from xspec.cost.settings import Pair
from xspec.errors import CalibrationError
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.spec_config import parse_spec_config, spec_config_json
from xspec.policy.spec_files import check_fit
from xspec.progress import silent

LOOPS, STEPS, DEPTHS = 4, (1, 3), (1, 2, 3)
PAIRS: tuple[Pair, ...] = tuple((steps, depth) for steps in STEPS for depth in DEPTHS)
SETTINGS = SamplingSettings(requests=(1, 4), screen_tokens=16, confirm_tokens=32, confirm=2, repeats=2)


@dataclass(frozen=True)
class Law:
    """Costs as a table would have them, and as the device takes: rows of a draft pass are dear, of verifying
    cheap, so that deep drafts of many tokens never pay."""

    prefill_ms_per_token: float = 0.0

    def at(self, kv_lengths: Sequence[int]) -> Law | None:
        return self if max(kv_lengths) < 400 else None

    def round_ms(self, steps: int, requests: int, rows: int, depth: int | None = None) -> float | None:
        if steps and rows > 12:
            return None  # as if it had not been measured
        return (
            1.0 + 2.0 * (depth or 0) * (steps + 1) * (steps > 0) + (LOOPS - (depth or 0)) * (3 + 0.2 * rows)
        )


def cost_ms(plan: RoundPlan) -> float:
    if not plan.batch.rows:
        return 0.5
    steps = plan.spec.draft_steps
    ms = Law().round_ms(steps, len(plan.batch.rows), min(12, plan.shape.target_rows), plan.spec.depth)
    assert ms is not None
    return ms


def group(first: int) -> Group:
    return Group(tuple(tuple(prompt_of(first + i, 8 + 3 * i)) for i in range(4)), ("a", "b", "a", "b"))


SELECTION, EVALUATION = group(0), group(50)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("sampling")
    return make_looped_rig(folder, widths=STEPS, depths=DEPTHS, adaptation=spec())


def sampler(rig: Rig, **changes: Any) -> Sampler:
    reader = FlagReader(rig.parts)
    values: dict[str, Any] = {
        "service": rig.service(rig.device(cost_ms)),
        "read": reader.read,
        "depths": reader.depths,
        "table": Law(),
        "lanes": rig.parts.grid,
        "pairs": PAIRS,
        "settings": SETTINGS,
        "progress": silent,
    }
    return Sampler(**(values | changes))


@pytest.fixture(scope="module")
def sampled(rig: Rig) -> Sampled:
    return sampler(rig).sample(SELECTION, EVALUATION)


def test_every_pair_with_a_cost_is_screened_by_law_and_flags(sampled: Sampled) -> None:
    told = {(s.requests, s.pair): s for s in sampled.screened}
    assert set(told) == {(1, pair) for pair in PAIRS} | {(4, (1, depth)) for depth in DEPTHS}
    for (requests, (steps, depth)), one in told.items():
        plain = Law().round_ms(0, requests, requests)
        ms = Law().round_ms(steps, requests, requests * (steps + 1), depth)
        assert plain is not None and ms is not None
        assert one.round_ms == ms
        per_round = one.tokens_per_s * ms / (1e3 * requests)
        assert 1.0 < per_round < steps + 1
        assert one.speedup == pytest.approx(per_round * plain / ms)


def test_short_answers_begin_the_long_ones(sampled: Sampled) -> None:
    """What was screened follows from the first tokens of the flags that the long answers have."""
    short = [flags[: SETTINGS.screen_tokens - 1] for flags in sampled.selection.flags]
    for one in sampled.screened:
        steps, depth = one.pair
        assert depth is not None
        counted = replay([flags[:, depth - 1] for flags in short], steps)
        assert one.acceptance == counted.acceptance


def test_the_best_of_the_screen_are_confirmed_beside_plain_rounds(sampled: Sampled) -> None:
    for requests in SETTINGS.requests:
        ranked = sorted((s for s in sampled.screened if s.requests == requests), key=lambda s: -s.speedup)
        ran = [c.pair for c in sampled.confirmed if c.requests == requests]
        assert ran == [None, *(s.pair for s in ranked[:2])]
        held_out = [c.pair for c in sampled.evaluated if c.requests == requests]
        assert held_out == [None, sampled.best_pair(requests)]


def test_predictions_are_what_the_engine_then_does(sampled: Sampled) -> None:
    """One request at a time and no noise: the very rounds that the replay counted."""
    for one in sampled.confirmed:
        if one.requests == 1:
            assert one.measured == pytest.approx(one.predicted, rel=0.01)
            assert one.round_ms is not None
            steps, depth = one.pair or (0, None)
            assert one.round_ms == pytest.approx(Law().round_ms(steps, 1, steps + 1, depth), rel=0.01)
        else:
            assert one.measured == pytest.approx(one.predicted, rel=0.1)
        if one.pair is not None and one.requests == 1:
            assert one.acceptance == sampled.selection.grid[one.pair].acceptance


def test_what_judges_had_no_say(sampled: Sampled, rig: Rig) -> None:
    judged = {c.pair: c for c in sampled.evaluated if c.requests == 1}
    pair = sampled.best_pair(1)
    assert judged[pair].acceptance == sampled.evaluation.grid[pair].acceptance
    assert judged[pair].acceptance != sampled.selection.grid[pair].acceptance
    assert (
        sampled.evaluation.prompt_tokens == (8, 11, 14, 17) and sampled.evaluation.classes == ("a", "b") * 2
    )
    assert sampled.selection.rates == pytest.approx(
        np.concatenate(sampled.selection.flags).mean(axis=0).tolist()
    )


def test_candidates_fit_the_engine_and_begin_with_the_fastest(sampled: Sampled, tmp_path: Path) -> None:
    config = make_config(
        sampled,
        model="ouro",
        loops=LOOPS,
        most_requests=16,
        fingerprint={"device": "a law"},
        source="a test",
        created_at="2025-01-02T03:04:05",
    )
    assert [(one.min_requests, one.max_requests) for one in config.ranges] == [(1, 2), (3, 16)]
    assert [config.ema_of(index).beta for index in range(2)] == [0.05, 0.087]
    assert config.provenance.kind == "measured" and config.fingerprint == {"device": "a law"}
    one = config.ranges[0]
    begins = one.candidates[one.initial]
    assert (begins.draft_steps, begins.draft_loops) == sampled.best_pair(1)
    assert one.initial_off == (sampled.best(1).pair is None)
    for candidate in one.candidates:
        pair = (candidate.draft_steps, candidate.draft_loops)
        assert candidate.acceptance == round(sampled.selection.grid[pair].acceptance, 4)
    costs = [sampled.confirmed_costs(1)[1][c.draft_steps, c.draft_loops] for c in one.candidates]
    assert costs == sorted(costs)
    path = tmp_path / "candidates.json"
    write_config(path, config, flag="candidates_output")
    read = parse_spec_config(json.loads(path.read_text()), "candidates.json")
    assert read == config and spec_config_json(read) == spec_config_json(config)
    check_fit(read, CandidateGeometry(BucketGrid([1, 2, 4]), STEPS, DEPTHS, LOOPS), "candidates.json")
    with pytest.raises(CalibrationError, match="exists already"):
        write_config(path, config, flag="candidates_output")


def test_confirmed_costs_are_those_of_trials(sampled: Sampled) -> None:
    """A table that says twice as much of everything, and of one pair four times: trials know better."""
    plain, of_pair = sampled.costs[1]
    ran = sampled.best_pair(1)
    doubled = {pair: 2 * ms * (2 if pair == ran else 1) for pair, ms in of_pair.items()}
    wrong = dataclasses.replace(sampled, costs={**sampled.costs, 1: (2 * plain, doubled)})
    found_plain, found = wrong.confirmed_costs(1)
    assert found_plain == pytest.approx(plain, rel=0.01)
    assert found == pytest.approx(of_pair, rel=0.01)


def test_batch_ranges_meet_half_way_by_factors() -> None:
    assert batch_ranges((1, 8, 32), 200) == [(1, 2), (3, 16), (17, 200)]
    assert batch_ranges((4,), 4) == [(1, 4)]
    assert batch_ranges((1, 2), 2) == [(1, 1), (2, 2)]


def test_what_the_table_does_not_know_is_refused(rig: Rig) -> None:
    long = dataclasses.replace(SETTINGS, confirm_tokens=800)
    with pytest.raises(CalibrationError, match="says nothing of 1 requests with a KV length of 41[23]"):
        sampler(rig, settings=long).sample(SELECTION, EVALUATION)


def test_flags_of_another_text_are_refused(rig: Rig) -> None:
    """Where a pass over the answer picks other tokens than rounds did, its flags are worthless."""

    def read(prompt: Sequence[int], answer: Sequence[int]) -> Told:
        told = FlagReader(rig.parts).read(prompt, answer)
        return Told(told.flags, np.arange(len(told.own)) % 10 > 0)

    with pytest.raises(CalibrationError, match="only 8[0-9].[0-9] % of the answers"):
        sampler(rig, read=read).sample(SELECTION, EVALUATION)
