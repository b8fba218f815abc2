"""`xspec calibrate`: flags, the report it writes, and a whole run on a tiny engine."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from calib_fake import effective_of
from tiny import make_checkpoint
from tiny_drafters import make_mtp
from tiny_dspark import Sizes, make_dspark, target_config

from xspec.cost.bundle import Bundle
from xspec.cost.fit import fit_table
from xspec.cost.model import Sample
from xspec.cost.settings import ContextInterval, Control, Point
from xspec_cli.calibration_plot import MISSING, draw
from xspec_cli.calibration_report import best_width, expected_tokens, markdown, summary
from xspec_cli.main import main

POINTS = {
    (0, 1, 1): 10.0, (1, 1, 2): 12.0, (2, 1, 3): 16.0, (1, 1, 4): 15.0, (2, 1, 6): 22.0,
    (0, 2, 2): 11.0, (1, 2, 4): 16.0, (2, 2, 6): 25.0,
}  # fmt: skip
"""(draft steps, requests, target rows): ms. Of two drafts, one and two requests are linked by 6 rows."""


def bundle_of(control: Control, costs: dict[tuple[int, int, int], float]) -> Bundle:
    points = [Point(0, *key) for key in costs]
    samples = tuple(
        Sample(*key, context=0, kv_length=64.0, windows_ms=(ms, ms + 1, ms - 1)) for key, ms in costs.items()
    )
    effective = effective_of(points, [ContextInterval(40, 1, 99)])
    table = fit_table(effective, samples, 0.125)
    return Bundle(control, "MTP", 2, {"device": "a CPU"}, effective, samples, table, "2025-01-02T03:04:05")


@pytest.mark.parametrize(
    ("requests", "rows", "steps", "rate", "tokens"),
    [
        (4, 4, 0, 0.5, 4.0),
        (1, 3, 2, 0.5, 1.75),  # 1 + 0.5 + 0.25
        (2, 8, 3, 0.5, 3.75),  # both get all three: 2 x (1 + 0.5 + 0.25 + 0.125)
        (4, 10, 2, 0.5, 6.5),  # 4 first drafts at 0.5, 2 second ones at 0.25
        (4, 6, 2, 0.5, 5.0),  # 2 first drafts
        (4, 64, 1, 0.5, 6.0),  # padding beyond the drafts there are yields nothing
        (3, 9, 2, 1.0, 9.0),
    ],
)  # fmt: skip
def test_expected_tokens_by_hand(requests: int, rows: int, steps: int, rate: float, tokens: float) -> None:
    assert expected_tokens(requests, rows, steps, rate) == pytest.approx(tokens)


def test_the_best_width_by_hand() -> None:
    """One request. Rate 0.4: 100 plain, 1.4 / 12 ms = 116.7, 1.56 / 16 = 97.5. Rate 0.8: 150 with one, 2.44 /
    16 ms = 152.5 with two. Two requests, 0.4: 181.8 plain, 2.8 / 16 = 175 with one, 3.12 / 25 with two."""
    bundle = bundle_of(Control.DRAFT_STEP, POINTS)
    found = {
        (requests, rate): best_width(bundle, 0, requests, rate) for requests in (1, 2) for rate in (0.4, 0.8)
    }
    assert {key: width.named(bundle.control) for key, width in found.items()} == {
        (1, 0.4): "1 steps", (1, 0.8): "2 steps", (2, 0.4): "plain", (2, 0.8): "1 steps",
    }  # fmt: skip
    assert [round(width.tokens_per_s, 1) for width in found.values()] == [116.7, 152.5, 181.8, 225.0]


def test_the_report_holds_what_was_found() -> None:
    text = markdown(bundle_of(Control.DRAFT_STEP, POINTS), MISSING)
    assert "# Costs of rounds: draft_step with MTP" in text and "Measured 2025-01-02T03:04:05." in text
    assert "| device | a CPU |" in text and MISSING in text
    assert "### KV 1-99, measured at a mean of 64 tokens" in text
    assert "| 1 | 1 steps, 116.7/s | 1 steps, 133.3/s | 2 steps, 152.5/s |" in text
    assert "| 2 | plain, 181.8/s | 1 steps, 200.0/s | 1 steps, 225.0/s |" in text
    assert "| 2 | 1 | 3 | 64 | 16.00 17.00 15.00 | 16.00 | +0.0 % |" in text
    assert "8 points; fitted against measured: median 0.0 %, worst" in text
    assert "- context 0, 0 draft steps: ms by target rows 1: 10.00, 2: 11.00" in text
    assert "- a prompt token: 0.125 ms" in text
    settings = json.loads(text.split("## Settings\n\n```json\n")[1].split("```")[0])
    assert settings["window_steps"] == 4 and settings["draft_width"] == 2
    tiers = summary(bundle_of(Control.TARGET_VERIFY, {(2, 1, 2): 12.0, (2, 1, 3): 16.0}))
    assert "| 1 | 2 rows, 116.7/s | 2 rows, 133.3/s | 3 rows, 152.5/s |" in tiers


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert not draw(bundle_of(Control.DRAFT_STEP, POINTS), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib (xspec[plots])")
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    assert draw(bundle_of(Control.DRAFT_STEP, POINTS), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


# -- the command ----------------------------------------------------------------------------------


SWITCH = "--enable_adaptive_draft_step=true"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--enable_adaptive_draft_step or --enable_adaptive_target_verify", "found none of them"]),
        (
            [SWITCH, "--enable_adaptive_target_verify"],
            ["--enable_adaptive_target_verify=true", "one of them"],
        ),
        ([SWITCH, "--report=x.html"], ["--report=x.html: allowed: a file name that ends in .md"]),
        ([SWITCH, "--report=/no/such/folder/x.md"], ["--report=/no/such/folder/x.md", "does not exist"]),
        (["--report=x.html"], ["found none of them", "ends in .md"]),
        ([SWITCH, "--round_trace=x.jsonl"], ["--round_trace=x.jsonl", "allowed: serve and bench"]),
        ([SWITCH, "--window_steps=3"], ["--window_steps: unknown flag"]),
    ],
)
def test_mistakes_are_told_before_anything_is_loaded(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xspec_cli.calibrate.measure", None)
    assert main(["calibrate", *flags]) == 1
    told = capsys.readouterr().err
    assert all(word in told for word in words), told


def test_a_report_that_exists_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.png").write_text("mine")
    assert main(["calibrate", SWITCH, f"--report={tmp_path / 'x.md'}"]) == 1
    assert f"--report={tmp_path / 'x.png'}: exists already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x.md", "x.png", "./x.md"])
def test_a_report_never_overwrites_the_costs_it_is_of(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xspec_cli.calibrate.measure", None)
    monkeypatch.chdir(tmp_path)
    output = f"--adaptive_draft_step_cost_table_output={name}"
    assert main(["calibrate", SWITCH, output, f"--report={tmp_path / 'x.md'}"]) == 1
    assert f"is the file of {output} too; allowed: two files" in capsys.readouterr().err


def test_a_setting_given_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.json").write_text('{"version": 1, "calibration": {"token_seed": 1, "token_seed": 2}}')
    assert main(["calibrate", SWITCH, f"--adaptive_draft_step_config={tmp_path / 'c.json'}"]) == 1
    assert "not JSON: keys given twice: token_seed" in capsys.readouterr().err


def test_help_tells_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--help"]) == 0
    told = capsys.readouterr().out
    assert "xspec calibrate --enable_adaptive_draft_step" in told and "--report" in told


def run(
    folder: Path, capsys: pytest.CaptureFixture[str], *flags: str, drafter: str = "mtp", code: int = 0
) -> tuple[str, str]:
    """stdout and stderr of a run on a tiny engine."""
    model = folder / "target"
    if not model.exists():
        make_checkpoint(model, "llama", overrides=target_config())
        make_mtp(folder / "mtp", "llama")
        make_dspark(folder / "dspark", Sizes(block=2))
    words = [
        "calibrate", f"--model={model}", f"--draft_model={folder / drafter}", "--num_speculative_tokens=2",
        "--dtype=float32", "--max_seqs_per_batch=2", "--block_size=8", "--max_tokens_per_batch=64",
        "--max_cache_size=4000000", "--num_compute_threads=1", *flags,
    ]  # fmt: skip
    assert main(words) == code
    told = capsys.readouterr()
    return told.out, told.err


def write_settings(path: Path, **values: Any) -> Path:
    calibration = {
        "contexts": [{"prefill_tokens": 16, "min_kv_length": 1, "max_kv_length": 200}],
        "warmup_steps": 1, "window_steps": 2, "windows_per_point": 2, **values,
    }  # fmt: skip
    path.write_text(json.dumps(calibration))
    return path


def test_a_run_measures_saves_and_reports_and_a_table_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = write_settings(tmp_path / "settings.json")
    flag = "--adaptive_target_verify_cost_table"
    out, _ = run(
        tmp_path, capsys, "--enable_adaptive_target_verify",
        f"--adaptive_target_verify_calibration={settings}",
        f"{flag}_output={tmp_path / 'costs.json'}", f"--report={tmp_path / 'report.md'}",
    )  # fmt: skip
    assert "KV 1-200" in out and "| requests | rate 0.4 | rate 0.6 | rate 0.8 |" in out
    saved = json.loads((tmp_path / "costs.json").read_text())
    assert saved["control"] == "target_verify" and saved["draft_width"] == 2
    assert saved["fingerprint"]["dtype"] == "float32" and saved["settings"]["window_steps"] == 2
    assert all(ms > 0 for sample in saved["samples"] for ms in sample["windows_ms"])
    report = (tmp_path / "report.md").read_text()
    assert "# Costs of rounds: target_verify with MTP" in report
    assert MISSING in report or (tmp_path / "report.png").is_file()
    assert not (tmp_path / "cache").exists()
    again, log = run(tmp_path, capsys, "--enable_adaptive_target_verify", f"{flag}={tmp_path / 'costs.json'}")
    assert again == out and f"source: {flag}={tmp_path / 'costs.json'}" in log
    _, told = run(
        tmp_path, capsys, "--enable_adaptive_target_verify", f"{flag}={tmp_path / 'costs.json'}",
        "--num_speculative_tokens=3", code=1,
    )  # fmt: skip
    assert "measured with 2 drafts a request, but this launch has 3" in told


def test_tables_of_one_algorithm_are_none_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = write_settings(tmp_path / "settings.json", request_buckets=[1, 2], windows_per_point=1)
    flag, table = "--adaptive_target_verify_cost_table", tmp_path / "costs.json"
    run(
        tmp_path, capsys, "--enable_adaptive_target_verify",
        f"--adaptive_target_verify_calibration={settings}", f"{flag}_output={table}", drafter="dspark",
    )  # fmt: skip
    saved = json.loads(table.read_text())
    assert saved["algorithm"] == saved["fingerprint"]["algorithm"] == "DSpark"
    _, told = run(tmp_path, capsys, "--enable_adaptive_target_verify", f"{flag}={table}", code=1)
    assert "measured with DSpark drafts, but this launch drafts with MTP" in told
