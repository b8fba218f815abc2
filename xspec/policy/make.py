"""The adaptive policy of a control. Fixed ones need neither costs nor geometry, see `fixed.py`."""

from __future__ import annotations

from xspec.cost.model import Costs
from xspec.cost.settings import Control
from xspec.policy.base import Policy
from xspec.policy.draft_step import DraftStepPolicy
from xspec.policy.geometry import PolicyGeometry
from xspec.policy.settings import DraftStepSettings, default_settings
from xspec.policy.target_verify import TargetVerifyPolicy


def make_policy(
    control: Control,
    costs: Costs,
    geometry: PolicyGeometry,
    settings: DraftStepSettings | None = None,
) -> Policy:
    """The adaptive policy of `control`. Target verify reads the two settings it has from `settings`; None:
    the defaults of the control."""
    settings = settings or default_settings(control)
    if control is Control.DRAFT_STEP:
        return DraftStepPolicy(costs, geometry, settings)
    return TargetVerifyPolicy(costs, geometry, settings.switch_min_gain, settings.allow_plain_rounds)
