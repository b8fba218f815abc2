"""The flag table in words: --help, --helpfull and docs/flags.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from xspec.setting import show
from xspec_cli.flags import by_category, engine_flags
from xspec_cli.flags_types import PLATFORMS, Flag, Status

HELP_WIDTH = 100

_HELP_OPTIONS = (
    ("help, -h", "this text"),
    ("helpfull", "also the xLLM flags that have no effect here or are refused"),
    ("version", "the version of xspec"),
    ("flagfile", "file of flags, one a line, # comments, may name further files"),
    ("fromenv, tryfromenv", "flags to read from environment variables FLAGS_name (fromenv: must be set)"),
    ("undefok", "names of flags that may be unknown"),
)

_MARKDOWN_HEAD = """\
# Flags

Made from the flag table by `python -m xspec_cli.flags_text > docs/flags.md`; do not edit by hand.

Names, types and syntax are xLLM's (gflags): one or two dashes, `--x=v` or `--x v`, switches as `--x`, `--nox`
or `--x=true` (a switch never takes the next word), the last occurrence wins. `--flagfile`, `--fromenv`,
`--tryfromenv`, `--undefok`, `--version`, `--help` and `--helpfull` work as in gflags.

`--config_json_file` names a flat JSON object of flag values; a flag on the command line wins over it, and it
wins over the default. Unlike in xLLM, a file that cannot be read, is no JSON object or holds an unknown flag
is an error. All mistakes of a command line are reported together, and the exit code is 1.

- **honoured**: it does what it says.
- **inert**: accepted and logged once. It chooses kernels, devices or worker processes that do not exist here,
  or belongs to a flag that is refused, so no value of it can change an answer or a limit.
- **refused**: only the values shown are accepted; any other would promise what is not there.
- **removed**: an old name; the error tells the new one.
"""


def render_help(
    usage: str, about: str, flags: Iterable[Flag], *, full: bool, platform: str = PLATFORMS[0]
) -> str:
    """Help text in sections like xLLM's, with types and defaults. `full` adds flags that do nothing here."""
    rows = list(flags)
    shown = [flag for flag in rows if full or flag.rules[platform].status is Status.HONOURED]
    lines = [f"USAGE: {usage}", "", *textwrap.wrap(about, HELP_WIDTH), "", "HELP OPTIONS"]
    for name, text in _HELP_OPTIONS:
        lines += _entry(f"--{name}: {text}")
    for category, group in by_category(shown).items():
        lines += ["", f"{category.upper()} OPTIONS"]
        for flag in group:
            lines += _entry(_sentence(flag, platform))
    if not full:
        hidden = len(rows) - len(shown)
        lines += ["", f"{hidden} more xLLM flags are known but inert, refused or removed: see --helpfull."]
    return "\n".join(lines)


def _entry(text: str) -> list[str]:
    return textwrap.wrap(text, HELP_WIDTH, initial_indent="  ", subsequent_indent="      ")


def _sentence(flag: Flag, platform: str) -> str:
    rule = flag.rules[platform]
    if rule.status is Status.REMOVED:
        return f"--{flag.name}: {flag.help}"
    kind = str(flag.setting.kind)
    choices = _choices(flag, platform)
    if choices and flag.setting.choices:
        kind = choices
    text = f"--{flag.name}: {flag.help} ({kind}, default {flag.default})"
    return text if rule.status is Status.HONOURED else f"{text} [{rule.status}: {rule.why}]"


def _choices(flag: Flag, platform: str) -> str:
    """Values that are accepted, where they are few."""
    allowed = flag.rules[platform].allowed or flag.setting.choices
    return ", ".join(show(value) or '""' for value in allowed)


def render_markdown() -> str:
    """docs/flags.md: the whole table, a section per category, a column per platform."""
    parts = [_MARKDOWN_HEAD]
    for category, group in by_category(engine_flags()).items():
        head = ["flag", "type", "default", "meaning", *PLATFORMS]
        parts.append(f"## {category}\n")
        parts.append("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        parts += [_markdown_row(flag) for flag in group]
        parts.append("")
    return "\n".join(parts)


def _markdown_row(flag: Flag) -> str:
    meaning = flag.help + (f". *Default: {flag.default_note}.*" if flag.default_note else "")
    cells = [f"`{flag.name}`", str(flag.setting.kind), f"`{flag.default}`", meaning]
    cells += [_markdown_status(flag, platform) for platform in PLATFORMS]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _markdown_status(flag: Flag, platform: str) -> str:
    rule = flag.rules[platform]
    text = str(rule.status)
    if _choices(flag, platform) and rule.status is not Status.REMOVED:
        text += f" (only {_choices(flag, platform)})"
    return f"{text}: {rule.why}" if rule.why else text


if __name__ == "__main__":
    print(render_markdown(), end="")
