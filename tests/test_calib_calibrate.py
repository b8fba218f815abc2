"""Costs of a start: measured, fitted, saved, kept and found again, with what the log says of them."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calib_fake import CostOf, Device, Rig, answers, make_rig

from xspec.calib.choose import Adaptation
from xspec.core.round import RoundPlan
from xspec.cost.model import Additive, Sps
from xspec.cost.settings import CalibrationSettings, ContextInterval, Control
from xspec.errors import CalibrationError, EngineError

CONTEXTS = (ContextInterval(20, 1, 99), ContextInterval(100, 100, 500, request_buckets=(1, 2)))
SETTINGS = CalibrationSettings(contexts=CONTEXTS, warmup_steps=1, window_steps=2, windows_per_point=3)
STEPS = Adaptation(Control.DRAFT_STEP, SETTINGS, "--adaptive_draft_step_config=/x.json")
ROWS = Adaptation(
    Control.TARGET_VERIFY,
    dataclasses.replace(SETTINGS, target_graph_rows=(2, 3, 4, 6, 8, 12), plain_rounds=False),
    "--adaptive_target_verify_calibration=/x.json",
)
PREFILL_MS = 0.25


def alpha_ms(requests: int) -> float:
    return 1.5 * requests + (0.75 if requests > 2 else 0.0)


def theta_ms(rows: int) -> float:
    return 0.5 * rows + (2.0 if rows > 4 else 0.0)


def round_ms(steps: int, requests: int, rows: int) -> float:
    """Additive with steps in both parts; whatever is fitted to it has no residual."""
    return 10.0 + 8.0 * steps + alpha_ms(requests) * (steps > 0) + theta_ms(rows)


def cost_ms(plan: RoundPlan) -> float:
    if not plan.batch.rows:
        return PREFILL_MS * plan.shape.prefill_tokens
    return round_ms(plan.spec.draft_steps, len(plan.batch.rows), plan.shape.target_rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calib")


@pytest.fixture(scope="module")
def steps(folder: Path) -> Rig:
    return make_rig(folder, adaptation=STEPS)


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rig:
    return make_rig(folder, adaptation=ROWS)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The log, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO)
    yield caplog


def configuration(log: pytest.LogCaptureFixture) -> str:
    """The one line about the effective configuration since the last call."""
    found = [r.getMessage() for r in log.records if "adaptive effective configuration" in r.getMessage()]
    log.clear()
    assert len(found) == 1, found
    return found[0]


def test_draft_steps_are_measured_and_fitted_exactly(steps: Rig, log: pytest.LogCaptureFixture) -> None:
    device = steps.device(cost_ms)
    before = answers(steps, [(5, 6, 7), tuple(range(30, 60))])
    costs = steps.costs(STEPS, device)
    table = costs.table
    assert {key: type(curve) for key, curve in table.curves.items()} == {
        (c, k): Sps if k == 0 else Additive for c in (0, 1) for k in (0, 1, 2)
    }
    at = table.at([50])
    assert at is not None
    for lanes in (1, 2, 4):
        for depth in (0, 1, 2):
            measured = at.round_ms(depth, lanes, lanes * (depth + 1))
            assert measured == pytest.approx(round_ms(depth, lanes, lanes * (depth + 1)), rel=1e-9)
        for depth in (1, 2):  # what connects the buckets: each also on the next one's rows
            linked = at.round_ms(depth, min(lanes, 2), 4 * (depth + 1) if lanes > 1 else 2 * (depth + 1))
            assert linked is not None
    assert table.prefill_ms_per_token == pytest.approx(PREFILL_MS)
    assert table.at([600]) is None
    assert costs.uncovered == "full_width"
    assert answers(steps, [(5, 6, 7), tuple(range(30, 60))]) == before
    assert "median 0.00 %, worst 0.00 %" in log.text and "6 draft" not in log.text
    line = configuration(log)
    assert line.startswith(
        "MTP adaptive effective configuration: source: --adaptive_draft_step_config=/x.json; "
    )
    assert "control: draft_step" in line
    settings = json.loads(line.split("settings: ")[1].split("; captured: ")[0])
    assert settings == {
        "model": "additive", "draft_width": 2, "request_buckets": [1, 2, 4], "warmup_steps": 1,
        "window_steps": 2, "windows_per_point": 3, "token_seed": 1, "plain_rounds": True,
        "uncovered": "full_width", "contexts": [
            {"prefill_tokens": 20, "min_kv_length": 1, "max_kv_length": 99, "request_buckets": [1, 2, 4]},
            {"prefill_tokens": 100, "min_kv_length": 100, "max_kv_length": 500, "request_buckets": [1, 2]},
        ],
    }  # fmt: skip
    captured = json.loads(line.split("captured: ")[1].split("; ")[0])
    assert captured == {
        "request_buckets": [1, 2, 4], "max_model_len": 512, "cache_tokens": 2048, "block_size": 8, "slots": 2,
        "target_tiers": {},
    }  # fmt: skip
    # 3 buckets x (plain + 2 depths) + 2 x 2 links, then 2 buckets x 3 + 2
    assert "; 21 points" in line


def test_target_rows_are_measured_and_fitted_exactly(rows: Rig, log: pytest.LogCaptureFixture) -> None:
    costs = rows.costs(ROWS, rows.device(cost_ms))
    at = costs.table.at([50, 200])
    assert at is not None and list(costs.table.curves) == [(0, 2), (1, 2)]
    tiers = {1: (2, 3), 2: (2, 3, 4, 6)}
    for lanes, sizes in tiers.items():
        for size in sizes:
            assert at.round_ms(2, lanes, size) == pytest.approx(round_ms(2, lanes, size), rel=1e-9)
    assert at.round_ms(2, 4, 12) is None, "the long context measured no four requests"
    assert at.round_ms(0, 1, 1) is None
    line = configuration(log)
    assert '"target_tiers": {"1": [2, 3], "2": [2, 3, 4, 6], "4": [4, 6, 8, 12]}' in line
    facts = costs.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["points"] == 16 and facts["median_residual"] < 1e-9 > facts["worst_residual"]
    assert facts["coverage"][1] == {"kv_length": [100, 500], "draft_steps": {"2": [2, 6]}}


def test_a_fall_of_costs_and_residuals_are_told(rows: Rig, log: pytest.LogCaptureFixture) -> None:
    """Four requests take half of what their rows say: the parts of an additive curve cannot both be right."""

    def falling(plan: RoundPlan) -> float:
        return cost_ms(plan) * (0.5 if plan.shape.target_rows == 12 else 1.0)

    costs = rows.costs(ROWS, rows.device(falling))
    warned = [r.getMessage() for r in log.records if r.levelno == logging.WARNING]
    assert len(warned) == 2
    assert warned[1].startswith("something else ran on the machine"), "no kernel makes twice the work cheaper"
    assert warned[0].startswith(
        "costs fall with more rows: context 0, 2 draft steps: 8 rows cost 33.50 ms, 12 rows"
    )
    # 12 rows occur once, so their part takes all of it
    assert costs.facts()["worst_residual"] < 1e-9

    def uneven(plan: RoundPlan) -> float:
        return cost_ms(plan) * (1.2 if (len(plan.batch.rows), plan.shape.target_rows) == (2, 3) else 1.0)

    log.clear()
    facts = rows.costs(ROWS, rows.device(uneven)).facts()
    assert 0.01 < facts["worst_residual"] < 0.2 and facts["median_residual"] > 1e-3
    said = next(r.getMessage() for r in log.records if "residuals of the fit" in r.getMessage())
    assert (
        f"worst {100 * facts['worst_residual']:.2f} %" in said
        and f"{100 * facts['median_residual']:.2f} %" in said
    )


def test_a_saved_table_is_loaded_without_measuring(
    rows: Rig, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "costs.json"
    saved = rows.costs(dataclasses.replace(ROWS, output=path, output_flag="x_output"), rows.device(cost_ms))
    configuration(log)
    device = rows.device(cost_ms)
    loading = dataclasses.replace(ROWS, table=path, table_flag="adaptive_target_verify_cost_table")
    loaded = rows.costs(loading, device)
    assert device.plans == []
    assert loaded.table == saved.table and loaded.bundle == saved.bundle
    line = configuration(log)
    assert f"source: --adaptive_target_verify_cost_table={path}, measured 20" in line
    assert '"window_steps": 2' in line and 'coverage: [{"kv_length": [1, 99]' in line


def test_a_table_of_another_engine_is_refused_with_every_difference(
    rows: Rig, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    rows.costs(dataclasses.replace(ROWS, output=path, output_flag="x_output"), rows.device(cost_ms))
    other = make_rig(folder, adaptation=ROWS, dtype="float32", block_size=16)
    device = other.device(cost_ms)
    with pytest.raises(CalibrationError) as caught:
        other.costs(dataclasses.replace(ROWS, table=path, table_flag="x"), device)
    assert caught.value.reasons == (
        "block_size: the table has 8, this launch 16",
        'dtype: the table has "float64", this launch "float32"',
    )
    assert device.plans == []


def test_an_output_that_exists_is_refused_before_any_work(rows: Rig, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text("precious")
    device = rows.device(cost_ms)
    with pytest.raises(CalibrationError, match="--x_output=.*exists already"):
        rows.costs(dataclasses.replace(ROWS, output=path, output_flag="x_output"), device)
    assert device.plans == [] and path.read_text() == "precious"


def test_settings_that_do_not_fit_are_refused_before_any_work(rows: Rig) -> None:
    long = dataclasses.replace(ROWS.settings, contexts=(ContextInterval(505, 1, 512),))
    device = rows.device(cost_ms)
    with pytest.raises(CalibrationError, match="prefill_tokens up to"):
        rows.costs(dataclasses.replace(ROWS, settings=long), device)
    assert device.plans == []


def test_a_bare_legacy_table_is_used_as_it_is(
    folder: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "bare.json"
    path.write_text(json.dumps({
        "draft_width": 2, "sample_batch_tokens": [1, 12], "sample_steps_per_sec": [100.0, 50.0],
        "max_batch_tokens": 12,
    }))  # fmt: skip
    rig = make_rig(folder, adaptation=ROWS)
    rig.choice = dataclasses.replace(rig.choice, algorithm="DSpark")
    costs = rig.costs(dataclasses.replace(ROWS, table=path, table_flag="x"), rig.device(cost_ms))
    at = costs.table.at([7])
    assert costs.bundle is None and at is not None
    assert at.round_ms(2, 4, 12) == pytest.approx(20.0)
    assert costs.uncovered == "full_width" and costs.facts()["source"] == f"--x={path}"
    assert "a bare table" in configuration(log)


def test_shipped_settings_say_so_and_in_what_they_differ(folder: Path, log: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(SETTINGS, request_buckets=(1, 2, 4, 32), model="sps")
    shipped = Adaptation(Control.DRAFT_STEP, settings, "calib_configs/cpu.json", shipped=True)
    rig = make_rig(folder, adaptation=shipped)
    rig.costs(shipped, rig.device(cost_ms))
    line = configuration(log)
    assert "source: calib_configs/cpu.json; " in line
    assert "request buckets left out: [32]" in line
    assert (
        "other than the built-in defaults: model, request_buckets, contexts, warmup_steps, window_steps"
        in line
    )


CACHED = dataclasses.replace(STEPS, cached=True, source="built-in defaults")


def cached_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "xspec" / "cost_tables").glob("*"))


def test_the_cache_measures_once(steps: Rig, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    first = steps.costs(CACHED, steps.device(cost_ms))
    (file,) = cached_files(tmp_path)
    assert file.name.startswith("draft_step-") and len(file.stem) == len("draft_step-") + 16
    configuration(log)
    device = steps.device(cost_ms)
    second = steps.costs(CACHED, device)
    assert device.plans == [] and second.table == first.table
    assert (
        f"source: built-in defaults, measured {first.bundle.created_at} and kept in {file}"
        in configuration(log)
    )
    assert not [r for r in log.records if r.levelno >= logging.WARNING]


def test_other_settings_or_another_engine_are_another_file(
    steps: Rig, rows: Rig, folder: Path, tmp_path: Path
) -> None:
    steps.costs(CACHED, steps.device(cost_ms))
    other = dataclasses.replace(CACHED, settings=dataclasses.replace(SETTINGS, token_seed=2))
    steps.costs(other, steps.device(cost_ms))
    rows.costs(dataclasses.replace(ROWS, cached=True), rows.device(cost_ms))
    rig = make_rig(folder, adaptation=STEPS, block_size=16)
    device = rig.device(cost_ms)
    rig.costs(CACHED, device)
    assert device.plans and len(cached_files(tmp_path)) == 4


@pytest.mark.parametrize("damage", ["garbage", "edited", "dangling"])
def test_a_damaged_table_in_the_cache_is_measured_again(
    steps: Rig, tmp_path: Path, log: pytest.LogCaptureFixture, damage: str
) -> None:
    first = steps.costs(CACHED, steps.device(cost_ms))
    (file,) = cached_files(tmp_path)
    content = json.loads(file.read_text())
    if damage == "dangling":
        file.unlink()
        file.symlink_to(tmp_path / "nowhere")
    else:
        content["curves"][0]["steps_per_second"][0] *= 2
        file.write_text("{" if damage == "garbage" else json.dumps(content))
    log.clear()
    device = steps.device(cost_ms)
    assert steps.costs(CACHED, device).table == first.table
    assert device.plans
    warned = [r.getMessage() for r in log.records if r.levelno == logging.WARNING]
    assert len(warned) == 1 and "measured again" in warned[0] and str(file) in warned[0]
    again = steps.device(cost_ms)
    steps.costs(CACHED, again)
    assert again.plans == [], "it was put right"


def test_a_cache_that_cannot_be_written_is_only_told_of(
    steps: Rig, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    costs = steps.costs(CACHED, steps.device(cost_ms))
    assert costs.bundle is not None
    warned = [r.getMessage() for r in log.records if r.levelno == logging.WARNING]
    assert len(warned) == 1 and "are not kept" in warned[0]


def busy_ms(keys: set[tuple[int, int, int]]) -> CostOf:
    """As `cost_ms`, but for these points all windows but the first (3 rounds) take half as long again."""
    seen: Counter[tuple[int, int, int]] = Counter()

    def cost(plan: RoundPlan) -> float:
        key = (plan.spec.draft_steps, len(plan.batch.rows), plan.shape.target_rows)
        seen[key] += 1
        return cost_ms(plan) * (1.5 if key in keys and seen[key] > 3 else 1.0)

    return cost


def test_a_tenth_of_the_points_may_be_disturbed_in_a_table_that_is_kept(
    steps: Rig, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Of 21 points two may, of four requests, which only the first context measures."""
    steps.costs(CACHED, steps.device(busy_ms({(0, 4, 4), (1, 4, 8)})))
    assert len(cached_files(tmp_path)) == 1
    assert not [r for r in log.records if r.levelno >= logging.WARNING]


def test_a_table_of_a_busy_machine_is_used_but_not_kept(
    steps: Rig, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    costs = steps.costs(CACHED, steps.device(busy_ms({(0, 4, 4), (1, 4, 8), (2, 4, 12)})))
    at = costs.table.at([50])
    assert at is not None and at.round_ms(0, 4, 4) == pytest.approx(1.5 * round_ms(0, 4, 4))
    assert cached_files(tmp_path) == []
    busy, lost = [r.getMessage() for r in log.records if r.levelno >= logging.WARNING]
    assert "0 draft steps, 4 requests, 4 target rows, context 0: windows of 12.0 to 18.0 ms; " in busy
    assert "are not kept" in lost
    again = steps.device(cost_ms)
    steps.costs(CACHED, again)
    assert again.plans and len(cached_files(tmp_path)) == 1, "measured by the next start, and kept"


@pytest.mark.parametrize(("factor", "kept"), [(0.8, True), (0.5, False)])
def test_a_table_whose_costs_fall_by_over_a_quarter_is_not_kept(
    steps: Rig, tmp_path: Path, log: pytest.LogCaptureFixture, factor: float, kept: bool
) -> None:
    """6 rows cost one request 32.5 ms; 12 cost two factor x 37 and one 1.5 ms less: 28.1, or 17.0."""

    def falling(plan: RoundPlan) -> float:
        return cost_ms(plan) * (factor if plan.shape.target_rows == 12 else 1.0)

    costs = steps.costs(CACHED, steps.device(falling))
    at = costs.table.at([50])
    assert at is not None and at.round_ms(2, 2, 12) == pytest.approx(37.0 * factor)
    assert len(cached_files(tmp_path)) == kept
    warned = [r.getMessage() for r in log.records if r.levelno >= logging.WARNING]
    assert "costs fall with more rows" in warned[0] and len(warned) == (1 if kept else 3)
    if not kept:
        assert "2 draft steps, context 0: 6 rows cost 32.5 ms and 12 rows 17.0 ms" in warned[1]
        assert "are not kept" in warned[2]


def test_a_named_output_of_a_busy_machine_is_written_with_a_warning(
    steps: Rig, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "costs.json"
    asked = dataclasses.replace(STEPS, output=path, output_flag="x_output")
    steps.costs(asked, steps.device(busy_ms({(0, 4, 4), (1, 4, 8), (2, 4, 12)})))
    assert path.is_file()
    (warned,) = [r.getMessage() for r in log.records if r.levelno >= logging.WARNING]
    assert warned.startswith("something else ran on the machine")


def test_a_lost_round_saves_nothing(steps: Rig, tmp_path: Path) -> None:
    class Lost(Device):
        def execute(self, plan: RoundPlan, slot: Any) -> Any:
            if plan.round_id == 20:
                raise RuntimeError("no luck")
            return super().execute(plan, slot)

    with pytest.raises(EngineError, match="no luck"):
        steps.costs(CACHED, Lost(steps.parts.runner, cost_ms))
    assert cached_files(tmp_path) == []
