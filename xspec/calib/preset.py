"""From offline sampling to the file of `--adaptive_spec_config`: candidates, thresholds, what they hold for.

Order and thresholds follow from acceptance and costs, of confirmed pairs those that the trials saw; the first
choice from the confirmed throughput.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xspec.calib.sampling import Sampled, batch_ranges
from xspec.cost.bundle import check_output
from xspec.errors import CalibrationError
from xspec.policy.derive import derive_candidates
from xspec.policy.spec_config import (
    AdaptiveSpecConfig,
    BatchRange,
    EmaSettings,
    ModelFacts,
    Provenance,
    spec_config_json,
)

BETA_ONE, BETA_MOST = 0.05, 0.2
"""Weight of a round's feedback at one request, and the most: a round of many requests says more."""


def make_config(
    sampled: Sampled,
    *,
    model: str,
    loops: int,
    most_requests: int,
    fingerprint: Mapping[str, Any],
    source: str,
    created_at: str,
) -> AdaptiveSpecConfig:
    """`most_requests`: the largest batch of the engine. `source`: where the numbers are from, in words."""
    ranges = []
    sizes = sampled.settings.requests
    for requests, (first, last) in zip(sizes, batch_ranges(sizes, most_requests), strict=True):
        plain_ms, of_pair = sampled.confirmed_costs(requests)
        acceptance = {pair: sampled.selection.grid[pair].acceptance for pair in of_pair}
        candidates, best, _ = derive_candidates(acceptance, of_pair.get, plain_ms)
        names = [(one.draft_steps, one.draft_loops) for one in candidates]
        fastest = sampled.best_pair(requests)
        ranges.append(
            BatchRange(
                min_requests=first,
                max_requests=last,
                candidates=candidates,
                initial=names.index(fastest) if fastest in names else best,
                initial_off=sampled.best(requests).pair is None,
                ema=EmaSettings(beta=round(min(BETA_MOST, BETA_ONE * requests**0.4), 3)),
            )
        )
    return AdaptiveSpecConfig(
        model=ModelFacts(model, loops),
        provenance=Provenance("measured", source, created_at),
        ranges=tuple(ranges),
        fingerprint=dict(fingerprint),
    )


def write_config(path: Path, config: AdaptiveSpecConfig, *, flag: str) -> None:
    """A new file. CalibrationError if it exists or cannot be written."""
    check_output(path, flag=flag)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(spec_config_json(config), indent=1) + "\n")
    except OSError as error:
        raise CalibrationError(f"--{flag}={path}: cannot be written: {error.strerror or error}") from error
