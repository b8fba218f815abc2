"""Bare cost tables: a curve and nothing else, in the two forms that other engines write.

They say neither what they were measured on nor at which KV lengths, so they hold for all, with clamped edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xspec.config import MAX_DRAFT_STEPS
from xspec.cost.model import Additive, CostTable, Curve, Sps
from xspec.cost.read import LARGEST_COUNT, Reader, count, listing, number, read_object
from xspec.cost.schema import ContextInterval
from xspec.errors import CalibrationError

LEGACY_DRAFT_WIDTH = 7
"""Width of bare tables that do not say theirs."""


def bare_table(curve: Curve, draft_width: int) -> dict[str, Any]:
    """A curve as a bare table, with its width explicit: JSON-ready, read back by read_bare."""
    if isinstance(curve, Sps):
        return {
            "draft_width": draft_width,
            "sample_batch_tokens": list(curve.target_rows),
            "sample_steps_per_sec": list(curve.steps_per_second),
            "max_batch_tokens": curve.target_rows[-1],
        }
    return {
        "draft_width": draft_width,
        "bias_seconds": curve.bias_s,
        "bs_probes": list(curve.requests),
        "alpha_seconds": list(curve.alpha_s),
        "m_probes": list(curve.target_rows),
        "theta_seconds": list(curve.theta_s),
    }


def read_bare(content: Mapping[str, Any], where: str) -> tuple[Curve, int]:
    """(curve, draft width) of a bare table; `bias_seconds` tells the additive form from the diagonal one.

    CalibrationError with everything that is missing, unknown or of no use.
    """
    mistakes: list[str] = []
    readers = _ADDITIVE if "bias_seconds" in content else _DIAGONAL
    needed = [key for key in readers if key != "draft_width"]
    held = read_object(content, readers, "", mistakes, needed)
    if mistakes:
        raise CalibrationError(f"{where} is neither a saved cost table nor a valid bare one", mistakes)
    try:
        curve = _additive(held) if "bias_seconds" in held else _diagonal(held)
    except CalibrationError as error:
        raise CalibrationError(f"{where} is no valid bare cost table: {error}") from error
    return curve, held.get("draft_width", LEGACY_DRAFT_WIDTH)


def everywhere(curve: Curve, draft_width: int) -> CostTable:
    """The table of a curve that holds at all KV lengths. Plain rounds and prompts have no cost in it."""
    return CostTable((ContextInterval(1, 1, LARGEST_COUNT),), {(0, draft_width): curve}, (1.0,), 0.0)


def _diagonal(held: Mapping[str, Any]) -> Sps:
    curve = Sps(held["sample_batch_tokens"], held["sample_steps_per_sec"], clamped=True)
    if held["max_batch_tokens"] < curve.target_rows[-1]:
        raise CalibrationError(
            f"max_batch_tokens is {held['max_batch_tokens']}, below the last of sample_batch_tokens, "
            f"{curve.target_rows[-1]}"
        )
    return curve


def _additive(held: Mapping[str, Any]) -> Additive:
    """In our gauge: what the first probes add moves into the bias."""
    alpha, theta = held["alpha_seconds"], held["theta_seconds"]
    return Additive(
        held["bias_seconds"] + alpha[0] + theta[0],
        held["bs_probes"],
        tuple(value - alpha[0] for value in alpha),
        held["m_probes"],
        tuple(value - theta[0] for value in theta),
        clamped=True,
    )


_rows = listing(count(1), "positive integers")
_numbers = listing(number(float("-inf")), "numbers")

_DIAGONAL: Mapping[str, Reader] = {
    "draft_width": count(1, MAX_DRAFT_STEPS),
    "sample_batch_tokens": _rows,
    "sample_steps_per_sec": listing(number(0.0, above=True), "positive numbers"),
    "max_batch_tokens": count(1),
}

_ADDITIVE: Mapping[str, Reader] = {
    "draft_width": count(1, MAX_DRAFT_STEPS),
    "bias_seconds": number(0.0, above=True),
    "bs_probes": _rows,
    "alpha_seconds": _numbers,
    "m_probes": _rows,
    "theta_seconds": _numbers,
}
