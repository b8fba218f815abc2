"""The file of adaptive speculation, its presets, and what of it an engine refuses."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from looped_world import DEPTHS, LANES, STEPS, config, geometry

from xspec.errors import ConfigError, UnsupportedError
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.spec_config import EmaSettings, parse_spec_config, spec_config_json
from xspec.policy.spec_files import PRESETS, check_fit, load_spec_config, preset

GOOD: dict[str, Any] = {
    "version": 1,
    "model": {"name": "small", "loops": 4},
    "provenance": {"kind": "measured", "source": "a test"},
    "ranges": [
        {
            "min_requests": 1,
            "max_requests": 4,
            "candidates": [
                {"draft_steps": 1, "draft_loops": 2, "up": 0.9, "off": 0.5},
                {"draft_steps": 4, "draft_loops": 1, "down": 0.4, "acceptance": 0.6},
            ],
            "initial": 1,
            "ema": {"beta": 0.05},
        },
        {
            "min_requests": 5,
            "max_requests": 32,
            "candidates": [{"draft_steps": 1, "draft_loops": 1}],
            "initial_off": True,
        },
    ],
    "fingerprint": {"device": "cpu"},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with the value at a dotted path replaced; None removes the key."""
    raw = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    held: Any = raw
    for name in parents:
        held = held[int(name)] if isinstance(held, list) else held[name]
    if value is None:
        del held[last]
    else:
        held[int(last) if isinstance(held, list) else last] = value
    return raw


def reasons(raw: object) -> tuple[str, ...]:
    with pytest.raises(UnsupportedError) as caught:
        parse_spec_config(raw, "--adaptive_spec_config=f.json")
    assert str(caught.value).startswith(
        "--adaptive_spec_config=f.json is no valid adaptive speculation config"
    )
    return caught.value.reasons


def test_a_good_file_is_read_and_written_back() -> None:
    found = parse_spec_config(GOOD, "f")
    assert (found.steps, found.depths) == ((1, 4), (1, 2))
    assert [str(one) for one in found.candidates] == ["1@2", "4@1", "1@1"]
    assert found.ema_of(0) == EmaSettings(beta=0.05)
    assert found.ema_of(1) == EmaSettings()
    assert found.ranges[1].initial_off and not found.ranges[0].initial_off
    written = json.loads(json.dumps(spec_config_json(found)))
    assert parse_spec_config(written, "f") == found
    assert "up" not in written["ranges"][0]["candidates"][1]
    assert parse_spec_config(json.loads(json.dumps(spec_config_json(config()))), "f") == config()


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", 2, "version: found 2; allowed: 1"),
        ("version", True, "version: found true; allowed: 1"),
        ("ranges", [], "ranges: found []; allowed: a list of batch ranges, not empty"),
        ("provenance.kind", "guess", 'provenance.kind: found "guess"; allowed: "measured", "prior"'),
        ("model.loops", 1, "model.loops: found 1; allowed: integers from 2 to 1024"),
        ("ranges.0.candidates.0.draft_steps", 17, "draft_steps: found 17; allowed: integers from 1 to 16"),
        ("ranges.0.candidates.0.draft_steps", 0, "draft_steps: found 0; allowed: integers from 1 to 16"),
        ("ranges.0.candidates.0.draft_loops", 4, "found 4; allowed: integers from 1 to 3, below model.loops"),
        ("ranges.0.candidates.0.draft_loops", None, "draft_loops is missing: model.loops is 4"),
        ("ranges.0.candidates.0.up", None, "up is missing: there is a candidate after it"),
        ("ranges.0.candidates.1.down", None, "down is missing: there is a candidate before it"),
        ("ranges.0.candidates.1.up", 0.9, "up: found 0.9; allowed: nothing, there is no candidate after it"),
        (
            "ranges.0.candidates.0.down",
            0.1,
            "down: found 0.1; allowed: nothing, there is no candidate before",
        ),
        ("ranges.0.candidates.0.up", 1.5, "up: found 1.5; allowed: numbers from 0 to 1"),
        ("ranges.0.candidates.1.acceptance", 0, "acceptance: found 0; allowed: numbers above 0 to 1"),
        ("ranges.0.initial", 2, "ranges[0].initial: found 2; allowed: a candidate's place, 0 to 1"),
        ("ranges.0.min_requests", 5, "ranges[0]: found 5-4 requests; allowed: min_requests up to"),
        ("ranges.1.min_requests", 4, "ranges[1]: found 4-32 requests after 1-4 requests; allowed: ascending"),
        ("ranges.0.ema.beta", 0, "ranges[0].ema.beta: found 0; allowed: numbers above 0 to 1"),
        ("ranges.0.candidates.1.draft_steps", True, "found true; allowed: integers from 1 to 16"),
        ("ranges.0.initial_off", 1, "initial_off: found 1; allowed: true or false"),
        (
            "disable",
            {"backoff_first": 9, "backoff_cap": 8},
            "disable: found backoff_first 9 and backoff_cap 8",
        ),
        ("disable", {"margin": 1.0}, "disable.margin: found 1.0; allowed: numbers from 0 to below 1"),
        ("goodput", {"shadow_share": 0}, "goodput.shadow_share: found 0; allowed: numbers above 0 to 1"),
        ("goodput", {"window": 9}, 'goodput: unknown key "window" (did you mean "window_flags"?)'),
        ("betas", 1, 'unknown key "betas"'),
    ],
)
def test_one_mistake(path: str, value: Any, said: str) -> None:
    (reason,) = reasons(changed(path, value))
    assert said in reason


@pytest.mark.parametrize(
    "path",
    ["version", "model", "ranges", "goodput", "ranges.0.ema", "ranges.0.candidates.0.up", "fingerprint"],
)
def test_null_is_no_value(path: str) -> None:
    raw = changed(path, 0)
    *parents, last = path.split(".")
    held: Any = raw
    for name in parents:
        held = held[int(name)] if isinstance(held, list) else held[name]
    held[last] = None
    assert any("found null" in reason for reason in reasons(raw))


def test_thresholds_need_a_dead_band() -> None:
    raw = changed(
        "ranges.0.candidates",
        [
            {"draft_steps": 1, "draft_loops": 2, "up": 0.9},
            {"draft_steps": 2, "draft_loops": 2, "up": 0.7, "down": 0.7},
            {"draft_steps": 4, "draft_loops": 1, "down": 0.4},
        ],
    )
    (reason,) = reasons(raw)
    assert (
        reason == "ranges[0].candidates[1]: found down 0.7 and up 0.7; allowed: down below up, a dead band "
        "between them"
    )


def test_the_same_pair_twice() -> None:
    raw = changed("ranges.0.candidates.1", {"draft_steps": 1, "draft_loops": 2, "down": 0.4})
    assert reasons(raw) == (
        "ranges[0].candidates[1]: 1@2 again, which is candidates[0]; allowed: each pair once",
    )


def test_all_mistakes_at_once() -> None:
    raw = changed("version", 3)
    raw["model"]["loop"] = 4
    raw["ranges"][0]["candidates"][0]["draft_steps"] = 99
    raw["ranges"][1]["candidates"][0]["draft_loops"] = "1"
    raw["disable"] = {"checks": 0}
    del raw["provenance"]
    found = reasons(raw)
    assert len(found) == 6
    for place in ("version", "model", "ranges[0]", "ranges[1]", "disable.checks", "provenance is missing"):
        assert any(place in reason for reason in found)


def test_candidates_of_other_drafters_have_no_loops() -> None:
    raw = changed("model", {"name": "mtp"})
    assert all("allowed: nothing, because model.loops is not given" in reason for reason in reasons(raw))
    for one in raw["ranges"]:
        for candidate in one["candidates"]:
            del candidate["draft_loops"]
    found = parse_spec_config(raw, "f")
    assert found.depths == () and [str(one) for one in found.candidates] == ["1", "4", "1"]


# -- files and engines ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_priors_and_say_where_from(name: str) -> None:
    found = preset(name)
    assert found.provenance.kind == "prior" and len(found.provenance.source) > 40
    assert found.ranges[0].min_requests == 1
    assert load_spec_config(name) == found
    loops = found.model.loops
    assert loops is not None
    check_fit(found, CandidateGeometry(LANES, tuple(range(1, 17)), tuple(range(1, loops)), loops), name)


def test_nanbeige_drafts_little_because_it_is_below_break_even() -> None:
    """39 % of loop 1's picks are those of loop 2, and d / D is 50 %: for the controller to switch off."""
    found = preset("nanbeige4.2_3b")
    assert max(one.draft_steps for one in found.candidates) <= 2
    assert all(one.acceptance is not None and one.acceptance < 0.5 for one in found.candidates)
    assert all(one.initial == 0 for one in found.ranges)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    with pytest.raises(
        ConfigError, match=r"cannot be read.*presets?: huginn_0125, nanbeige4.2_3b, ouro_1.4b"
    ):
        load_spec_config(str(file))
    file.write_text('{"version": 1, "version": 1}')
    with pytest.raises(ConfigError, match="not JSON: keys given twice: version"):
        load_spec_config(str(file))
    file.write_text(json.dumps(GOOD))
    assert load_spec_config(str(file)) == parse_spec_config(GOOD, "f")


def test_an_engine_refuses_what_it_has_not_prepared() -> None:
    check_fit(config(), geometry(), "f")
    narrow = CandidateGeometry(LANES, (1, 2), (2, 3), 4)
    with pytest.raises(UnsupportedError) as caught:
        check_fit(parse_spec_config(GOOD, "f"), narrow, "f")
    assert len(caught.value.reasons) == 3
    assert "4@1): draft_steps 4 is not prepared; allowed: 1, 2" in caught.value.reasons[0]
    assert "draft_loops 1 is none of this drafter's; allowed: 2, 3" in caught.value.reasons[1]
    with pytest.raises(UnsupportedError, match="for 4 loops, the target of this launch has 8"):
        check_fit(config(), CandidateGeometry(LANES, STEPS, tuple(range(1, 8)), 8), "f")
    with pytest.raises(UnsupportedError, match="for 4 loops, the target of this launch is not looped"):
        check_fit(config(), CandidateGeometry(LANES, STEPS), "f")


def test_a_geometry_is_whole() -> None:
    with pytest.raises(ConfigError, match="draft steps"):
        CandidateGeometry(LANES, (2, 1), DEPTHS, 4)
    with pytest.raises(ConfigError, match="one without the other"):
        CandidateGeometry(LANES, STEPS, DEPTHS)
