"""What a configuration says about adapting: which control, measured how, kept where, what must be captured.

Reads flags and the files they name, before anything is loaded; measures nothing.
"""

from __future__ import annotations

import re
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
from xspec.draft.choose import Candidates, DraftChoice, loops_of
from xspec.errors import ConfigError, UnsupportedError
from xspec.exec.assemble import Speculation
from xspec.platform.base import Platform
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.make_spec import ACCEPTANCE_EMA, FIXED, GOODPUT
from xspec.policy.requirements import adaptive_refusals, calibration_with_table, control_of
from xspec.policy.settings import VERIFY_DEFAULTS, DraftStepSettings, parse_draft_step_config
from xspec.policy.spec_config import AdaptiveSpecConfig
from xspec.policy.spec_files import PRESETS, check_fit, load_spec_config, preset


@dataclass(frozen=True, slots=True)
class SpecChoice:
    """--speculation_policy other than fixed. `config` None: no candidates were given, nor are any shipped."""

    policy: str
    config: AdaptiveSpecConfig | None
    source: str

    @property
    def candidates(self) -> Candidates:
        return Candidates() if self.config is None else Candidates(self.config.steps, self.config.depths)

    @property
    def measures(self) -> bool:
        """Whether costs are needed: acceptance_ema does without where every candidate says when it is off."""
        told = self.config is not None and all(one.off is not None for one in self.config.candidates)
        return self.policy == GOODPUT or not told


def choose_spec(config: Config, model: Path, *, whole_grid: bool = False) -> SpecChoice | None:
    """What --speculation_policy and its file say of the model at `model`; None: nothing chooses (K, d).

    Without a file the preset of that name is taken, if there is one. ConfigError if candidates are needed
    and there are none; `whole_grid` takes none and needs none.
    """
    policy, file = config.speculation.speculation_policy, config.speculation.adaptive_spec_config
    if policy == FIXED:
        return None
    if whole_grid:
        return SpecChoice(policy, None, "the whole grid")
    if file:
        return SpecChoice(policy, load_spec_config(file), f"--adaptive_spec_config={file}")
    name = re.sub("[-_]+", "_", model.resolve().name.lower())
    if name in PRESETS:
        return SpecChoice(policy, preset(name), f"calib_configs/{name}.json")
    if policy == ACCEPTANCE_EMA:
        raise ConfigError(
            f"--speculation_policy={policy} moves along candidates, and none come with {model.name}: "
            f"give --adaptive_spec_config=FILE (xspec calibrate makes one; presets: {', '.join(PRESETS)})"
        )
    return SpecChoice(policy, None, "no candidates given")


def check_candidates(spec: SpecChoice, choice: DraftChoice, model: Path) -> None:
    """UnsupportedError, before anything is loaded, for candidates that target or drafter cannot run."""
    if spec.config is None:
        return
    loops = loops_of(model) if choice.loops else None
    geometry = CandidateGeometry(
        lanes=BucketGrid([1]),  # what is captured does not matter here
        steps=tuple(range(1, choice.steps + 1)),
        depths=() if loops is None else tuple(range(1, loops)),
        loops=loops,
    )
    check_fit(spec.config, geometry, spec.source)


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
    spec: SpecChoice | None = None
    table: Path | None = None
    table_flag: str = ""
    output: Path | None = None
    output_flag: str = ""
    cached: bool = False  # measured once, then kept in the user's cache folder

    @property
    def measures(self) -> bool:
        """Whether the policy is to have costs, measured or loaded."""
        return self.spec is None or self.table is not None or self.output is not None or self.spec.measures


def choose_adaptation(
    config: Config, platform: Platform, choice: DraftChoice | None, spec: SpecChoice | None = None
) -> Adaptation | None:
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
        spec=spec,
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
    if choice.widths or choice.loops:
        steps = choice.widths or (choice.steps,)
        pairs = tuple((k, depth) for k in steps for depth in choice.loops)
        shadows = adaptation is not None and adaptation.spec is not None and adaptation.spec.policy == GOODPUT
        return Speculation(steps=steps, widths=steps, pairs=pairs, shadows=shadows and bool(pairs))
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
    if control is Control.SPEC:
        return DraftStepSettings(), None, ""
    if control is Control.DRAFT_STEP:
        flag, path = "adaptive_draft_step_config", config.adaptive_draft_step_config
        if not path:
            return DraftStepSettings(), None, ""
        policy, calibration = parse_draft_step_config(_read(path, flag), f"--{flag}={path}")
        return policy, calibration, f"--{flag}={path}"
    flag, path = "adaptive_target_verify_calibration", config.adaptive_target_verify_calibration
    if not path:
        return VERIFY_DEFAULTS, None, ""
    return VERIFY_DEFAULTS, parse_calibration(_read(path, flag), f"--{flag}={path}"), f"--{flag}={path}"


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
