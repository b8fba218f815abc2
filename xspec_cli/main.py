"""The `xspec` command: picks the subcommand and hands it the remaining words untouched.

gflags' syntax (`-flag`, `--noflag`) is each subcommand's own; nothing is parsed here.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import xspec
from xspec.errors import XspecError

SUBCOMMANDS = {
    "serve": "serve a model over HTTP (OpenAI API)",
    "generate": "answer one prompt on the command line",
    "bench": "measure an engine or a server under load",
}

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else ""
    if name in ("", "help", "--help", "-help", "-h", "--helpfull"):
        print(usage())
        return 0
    if name in ("--version", "-version"):
        print(f"xspec {xspec.__version__}")
        return 0
    if name not in SUBCOMMANDS:
        print(f"xspec: unknown command {name}{_closest(name)}\n\n{usage()}", file=sys.stderr)
        return 1
    try:
        return int(importlib.import_module(f"xspec_cli.{name}").main(words[1:]))
    except XspecError as error:
        report(name, error)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read us (head, less) is gone; keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def usage() -> str:
    lines = ["Usage: xspec COMMAND [--flag=value ...]", "", "Commands:"]
    lines += [f"  {name:<9} {text}" for name, text in SUBCOMMANDS.items()]
    lines += ["", "xspec COMMAND --help lists the flags of a command."]
    return "\n".join(lines)


def report(name: str, error: XspecError) -> None:
    """Every line of the message on stderr, named after the command."""
    for line in str(error).splitlines() or [type(error).__name__]:
        print(f"xspec {name}: {line}", file=sys.stderr)
    print(f"Try: xspec {name} --help", file=sys.stderr)


def _closest(name: str) -> str:
    near = [known for known in SUBCOMMANDS if known.startswith(name[:3])] if len(name) > 2 else []
    return f" (did you mean {near[0]}?)" if near else ""


if __name__ == "__main__":
    sys.exit(main())
