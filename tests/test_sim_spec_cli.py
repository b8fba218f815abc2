"""`xspec simulate` by costs of (K, d): fixed pairs, acceptance_ema and goodput over recorded match flags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cost_measured import geometry
from looped_world import CODE, DEPTHS, LANES, LAST_LOOP_ONLY, LOOPS, STEPS, config, costs

from xspec.cost.bundle import Bundle, write_bundle
from xspec.cost.fit import fit_table
from xspec.cost.model import Sample
from xspec.cost.settings import CalibrationSettings, ContextInterval, Control, Pair, resolve
from xspec.errors import ConfigError, UnsupportedError
from xspec.policy.spec_config import spec_config_json
from xspec.sim.looped import FlagStream, LoopedRecorded, read_flags, write_flags
from xspec_cli import simulate as command
from xspec_cli.flags_resolve import Launch
from xspec_cli.flags_resolve import resolve as resolve_words

GRID: list[Pair] = [(steps, depth) for steps in STEPS for depth in DEPTHS]
BUCKETS = tuple(bucket.rows for bucket in LANES.buckets)


def bundle_of(pairs: Sequence[Pair]) -> Bundle:
    """A saved table as a calibration would make it of `looped_world`'s costs; without loops those of one."""
    settings = CalibrationSettings(contexts=(ContextInterval(16, 1, 4096),), windows_per_point=1)
    engine = geometry(Control.SPEC, 8, BUCKETS, pairs=tuple(pairs))
    effective, table = resolve(settings, engine, lambda lanes: (lanes * 9,)), costs()

    def ms(steps: int, requests: int, rows: int, depth: int | None) -> float:
        known = table.round_ms(steps, requests, rows, depth or 1)
        return 1e3 if known is None else known  # wider than anything that is asked for

    samples = tuple(
        Sample(
            p.draft_steps, p.requests, p.target_rows, p.context, 100.0,
            (ms(p.draft_steps, p.requests, p.target_rows, p.depth),), p.depth,
        )
        for p in effective.points
    )  # fmt: skip
    fitted = fit_table(effective, samples, 0.01)
    return Bundle(Control.SPEC, "Looped", 8, {}, effective, samples, fitted, "2026-01-02T03:04:05+00:00")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pairs")
    paths = {name: folder / f"{name}.json" for name in ("costs", "flags", "candidates", "widths", "shallow")}
    write_bundle(paths["costs"], bundle_of(GRID))
    write_bundle(paths["widths"], bundle_of([(steps, None) for steps in STEPS]))
    rng = np.random.default_rng(3)
    streams = [FlagStream(16, text.flags(160, rng), text.name) for text in (CODE, LAST_LOOP_ONLY) * 8]
    write_flags(paths["flags"], DEPTHS, streams)
    write_flags(paths["shallow"], DEPTHS[:1], [FlagStream(s.prompt_tokens, s.flags[:, :1]) for s in streams])
    paths["candidates"].write_text(json.dumps(spec_config_json(config())))
    return paths


def words_of(files: dict[str, Path], *more: str, **changes: str) -> list[str]:
    """A whole command line; `changes` name other files, or none by an empty word."""
    named = {"cost_table": "costs", "match_flags": "flags", "adaptive_spec_config": "candidates", **changes}
    words = [f"--{flag}={files.get(file, file)}" for flag, file in named.items() if file]
    return [*words, "--max_seqs_per_batch=32", *more]


def job(words: Sequence[str]) -> command.Job:
    launch = resolve_words(words, command.COMMAND, environ={})
    assert isinstance(launch, Launch)
    return command.job_of(launch)


def document(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_a_whole_run(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second class is text that one loop drafts badly."""
    output = tmp_path / "found.json"
    assert command.main(words_of(files, "--phases=1:0.6:1,1:0.6:2", f"--output={output}")) == 0
    shown = capsys.readouterr().out
    assert shown.count("best fixed width in hindsight") == 3
    found = document(output)
    names = ["plain", *(f"{steps}@{depth}" for steps, depth in GRID), "acceptance_ema", "goodput"]
    assert [entry["name"] for entry in found["contenders"]] == names
    assert found["costs"]["policy"] is None and found["costs"]["candidates"]["model"]["loops"] == LOOPS
    by_name = {entry["name"]: entry for entry in found["contenders"]}
    one_loop = [phase["tokens_per_s"] for phase in by_name["4@1"]["phases"]]
    assert one_loop[0] > 1.3 * one_loop[1]
    goodput = by_name["goodput"]
    assert goodput["total"]["regret_oracle"] < 0.1
    oracle = found["per_phase_best_tokens_per_s"]
    assert goodput["total"]["regret_oracle"] == pytest.approx(1 - goodput["total"]["tokens_per_s"] / oracle)
    for phase in goodput["phases"]:  # of one phase the best fixed pair is the oracle
        assert phase["regret_oracle"] == phase["regret_best_fixed"]


def test_without_candidates_goodput_runs_alone(files: dict[str, Path]) -> None:
    made = job(words_of(files, "--phases=1:0.2", adaptive_spec_config=""))
    names = [contender.name for contender in command.contenders_of(made)]
    assert "goodput" in names and "acceptance_ema" not in names
    assert made.pairs is not None and made.pairs.geometry.loops == LOOPS


def test_flags_of_more_depths_than_draft_are_told_apart(files: dict[str, Path], tmp_path: Path) -> None:
    """Costs of two and three loops, flags of one to three: the first column is that of two loops then."""
    table = tmp_path / "deep.json"
    write_bundle(table, bundle_of([pair for pair in GRID if pair[1] != 1]))
    made = job(words_of(files, "--phases=1:0.2", cost_table=str(table), adaptive_spec_config=""))
    assert isinstance(made.world.population, LoopedRecorded)
    whole = read_flags(files["flags"], 8)
    assert made.world.population.depths == DEPTHS[1:]
    for stream, all_of_it in zip(made.world.population.streams, whole.streams, strict=True):
        assert np.array_equal(stream.flags, all_of_it.flags[:, 1:])


def test_no_recorded_answer_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    write_flags(empty, DEPTHS, [])
    with pytest.raises(ConfigError, match="--match_flags=.*\n.*requests: found"):
        job(words_of(files, "--phases=1:1", match_flags=str(empty)))


def test_shadow_rounds_cost_what_is_said(files: dict[str, Path]) -> None:
    assert job(words_of(files, "--phases=1:0.2", "--shadow_cost=0.5")).engine.shadow_cost == 0.5


@pytest.mark.parametrize(
    ("changes", "more", "complaint"),
    [
        ({"match_flags": ""}, [], "--match_flags=FILE is needed with costs of"),
        ({"match_flags": "shallow"}, [], "has depths 1, but costs are of depths 1, 2, 3"),
        ({"match_flags": "/nowhere"}, [], "--match_flags=/nowhere: match flags cannot be read"),
        ({"cost_table": "widths"}, [], "costs of K without loops"),
        ({"adaptive_spec_config": "/nowhere"}, [], "--adaptive_spec_config=/nowhere: cannot be read"),
        ({}, ["--acceptance=0.5", "--trace=x"], "--trace is not read with .*\n--acceptance is not read with"),
        ({}, ["--policy_config=x"], "--policy_config is not read with costs of"),
        ({}, ["--phases=1:1:3"], "allowed classes: 1 to 2"),
    ],
)
def test_refused_command_lines(
    files: dict[str, Path], changes: dict[str, str], more: list[str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        job(words_of(files, *(["--phases=1:1", *more]), **changes))


def test_candidates_of_another_model_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    content = document(files["candidates"])
    content["ranges"][0]["candidates"][0]["draft_steps"] = 3
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    with pytest.raises(UnsupportedError, match="draft_steps 3 is not prepared"):
        job(words_of(files, "--phases=1:1", adaptive_spec_config=str(other)))
