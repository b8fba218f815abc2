"""The file of --adaptive_spec_config: what it means, written as it is read, and all its refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xspec.core.shapes import BucketGrid
from xspec.cost.looped import IdealCosts
from xspec.errors import ConfigError, UnsupportedError
from xspec.policy.fixed import FixedPolicy
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.goodput import GoodputPolicy
from xspec.policy.loop_candidates import AdaptiveController
from xspec.policy.make_spec import SPECULATION_POLICIES, make_speculation_policy
from xspec.policy.spec_config import (
    AdaptiveSpecConfig,
    BatchRange,
    Candidate,
    DisableSettings,
    EmaSettings,
    GoodputSettings,
    ModelFacts,
    Provenance,
    parse_spec_config,
    spec_config_json,
)
from xspec.policy.spec_files import PRESETS, check_fit, load_spec_config

SMALL: dict[str, Any] = {
    "version": 1,
    "model": {"name": "small", "loops": 4},
    "provenance": {"kind": "measured", "source": "a test"},
    "ranges": [
        {
            "min_requests": 1,
            "max_requests": 7,
            "candidates": [
                {"draft_steps": 1, "draft_loops": 1, "up": 0.8},
                {"draft_steps": 4, "draft_loops": 1, "down": 0.5, "up": 0.9, "off": 0.3, "acceptance": 0.7},
                {"draft_steps": 8, "draft_loops": 1, "down": 0.75},
            ],
            "initial": 1,
        },
        {"min_requests": 8, "max_requests": 32, "candidates": [{"draft_steps": 2, "draft_loops": 2}]},
    ],
}


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = copy.deepcopy(SMALL)
    change(document)
    return document


def reasons(raw: Any) -> list[str]:
    with pytest.raises(UnsupportedError) as error:
        parse_spec_config(raw, "--flag=x.json")
    assert str(error.value).startswith("--flag=x.json is no valid adaptive speculation config")
    return list(error.value.reasons)


# -- what is read ---------------------------------------------------------------------------------


def test_the_document() -> None:
    config = parse_spec_config(SMALL, "x")
    assert config.model == ModelFacts("small", 4)
    assert config.provenance == Provenance("measured", "a test")
    first, second = config.ranges
    assert (first.min_requests, first.max_requests, first.initial, first.initial_off) == (1, 7, 1, False)
    assert first.candidates[1] == Candidate(4, 1, up=0.9, down=0.5, off=0.3, acceptance=0.7)
    assert second.candidates == (Candidate(2, 2),)
    assert config.steps == (1, 2, 4, 8) and config.depths == (1, 2)
    assert [str(one) for one in config.candidates] == ["1@1", "4@1", "8@1", "2@2"]


def test_nothing_said_is_the_defaults() -> None:
    config = parse_spec_config(SMALL, "x")
    assert (config.ema, config.disable, config.goodput) == (
        EmaSettings(),
        DisableSettings(),
        GoodputSettings(),
    )
    assert config.fingerprint == {} and config.provenance.created_at is None


def test_a_range_may_have_its_own_averaging() -> None:
    config = parse_spec_config(changed(lambda d: d["ranges"][1].update(ema={"beta": 0.25})), "x")
    assert config.ema_of(0) == EmaSettings()
    assert config.ema_of(1) == EmaSettings(beta=0.25)


def test_without_loops_candidates_are_k_alone() -> None:
    document = changed(lambda d: d["model"].pop("loops"))
    for one in document["ranges"]:
        for candidate in one["candidates"]:
            del candidate["draft_loops"]
    config = parse_spec_config(document, "x")
    assert config.depths == () and [str(one) for one in config.candidates] == ["1", "4", "8", "2"]


def test_the_largest_values_that_are_allowed() -> None:
    def widen(d: dict[str, Any]) -> None:
        d["ema"] = {"beta": 1}
        d["disable"] = {"margin": 0, "backoff_first": 5, "backoff_cap": 5}
        d["ranges"][0]["candidates"][1] |= {"off": 7, "acceptance": 1}

    config = parse_spec_config(changed(widen), "x")
    assert config.ema.beta == 1.0 and config.disable.margin == 0.0
    assert config.candidates[1].off == 7.0 and config.candidates[1].acceptance == 1.0


# -- it is written as it is read ------------------------------------------------------------------


def test_written_and_read_again() -> None:
    config = parse_spec_config(
        changed(
            lambda d: d.update(
                fingerprint={"torch": "2.13", "buckets": [1, 8]},
                ema={"interval": 9},
                disable={"enabled": False, "probe_share": 0.5},
                goodput={"window_flags": 99},
            )
        ),
        "x",
    )
    document = json.loads(json.dumps(spec_config_json(config)))
    assert parse_spec_config(document, "x") == config
    assert document["disable"]["backoff_cap"] == DisableSettings().backoff_cap  # no default left out
    assert "ema" not in document["ranges"][0] and "down" not in document["ranges"][0]["candidates"][0]
    assert "fingerprint" not in spec_config_json(replace(config, fingerprint={}))


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 3)), min_size=1, max_size=6, unique=True),
    st.floats(0.01, 1.0),
    st.integers(1, 1000),
    st.one_of(st.none(), st.floats(0.0, 5.0)),
)
def test_any_config_is_written_as_it_is_read(
    pairs: list[tuple[int, int]], beta: float, interval: int, off: float | None
) -> None:
    last = len(pairs) - 1
    candidates = tuple(
        Candidate(
            steps, depth, up=0.75 if j < last else None, down=0.25 if j else None, off=off, acceptance=beta
        )
        for j, (steps, depth) in enumerate(pairs)
    )
    config = AdaptiveSpecConfig(
        model=ModelFacts("m", 4),
        provenance=Provenance("prior", "s", "2026-01-01"),
        ranges=(BatchRange(1, 32, candidates, last, True, EmaSettings(beta, interval, 3)),),
    )
    assert parse_spec_config(json.loads(json.dumps(spec_config_json(config))), "x") == config


# -- what is refused ------------------------------------------------------------------------------

REFUSED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    # the whole
    (lambda d: d.pop("version"), "version is missing"),
    (lambda d: d.pop("model"), "model is missing"),
    (lambda d: d.pop("provenance"), "provenance is missing"),
    (lambda d: d.pop("ranges"), "ranges is missing"),
    (lambda d: d.update(version=2), "version: found 2; allowed: 1"),
    (lambda d: d.update(version=True), "version: found true; allowed: 1"),
    (lambda d: d.update(version=1.0), "version: found 1.0; allowed: 1"),
    (lambda d: d.update(rages=[]), 'unknown key "rages" (did you mean "ranges"?)'),
    (lambda d: d.update(fingerprint=[]), "fingerprint: found []; allowed: a JSON object"),
    (lambda d: d.update(ema=None), "ema: found null; allowed: a JSON object"),
    # model and provenance
    (lambda d: d["model"].pop("name"), "model: name is missing"),
    (lambda d: d["model"].update(name=""), 'model.name: found ""; allowed: text, not empty'),
    (lambda d: d["model"].update(loops=1), "model.loops: found 1; allowed: integers from 2 to 256"),
    (lambda d: d["model"].update(loops=4.0), "model.loops: found 4.0; allowed: integers from 2 to 256"),
    (lambda d: d["model"].update(loops=None), "model.loops: found null; allowed: integers from 2 to 256"),
    (lambda d: d["provenance"].pop("kind"), "provenance: kind is missing"),
    (lambda d: d["provenance"].pop("source"), "provenance: source is missing"),
    (
        lambda d: d["provenance"].update(kind="guess"),
        'provenance.kind: found "guess"; allowed: "measured", "prior"',
    ),
    (
        lambda d: d["provenance"].update(created_at=7),
        "provenance.created_at: found 7; allowed: text, not empty",
    ),
    # ranges
    (lambda d: d.update(ranges=[]), "ranges: found []; allowed: a list of batch ranges, not empty"),
    (lambda d: d.update(ranges=[3]), "ranges[0]: found 3; allowed: a JSON object"),
    (lambda d: d["ranges"][0].pop("min_requests"), "ranges[0]: min_requests is missing"),
    (lambda d: d["ranges"][0].pop("max_requests"), "ranges[0]: max_requests is missing"),
    (lambda d: d["ranges"][0].pop("candidates"), "ranges[0]: candidates is missing"),
    (
        lambda d: d["ranges"][0].update(min_requests=0),
        "ranges[0].min_requests: found 0; allowed: integers from 1 to 1000000",
    ),
    (
        lambda d: d["ranges"][0].update(min_requests=8),
        "ranges[0]: found 8-7 requests; allowed: min_requests up to max_requests",
    ),
    (
        lambda d: d["ranges"][1].update(min_requests=7),
        "ranges[1]: found 7-32 requests after 1-7 requests; allowed: ascending ranges that do not overlap",
    ),
    (
        lambda d: d["ranges"].reverse(),
        "ranges[1]: found 1-7 requests after 8-32 requests; allowed: ascending ranges that do not overlap",
    ),
    (
        lambda d: d["ranges"][0].update(candidates=[]),
        "ranges[0].candidates: found []; allowed: a list of candidates, not empty",
    ),
    (
        lambda d: d["ranges"][0].update(initial=3),
        "ranges[0].initial: found 3; allowed: a candidate's place, 0 to 2",
    ),
    (
        lambda d: d["ranges"][0].update(initial=-1),
        "ranges[0].initial: found -1; allowed: integers from 0 to 2147483647",
    ),
    (
        lambda d: d["ranges"][0].update(initial_off=1),
        "ranges[0].initial_off: found 1; allowed: true or false",
    ),
    (
        lambda d: d["ranges"][0].update(ema={"beta": 0}),
        "ranges[0].ema.beta: found 0; allowed: numbers above 0 to 1",
    ),
    # candidates
    (lambda d: candidate(d).pop("draft_steps"), "ranges[0].candidates[1]: draft_steps is missing"),
    (
        lambda d: candidate(d).update(draft_steps=0),
        "ranges[0].candidates[1].draft_steps: found 0; allowed: integers from 1 to 16",
    ),
    (
        lambda d: candidate(d).update(draft_steps=17),
        "ranges[0].candidates[1].draft_steps: found 17; allowed: integers from 1 to 16",
    ),
    (
        lambda d: candidate(d).update(draft_loops=0),
        "ranges[0].candidates[1].draft_loops: found 0; allowed: integers from 1 to 255",
    ),
    (
        lambda d: candidate(d).update(draft_loops=4),
        "ranges[0].candidates[1].draft_loops: found 4; allowed: integers from 1 to 3, below model.loops",
    ),
    (
        lambda d: candidate(d).pop("draft_loops"),
        "ranges[0].candidates[1].draft_loops is missing: model.loops is 4; allowed: integers from 1 to 3",
    ),
    (
        lambda d: candidate(d, 2).update(draft_steps=4),
        "ranges[0].candidates[2]: 4@1 again, which is candidates[1]; allowed: each pair once",
    ),
    (
        lambda d: candidate(d).pop("up"),
        "ranges[0].candidates[1].up is missing: there is a candidate after it",
    ),
    (
        lambda d: candidate(d).pop("down"),
        "ranges[0].candidates[1].down is missing: there is a candidate before it",
    ),
    (
        lambda d: candidate(d, 0).update(down=0.1),
        "ranges[0].candidates[0].down: found 0.1; allowed: nothing, there is no candidate before it",
    ),
    (
        lambda d: candidate(d, 2).update(up=0.9),
        "ranges[0].candidates[2].up: found 0.9; allowed: nothing, there is no candidate after it",
    ),
    (
        lambda d: candidate(d).update(up=0.5),
        "ranges[0].candidates[1]: found down 0.5 and up 0.5; allowed: down below up, a dead band between "
        "them",
    ),
    (
        lambda d: candidate(d).update(up=1.01),
        "ranges[0].candidates[1].up: found 1.01; allowed: numbers from 0 to 1",
    ),
    (
        lambda d: candidate(d).update(down=-0.1),
        "ranges[0].candidates[1].down: found -0.1; allowed: numbers from 0 to 1",
    ),
    (
        lambda d: candidate(d).update(up=True),
        "ranges[0].candidates[1].up: found true; allowed: numbers from 0 to 1",
    ),
    (
        lambda d: candidate(d).update(up=None),
        "ranges[0].candidates[1].up: found null; allowed: numbers from 0 to 1",
    ),
    (
        lambda d: candidate(d).update(acceptance=0),
        "ranges[0].candidates[1].acceptance: found 0; allowed: numbers above 0 to 1",
    ),
    (
        lambda d: candidate(d).update(k=3),
        'ranges[0].candidates[1]: unknown key "k" (allowed: draft_steps, draft_loops, '
        "up, down, off, acceptance)",
    ),
    # settings
    (lambda d: d.update(ema={"beta": 1.5}), "ema.beta: found 1.5; allowed: numbers above 0 to 1"),
    (
        lambda d: d.update(ema={"interval": 0}),
        "ema.interval: found 0; allowed: integers from 1 to 2147483647",
    ),
    (
        lambda d: d.update(ema={"min_feedback": 0}),
        "ema.min_feedback: found 0; allowed: integers from 1 to 2147483647",
    ),
    (lambda d: d.update(disable={"enabled": "yes"}), 'disable.enabled: found "yes"; allowed: true or false'),
    (
        lambda d: d.update(disable={"margin": 1}),
        "disable.margin: found 1; allowed: numbers from 0 to below 1",
    ),
    (
        lambda d: d.update(disable={"checks": 0}),
        "disable.checks: found 0; allowed: integers from 1 to 2147483647",
    ),
    (
        lambda d: d.update(disable={"backoff_first": 9, "backoff_cap": 8}),
        "disable: found backoff_first 9 and backoff_cap 8; allowed: backoff_first up to backoff_cap",
    ),
    (
        lambda d: d.update(disable={"probe_rounds": 0}),
        "disable.probe_rounds: found 0; allowed: integers from 1 to 2147483647",
    ),
    (
        lambda d: d.update(disable={"probe_share": 0}),
        "disable.probe_share: found 0; allowed: numbers above 0 to below 1",
    ),
    (
        lambda d: d.update(disable={"probe_share": 1}),
        "disable.probe_share: found 1; allowed: numbers above 0 to below 1",
    ),
    (
        lambda d: d.update(goodput={"margin": -0.1}),
        "goodput.margin: found -0.1; allowed: numbers from 0 to below 1",
    ),
    (
        lambda d: d.update(goodput={"checks": 0}),
        "goodput.checks: found 0; allowed: integers from 1 to 2147483647",
    ),
    (
        lambda d: d.update(goodput={"interval": 0}),
        "goodput.interval: found 0; allowed: integers from 1 to 2147483647",
    ),
    (
        lambda d: d.update(goodput={"shadow_share": 0}),
        "goodput.shadow_share: found 0; allowed: numbers above 0 to 1",
    ),
    (
        lambda d: d.update(goodput={"shadow_burst": 0}),
        "goodput.shadow_burst: found 0; allowed: integers from 1 to 2147483647",
    ),
    (
        lambda d: d.update(goodput={"window_flags": 15}),
        "goodput.window_flags: found 15; allowed: integers from 16 to 2147483647",
    ),
]


def candidate(document: dict[str, Any], j: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = document["ranges"][0]["candidates"][j]
    return found


@pytest.mark.parametrize("change, reason", REFUSED, ids=[reason[:60] for _, reason in REFUSED])
def test_refused(change: Callable[[dict[str, Any]], Any], reason: str) -> None:
    found = reasons(changed(change))
    assert len(found) == 1
    assert found[0].startswith(reason)


def test_every_mistake_is_told() -> None:
    def spoil(d: dict[str, Any]) -> None:
        d.update(version=3, ema={"beta": 0}, provenance={"kind": "measured"}, extra=1)
        candidate(d)["draft_steps"] = 0
        d["ranges"][1]["initial"] = 1

    found = "\n".join(reasons(changed(spoil)))
    for told in (
        "version: found 3",
        "ema.beta: found 0",
        "provenance: source is missing",
        'unknown key "extra"',
        "ranges[0].candidates[1].draft_steps: found 0",
        "ranges[1].initial: found 1",
    ):
        assert told in found


@pytest.mark.parametrize("raw", [[], 3, None, "x"])
def test_a_document_must_be_an_object(raw: Any) -> None:
    assert "the whole" in reasons(raw)[0]


def test_loops_without_looped_candidates_and_the_other_way_round() -> None:
    found = reasons(changed(lambda d: d["model"].pop("loops")))
    assert len(found) == 4  # one for each candidate
    assert (
        found[3]
        == "ranges[1].candidates[0].draft_loops: found 2; allowed: nothing, because model.loops is not given"
    )


@pytest.mark.parametrize("off", [-0.01, 10**400, float("inf"), float("nan"), "0.5", True])
def test_off_must_be_finite(off: Any) -> None:
    found = reasons(changed(lambda d: candidate(d).update(off=off)))
    assert len(found) == 1 and found[0].startswith("ranges[0].candidates[1].off: found ")


def test_places_are_those_of_the_file() -> None:
    """A range that cannot be read does not move the others up."""

    def spoil(d: dict[str, Any]) -> None:
        d["ranges"][0]["initial"] = "x"
        d["ranges"][1]["candidates"][0]["draft_loops"] = 4
        d["ranges"].append({**copy.deepcopy(d["ranges"][1]), "min_requests": 20})

    found = reasons(changed(spoil))
    assert any(one.startswith("ranges[0].initial: ") for one in found)
    assert any(one.startswith("ranges[1].candidates[0].draft_loops: ") for one in found)
    assert any(one.startswith("ranges[2]: found 20-32 requests after 8-32 requests") for one in found)
    assert len(found) == 4


# -- files ----------------------------------------------------------------------------------------


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(SMALL))
    assert load_spec_config(str(file)) == parse_spec_config(SMALL, "x")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_spec_config(str(tmp_path / "none.json"))
    assert "none.json: cannot be read: No such file or directory" in str(error.value)
    assert all(name in str(error.value) for name in PRESETS)


@pytest.mark.parametrize(
    "content, why",
    [
        (b"{", "not JSON: "),
        (b"\xff", "not JSON: "),
        (b'{"version": 1, "version": 1}', "not JSON: keys given twice: version"),
        (b'{"version": NaN}', "not JSON: NaN is no JSON number"),
        (b"[" * 100_000, "not JSON: "),
    ],
)
def test_files_that_are_no_json(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_spec_config(str(file))
    assert f"--adaptive_spec_config={file}: {why}" in str(error.value)


def test_a_wrong_file_names_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps({**SMALL, "version": 9}))
    with pytest.raises(UnsupportedError) as error:
        load_spec_config(str(file))
    assert str(error.value).startswith(
        f"--adaptive_spec_config={file} is no valid adaptive speculation config"
    )


# -- whether it fits ------------------------------------------------------------------------------

LANES = BucketGrid([1, 8, 32])
GEOMETRY = CandidateGeometry(LANES, (1, 2, 4, 8), (1, 2, 3), 4)


def misfits(geometry: CandidateGeometry) -> list[str]:
    with pytest.raises(UnsupportedError) as error:
        check_fit(parse_spec_config(SMALL, "x"), geometry, "--flag")
    assert str(error.value).startswith("--flag does not fit this engine")
    return list(error.value.reasons)


def test_it_fits_where_everything_is_prepared() -> None:
    check_fit(parse_spec_config(SMALL, "x"), GEOMETRY, "--flag")
    check_fit(parse_spec_config(SMALL, "x"), CandidateGeometry(LANES, (1, 2, 4, 8, 9), (1, 2), 4), "--flag")


def test_steps_that_are_not_prepared() -> None:
    assert misfits(replace(GEOMETRY, steps=(1, 2, 4))) == [
        "ranges[0].candidates[2] (8@1): draft_steps 8 is not prepared; allowed: 1, 2, 4 (see "
        "--num_speculative_tokens)"
    ]


def test_depths_that_the_drafter_lacks() -> None:
    assert misfits(replace(GEOMETRY, depths=(1, 3))) == [
        "ranges[1].candidates[0] (2@2): draft_loops 2 is none of this drafter's; allowed: 1, 3"
    ]


@pytest.mark.parametrize("depths, loops, has", [((), None, "is not looped"), ((1,), 2, "has 2")])
def test_other_loops(depths: tuple[int, ...], loops: int | None, has: str) -> None:
    assert misfits(CandidateGeometry(LANES, (1, 2, 4, 8), depths, loops)) == [
        f"model.loops: the candidates are for 4 loops, the target of this launch {has}"
    ]


@pytest.mark.parametrize("steps", [(), (0, 1), (2, 1), (1, 1)])
def test_geometries_that_cannot_be(steps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="prepared draft steps"):
        CandidateGeometry(LANES, steps)
    with pytest.raises(ConfigError, match="one without the other"):
        CandidateGeometry(LANES, (1,), (1,), None)


# -- policies by name -----------------------------------------------------------------------------


def test_policies_by_name() -> None:
    config = parse_spec_config(SMALL, "x")
    made = {
        name: make_speculation_policy(name, config, IdealCosts(4), GEOMETRY, draft_steps=4, depth=2)
        for name in SPECULATION_POLICIES
    }
    assert [type(one) for one in made.values()] == [FixedPolicy, AdaptiveController, GoodputPolicy]
    assert [one.name for one in made.values()] == list(SPECULATION_POLICIES)
    assert made["fixed"].status()["draft_loops"] == 2
    make_speculation_policy("acceptance_ema", config, None, GEOMETRY)
    make_speculation_policy("goodput", None, IdealCosts(4), GEOMETRY)


def test_policies_that_lack_something() -> None:
    with pytest.raises(
        ConfigError, match="--speculation_policy=best: allowed: fixed, acceptance_ema, goodput"
    ):
        make_speculation_policy("best", None, None, GEOMETRY)
    with pytest.raises(ConfigError, match="acceptance_ema needs --adaptive_spec_config=FILE"):
        make_speculation_policy("acceptance_ema", None, IdealCosts(4), GEOMETRY)
    with pytest.raises(ConfigError, match="goodput needs costs"):
        make_speculation_policy("goodput", parse_spec_config(SMALL, "x"), None, GEOMETRY)
    for name in ("acceptance_ema", "goodput"):
        with pytest.raises(UnsupportedError, match="does not fit this engine"):
            make_speculation_policy(
                name, parse_spec_config(SMALL, "x"), IdealCosts(2), CandidateGeometry(LANES, (1,), (1,), 2)
            )
