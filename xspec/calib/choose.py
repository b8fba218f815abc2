"""What a configuration says about adapting: which control, measured how, kept where, what must be captured.

Reads flags and the files they name, before anything is loaded; measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xspec.config import Config, SpeculationConfig
from xspec.core.shapes import BucketGrid, TargetTiers
from xspec.cost.bundle import check_output, peek_settings
from xspec.cost.read import read_json
from xspec.cost.settings import (
    MAX_DRAFT_STEP_BUCKET,
    CalibrationSettings,
    Control,
    parse_calibration,
    shipped_calibration,
)
from xspec.draft.choose import DraftChoice
from xspec.errors import ConfigError, UnsupportedError
from xspec.exec.assemble import Speculation
from xspec.platform.base import Platform
from xspec.policy.requirements import adaptive_refusals, calibration_with_table, control_of
from xspec.policy.settings import DraftStepSettings, parse_draft_step_config


@dataclass(frozen=True, slots=True)
class Adaptation:
    """`settings` are as written, not yet fitted to an engine; `source` says in words where they come from.

    `shipped`: they are the platform's own file, of which what the engine has no room for is left out.
    `table`: a saved table to load instead of measuring. `output`: where to save a measured one. `cached`:
    keep a measured one in the user's cache folder, and take it from there.
    """

    control: Control
    settings: CalibrationSettings
    source: str
    shipped: bool = False
    policy: DraftStepSettings = DraftStepSettings()
    table: Path | None = None
    table_flag: str = ""
    output: Path | None = None
    output_flag: str = ""
    cached: bool = False  # measured once, then kept in the user's cache folder


def choose_adaptation(config: Config, platform: Platform, choice: DraftChoice | None) -> Adaptation | None:
    """None: nothing adapts. All reasons against the flags come at once; files are read and checked."""
    algorithm, steps = (None, 0) if choice is None else (choice.algorithm, choice.steps)
    reasons = adaptive_refusals(config, algorithm, steps)
    if reasons:
        raise UnsupportedError("adaptive speculation cannot run like this", reasons)
    speculation = config.speculation
    control = control_of(speculation)
    if control is None or choice is None:
        return None
    policy, calibration, source = _settings(speculation, control)
    name = f"adaptive_{control}_cost_table"
    table, output = _path(getattr(speculation, name)), _path(getattr(speculation, f"{name}_output"))
    if output is not None:
        check_output(output, flag=f"{name}_output")
    shipped = None
    if table is not None:
        if calibration is not None:
            raise ConfigError(calibration_with_table(speculation))
        calibration, source = peek_settings(table, flag=name), f"--{name}={table}"
    elif calibration is None:
        shipped = shipped_calibration(platform.name, control)
        calibration = shipped or CalibrationSettings()
        source = f"calib_configs/{platform.name}.json" if shipped else "built-in defaults"
    return Adaptation(
        control=control,
        settings=calibration,
        source=source,
        shipped=shipped is not None,
        policy=policy,
        table=table,
        table_flag=name,
        output=output,
        output_flag=f"{name}_output",
        cached=shipped is not None and output is None,
    )


def speculation_of(
    adaptation: Adaptation | None, choice: DraftChoice | None, platform: Platform, grid: BucketGrid
) -> Speculation:
    """What must be captured for the policy `adaptation` asks for and the fixed ones it is compared to."""
    if choice is None or choice.verify == 0:
        return Speculation()
    if choice.loops:
        pairs = tuple((choice.steps, depth) for depth in choice.loops)
        return Speculation(steps=(choice.steps,), widths=(choice.steps,), pairs=pairs)
    if adaptation is None:
        return Speculation(steps=(choice.steps,), widths=(choice.verify,))
    if adaptation.control is Control.TARGET_VERIFY:
        tiers = _budgets(adaptation.settings, platform, grid, choice.steps)
        return Speculation(steps=(choice.steps,), widths=(choice.steps,), tiers=tiers)
    depths = tuple(range(1, choice.steps + 1))
    return Speculation(steps=depths, widths=depths, tiers=_links(adaptation.settings, grid, depths))


def _budgets(settings: CalibrationSettings, platform: Platform, grid: BucketGrid, width: int) -> TargetTiers:
    if settings.target_graph_rows is not None:
        return TargetTiers.listed(grid, settings.target_graph_rows, width)
    return TargetTiers.pruned(grid, platform.bucket_grid(grid.max_rows * width), width)


def _links(settings: CalibrationSettings, grid: BucketGrid, depths: tuple[int, ...]) -> TargetTiers:
    """The padded passes that connect an additive probe grid: each bucket also on the next one's rows."""
    if settings.model != "additive":
        return TargetTiers()
    captured = [b.rows for b in grid.buckets if b.rows <= MAX_DRAFT_STEP_BUCKET]
    grids = [settings.request_buckets or captured]
    grids += [context.request_buckets for context in settings.contexts or () if context.request_buckets]
    links: dict[tuple[int, int], set[int]] = {}
    for buckets in map(sorted, grids):
        for lanes, following in zip(buckets, buckets[1:], strict=False):
            for depth in depths:
                links.setdefault((lanes, depth), set()).add(following * (depth + 1))
    return TargetTiers(links)


def _settings(
    config: SpeculationConfig, control: Control
) -> tuple[DraftStepSettings, CalibrationSettings | None, str]:
    """Policy and calibration as the control's own file has them; None where it leaves the latter out."""
    if control is Control.DRAFT_STEP:
        flag, path = "adaptive_draft_step_config", config.adaptive_draft_step_config
        if not path:
            return DraftStepSettings(), None, ""
        policy, calibration = parse_draft_step_config(_read(path, flag), f"--{flag}={path}")
        return policy, calibration, f"--{flag}={path}"
    flag, path = "adaptive_target_verify_calibration", config.adaptive_target_verify_calibration
    if not path:
        return DraftStepSettings(), None, ""
    return DraftStepSettings(), parse_calibration(_read(path, flag), f"--{flag}={path}"), f"--{flag}={path}"


def _path(given: str) -> Path | None:
    return Path(given).expanduser() if given else None


def _read(path: str, flag: str) -> dict[str, Any]:
    try:
        raw = read_json(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(f"--{flag}={path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # JSON and encoding errors are ValueErrors
        raise ConfigError(f"--{flag}={path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"--{flag}={path}: allowed: a JSON object, got {type(raw).__name__}")
    return raw
