"""What a row of the flag table is, and the short constructors its data modules are written with."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from xspec.config import settings
from xspec.setting import Kind, Setting, Value, show

PLATFORMS = ("cpu",)
"""Platforms the table has a column for."""


class Status(enum.StrEnum):
    HONOURED = "honoured"  # a config field, or the command itself, reads it
    INERT = "inert"  # accepted and said to have no effect
    REFUSED = "refused"  # only its neutral values are accepted
    REMOVED = "removed"  # an old name; the message tells the new one


@dataclass(frozen=True, slots=True)
class Rule:
    """What one platform makes of a flag. `allowed` cuts its values further (empty: no cut)."""

    status: Status
    why: str = ""
    allowed: tuple[Value, ...] = ()

    def admits(self, value: Value) -> bool:
        return not self.allowed or _folded(value) in {_folded(choice) for choice in self.allowed}


@dataclass(frozen=True, slots=True)
class Flag:
    """One row. `section` is the config section that holds the field of the same name, if one does."""

    name: str
    category: str
    help: str
    setting: Setting
    rules: Mapping[str, Rule]
    section: str | None = None
    default_note: str = ""  # why the default is not xLLM's

    @property
    def default(self) -> str:
        value = self.setting.default
        return '""' if value in ("", ()) else show(value)


def _folded(value: Value) -> tuple[type, object]:
    """Text compares without case, as xLLM compares it; true and 1 stay different."""
    return type(value), value.casefold() if isinstance(value, str) else value


def _everywhere(rule: Rule) -> Mapping[str, Rule]:
    return {platform: rule for platform in PLATFORMS}


def honoured(
    name: str, category: str, help: str, *, note: str = "", allowed: tuple[Value, ...] = (), why: str = ""
) -> Flag:
    """Read from a Config; kind, default and values are the field's own."""
    section, setting = settings()[name]
    rules = _everywhere(Rule(Status.HONOURED, why, allowed))
    return Flag(name, category, help, setting, rules, section, note)


def command(
    name: str,
    category: str,
    kind: Kind,
    default: Value,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    any_case: bool = False,
    note: str = "",
) -> Flag:
    """Read by the command itself; no Config holds it."""
    setting = Setting(kind, default, low=low, high=high, choices=choices, any_case=any_case)
    return Flag(name, category, help, setting, _everywhere(Rule(Status.HONOURED)), None, note)


def inert(
    name: str,
    category: str,
    kind: Kind,
    default: Value,
    help: str,
    because: str,
    *,
    choices: tuple[str, ...] = (),
) -> Flag:
    """Accepted and said to have no effect."""
    setting = Setting(kind, default, choices=choices)
    return Flag(name, category, help, setting, _everywhere(Rule(Status.INERT, because)))


def refused(
    name: str,
    category: str,
    kind: Kind,
    default: Value,
    help: str,
    why: str,
    *,
    also: tuple[Value, ...] = (),
    note: str = "",
) -> Flag:
    """Only the default and the values in `also` are accepted; they ask for nothing."""
    rule = Rule(Status.REFUSED, why, (default, *also))
    return Flag(name, category, help, Setting(kind, default), _everywhere(rule), None, note)


def removed(name: str, category: str, kind: Kind, default: Value, instead: str) -> Flag:
    """A name xLLM once had. Whatever its value, the user is told what replaced it."""
    rules = _everywhere(Rule(Status.REMOVED, instead))
    return Flag(name, category, f"removed: {instead}", Setting(kind, default), rules)
