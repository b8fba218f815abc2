"""Settings of the adaptive policies, and the JSON of the draft-step control (`adaptive_draft_step_config`).

Takes parsed JSON; who reads the file names it in `where`. All mistakes in it are reported, not only the
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xspec.cost.read import BadValue, Reader, count, mapping, number, read_object, record, refusal, truth
from xspec.cost.settings import CalibrationSettings, Control, parse_calibration
from xspec.errors import CalibrationError, UnsupportedError

VERSION = 1
MAX_WINDOW_BATCHES = 10_000
PRECOMPUTED = "step_cost_models"


@dataclass(frozen=True, slots=True)
class DraftStepSettings:
    """The policy section of the document. `allow_plain_rounds` is our extension: may depth 0 be chosen."""

    window_size: int = 20  # completed speculative batches that acceptance is averaged over
    update_interval: int = 5  # completed decode batches between two scorings
    switch_min_gain: float = 0.05  # a switch must promise strictly more
    allow_plain_rounds: bool = True


DEFAULTS = DraftStepSettings()

VERIFY_DEFAULTS = DraftStepSettings(switch_min_gain=0.02)
"""Of target verification, which only switches between plain and speculative rounds: budgets follow every
round, so little noise is left in what the two promise, and the dwell alone keeps them from flapping."""


def default_settings(control: Control) -> DraftStepSettings:
    return VERIFY_DEFAULTS if control is Control.TARGET_VERIFY else DEFAULTS


def parse_draft_step_config(raw: object, where: str) -> tuple[DraftStepSettings, CalibrationSettings | None]:
    """{"version": 1, "policy": {...}, "calibration": {...}}, the last two optional; None: no calibration.

    `where` says whose object it is (a flag and file) in the UnsupportedError, which names every key that is
    unknown or holds a value that is not allowed.
    """
    mistakes: list[str] = []
    if _mentions(raw, PRECOMPUTED):
        mistakes.append(
            f"{PRECOMPUTED}: loading precomputed step costs is not supported by this file; "
            "load a saved table with --adaptive_draft_step_cost_table"
        )
    read = read_object(_without(raw, PRECOMPUTED), _SECTIONS, "", mistakes, needed=("version",))
    if mistakes:
        raise UnsupportedError(f"{where} is no valid draft-step configuration", mistakes)
    return read.get("policy", DraftStepSettings()), read.get("calibration")


def _version(value: Any, where: str, mistakes: list[str]) -> int:
    if value != VERSION or isinstance(value, bool) or not isinstance(value, int):
        raise BadValue(refusal(where, value, str(VERSION)))
    return value


def _window(value: Any, where: str, mistakes: list[str]) -> int:
    batches: int = count(1)(value, where, mistakes)
    if batches > MAX_WINDOW_BATCHES:
        raise BadValue(refusal(where, value, f"integers from 1 to {MAX_WINDOW_BATCHES}"))
    return batches


def _calibration(value: Any, where: str, mistakes: list[str]) -> CalibrationSettings | None:
    try:
        return parse_calibration(mapping(value, where, mistakes), where)
    except CalibrationError as error:
        mistakes.extend(f"{where}: {reason}" for reason in error.reasons)
        return None


_POLICY: Mapping[str, Reader] = {
    "window_size": _window,
    "update_interval": count(1),
    "switch_min_gain": number(0.0),
    "allow_plain_rounds": truth,
}

_SECTIONS: Mapping[str, Reader] = {
    "version": _version,
    "policy": record(DraftStepSettings, _POLICY, ()),
    "calibration": _calibration,
}


def _mentions(raw: object, key: str) -> bool:
    """Whether `key` is a key anywhere in parsed JSON."""
    if isinstance(raw, dict):
        return key in raw or any(_mentions(value, key) for value in raw.values())
    return isinstance(raw, list) and any(_mentions(value, key) for value in raw)


def _without(raw: object, key: str) -> object:
    """`raw` without that key, so that it is reported once."""
    if isinstance(raw, dict):
        return {name: _without(value, key) for name, value in raw.items() if name != key}
    return [_without(value, key) for value in raw] if isinstance(raw, list) else raw
