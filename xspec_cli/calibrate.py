"""`xspec calibrate`: measure what rounds cost on this engine, save it for later starts, and report on it.

Builds the engine as serving does; the measuring is in `xspec.calib`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xspec.config import Config
from xspec.cost.bundle import check_output
from xspec.errors import ConfigError
from xspec.policy.requirements import SWITCHES, files_of, switched, switched_on
from xspec.progress import Progress
from xspec.setting import Kind
from xspec_cli import calibrate_spec
from xspec_cli.flags_resolve import Command, Info, Launch, resolve
from xspec_cli.flags_types import command
from xspec_cli.serve import begin

if TYPE_CHECKING:
    from xspec.calib.calibrate import Calibrated

log = logging.getLogger(__name__)

CALIBRATE = "Calibrate"

FLAGS = (
    command(
        "report",
        CALIBRATE,
        Kind.STRING,
        "",
        "new Markdown file (.md) for the settings, the fit and the best width at each load; a picture of the "
        "curves goes beside it as .png; with --candidates_output one of offline sampling with its figures",
    ),
    *calibrate_spec.FLAGS,
)

COMMAND = Command(
    usage="xspec calibrate --enable_adaptive_draft_step|--enable_adaptive_target_verify|"
    "--speculation_policy=POLICY [--flag=value ...]",
    about="Measure what rounds of an engine cost, as a start with the same flags would, and print the width "
    "that these costs favour at each load. --adaptive_draft_step_cost_table_output, "
    "--adaptive_target_verify_cost_table_output or --adaptive_spec_cost_table_output saves them for later "
    "starts. --candidates_output samples a looped model's (K, d) as well, for --adaptive_spec_config.",
    flags=FLAGS,
)


def main(argv: Sequence[str]) -> int:
    launch = resolve(argv, COMMAND)
    if isinstance(launch, Info):
        print(launch.text)
        return 0
    report = check(launch)
    progress = begin(launch)
    if launch.value(calibrate_spec.OUTPUT):
        return calibrate_spec.run(launch, report, progress)
    # imported late: they load torch, which has to see the threads that begin() settled
    import asyncio

    from xspec_cli.calibration_report import summary

    costs = asyncio.run(measure(launch.config, progress))
    if costs.bundle is None:
        raise ConfigError(f"{costs.source} is a bare table: it holds nothing to report on")
    print(summary(costs.bundle))
    if report is not None:
        write_report(costs, report)
    return 0


def check(launch: Launch) -> Path | None:
    """Exactly one control, and a report that can be written; ConfigError lists every mistake."""
    speculation = launch.config.speculation
    on = [switched(speculation, control) for control in switched_on(speculation)]
    mistakes = []
    if len(on) != 1:
        found = " and ".join(on) or "none of them"
        allowed = " or ".join(f"--{switch}" for switch in SWITCHES.values())
        mistakes.append(f"{allowed} says what is calibrated: found {found}; allowed: one of them")
    if trace := launch.config.execution.round_trace:
        mistakes.append(
            f"--round_trace={trace}: there are no requests to trace here; allowed: serve and bench"
        )
    report = Path(launch.value("report")).expanduser() if launch.value("report") else None
    mistakes += calibrate_spec.mistakes_of(launch, report)
    if report is not None:
        mistakes += _against_report(report, launch.config)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return report


def _against_report(report: Path, config: Config) -> Iterator[str]:
    """Why the report or its picture cannot be written."""
    if report.suffix.lower() != ".md":
        yield f"--report={report}: allowed: a file name that ends in .md"
        return
    outputs = [files_of(config.speculation, control).output for control in SWITCHES]
    for path in (report, report.with_suffix(".png")):
        try:
            check_output(path, flag="report")
        except ConfigError as error:
            yield str(error)
        for output in outputs:
            if output.path and Path(output.path).resolve() == path.resolve():
                yield f"--report={report}: {path} is the file of {output} too; allowed: two files"


async def measure(config: Config, progress: Progress) -> Calibrated:
    """Costs of the engine that `config` means, measured or loaded as its flags say, never from the cache."""
    import asyncio

    from xspec.engine.build import build_parts, choose

    # Costs of (K, d) are those of all usual ones where no file names them, whatever candidates ship.
    choices = choose(config, whole_grid=not config.speculation.adaptive_spec_config)
    assert choices.adaptation is not None  # one of the switches is on
    choices = dataclasses.replace(choices, adaptation=dataclasses.replace(choices.adaptation, cached=False))
    built = await build_parts(choices, progress=progress)
    await asyncio.to_thread(built.threads.close)
    assert built.costs is not None
    return built.costs


def write_report(costs: Calibrated, path: Path) -> None:
    """The report, and its picture where one can be drawn."""
    from xspec_cli.calibration_plot import MISSING, draw
    from xspec_cli.calibration_report import markdown

    assert costs.bundle is not None
    picture = path.with_suffix(".png")
    try:
        drawn = draw(costs.bundle, picture)
        shown = f"![Fitted curves and measured costs]({picture.name})" if drawn else MISSING
        path.write_text(markdown(costs.bundle, shown), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report={path}: cannot be written: {error.strerror or error}") from error
    log.info("the report is in %s%s", path, f", its picture in {picture}" if drawn else "")
