"""Costs of (K, d): what is measured, how it is fitted, saved and found again, and for whom it holds."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calib_fake import Device, Rig, answers, effective_of, make_looped_rig
from cost_measured import geometry, law_ms, measured, multiples

from xspec.calib.calibrate import pairs_of
from xspec.calib.choose import Adaptation, SpecChoice
from xspec.calib.probe import probe
from xspec.calib.quality import disturbances, quality_of
from xspec.core.round import RoundPlan
from xspec.cost.bundle import Bundle, SavedCosts, peek_settings, read_bundle, write_bundle
from xspec.cost.fit import check_coverage, curve_of, curves_of, fit_table
from xspec.cost.model import Sample, Sps
from xspec.cost.settings import (
    CalibrationSettings,
    ContextInterval,
    Control,
    Effective,
    Pair,
    Point,
    resolve,
    shipped_calibration,
)
from xspec.draft.choose import DraftChoice
from xspec.errors import CalibrationError, EngineError
from xspec.policy.spec_config import AdaptiveSpecConfig, BatchRange, Candidate, ModelFacts, Provenance
from xspec.progress import silent
from xspec_cli.calibration_report import markdown, summary

CONTEXTS = (ContextInterval(20, 1, 99), ContextInterval(100, 100, 500, request_buckets=(1, 2)))
SETTINGS = CalibrationSettings(contexts=CONTEXTS, warmup_steps=1, window_steps=2, windows_per_point=3)
LOOPED: tuple[Pair, ...] = ((1, 1), (1, 3), (2, 1), (2, 3))
MTP: tuple[Pair, ...] = ((1, None), (2, None))
FACTS = {"device": "cpu: some", "loops": 4, "pairs": "1@1,1@3,2@1,2@3", "draft_width": 2}


def resolved(pairs: tuple[Pair, ...] = LOOPED, **changes: Any) -> Effective:
    """Two drafts at most, buckets of 1, 2 and 4."""
    settings = dataclasses.replace(SETTINGS, **changes)
    return resolve(settings, geometry(Control.SPEC, 2, (1, 2, 4), pairs=pairs), multiples(2))


def samples_of(effective: Effective) -> tuple[Sample, ...]:
    return measured(effective, (50.0, 200.0))


# -- what is measured -----------------------------------------------------------------------------


def test_points_are_buckets_by_plain_rounds_and_pairs() -> None:
    effective = resolved()
    assert effective.points[:5] == (
        Point(0, 0, 4, 4), Point(0, 1, 4, 8, 1), Point(0, 1, 4, 8, 3), Point(0, 2, 4, 12, 1),
        Point(0, 2, 4, 12, 3),
    )  # fmt: skip
    assert [p for p in effective.points if (p.context, p.requests) == (1, 1)] == [
        Point(1, 0, 1, 1), Point(1, 1, 1, 2, 1), Point(1, 1, 1, 2, 3), Point(1, 2, 1, 3, 1),
        Point(1, 2, 1, 3, 3),
    ]  # fmt: skip
    assert len(effective.points) == 5 * (3 + 2), "three buckets in the first context, two in the second"
    assert effective.model == "sps", "the default, additive, would need padded rounds"
    assert effective.target_rows == {1: (2, 3), 2: (4, 6), 4: (8, 12)}


def test_points_without_loops_have_no_depth() -> None:
    points = [p for p in resolved(MTP).points if (p.context, p.requests) == (0, 4)]
    assert points == [Point(0, 0, 4, 4), Point(0, 1, 4, 8), Point(0, 2, 4, 12)]


def test_rows_may_be_limited_and_something_must_be_left() -> None:
    cells = {(p.draft_steps, p.requests) for p in resolved(max_target_rows=8).points}
    assert cells == {(0, 1), (0, 2), (0, 4), (1, 1), (1, 2), (1, 4), (2, 1), (2, 2)}
    with pytest.raises(CalibrationError) as caught:
        resolved(())
    assert caught.value.reasons == ("nothing to measure: no number of draft steps is captured",)
    with pytest.raises(CalibrationError) as caught:
        resolved(target_graph_rows=(4,))
    assert "target_graph_rows: only for target verify" in caught.value.reasons[0]


def test_the_shipped_grid_of_cpus_is_small() -> None:
    """The usual (K, d) of four loops: at most 124 points, and a growth that keeps KV lengths together."""
    settings = shipped_calibration("cpu", Control.SPEC)
    assert settings is not None and settings.kv_growth is not None
    pairs = tuple((k, d) for k in (1, 2, 4, 8) for d in (1, 2, 3))
    assert settings.request_buckets is not None
    engine = geometry(Control.SPEC, 8, settings.request_buckets, max_model_len=8192, pairs=pairs)
    effective = resolve(settings, engine, multiples(8))
    assert len(effective.points) == 124
    rounds = settings.warmup_steps + settings.windows_per_point * (settings.window_steps + 1) - 1
    assert len(effective.points) * rounds < 1650
    assert resolve(effective.as_settings(), engine, multiples(8)) == effective


# -- curves ---------------------------------------------------------------------------------------


def test_every_pair_has_a_curve_of_its_own() -> None:
    effective = resolved()
    table = fit_table(effective, samples_of(effective), 0.25)
    assert set(table.curves) == {(0, 0), (1, 0)}
    assert set(table.looped) == {(context, *pair) for context in (0, 1) for pair in LOOPED}
    assert all(isinstance(curve, Sps) for curve in curves_of(table).values())
    at = table.at([50])  # what the first context was measured at
    assert at is not None
    for steps, depth in LOOPED:
        for lanes in (1, 2, 4):
            point = Point(0, steps, lanes, lanes * (steps + 1), depth)
            assert at.round_ms(steps, lanes, point.target_rows, depth) == pytest.approx(law_ms(point))
            assert curve_of(table, point).ms(lanes, point.target_rows) == pytest.approx(law_ms(point))
    assert at.round_ms(0, 2, 2) == at.round_ms(0, 2, 2, 3) == pytest.approx(law_ms(Point(0, 0, 2, 2)))
    assert at.round_ms(1, 1, 2, 2) is None, "no such depth"
    assert at.round_ms(1, 1, 2) is None, "a depth is needed"
    assert quality_of(table, samples_of(effective)).median < 1e-12


def test_curves_without_loops_are_the_plain_ones() -> None:
    effective = resolved(MTP)
    table = fit_table(effective, samples_of(effective), 0.25)
    assert set(table.curves) == {(c, k) for c in (0, 1) for k in (0, 1, 2)} and not table.looped
    at = table.at([50])
    assert at is not None and at.round_ms(2, 4, 12) == pytest.approx(law_ms(Point(0, 2, 4, 12)))


def test_a_sample_of_another_depth_is_none_of_the_point() -> None:
    effective = resolved()
    samples = list(samples_of(effective))
    samples[1] = dataclasses.replace(samples[1], depth=2)
    with pytest.raises(CalibrationError) as caught:
        check_coverage(effective.points, samples)
    assert caught.value.reasons == (
        "not measured: context 0, 1 drafts with 1 loops, 4 requests, 8 target rows",
        "not asked for: context 0, 1 drafts with 2 loops, 4 requests, 8 target rows",
    )


def test_disturbances_name_the_loops() -> None:
    effective = resolved()
    samples = [
        dataclasses.replace(s, windows_ms=(99.0, 99.0, 99.0))
        if (s.draft_steps, s.depth, s.requests, s.context) == (2, 3, 1, 0)
        else s
        for s in samples_of(effective)
    ]
    found = disturbances(bundle(effective=effective, samples=tuple(samples)))
    assert found[0].startswith("2 draft steps with 3 loops, context 0: 3 rows cost 99.0 ms and 6 rows")


# -- saved tables ---------------------------------------------------------------------------------


def bundle(
    pairs: tuple[Pair, ...] = LOOPED,
    *,
    effective: Effective | None = None,
    samples: tuple[Sample, ...] | None = None,
) -> Bundle:
    effective = resolved(pairs) if effective is None else effective
    samples = samples_of(effective) if samples is None else samples
    table = fit_table(effective, samples, 0.25)
    return Bundle(Control.SPEC, "Looped", 2, FACTS, effective, samples, table, "2026-01-02T03:04:05")


def read(path: Path, width: int = 2, **facts: Any) -> SavedCosts:
    return read_bundle(
        path,
        flag="adaptive_spec_cost_table",
        control=Control.SPEC,
        algorithm="Looped",
        draft_width=width,
        fingerprint=FACTS | {"draft_width": width} | facts,
    )


@pytest.mark.parametrize("pairs", [LOOPED, MTP])
def test_what_is_written_is_read(tmp_path: Path, pairs: tuple[Pair, ...]) -> None:
    saved, path = bundle(pairs), tmp_path / "t.json"
    write_bundle(path, saved)
    found = read(path)
    assert found.bundle == saved and found.table == saved.table and found.warnings == ()
    assert peek_settings(path, flag="x") == saved.effective.as_settings()
    content = json.loads(path.read_text())
    assert content["captured"]["pairs"] == [[k] if d is None else [k, d] for k, d in pairs]
    assert ("depth" in content["samples"][1]) == (pairs is LOOPED)
    assert "depth" not in content["samples"][0], "a plain round has none"


@pytest.mark.parametrize(("pairs", "width"), [("1@1,2@3", 2), ("1@1", 1)])
def test_a_table_may_have_more_pairs_than_the_launch(tmp_path: Path, pairs: str, width: int) -> None:
    """The whole grid is measured, candidates are chosen from it, and the table serves them."""
    write_bundle(tmp_path / "t.json", bundle())
    assert read(tmp_path / "t.json", width, pairs=pairs).bundle == bundle()


def test_a_table_without_a_pair_of_the_launch_is_refused(tmp_path: Path) -> None:
    write_bundle(tmp_path / "t.json", bundle())
    with pytest.raises(CalibrationError) as caught:
        read(tmp_path / "t.json", 4, pairs="1@1,2@2,4@1", loops=3)
    assert caught.value.reasons == (
        "loops: the table has 4, this launch 3",
        "pairs: the table lacks 2@2, 4@1, which this launch may choose",
    )


def test_a_table_of_another_control_is_refused(tmp_path: Path) -> None:
    write_bundle(tmp_path / "t.json", bundle())
    with pytest.raises(CalibrationError) as caught:
        read_bundle(
            tmp_path / "t.json",
            flag="x",
            control=Control.DRAFT_STEP,
            algorithm="MTP",
            draft_width=2,
            fingerprint={"device": "cpu: some", "draft_width": 2},
        )
    assert "it is for choosing (K, d), but this launch is adapting draft steps" in caught.value.reasons


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        if value is None:
            del content[path[-1]]
        else:
            content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put([[1, 1], [1, 1]], "captured", "pairs"), 'captured.pairs: found [[1, 1], [1, 1]]'),
        (put([[1, 1], [2]], "captured", "pairs"), "captured.pairs: found [[1, 1], [2]]"),
        (put([[0, 1]], "captured", "pairs"), "captured.pairs: found [[0, 1]]"),
        (put([[1, True]], "captured", "pairs"), "captured.pairs: found [[1, true]]"),
        (put([[99, 1]], "captured", "pairs"), "with K up to"),
        (put([[2, 1], [1, 1]], "captured", "pairs"), "ascending"),
        (put([[1, 1], [1, 3], [2, 1], [2, 2]], "captured", "pairs"), "not measured: context 0, 2 drafts wi"),
        (put(None, "captured", "pairs"), "nothing to measure"),
        (put(2, "samples", 1, "depth"), "not asked for: context 0, 1 drafts with 2 loops"),
        (put(None, "samples", 1, "depth"), "not asked for: context 0, 1 drafts, 4 requests"),
        (put(2, "curves", 1, "depth"), "curve of context 0, 1 drafts with 1 loops: missing"),
        (put("1", "samples", 1, "depth"), 'samples[1].depth: found "1"; allowed: integers from 1'),
        (put(3, "curves", 1, "depth"), "a second curve of context 0, 1 drafts with 3 loops"),
        (put("draft_step", "control"), "it is for adapting draft steps"),
    ],
)  # fmt: skip
def test_an_edited_table_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    path = tmp_path / "t.json"
    write_bundle(path, bundle())
    content = copy.deepcopy(json.loads(path.read_text()))
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(CalibrationError) as caught:
        read(path)
    assert said in str(caught.value)


# -- which pairs ----------------------------------------------------------------------------------


def config_of(*pairs: Pair) -> AdaptiveSpecConfig:
    candidates = tuple(Candidate(steps, depth, up=0.9, down=0.1) for steps, depth in pairs)
    return AdaptiveSpecConfig(
        ModelFacts("tiny", 4), Provenance("prior", "a test"), (BatchRange(1, 4, candidates),)
    )


def spec(*pairs: Pair, **changes: Any) -> Adaptation:
    choice = SpecChoice("goodput", config_of(*pairs) if pairs else None, "a test")
    adaptation = Adaptation(Control.SPEC, SETTINGS, "a test", spec=choice)
    return dataclasses.replace(adaptation, **changes)


def test_pairs_are_the_candidates_or_all_that_is_prepared() -> None:
    looped = DraftChoice("Looped", None, 2, 2, loops=(1, 3), widths=(1, 2))
    assert pairs_of(spec(), looped) == LOOPED
    assert pairs_of(spec((2, 3), (1, 1)), looped) == ((1, 1), (2, 3))
    assert pairs_of(spec(), DraftChoice("MTP", None, 2, 2, widths=(1, 2))) == MTP
    assert pairs_of(Adaptation(Control.DRAFT_STEP, SETTINGS, ""), looped) == ()


# -- on an engine ---------------------------------------------------------------------------------


def point_ms(steps: int, depth: int, requests: int, rows: int) -> float:
    return 5.0 + 3.0 * depth * (steps + 1) * (steps > 0) + 0.5 * requests + (4 - depth) * rows / 8


def cost_ms(plan: RoundPlan) -> float:
    if not plan.batch.rows:
        return 0.25 * plan.shape.prefill_tokens
    depth = plan.spec.depth or 0
    return point_ms(plan.spec.draft_steps, depth, len(plan.batch.rows), plan.shape.target_rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spec")


@pytest.fixture(scope="module")
def rig(folder: Path) -> Rig:
    return make_looped_rig(folder, adaptation=spec())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "xspec" / "cost_tables"


def test_every_pair_is_measured_exactly_and_nothing_stays(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    prompts = [(5, 6, 7), tuple(range(30, 60))]
    before, device = answers(rig, prompts), rig.device(cost_ms)
    costs = rig.costs(spec(), device)
    at = costs.table.at([25])
    assert at is not None
    for lanes in (1, 2, 4):
        assert at.round_ms(0, lanes, lanes) == pytest.approx(point_ms(0, 0, lanes, lanes))
        for steps, depth in LOOPED:
            rows = lanes * (steps + 1)
            assert at.round_ms(steps, lanes, rows, depth) == pytest.approx(
                point_ms(steps, depth, lanes, rows)
            )
    ran = {(p.spec.draft_steps, p.spec.depth) for p in device.plans if p.batch.rows}
    assert ran == {(0, None), *LOOPED}
    assert not any(plan.spec.shadow for plan in device.plans)
    assert costs.table.prefill_ms_per_token == pytest.approx(0.25)
    facts = costs.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["coverage"][0]["draft_steps"] == {
        "0": [1, 4], "1@1": [2, 8], "1@3": [2, 8], "2@1": [3, 12], "2@3": [3, 12],
    }  # fmt: skip
    assert costs.bundle is not None
    assert costs.bundle.fingerprint["pairs"] == "1@1,1@3,2@1,2@3"
    assert costs.bundle.fingerprint["loops"] == 4
    assert "control: spec" in caplog.text and '"pairs": [[1, 1], [1, 3], [2, 1], [2, 3]]' in caplog.text
    assert answers(rig, prompts) == before


def test_the_whole_grid_serves_any_candidates(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    whole = rig.costs(spec(output=path, output_flag="out"), rig.device(cost_ms))
    device = rig.device(cost_ms)
    loaded = rig.costs(spec((2, 3), table=path, table_flag="table"), device)
    assert device.plans == [] and loaded.table == whole.table
    with pytest.raises(CalibrationError, match="pairs: the table lacks 4@1"):
        rig.costs(spec((2, 3), (4, 1), table=path, table_flag="table"), device)


def test_candidates_alone_are_measured_and_kept_apart(rig: Rig, cache: Path) -> None:
    few, whole = spec((2, 1), cached=True), spec(cached=True)
    device = rig.device(cost_ms)
    costs = rig.costs(few, device)
    assert set(costs.table.looped) == {(0, 2, 1), (1, 2, 1)}
    again = rig.device(cost_ms)
    assert rig.costs(few, again).table == costs.table and again.plans == []
    rig.costs(whole, again)
    assert again.plans and len(list(cache.glob("spec-*.json"))) == 2


def test_a_lost_round_names_the_loops(rig: Rig) -> None:
    """Two loops are not prepared."""
    service = rig.service(rig.device(cost_ms))
    effective = effective_of([Point(0, 2, 2, 6, 2)], CONTEXTS)
    with pytest.raises(EngineError, match="draft steps 2 with 2 loops, 2 requests, 6 target rows, context 0"):
        probe(service, effective, silent)
    assert service.scheduler.idle and service.pipeline.empty
    assert service.scheduler.pages.available == service.scheduler.pages.pages


@pytest.mark.parametrize("growth", [None, 12])
def test_requests_that_have_grown_enough_make_way_for_others(rig: Rig, growth: int | None) -> None:
    """Plain rounds commit one token: windows end at 28, 33 and 38 tokens. With a growth of 12 no more than
    32: the second begins afresh, and ends at 26, the third at 31."""
    device: Device = rig.device(cost_ms)
    effective = effective_of([Point(0, 0, 2, 2)], (ContextInterval(20, 1, 400),), kv_growth=growth)
    (sample,) = probe(rig.service(device), effective, silent).samples
    fillings = sum(bool(plan.binds) for plan in device.plans)
    # ends of the four rounds that count: 25 to 28, then 30 to 33 and 35 to 38, or 23 to 26 and 28 to 31
    middles = (26.5, 31.5, 36.5) if growth is None else (26.5, 24.5, 29.5)
    assert fillings == (1 if growth is None else 2)
    assert sample.kv_length == pytest.approx(sum(middles) / 3)


# -- the report -----------------------------------------------------------------------------------


def test_the_report_tells_where_a_pair_begins_to_gain() -> None:
    """By the law at one request: plain 20.75; (2, 3): 20 + 2 x 2 x 3 + .25 + 1.5 = 33.75, so (33.75 / 20.75
    - 1) / 2 = .31. At four: 20 + 1 + 2 = 23 and 20 + 12 + 1 + 6 = 39, so .35."""
    text = summary(bundle())
    assert "| K@d | 1 requests | 2 requests | 4 requests |" in text
    assert "| plain | 20.75 | 21.50 | 23.00 |" in text
    assert "| 2@3 | 33.75, 0.31 | 35.50, 0.33 | 39.00, 0.35 |" in text
    whole = markdown(bundle(), "no picture")
    assert "## Where speculation begins to gain" in whole
    assert all("\n".join(part.splitlines()[1:]) in whole for part in text.split("\n\n")[1:])
    assert "- context 0, 2 draft steps with 3 loops: ms by target rows 3: 33.75" in whole
    assert "| 2@3 | 1 | 3 | 50 |" in whole
    plainless = summary(bundle(effective=resolved(MTP, plain_rounds=False)))
    assert "| 2 | 25.75 |" in plainless
