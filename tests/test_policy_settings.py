"""The file of the draft-step control."""

from __future__ import annotations

import pytest

from xspec.cost.settings import CalibrationSettings, Control
from xspec.errors import UnsupportedError
from xspec.policy.draft_step import DraftStepPolicy
from xspec.policy.make import make_policy
from xspec.policy.settings import DraftStepSettings, parse_draft_step_config
from xspec.policy.target_verify import TargetVerifyPolicy


def reasons(raw: object) -> tuple[str, ...]:
    with pytest.raises(UnsupportedError) as caught:
        parse_draft_step_config(raw, "--adaptive_draft_step_config f.json")
    assert str(caught.value).startswith("--adaptive_draft_step_config f.json is no valid")
    return caught.value.reasons


def test_the_example_of_the_document() -> None:
    settings, calibration = parse_draft_step_config(
        {
            "version": 1,
            "policy": {"window_size": 20, "update_interval": 5, "switch_min_gain": 0.05},
            "calibration": {
                "model": "additive",
                "request_buckets": [1, 2, 4, 8, 16],
                "contexts": [{"prefill_tokens": 2048, "min_kv_length": 1, "max_kv_length": 4096}],
                "warmup_steps": 8,
                "window_steps": 32,
                "windows_per_point": 3,
                "token_seed": 1,
            },
        },
        "f.json",
    )
    assert settings == DraftStepSettings(20, 5, 0.05, True)
    assert calibration is not None
    assert (calibration.request_buckets, calibration.window_steps) == ((1, 2, 4, 8, 16), 32)


def test_either_part_may_be_missing() -> None:
    assert parse_draft_step_config({"version": 1}, "f") == (DraftStepSettings(), None)
    changed = {"switch_min_gain": 0.02, "allow_plain_rounds": False}
    assert parse_draft_step_config({"version": 1, "policy": changed}, "f") == (
        DraftStepSettings(switch_min_gain=0.02, allow_plain_rounds=False),
        None,
    )
    assert parse_draft_step_config({"version": 1, "calibration": {}}, "f")[1] == CalibrationSettings()


def test_all_mistakes_at_once() -> None:
    found = reasons(
        {
            "version": 2,
            "policy": {"window_size": 0, "update_interval": True, "switch_min_gain": -1, "window": 3},
            "calibration": {"warmup_steps": "8", "extra": 1},
            "polcy": {},
        }
    )
    for part in (
        "version: found 2; allowed: 1",
        "policy.window_size: found 0",
        "policy.update_interval: found true",
        "policy.switch_min_gain: found -1",
        'policy: unknown key "window"',
        "calibration: warmup_steps",
        'calibration: unknown key "extra"',
        'unknown key "polcy"',
    ):
        assert sum(part in reason for reason in found) == 1, (part, found)
    assert len(found) == 8


@pytest.mark.parametrize(
    "raw",
    [
        {"version": 1, "step_cost_models": []},
        {"version": 1, "calibration": {"step_cost_models": {}}},
        {"version": 1, "policy": {"step_cost_models": 1}},
        {"version": 1, "calibration": {"contexts": [{"step_cost_models": 1}]}},
    ],
)
def test_precomputed_costs_are_refused_with_the_way_to_load_them(raw: object) -> None:
    told = [reason for reason in reasons(raw) if "step_cost_models" in reason]
    assert len(told) == 1
    assert "not supported by this file" in told[0] and "--adaptive_draft_step_cost_table" in told[0]


@pytest.mark.parametrize("raw", [None, [], "x", 1, {}, {"version": "1"}, {"version": True}, {"version": 1.0}])
def test_what_is_no_configuration(raw: object) -> None:
    assert reasons(raw)


@pytest.mark.parametrize("gain", [float("nan"), float("inf"), "0.05", None, [0.1]])
def test_gains_are_finite_numbers(gain: object) -> None:
    assert reasons({"version": 1, "policy": {"switch_min_gain": gain}})


def test_make_policy_knows_both_controls() -> None:
    from policy_world import FakeCosts, geometry

    costs = FakeCosts(lambda *_: 1.0)
    assert isinstance(make_policy(Control.DRAFT_STEP, costs, geometry(3)), DraftStepPolicy)
    assert isinstance(make_policy(Control.TARGET_VERIFY, costs, geometry(3)), TargetVerifyPolicy)
