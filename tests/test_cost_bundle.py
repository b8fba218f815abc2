"""Saved cost tables: what is written is read back, what does not belong is refused with its reason."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cost_measured import measured, small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import xspec.cost.bundle as bundle_module
from xspec.cost.bundle import (
    Bundle,
    SavedCosts,
    bare_table,
    check_output,
    peek_settings,
    read_bundle,
    read_saved_costs,
    write_bundle,
)
from xspec.cost.fit import fit_table
from xspec.cost.model import Additive, Sps
from xspec.cost.settings import Control
from xspec.errors import CalibrationError, ConfigError

FLAG = "adaptive_target_verify_cost_table"
FINGERPRINT = {
    "device": "cpu: some",
    "torch": "2.8",
    "torch_patch": "2.8.1",
    "driver": "none",
    "graph": True,
    "tp_size": 1,
    "kernels": {"attention": "paged", "threads": 2},
}


def bundle(control: Control = Control.TARGET_VERIFY, **changes: Any) -> Bundle:
    effective = small(control, **changes)
    samples = measured(effective)
    return Bundle(
        control=control,
        algorithm="DSpark" if control is Control.TARGET_VERIFY else "MTP",
        draft_width=2,
        fingerprint=FINGERPRINT,
        effective=effective,
        samples=samples,
        table=fit_table(effective, samples, 0.25),
        created_at="2025-01-01T00:00:00Z",
    )


def read(path: Path, saved: Bundle, **changes: Any) -> SavedCosts:
    launch: dict[str, Any] = {
        "flag": FLAG,
        "control": saved.control,
        "algorithm": saved.algorithm,
        "draft_width": saved.draft_width,
        "fingerprint": saved.fingerprint,
    }
    return read_bundle(path, **{**launch, **changes})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a target verify bundle with an additive fit."""
    path = tmp_path_factory.mktemp("bundle") / "table.json"
    write_bundle(path, bundle())
    content = json.loads(path.read_bytes())
    assert isinstance(content, dict)
    return content


def refusal(path: Path, content: object, **changes: Any) -> CalibrationError:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CalibrationError) as error:
        read(path, bundle(), **changes)
    assert str(error.value).startswith(f"--{FLAG}={path}")
    return error.value


# -- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("control", Control)
@pytest.mark.parametrize("model", ["sps", "additive"])
@pytest.mark.parametrize(
    "changes", [{}, {"plain_rounds": False}, {"max_target_rows": 6, "uncovered": "plain"}]
)
def test_what_is_written_is_read(
    tmp_path: Path, control: Control, model: str, changes: dict[str, Any]
) -> None:
    saved, path = bundle(control, model=model, **changes), tmp_path / "table.json"
    write_bundle(path, saved, flag="output")
    costs = read(path, saved)
    assert costs.bundle == saved
    assert (costs.table, costs.control, costs.draft_width) == (saved.table, control, 2)
    assert costs.warnings == ()
    assert read_saved_costs(path, flag="x").bundle == saved
    assert peek_settings(path, flag="x") == saved.effective.as_settings()
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    st.sampled_from(Control),
    st.sampled_from(["sps", "additive"]),
    st.lists(st.floats(0.5, 2.0), min_size=90, max_size=90),
    st.floats(0.0, 10.0),
    st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(), max_size=4),
)
def test_noisy_measurements_are_read_back_exactly(
    tmp_path: Path,
    control: Control,
    model: str,
    noise: list[float],
    prefill_ms: float,
    fingerprint: dict[str, Any],
) -> None:
    effective = small(control, model=model)
    samples = tuple(
        replace(sample, windows_ms=tuple(ms * factor for ms in sample.windows_ms))
        for sample, factor in zip(measured(effective), noise, strict=False)
    )
    try:
        table = fit_table(effective, samples, prefill_ms)
    except CalibrationError:  # noise that no additive law explains
        return
    saved = Bundle(control, "MTP", 2, fingerprint, effective, samples, table, "now")
    path = tmp_path / "table.json"
    path.unlink(missing_ok=True)
    write_bundle(path, saved)
    assert read(path, saved).bundle == saved


# -- writing --------------------------------------------------------------------------------------


def test_an_existing_file_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    path.write_text("mine")
    for attempt in (lambda: check_output(path, flag="out"), lambda: write_bundle(path, bundle(), flag="out")):
        with pytest.raises(ConfigError, match=rf"^--out={path}: exists already"):
            attempt()
    monkeypatch.setattr(bundle_module, "check_output", lambda path, flag: None)  # it appeared since the check
    with pytest.raises(CalibrationError, match="exists already"):
        write_bundle(path, bundle(), flag="out")
    assert path.read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]


def test_a_dangling_link_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CalibrationError, match="exists already"):
        check_output(path)


def test_an_output_that_cannot_be_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, reason in (("none", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(CalibrationError, match=rf"^--out=.*{folder} {reason}"):
            check_output(tmp_path / folder / "table.json", flag="--out")
    with pytest.raises(CalibrationError, match="cannot write in /proc"):
        check_output(Path("/proc/table.json"))
    check_output(tmp_path / "table.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def no_links(source: str, target: Path) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_file_systems_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", no_links)
    saved, path = bundle(), tmp_path / "table.json"
    write_bundle(path, saved)
    assert read(path, saved).bundle == saved
    monkeypatch.setattr(bundle_module, "check_output", lambda path, flag: None)
    with pytest.raises(CalibrationError, match="exists already"):
        write_bundle(path, saved)
    assert read(path, saved).bundle == saved
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CalibrationError, match="cannot be written: No space left on device"):
        write_bundle(tmp_path / "table.json", bundle())
    assert list(tmp_path.iterdir()) == []


# -- another launch -------------------------------------------------------------------------------


def test_every_difference_is_told_with_both_values(tmp_path: Path, written: dict[str, Any]) -> None:
    launched = {
        **FINGERPRINT,
        "device": "cpu: other",
        "graph": 1,
        "kernels": {"attention": "paged", "threads": 4},
        "new": None,
        "torch_patch": "2.8.2",
    }
    del launched["tp_size"]
    error = refusal(tmp_path / "t", written, fingerprint=launched)
    assert "was not measured on what is launched:\n" in str(error)
    assert error.reasons == (
        'device: the table has "cpu: some", this launch "cpu: other"',
        "graph: the table has true, this launch 1",
        "kernels.threads: the table has 2, this launch 4",
        "new: the table has nothing, this launch null",
        "tp_size: the table has 1, this launch nothing",
    )


def test_soft_facts_only_warn(tmp_path: Path) -> None:
    saved, path = bundle(), tmp_path / "table.json"
    write_bundle(path, saved)
    launched = {key: value for key, value in FINGERPRINT.items() if key != "driver"} | {
        "torch_patch": "2.8.2"
    }
    costs = read(path, saved, fingerprint=launched)
    assert costs.bundle == saved
    assert costs.warnings == (
        f'--{FLAG}={path}: driver: the table has "none", this launch nothing',
        f'--{FLAG}={path}: torch_patch: the table has "2.8.1", this launch "2.8.2"',
    )
    with pytest.raises(CalibrationError, match="driver"):
        read(path, saved, fingerprint=launched, soft_keys=("torch_patch",))


def test_kinds_of_tables_never_mix(tmp_path: Path, written: dict[str, Any]) -> None:
    """Said in a sentence each, beside all differing facts, and not a second time as facts."""
    written = {**written, "fingerprint": {**FINGERPRINT, "algorithm": "DSpark", "draft_width": 2}}
    error = refusal(
        tmp_path / "t",
        written,
        control=Control.DRAFT_STEP,
        algorithm="MTP",
        draft_width=7,
        fingerprint={**FINGERPRINT, "algorithm": "MTP", "draft_width": 7, "tp_size": 2},
    )
    assert error.reasons == (
        "it is for adapting target verification, but this launch is adapting draft steps",
        "it was measured with DSpark drafts, but this launch drafts with MTP: "
        "their costs never stand for each other",
        "it was measured with 2 drafts a request, but this launch has 7: "
        "costs of one width never stand for another",
        "tp_size: the table has 1, this launch 2",
    )


# -- no table at all ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "a JSON object, found list"),
        ('{"format": "xspec-cost-table", "version": NaN}', "NaN is no JSON number"),
        ('{"format": "a", "format": "b"}', "keys given twice: format"),
        (
            '{"format": "other", "version": 1}',
            "format 'other', version 1; read are 'xspec-cost-table', version 1",
        ),
        ('{"format": "xspec-cost-table", "version": 2}', "version 2; read are"),
        ('{"format": "xspec-cost-table"}', "version None"),
        ('{"format": "xspec-cost-table", "version": true}', "version True"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in str(refusal(tmp_path / "t", text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(CalibrationError, match=f"^--{FLAG}={path}: cannot be read: "):
            read(path, bundle())
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="not JSON"):
        read(tmp_path / "binary", bundle())


def test_missing_and_unknown_keys_are_told_at_once(tmp_path: Path, written: dict[str, Any]) -> None:
    content = {key: value for key, value in written.items() if key not in ("samples", "algorithm")}
    content["curve"] = 1
    content["captured"] = {**written["captured"], "slots": 0, "target_tiers": {"01": [1]}}
    error = refusal(tmp_path / "t", content)
    assert "is no valid cost table" in str(error)
    assert error.reasons == (
        "captured.slots: found 0; allowed: integers from 1 to 2147483647",
        'captured.target_tiers: found "01"; allowed: request buckets as keys',
        'unknown key "curve" (did you mean "curves"?)',
        "algorithm is missing",
        "samples is missing",
    )


# -- edited by hand -------------------------------------------------------------------------------

Edit = Callable[[dict[str, Any]], object]


def put(value: object, *place: str | int) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        held: Any = content
        for key in place[:-1]:
            held = held[key]
        held[place[-1]] = value

    return edit


def scale(factor: float, *place: str | int) -> Edit:
    def edit(content: dict[str, Any]) -> None:
        held: Any = content
        for key in place[:-1]:
            held = held[key]
        held[place[-1]] *= factor

    return edit


def curve(content: dict[str, Any], steps: int) -> dict[str, Any]:
    found = next(item for item in content["curves"] if (item["context"], item["draft_steps"]) == (0, steps))
    assert isinstance(found, dict)
    return found


EDITS: list[tuple[str, Edit, str]] = [
    (
        "bias",
        lambda c: scale(1.001, "bias_s")(curve(c, 2)),
        "curve of context 0, 2 drafts: bias_s is 0.02477475, but its samples give 0.02475",
    ),
    ("theta", lambda c: scale(1.01, "theta_s", 1)(curve(c, 2)), "2 drafts: theta_s is 0, 0.000505"),
    ("alpha", lambda c: put([0.0, 0.0, 0.0], "alpha_s")(curve(c, 2)), "2 drafts: alpha_s is 0, 0, 0, but"),
    ("plain", lambda c: scale(1.00001, "steps_per_second", 0)(curve(c, 0)), "0 drafts: steps_per_second is"),
    ("gauge", lambda c: put(0.1, "alpha_s", 0)(curve(c, 2)), "must begin with 0"),
    (
        "rows",
        lambda c: put(4, "target_rows", 4)(curve(c, 2)),
        "target_rows must be positive and strictly asc",
    ),
    ("shorter", lambda c: curve(c, 2)["theta_s"].pop(), "target_rows and theta_s must be equally long"),
    ("other rows", lambda c: put(13, "target_rows", -1)(curve(c, 2)), "target_rows is 1, 2, 3, 4, 6, 8, 13"),
    ("model of curve", lambda c: put("cubic", "model")(curve(c, 2)), 'allowed: "sps", "additive"'),
    ("no curve", lambda c: c["curves"].remove(curve(c, 2)), "curve of context 0, 2 drafts: missing"),
    ("two curves", lambda c: c["curves"].append(curve(c, 2)), "a second curve of context 0, 2 drafts"),
    (
        "stray curve",
        lambda c: c["curves"].append({**curve(c, 2), "draft_steps": 1}),
        "curve of context 0, 1 drafts: no samples of it",
    ),
    (
        "curve of the other model",
        lambda c: c["curves"].__setitem__(
            c["curves"].index(curve(c, 0)),
            {
                "context": 0,
                "draft_steps": 0,
                "model": "additive",
                "bias_s": 1.0,
                "requests": [1],
                "alpha_s": [0.0],
                "target_rows": [1],
                "theta_s": [0.0],
            },
        ),
        "0 drafts: its model is additive, but the settings make it sps",
    ),
    (
        "sample",
        lambda c: put([ms * 1.01 for ms in c["samples"][1]["windows_ms"]], "samples", 1, "windows_ms")(c),
        "theta_s is 0, 0.0005, 0.001, 0.0015, 0.0025, 0.0035, 0.0055, but its samples give 0, 0.0005",
    ),
    (
        "long sample",
        put(2049.0, "samples", 0, "kv_length"),
        "samples[0]: a mean KV length of 2049 after 32 tok",
    ),
    (
        "short sample",
        put(31.0, "samples", 0, "kv_length"),
        "samples[0]: a mean KV length of 31 after 32 tokens",
    ),
    ("negative sample", put(-1.0, "samples", 0, "windows_ms", 0), "samples[0].windows_ms[0]: found -1.0"),
    ("sample of text", put("9", "samples", 0, "windows_ms", 0), 'windows_ms[0]: found "9"; allowed: finite'),
    ("huge sample", put(10**400, "samples", 0, "windows_ms", 0), "windows_ms[0]: found 1000000"),
    ("no windows", put([], "samples", 0, "windows_ms"), "samples[0].windows_ms: found []"),
    ("fewer windows", lambda c: c["samples"][3]["windows_ms"].pop(), "but windows_per_point is 3"),
    ("sample gone", lambda c: c["samples"].pop(), "not measured: context 1, 2 drafts, 1 requests, 3 target"),
    ("sample twice", lambda c: c["samples"].append(c["samples"][0]), "measured 2 times: context 0, 0 drafts"),
    (
        "sample elsewhere",
        put(5, "samples", 0, "target_rows"),
        "not asked for: context 0, 0 drafts, 4 requests, 5",
    ),
    (
        "no length",
        put(0, "samples", 0, "kv_length"),
        "samples[0].kv_length: found 0; allowed: finite numbers ab",
    ),
    (
        "lengths swapped",
        lambda c: [put(s["kv_length"] % 500 + 50, "kv_length")(s) for s in c["samples"]],
        "grow",
    ),
    (
        "prefill",
        put(-0.1, "prefill_ms_per_token"),
        "prefill_ms_per_token: found -0.1; allowed: finite numbers from",
    ),
    (
        "bucket",
        put([1, 2], "settings", "request_buckets"),
        "4 not among request_buckets; among request_buckets: 1",
    ),
    (
        "captured",
        put([1, 2], "captured", "request_buckets"),
        "request_buckets: 4 not captured; captured: 1, 2",
    ),
    (
        "tier",
        put([2, 4], "captured", "target_tiers", "2"),
        "6, the full width of request bucket 2, is missing",
    ),
    (
        "stray tier",
        put([8, 24], "captured", "target_tiers", "8"),
        "for request buckets 1, 2, 4, and no others",
    ),
    ("model length", put(170, "captured", "max_model_len"), "the model's context holds 170"),
    ("cache", put(511, "captured", "cache_tokens"), "the cache holds 0 for each of 4 requests"),
    (
        "overlap",
        put(200, "settings", "contexts", 0, "max_kv_length"),
        "contexts: found KV 1-200 and KV 128-2048, which overlap",
    ),
    ("beyond the model", put(4096, "settings", "contexts", 1, "max_kv_length"), "settings: contexts is [{"),
    ("width", put(3, "settings", "draft_width"), "draft_width: found 3; allowed: 2, the engine's"),
    (
        "model",
        put("sps", "settings", "model"),
        "2 drafts: its model is additive, but the settings make it sps",
    ),
    (
        "plain rounds",
        put(False, "settings", "plain_rounds"),
        "not asked for: context 0, 0 drafts, 4 requests, 4",
    ),
    (
        "most rows",
        put(8, "settings", "max_target_rows"),
        "target_graph_rows is [1, 2, 3, 4, 6, 8, 12], but what was captured",
    ),
    (
        "row",
        put([1, 2, 3, 4, 6, 12], "settings", "target_graph_rows"),
        "not asked for: context 0, 2 drafts, 4 ",
    ),
    ("windows", put(5, "settings", "windows_per_point"), "samples[0]: 3 windows, but windows_per_point is 5"),
    (
        "misspelt",
        put(1, "settings", "windows_per_pont"),
        'unknown key "windows_per_pont" (did you mean "windows_p',
    ),
    (
        "left out",
        lambda c: c["settings"].pop("request_buckets"),
        "settings: request_buckets is left out, but",
    ),
]


@pytest.mark.parametrize(("edit", "reason"), [case[1:] for case in EDITS], ids=[case[0] for case in EDITS])
def test_an_edited_table_is_refused_with_the_reason(
    tmp_path: Path, written: dict[str, Any], edit: Edit, reason: str
) -> None:
    content = copy.deepcopy(written)
    edit(content)
    assert content != written
    assert reason in str(refusal(tmp_path / "t", content))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data(), st.sampled_from([0.5, 0.99, 1.0001, 2.0]))
def test_no_measured_number_can_be_changed(
    tmp_path: Path, written: dict[str, Any], data: st.DataObject, factor: float
) -> None:
    """Any number of a curve but its zeros, or all windows of any sample."""
    content = copy.deepcopy(written)
    if data.draw(st.booleans()):
        sample = data.draw(st.sampled_from(content["samples"]))
        sample["windows_ms"] = [ms * factor for ms in sample["windows_ms"]]
    else:
        found = data.draw(st.sampled_from(content["curves"]))
        name = data.draw(st.sampled_from([key for key in found if key.endswith(("_s", "_second"))]))
        if isinstance(found[name], float):
            found[name] *= factor
        else:
            index = data.draw(st.integers(0, len(found[name]) - 1))
            found[name][index] = found[name][index] * factor or 1e-4
    assert refusal(tmp_path / "t", content).reasons


# -- bare tables ----------------------------------------------------------------------------------

DIAGONAL = {"sample_batch_tokens": [4, 8], "sample_steps_per_sec": [100, 50.0], "max_batch_tokens": 64}
SUM = {
    "bias_seconds": 0.008,
    "bs_probes": [1, 4],
    "alpha_seconds": [0.001, 0.004],
    "m_probes": [2, 8],
    "theta_seconds": [0.001, 0.006],
}
BARE: dict[str, Any] = {"control": Control.TARGET_VERIFY, "algorithm": "DSpark", "draft_width": 7}


def read_bare_file(path: Path, content: object, **changes: Any) -> SavedCosts:
    path.write_text(json.dumps(content))
    return read_bundle(path, flag=FLAG, fingerprint=FINGERPRINT, **{**BARE, **changes})


def test_a_bare_diagonal_table(tmp_path: Path) -> None:
    costs = read_bare_file(tmp_path / "t", DIAGONAL)
    assert costs.bundle is None
    (warning,) = costs.warnings
    assert "has no fingerprint" in warning and "does not say its draft width, which means 7" in warning
    at = costs.table.at([1, 100_000])
    assert at is not None
    assert [at.round_ms(7, 1, rows) for rows in (1, 4, 6, 8, 900)] == pytest.approx(
        [10.0, 10.0, 15.0, 20.0, 20.0]
    )
    assert at.round_ms(0, 1, 4) is None
    assert costs.table.prefill_ms_per_token == 0.0


def test_a_bare_additive_table(tmp_path: Path) -> None:
    costs = read_bare_file(tmp_path / "t", {**SUM, "draft_width": 5}, draft_width=5)
    assert "does not say its draft width" not in costs.warnings[0]
    at = costs.table.at([500])
    assert at is not None
    found = [at.round_ms(5, requests, rows) for requests, rows in ((1, 2), (4, 8), (2, 5), (9, 1))]
    assert found == pytest.approx([10.0, 18.0, 13.5, 13.0])
    assert peek_settings(tmp_path / "t", flag="x").draft_width == 5
    assert read_saved_costs(tmp_path / "t", flag="x").table == costs.table


@pytest.mark.parametrize(
    ("content", "changes", "reason"),
    [
        (
            DIAGONAL,
            {"algorithm": "MTP"},
            "it was measured with DSpark drafts, but this launch drafts with MTP",
        ),
        (DIAGONAL, {"control": Control.DRAFT_STEP}, "it is for adapting target verification"),
        (DIAGONAL, {"draft_width": 5}, "it was measured with 7 drafts a request, but this launch has 5"),
        ({**SUM, "draft_width": 5}, {}, "it was measured with 5 drafts a request, but this launch has 7"),
        ({}, {}, "sample_batch_tokens is missing"),
        ({**DIAGONAL, "bias": 1}, {}, 'unknown key "bias"'),
        ({**DIAGONAL, "sample_batch_tokens": [8, 4]}, {}, "strictly ascending"),
        ({**DIAGONAL, "sample_batch_tokens": [4]}, {}, "equally long"),
        ({**DIAGONAL, "sample_steps_per_sec": [1, 0]}, {}, "sample_steps_per_sec[1]: found 0"),
        (
            {**DIAGONAL, "max_batch_tokens": 7},
            {},
            "max_batch_tokens is 7, below the last of sample_batch_tokens, 8",
        ),
        ({**SUM, "bias_seconds": 0}, {}, "bias_seconds: found 0; allowed: finite numbers above 0"),
        ({**SUM, "m_probes": [2, 2]}, {}, "strictly ascending"),
        ({**SUM, "alpha_seconds": [0.0]}, {}, "requests and alpha_s must be equally long"),
        ({**SUM, "alpha_seconds": [True, 0.1]}, {}, "alpha_seconds[0]: found true"),
        ({**SUM, "draft_width": "7"}, {}, 'draft_width: found "7"'),
    ],
)
def test_bare_tables_that_do_not_fit(
    tmp_path: Path, content: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CalibrationError) as error:
        read_bare_file(tmp_path / "t", content, **changes)
    assert reason in str(error.value)
    assert str(error.value).startswith(f"--{FLAG}={tmp_path / 't'}")


@pytest.mark.parametrize(
    "curve",
    [
        Sps((4, 8), (100.0, 50.0)),
        Additive(0.010, (1, 4), (0.0, 0.003), (2, 8), (0.0, 0.005)),
    ],
)
@pytest.mark.parametrize("width", [5, 7])
def test_a_new_bare_table_says_its_width(tmp_path: Path, curve: Sps | Additive, width: int) -> None:
    content = bare_table(curve, width)
    assert content["draft_width"] == width
    costs = read_bare_file(tmp_path / "t", content, draft_width=width)
    assert costs.table.curves == {(0, width): replace(curve, clamped=True)}
