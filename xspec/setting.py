"""What one flag may hold: its type, default and allowed values, and how a value is shown.

The only gate a value passes on its way into a Config. Knows no flag by name.
"""

from __future__ import annotations

import difflib
import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from xspec.errors import ConfigError

Value = bool | int | float | str | tuple[str, ...]


class Kind(enum.StrEnum):
    """Type of a flag, in gflags' words. LIST is a comma-separated string holding several."""

    BOOL = "bool"
    INT32 = "int32"
    INT64 = "int64"
    UINT32 = "uint32"
    UINT64 = "uint64"
    DOUBLE = "double"
    STRING = "string"
    LIST = "list"


INTEGER_RANGES: Mapping[Kind, tuple[int, int]] = MappingProxyType(
    {
        Kind.INT32: (-(2**31), 2**31 - 1),
        Kind.INT64: (-(2**63), 2**63 - 1),
        Kind.UINT32: (0, 2**32 - 1),
        Kind.UINT64: (0, 2**64 - 1),
    }
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What one flag may hold. `check` is the only gate a value passes on its way into a Config."""

    kind: Kind
    default: Value
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()  # other spellings of choices, replaced on the way in
    any_case: bool = False  # choices are matched without regard to case
    nonempty: bool = False
    secret: bool = False  # never shown, dumped or logged

    def check(self, flag: str, value: object) -> Value:
        """The value in canonical form; ConfigError names flag, value found and values allowed."""
        checked = self._canonical(value)
        if checked is None:
            raise ConfigError(f"{self.shown(flag, value)}: allowed: {self.allowed()}")
        return checked

    def shown(self, flag: str, value: object) -> str:
        """`--flag=value` as a user would have typed it, without giving secrets away."""
        return f"--{flag}={'***' if self.secret else show(value)}"

    def allowed(self) -> str:
        """The allowed values in words."""
        if self.kind is Kind.BOOL:
            return "true or false"
        if self.choices:
            return ", ".join(choice or '""' for choice in self.choices)
        if self.kind is Kind.LIST:
            return "text, several separated by commas"
        if self.kind is Kind.STRING:
            return "printable ASCII text" if self.secret else "non-empty text" if self.nonempty else "text"
        low, high = self._bounds()
        noun = "numbers" if self.kind is Kind.DOUBLE else "integers"
        if high == math.inf:
            return noun if low == -math.inf else f"{noun} from {show(low)}"
        return f"{noun} from {show(low)} to {show(high)}"

    def _bounds(self) -> tuple[float, float]:
        low, high = INTEGER_RANGES.get(self.kind, (-math.inf, math.inf))
        return low if self.low is None else self.low, high if self.high is None else self.high

    def _canonical(self, value: object) -> Value | None:
        match self.kind:
            case Kind.BOOL:
                return value if isinstance(value, bool) else None
            case Kind.STRING:
                return self._text(value)
            case Kind.LIST:
                return _text_list(value)
            case Kind.DOUBLE:
                return self._number(value)
        return self._in_range(value) if isinstance(value, int) and not isinstance(value, bool) else None

    def _number(self, value: object) -> Value | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        try:
            return self._in_range(float(value))
        except OverflowError:  # an int that no double holds
            return None

    def _in_range(self, value: float) -> int | float | None:
        low, high = self._bounds()
        return value if math.isfinite(value) and low <= value <= high else None

    def _text(self, value: object) -> str | None:
        if not isinstance(value, str) or "\0" in value or (self.nonempty and not value):
            return None
        if self.secret and not (value.isascii() and value.isprintable()):
            return None  # it has to travel in an HTTP header
        value = dict(self.aliases).get(value, value)
        if self.any_case:
            value = {choice.casefold(): choice for choice in self.choices}.get(value.casefold(), value)
        return value if not self.choices or value in self.choices else None


def _text_list(value: object) -> tuple[str, ...] | None:
    if isinstance(value, str):
        value = tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, list | tuple):
        return None
    return tuple(value) if all(isinstance(part, str) and _is_list_item(part) for part in value) else None


def _is_list_item(part: str) -> bool:
    """Whether it would come back the same from a comma-separated command line."""
    return bool(part) and part == part.strip() and "," not in part and part.isprintable()


def show(value: object) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, list | tuple):
        return ",".join(map(show, value))
    return str(value)


def closest(name: str, names: Iterable[str]) -> str:
    """` (did you mean --x?)` for an unknown flag, or nothing when no name is near."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.7)
    return f" (did you mean --{near[0]}?)" if near else ""
