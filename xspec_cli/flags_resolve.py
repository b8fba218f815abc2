"""From a command line to a Config: syntax, JSON file, the flag table's rules, and the dump.

Precedence is command line, then JSON file, then default. Every mistake found on the way is reported
in one ConfigError, one a line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xspec
from xspec.config import Config
from xspec.errors import ConfigError
from xspec.setting import Value, closest, show
from xspec_cli import gflags
from xspec_cli.flags import Flag, Status, table
from xspec_cli.flags_serving import CONFIG
from xspec_cli.flags_text import render_help
from xspec_cli.flags_types import PLATFORMS

NEVER_DUMPED = ("model",)
"""Like xLLM: a dumped file is for the next launch, which names its own model. Secrets stay out as well."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is told apart between subcommands: words of the help, and flags that no Config holds."""

    usage: str
    about: str
    flags: tuple[Flag, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line that holds.

    `given` has the command's own flags as typed, `chosen` names those of the engine that were set at all,
    `notes` tell what has no effect.
    """

    config: Config
    given: Mapping[str, Value]
    notes: tuple[str, ...]
    command_defaults: Mapping[str, Value]
    chosen: frozenset[str] = frozenset()

    def value(self, name: str) -> Any:
        """A flag of the command itself: as given, else its default."""
        return self.given.get(name, self.command_defaults[name])


@dataclass(frozen=True, slots=True)
class Info:
    """The command line asked for a text instead of a run."""

    text: str


def resolve(
    argv: Sequence[str],
    command: Command,
    *,
    environ: Mapping[str, str] | None = None,
    platform: str = PLATFORMS[0],
) -> Launch | Info:
    """Read a command line. ConfigError lists every mistake; nothing is written or started."""
    flags = {**table(), **{flag.name: flag for flag in command.flags}}
    environ = os.environ if environ is None else environ
    parsed = gflags.parse(argv, {name: flag.setting for name, flag in flags.items()}, environ)
    if parsed.helps:
        return Info(_info(parsed.helps, command, flags, platform))
    mistakes = list(parsed.mistakes)
    from_file: dict[str, object] = {}
    path = str(parsed.values.get("config_json_file", ""))
    if path:
        try:
            from_file = read_json(path)
        except ConfigError as error:
            mistakes.append(str(error))
    sorter = _Sorter(flags, platform, mistakes)
    # what the command line overrides is still checked: a broken file is broken either way
    for name, value in from_file.items():
        sorter.take(name, value, f"{path}: ", from_file=True)
    for name, value in parsed.values.items():
        sorter.take(name, value, "", from_file=False)
    try:
        config = Config.from_mapping(sorter.config)
    except ConfigError as error:
        mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(dict.fromkeys(mistakes)))
    defaults = {name: flag.setting.default for name, flag in flags.items() if flag.section is None}
    return Launch(config, sorter.given, tuple(sorter.notes.values()), defaults, frozenset(sorter.config))


class _Sorter:
    """Passes values by the table's rules into config values, command values, notes and mistakes."""

    def __init__(self, flags: Mapping[str, Flag], platform: str, mistakes: list[str]) -> None:
        self.flags = flags
        self.platform = platform
        self.mistakes = mistakes
        self.config: dict[str, Value] = {}
        self.given: dict[str, Value] = {}
        self.notes: dict[str, str] = {}

    def take(self, name: str, value: object, where: str, *, from_file: bool) -> None:
        flag = self.flags.get(name)
        if flag is None:
            self.mistakes.append(f"{where}--{name}: unknown flag{closest(name, self.flags)}")
            return
        if from_file and flag.category == CONFIG and name != "log_level":
            self.mistakes.append(f"{where}--{name}: only taken on the command line")
            return
        rule = flag.rules[self.platform]
        if rule.status is Status.REMOVED:
            self.mistakes.append(f"{where}--{name}: removed, {rule.why}")
            return
        try:
            checked = flag.setting.check(name, value)
        except ConfigError as error:
            self.mistakes.append(f"{where}{error}")
            return
        shown = flag.setting.shown(name, checked)
        if not rule.admits(checked):
            allowed = ", ".join(show(choice) or '""' for choice in rule.allowed)
            self.mistakes.append(f"{where}{shown}: allowed: {allowed} ({rule.why})")
        elif rule.status is Status.INERT:
            self.notes[name] = f"{shown}: accepted, has no effect here because {rule.why}"
        elif flag.section is not None:
            self.config[name] = checked
        elif rule.status is Status.HONOURED:
            self.given[name] = checked


def read_json(path: str) -> dict[str, object]:
    """A flat JSON object of flag values, or ConfigError saying what is wrong with the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        loaded = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except OSError as error:
        raise ConfigError(f"--config_json_file={path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config_json_file={path}: is not valid JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config_json_file={path}: allowed: one JSON object of flag values")
    return loaded


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    seen: dict[str, object] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"{key} occurs twice")
        seen[key] = value
    return seen


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def dump_json(config: Config, path: str) -> None:
    """Write the settings that differ from their defaults, for --config_json_file of a later launch."""
    flat = config.to_flat(non_default_only=True)
    flat = {name: value for name, value in flat.items() if name not in NEVER_DUMPED}
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(flat, indent=2) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dump_config_json_file={path}: cannot be written: {error}") from error


def _info(helps: set[str], command: Command, flags: Mapping[str, Flag], platform: str) -> str:
    if helps == {"version"}:
        return f"xspec {xspec.__version__}"
    own = [*command.flags, *(flag for flag in flags.values() if flag not in command.flags)]
    return render_help(command.usage, command.about, own, full="helpfull" in helps, platform=platform)
