"""Confidence calibration: what the fit recovers, when it may use a bias, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from xspec.errors import ConfigError
from xspec.train.sts import BINS, Rollouts, calibrate, expected_calibration_error

K = 4


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def simulate(
    rounds: int, *, temperature: float = 1.0, bias: float = 0.0, width: int | None = None, seed: int = 0
) -> Rollouts:
    """Rounds whose true conditional acceptance is sigmoid(logit / temperature + bias)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, (rounds, K))
    accepts = rng.random((rounds, K)) < sigmoid(logits / temperature + bias)
    widths = np.full(rounds, K) if width is None else np.full(rounds, width)
    accepted = np.minimum(np.cumprod(accepts, axis=1).sum(1), widths)
    return Rollouts(logits, accepted, widths)


def test_ece_counts_bins_by_their_share() -> None:
    predicted = np.array([0.91, 0.93, 0.12, 1.0])
    happened = np.array([True, False, False, True])
    # bin 18 holds two: mean .92 against .5; bin 2: .12 against 0; 1.0 belongs to the last bin, exact
    assert BINS == 20
    assert expected_calibration_error(predicted, happened) == pytest.approx(0.5 * 0.42 + 0.25 * 0.12)
    assert expected_calibration_error(np.array([]), np.array([], dtype=bool)) == 0.0


def test_over_confident_logits_get_their_temperature_back_and_a_lower_ece() -> None:
    records = simulate(40_000, temperature=2.5)
    fit = calibrate(records)
    for found in fit.temperatures[:3]:
        assert 2.0 <= found <= 3.2  # two steps of the grid either side of 2.5
    assert fit.biases == (0.0,) * K
    for before, after in zip(fit.ece_before, fit.ece_after, strict=True):
        assert after < 0.01 and after < before / 3
    assert fit.samples == (40_000,) * K


def test_calibrated_logits_stay_nearly_as_they_are() -> None:
    """Rounds rejected earlier count as not accepted; without them every later slot would look too careful."""
    fit = calibrate(simulate(40_000))
    assert all(0.79 <= value <= 1.26 for value in fit.temperatures[:2])
    assert all(0.6 <= value <= 1.6 for value in fit.temperatures)
    assert fit.biases == (0.0,) * K
    assert max(fit.ece_before) < 0.01


def test_an_offset_is_fitted_by_a_bias_and_only_where_allowed() -> None:
    records = simulate(40_000, bias=-1.6)
    without, with_bias = calibrate(records, bias=False), calibrate(records)
    assert without.biases == (0.0,) * K
    assert with_bias.biases[0] == pytest.approx(-1.6, abs=0.21)
    assert with_bias.ece_after[0] < 0.01 < without.ece_after[0] - 0.01
    assert calibrate(records, bias_margin=1.0) == without


def test_later_positions_are_fitted_with_earlier_ones_frozen() -> None:
    records = simulate(20_000, temperature=2.0)
    short = Rollouts(records.logits[:, :2], np.minimum(records.accepted, 2), np.minimum(records.widths, 2))
    assert calibrate(short).temperatures == calibrate(records).temperatures[:2]


def test_positions_that_were_not_verified_are_ignored() -> None:
    records = simulate(20_000, temperature=2.0, width=2)
    fit = calibrate(records)
    assert fit.samples == (20_000, 20_000, 0, 0)
    assert fit.temperatures[2:] == (1.0, 1.0) and fit.biases[2:] == (0.0, 0.0)
    full = simulate(20_000, temperature=2.0)
    assert fit.temperatures[:2] == calibrate(full).temperatures[:2]
    scrambled = Rollouts(np.where(np.arange(K) < 2, records.logits, 30.0), records.accepted, records.widths)
    assert calibrate(scrambled) == fit


def test_extreme_logits_and_one_round_do_not_break_it() -> None:
    fit = calibrate(Rollouts(np.array([[800.0, -800.0]]), np.array([1]), np.array([2])))
    assert fit.ece_before == (0.0, 0.0) and fit.temperatures == (1.0, 1.0)


def test_the_table_as_the_config_holds_it() -> None:
    fit = calibrate(simulate(5_000, temperature=2.0, bias=-1.0))
    section = fit.to_config()
    assert set(section) == {"temperatures", "biases", "ece_before", "ece_after", "samples"}
    assert section["temperatures"] == pytest.approx(fit.temperatures, abs=1e-6)
    assert section["samples"] == [5_000] * K


@pytest.mark.parametrize(
    ("logits", "accepted", "widths", "complaint"),
    [
        (np.zeros((3, K)), np.zeros(2, int), np.full(3, K), "accepted must be 3 integers"),
        (np.zeros((3, K)), np.zeros(3, int), np.full((3, 1), K), "widths must be 3 integers"),
        (np.zeros((3, K)), np.zeros(3), np.full(3, K), "accepted must be 3 integers"),
        (np.zeros(3), np.zeros(3, int), np.full(3, K), "must be"),
        (np.zeros((3, 0)), np.zeros(3, int), np.zeros(3, int), "must be"),
        (np.full((3, K), np.nan), np.zeros(3, int), np.full(3, K), "finite"),
        (np.zeros((3, K)), np.full(3, 3), np.full(3, 2), "0..width"),
        (np.zeros((3, K)), np.zeros(3, int), np.full(3, K + 1), "widths must lie in 0..4"),
        (np.zeros((3, K)), np.full(3, -1), np.full(3, K), "0..width"),
    ],
)
def test_records_that_do_not_fit_are_refused(
    logits: np.ndarray, accepted: np.ndarray, widths: np.ndarray, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Rollouts(logits, accepted, widths)
