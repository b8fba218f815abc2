"""Sequential temperature scaling: makes a drafter's confidence a probability one may plan with.

Pure numpy on records of rollouts. Owns the fit and the table stored in a checkpoint's config; knows nothing
about models, texts or how the rollouts were made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xspec.errors import ConfigError

REGIMES = ("greedy", "sampled")
BINS = 20
TEMPERATURES = np.logspace(-1.0, 1.0, 41)  # 10 ** -1 .. 10, a twentieth of a decade apart, 1 among them
BIASES = np.linspace(-4.0, 4.0, 41)
BIAS_MARGIN = 0.01

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """N rounds of one sampling regime: what the confidence head said and what was accepted.

    `widths` are the positions whose outcome is known: the verified ones. It must not depend on the draws of
    its own round (a width chosen from confidences is fine), or the fit is of a selected sample.
    """

    logits: NDArray[np.floating]  # [N, K] raw confidence logits, in drafting order
    accepted: NDArray[np.integer]  # [N] drafts accepted, 0 .. width
    widths: NDArray[np.integer]  # [N] drafts verified, 0 .. K

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or self.logits.shape[1] == 0:
            raise ConfigError(f"confidence logits must be [rounds, positions], found {self.logits.shape}")
        count, positions = self.logits.shape
        for name, column in (("accepted", self.accepted), ("widths", self.widths)):
            if column.shape != (count,) or not np.issubdtype(column.dtype, np.integer):
                raise ConfigError(
                    f"{name} must be {count} integers like the confidence logits, found {column.dtype} "
                    f"{column.shape}"
                )
        if not np.isfinite(self.logits).all():
            raise ConfigError("confidence logits must be finite")
        if ((self.widths < 0) | (self.widths > positions)).any():
            raise ConfigError(f"widths must lie in 0..{positions}")
        if ((self.accepted < 0) | (self.accepted > self.widths)).any():
            raise ConfigError("accepted must lie in 0..width of its round")

    @property
    def positions(self) -> int:
        return int(self.logits.shape[1])


@dataclass(frozen=True, slots=True)
class Calibration:
    """P(position k is accepted, given those before it) = sigmoid(logit / temperatures[k] + biases[k])."""

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]
    ece_before: tuple[float, ...]  # of the prefix product up to each position
    ece_after: tuple[float, ...]
    samples: tuple[int, ...]  # rounds that verified each position

    def to_config(self) -> dict[str, list[float] | list[int]]:
        return {
            "temperatures": [round(value, 6) for value in self.temperatures],
            "biases": [round(value, 6) for value in self.biases],
            "ece_before": [round(value, 6) for value in self.ece_before],
            "ece_after": [round(value, 6) for value in self.ece_after],
            "samples": list(self.samples),
        }


def expected_calibration_error(predicted: Floats, happened: NDArray[np.bool_]) -> float:
    """Sum over 20 equal bins of (share of samples) x |mean prediction - observed rate|; 0 without samples."""
    if predicted.size == 0:
        return 0.0
    bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, weights=predicted - happened, minlength=BINS)
    return float(np.abs(gaps).sum() / predicted.size)


def calibrate(records: Rollouts, *, bias: bool = True, bias_margin: float = BIAS_MARGIN) -> Calibration:
    """Fit one regime, position by position, those before frozen (DSpark paper, section on calibration).

    Position k takes the T of a grid that minimises the ECE of prod_{i<=k} sigmoid(z_i / T_i + b_i) against
    "at least k accepted". All rounds that verified k count, those rejected earlier as not accepted: leaving
    them out would compare a product with a rate that is conditional on its other factors. With `bias`, an
    offset is searched jointly and kept only where it lowers the ECE by more than `bias_margin`.
    """
    temperatures: list[float] = []
    biases: list[float] = []
    before: list[float] = []
    after: list[float] = []
    samples: list[int] = []
    raw_prefix = np.ones(len(records.accepted))
    prefix = np.ones(len(records.accepted))
    for index in range(records.positions):
        logits = records.logits[:, index].astype(np.float64)
        known = records.widths > index
        happened = records.accepted[known] > index
        raw_prefix = raw_prefix * _sigmoid(logits)
        before.append(expected_calibration_error(raw_prefix[known], happened))
        temperature, offset = _fit(logits[known], prefix[known], happened, bias, bias_margin)
        prefix = prefix * _sigmoid(logits / temperature + offset)
        after.append(expected_calibration_error(prefix[known], happened))
        temperatures.append(temperature)
        biases.append(offset)
        samples.append(int(known.sum()))
    return Calibration(tuple(temperatures), tuple(biases), tuple(before), tuple(after), tuple(samples))


def _fit(
    logits: Floats, prefix: Floats, happened: NDArray[np.bool_], bias: bool, bias_margin: float
) -> tuple[float, float]:
    """(temperature, bias) of one position; the identity where nothing was observed."""
    if logits.size == 0:
        return 1.0, 0.0

    def search(offset: float) -> tuple[float, float]:
        # Nearest to 1 first, so that among equals the least change wins.
        grid = TEMPERATURES[np.argsort(np.abs(np.log(TEMPERATURES)), kind="stable")]
        errors = [
            expected_calibration_error(prefix * _sigmoid(logits / value + offset), happened) for value in grid
        ]
        best = int(np.argmin(errors))
        return errors[best], float(grid[best])

    error, temperature = search(0.0)
    if not bias or error <= bias_margin:
        return temperature, 0.0
    shifted_error, shifted, offset = error - bias_margin, temperature, 0.0
    for candidate in BIASES[np.argsort(np.abs(BIASES), kind="stable")]:
        found, at = search(float(candidate))
        if found < shifted_error:
            shifted_error, shifted, offset = found, at, float(candidate)
    return shifted, offset


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return result
