"""gflags' command line syntax: turns words into typed values by name.

Knows names and kinds, not what a flag means. It never stops at the first mistake: `Parsed.mistakes`
lists all of them, so that a user repairs a command line once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xspec.setting import INTEGER_RANGES, Kind, Setting, Value, closest

BUILT_IN: Mapping[str, Setting] = {
    **{name: Setting(Kind.BOOL, False) for name in ("help", "h", "helpfull", "version")},
    **{name: Setting(Kind.LIST, ()) for name in ("flagfile", "fromenv", "tryfromenv", "undefok")},
}
"""Flags of the syntax itself, present in every command."""

_TRUE = frozenset({"true", "t", "yes", "y", "1"})
_FALSE = frozenset({"false", "f", "no", "n", "0"})
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|[0-9]+)", re.ASCII)
_DOUBLE = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)


@dataclass(slots=True)
class Parsed:
    """What one command line says. `values` holds only flags that were given; the last occurrence won."""

    values: dict[str, Value] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    helps: set[str] = field(default_factory=set)  # of help, helpfull, version


def parse(argv: Sequence[str], settings: Mapping[str, Setting], environ: Mapping[str, str]) -> Parsed:
    """Read `argv` (without the program name). `environ` serves --fromenv and --tryfromenv.

    Of a Setting only the kind is applied here; its range and choices are the caller's to check.
    """
    parser = _Parser({**settings, **BUILT_IN}, environ)
    parser.words(argv)
    return parser.finish()


def parse_value(kind: Kind, text: str) -> Value | None:
    """The typed value of `text`, or None where gflags would call it illegal."""
    match kind:
        case Kind.BOOL:
            word = text.lower()
            return True if word in _TRUE else False if word in _FALSE else None
        case Kind.STRING:
            return text
        case Kind.LIST:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        case Kind.DOUBLE:
            return float(text) if _DOUBLE.fullmatch(text) else None
    # 24 characters hold every 64-bit number; longer ones would only cost time
    if not _INTEGER.fullmatch(text) or len(text) > 24:
        return None
    number = int(text, 16 if "x" in text.lower() else 10)
    low, high = INTEGER_RANGES[kind]
    return number if low <= number <= high else None


class _Parser:
    def __init__(self, settings: Mapping[str, Setting], environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.environ = environ
        self.parsed = Parsed()
        self.unknown: list[tuple[str, str]] = []  # (name, mistake), forgiven by --undefok
        self.forgiven: set[str] = set()
        self.open_files: list[Path] = []

    def finish(self) -> Parsed:
        self.parsed.mistakes += [text for name, text in self.unknown if name not in self.forgiven]
        return self.parsed

    def words(self, argv: Sequence[str]) -> None:
        index = 0
        while index < len(argv):
            word = argv[index]
            index += 1
            if word == "--":
                for stray in argv[index:]:
                    self._stray(stray, None)
                return
            if not word.startswith("-") or word == "-":
                self._stray(word, argv[index - 2] if index >= 2 else None)
                continue
            following = argv[index] if index < len(argv) else None
            index += self._flag(word, following, where="")

    def _flag(self, word: str, following: str | None, where: str) -> int:
        """Take one flag; returns how many following words it used as its value (0 or 1)."""
        name, equals, text = word.lstrip("-").partition("=")
        if len(word) - len(word.lstrip("-")) > 2:
            self._mistake(where, f"{word}: flags start with one or two dashes")
            return 0
        setting = self.settings.get(name)
        if setting is None:
            self._negated_or_unknown(name, bool(equals), where)
            return 0
        if equals:
            self._assign(name, text, where)
            return 0
        if setting.kind is Kind.BOOL:
            self._set(name, True, where)
            return 0
        if following is None:
            self._mistake(where, f"--{name}: its value is missing ({setting.kind})")
            return 0
        if following.startswith("--") and following.lstrip("-").partition("=")[0] in self.settings:
            self._mistake(
                where, f"--{name}: its value is missing (write --{name}={following} if that is the value)"
            )
            return 0
        self._assign(name, following, where)
        return 1

    def _negated_or_unknown(self, name: str, has_value: bool, where: str) -> None:
        positive = name.removeprefix("no")
        setting = self.settings.get(positive) if positive != name else None
        if setting is None:
            self.unknown.append((name, f"{where}--{name}: unknown flag{closest(name, self.settings)}"))
        elif setting.kind is not Kind.BOOL:
            self._mistake(where, f"--{name}: --{positive} is not a switch but takes a value ({setting.kind})")
        elif has_value:
            self._mistake(where, f"--{name}: takes no value; write --{positive}=true or --{positive}=false")
        else:
            self._set(positive, False, where)

    def _assign(self, name: str, text: str, where: str) -> None:
        setting = self.settings[name]
        value = parse_value(setting.kind, text)
        if value is None:
            hint = " (or t, f, yes, no, y, n, 1, 0)" if setting.kind is Kind.BOOL else ""
            self._mistake(where, f"{setting.shown(name, text)}: allowed: {setting.allowed()}{hint}")
        else:
            self._set(name, value, where)

    def _set(self, name: str, value: Value, where: str) -> None:
        if name not in BUILT_IN:
            self.parsed.values[name] = value
        elif isinstance(value, tuple):
            self._include(name, value, where)
        elif value:
            self.parsed.helps.add("help" if name == "h" else name)

    def _include(self, name: str, items: tuple[str, ...], where: str) -> None:
        for item in items:
            if name == "undefok":
                self.forgiven.update((item, f"no{item}"))
            elif name == "flagfile":
                self._flag_file(item, where)
            else:
                self._from_environment(item, where, required=name == "fromenv")

    def _from_environment(self, name: str, where: str, *, required: bool) -> None:
        variable = f"FLAGS_{name}"
        if name in BUILT_IN or name not in self.settings:
            self.unknown.append((name, f"{where}--{name}: unknown flag{closest(name, self.settings)}"))
        elif variable in self.environ:
            self._assign(name, self.environ[variable], f"{where}{variable}: ")
        elif required:
            self._mistake(where, f"--fromenv={name}: {variable} is not set in the environment")

    def _flag_file(self, name: str, where: str) -> None:
        path = Path(name)
        try:
            resolved = path.resolve()
            if resolved in self.open_files:
                chain = " -> ".join(str(file) for file in [*self.open_files, resolved])
                self._mistake(where, f"--flagfile={name}: includes itself: {chain}")
                return
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._mistake(where, f"--flagfile={name}: cannot be read: {reason}")
            return
        self.open_files.append(resolved)
        for number, line in enumerate(text.splitlines(), 1):
            self._flag_file_line(line.strip(), f"{name}:{number}: ")
        self.open_files.pop()

    def _flag_file_line(self, line: str, where: str) -> None:
        if not line or line.startswith("#"):
            return
        if not line.startswith("-") or line.strip("-") == "":
            self._mistake(where, f"{line}: expected one --flag=value a line, or a # comment")
            return
        word, *rest = line.split(maxsplit=1)
        if "=" in word:
            self._flag(line, None, where)
        elif self._flag(word, rest[0] if rest else None, where) < len(rest):
            self._mistake(where, f"{rest[0]}: unexpected text after {word}")

    def _stray(self, word: str, before: str | None) -> None:
        name = before.lstrip("-") if before is not None and before.startswith("-") else ""
        hint = ""
        setting = self.settings.get(name)
        if setting is not None and setting.kind is Kind.BOOL and parse_value(Kind.BOOL, word) is not None:
            hint = f" (a switch takes its value with =: --{name}={word})"
        self.parsed.mistakes.append(f"{word}: unexpected argument, only flags are taken{hint}")

    def _mistake(self, where: str, text: str) -> None:
        self.parsed.mistakes.append(where + text)
