"""The `xspec` command: picks the subcommand and hands it the remaining words untouched.

gflags' syntax (`-flag`, `--noflag`) is each subcommand's own; nothing beyond its name is parsed here.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import click

import xspec
from xspec.errors import XspecError

SUBCOMMANDS = {
    "serve": "serve a model over HTTP (OpenAI API)",
    "generate": "answer one prompt on the command line",
    "bench": "measure an engine or a server under load",
    "calibrate": "measure what rounds cost, for adaptive speculation",
    "train": "train a drafter for a model on its own answers",
    "simulate": "run adaptive speculation on a virtual clock, by saved costs",
}

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


class _Lazy(click.Group):
    """Subcommands are imported when they run: `xspec --help` must not wait for their libraries."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in SUBCOMMANDS:
            near = difflib.get_close_matches(args[0], SUBCOMMANDS, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]}?)" if near else ""
            ctx.fail(f"unknown command {args[0]}{hint}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
        return click.Command(
            cmd_name,
            params=[words],
            callback=lambda words: _run(cmd_name, words),
            help=SUBCOMMANDS[cmd_name],
            add_help_option=False,
            context_settings={"ignore_unknown_options": True},
        )


cli = _Lazy(
    "xspec",
    help="An LLM engine built around adaptive speculative decoding.",
    epilog="xspec COMMAND --help lists the flags of a command.",
    context_settings={"help_option_names": ["--help", "-h"]},
    subcommand_metavar="COMMAND [--flag=value ...]",
)
cli = click.version_option(xspec.__version__, prog_name="xspec", message="%(prog)s %(version)s")(cli)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        return int(cli.main(words, prog_name="xspec", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return 1
    except XspecError as error:
        report(words[0], error)
        return 1
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read us (head, less) is gone; keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(name: str, words: Sequence[str]) -> int:
    return int(importlib.import_module(f"xspec_cli.{name}").main(words))


def report(name: str, error: XspecError) -> None:
    """Every line of the message on stderr, named after the command."""
    for line in str(error).splitlines() or [type(error).__name__]:
        print(f"xspec {name}: {line}", file=sys.stderr)
    print(f"Try: xspec {name} --help", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
