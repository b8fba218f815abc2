"""What adaptive speculation needs of a configuration; everything that stands against it is found at once.

Reads settled flags only: no file, no platform, no model. Who calls it decides what to do about the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xspec.config import Config, SpeculationConfig
from xspec.cost.schema import Control
from xspec.setting import show

SWITCHES = {
    Control.DRAFT_STEP: "enable_adaptive_draft_step",
    Control.TARGET_VERIFY: "enable_adaptive_target_verify",
    Control.SPEC: "speculation_policy",
}

ALGORITHMS = {
    Control.DRAFT_STEP: ("MTP",),
    Control.TARGET_VERIFY: ("MTP", "DSpark"),
    Control.SPEC: ("MTP", "Looped"),
}
"""Draft steps can only be saved where they are made one after the other; a block is drafted in one pass."""


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file as a flag names it; an empty path is no file."""

    flag: str
    path: str

    def __str__(self) -> str:
        return f"--{self.flag}={self.path}"


@dataclass(frozen=True, slots=True)
class ControlFiles:
    """The files of one control: its settings, saved costs, and where to save measured ones."""

    settings: NamedFile
    table: NamedFile
    output: NamedFile

    @property
    def given(self) -> tuple[NamedFile, ...]:
        return tuple(file for file in (self.settings, self.table, self.output) if file.path)


def files_of(config: SpeculationConfig, control: Control) -> ControlFiles:
    """What the flags of `control` name."""
    if control is Control.DRAFT_STEP:
        return ControlFiles(
            NamedFile("adaptive_draft_step_config", config.adaptive_draft_step_config),
            NamedFile("adaptive_draft_step_cost_table", config.adaptive_draft_step_cost_table),
            NamedFile("adaptive_draft_step_cost_table_output", config.adaptive_draft_step_cost_table_output),
        )
    if control is Control.SPEC:
        return ControlFiles(
            NamedFile("adaptive_spec_config", config.adaptive_spec_config),
            NamedFile("adaptive_spec_cost_table", config.adaptive_spec_cost_table),
            NamedFile("adaptive_spec_cost_table_output", config.adaptive_spec_cost_table_output),
        )
    return ControlFiles(
        NamedFile("adaptive_target_verify_calibration", config.adaptive_target_verify_calibration),
        NamedFile("adaptive_target_verify_cost_table", config.adaptive_target_verify_cost_table),
        NamedFile(
            "adaptive_target_verify_cost_table_output", config.adaptive_target_verify_cost_table_output
        ),
    )


def control_of(config: SpeculationConfig) -> Control | None:
    """The control that is switched on, None without one. Both together are refused: `adaptive_refusals`."""
    return next(iter(switched_on(config)), None)


def adaptive_refusals(config: Config, algorithm: str | None, steps: int) -> list[str]:
    """Every reason why the adaptive flags of `config` cannot be honoured, each naming the flags at fault.

    `algorithm` and `steps`: the drafter that was chosen and its K; None and 0 where nothing is drafted.
    """
    speculation = config.speculation
    controls = switched_on(speculation)
    reasons = list(_strays(speculation, controls))
    if len(controls) > 1:
        if Control.SPEC in controls:
            several = " and ".join(switched(speculation, control) for control in controls)
            reasons.append(f"{several} cannot go together; allowed: one of them")
        else:
            both = " and ".join(f"--{SWITCHES[control]}" for control in controls)
            reasons.append(f"{both} are both true: allowed: one of them")
    for control in controls:
        reasons += _drafting(speculation, control, algorithm, steps)
        reasons += _files(config, control)
    if controls:
        reasons += _execution(config, " and ".join(f"--{SWITCHES[control]}" for control in controls))
    return reasons


def calibration_with_table(config: SpeculationConfig) -> str:
    """The reason to refuse a draft-step config that has a calibration part beside a saved table."""
    files = files_of(config, Control.DRAFT_STEP)
    return (
        f"{files.settings}: its calibration part says how costs are measured, but {files.table} brings them; "
        "allowed: one of the two"
    )


def switched(config: SpeculationConfig, control: Control) -> str:
    """The flag that switches `control` on, as it was given."""
    if control is Control.SPEC:
        return f"--speculation_policy={config.speculation_policy}"
    return f"--{SWITCHES[control]}=true"


def switched_on(config: SpeculationConfig) -> tuple[Control, ...]:
    """Every control that the flags ask for."""
    on = {
        Control.DRAFT_STEP: config.enable_adaptive_draft_step,
        Control.TARGET_VERIFY: config.enable_adaptive_target_verify,
        Control.SPEC: config.speculation_policy != "fixed",
    }
    return tuple(control for control, switched_on in on.items() if switched_on)


def _strays(config: SpeculationConfig, controls: tuple[Control, ...]) -> Iterator[str]:
    for control, switch in SWITCHES.items():
        on = "=acceptance_ema or goodput" if control is Control.SPEC else "=true"
        if control not in controls:
            for file in files_of(config, control).given:
                yield f"{file}: it is only read with --{switch}{on}"


def _drafting(
    config: SpeculationConfig, control: Control, algorithm: str | None, steps: int
) -> Iterator[str]:
    switch = switched(config, control)
    allowed = ALGORITHMS[control]
    if algorithm is None or steps < 1:
        found = (
            "--num_speculative_tokens=0 switches it off; allowed: -1 or integers from 1"
            if config.num_speculative_tokens == 0
            else "this model has no drafter; give --draft_model, or --speculative_algorithm=MTP where its "
            "checkpoint holds MTP layers, Looped where its layers loop"
        )
        yield f"{switch} needs speculation: {found}"
    elif algorithm not in allowed:
        yield f"{switch}: the drafter is {algorithm}; allowed: {', '.join(allowed)}"
    if config.target_verify_width != -1:
        width = config.target_verify_width
        yield f"--target_verify_width={width} fixes what {switch} is to choose; allowed: -1"
    if control is Control.SPEC and config.draft_loops != -1:
        yield f"--draft_loops={config.draft_loops} fixes what {switch} is to choose; allowed: -1"


def _files(config: Config, control: Control) -> Iterator[str]:
    """A saved table replaces measuring: what says how to measure, or where to save, contradicts it."""
    files = files_of(config.speculation, control)
    if files.output.path and files.output.path == config.execution.round_trace:
        yield f"{files.output}: is the file of --round_trace too; allowed: two files"
    if not files.table.path:
        return
    for file in files.given:
        # a draft-step config may hold nothing but a policy, see `calibration_with_table`; candidates go along
        policy = file is files.settings and control is not Control.TARGET_VERIFY
        if file is not files.table and not policy:
            yield f"{file}: nothing is measured where {files.table} brings costs; allowed: one of the two"


def _execution(config: Config, switches: str) -> Iterator[str]:
    execution, scheduler = config.execution, config.scheduler
    prewarmed = f"{switches} needs prewarmed graphs"
    overlapped = f"{switches} needs asynchronous scheduling and the task pipeline"
    for needs, flag, value, allowed in (
        (prewarmed, "enable_graph", execution.enable_graph, True),
        (prewarmed, "disable_graph_warmup", execution.disable_graph_warmup, False),
        (overlapped, "enable_schedule_overlap", scheduler.enable_schedule_overlap, True),
        (overlapped, "enable_task_pipeline", scheduler.enable_task_pipeline, True),
    ):
        if value is not allowed:
            yield f"--{flag}={show(value)}: {needs}; allowed: {show(allowed)}"
    if execution.python_graph_backend == "off":
        yield f"--python_graph_backend=off: {prewarmed}; allowed: auto"
