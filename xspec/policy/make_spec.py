"""The policy of `--speculation_policy`, for looped drafters and those that only choose K."""

from __future__ import annotations

from xspec.cost.model import Costs
from xspec.errors import ConfigError
from xspec.policy.base import Policy
from xspec.policy.fixed import FixedPolicy
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.goodput import GoodputPolicy
from xspec.policy.loop_candidates import AdaptiveController
from xspec.policy.spec_config import AdaptiveSpecConfig
from xspec.policy.spec_files import FLAG, check_fit

FIXED, ACCEPTANCE_EMA, GOODPUT = "fixed", "acceptance_ema", "goodput"
SPECULATION_POLICIES = (FIXED, ACCEPTANCE_EMA, GOODPUT)


def make_speculation_policy(
    name: str,
    config: AdaptiveSpecConfig | None,
    costs: Costs | None,
    geometry: CandidateGeometry,
    *,
    draft_steps: int = 0,
    depth: int | None = None,
) -> Policy:
    """A fresh policy. "fixed" runs `draft_steps` with `depth` every round and reads nothing else.

    "acceptance_ema" needs a config, "goodput" costs; without a config it has the default settings.
    ConfigError where that is missing, UnsupportedError where the config does not fit the engine.
    """
    if name not in SPECULATION_POLICIES:
        raise ConfigError(f"--speculation_policy={name}: allowed: {', '.join(SPECULATION_POLICIES)}")
    if name == FIXED:
        return FixedPolicy(draft_steps, depth=depth)
    if config is not None:
        check_fit(config, geometry, FLAG)
    if name == ACCEPTANCE_EMA:
        if config is None:
            raise ConfigError(f"--speculation_policy={name} needs {FLAG}=FILE: the candidates it moves along")
        return AdaptiveController(config, costs, geometry)
    if costs is None:
        raise ConfigError(f"--speculation_policy={name} needs costs: a saved cost table, or a calibration")
    return GoodputPolicy(config, costs, geometry)
