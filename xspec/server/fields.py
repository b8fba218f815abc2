"""Typed reading of a JSON body: each field is checked by kind and range, and refused by name.

Knows nothing about what the fields mean. An explicit null is an omitted field throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from xspec.errors import RequestError

INT64_MAX = 2**63 - 1


def shown(value: object) -> str:
    """A value as it appears in a message: never longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def refuse(name: str, found: object, allowed: str) -> RequestError:
    return RequestError(f"{name} must be {allowed}, found {shown(found)}.", param=name)


def as_integer(value: object) -> int | None:
    """An int, or a float that is one (JavaScript clients write 16.0). A bool is no number."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return None


class Fields:
    """One JSON object and its accessors. `seen` collects what was read, to report strangers."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self.seen: set[str] = set()

    def raw(self, name: str) -> Any:
        self.seen.add(name)
        return self._body.get(name)

    def strangers(self) -> list[str]:
        return [name for name in self._body if name not in self.seen]

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        number = as_integer(value)
        if number is None or not low <= number <= high:
            open_ended = high == INT64_MAX and low >= 0
            allowed = f"of at least {low}" if open_ended else f"between {low} and {high}"
            raise refuse(name, value, f"an integer {allowed}")
        return number

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        inside = (
            type(value) in (int, float)
            and math.isfinite(value)
            and (low < value if above_low else low <= value)
            and value <= high
        )
        if not inside:
            raise refuse(name, value, f"a number {'above' if above_low else 'from'} {low:g} to {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise refuse(name, value, "true or false")
        return value

    def string(self, name: str) -> str | None:
        value = self.raw(name)
        if value is not None and type(value) is not str:
            raise refuse(name, value, "a string")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.raw(name)
        if value is not None and type(value) is not dict:
            raise refuse(name, value, "an object")
        return value

    def token_ids(self, name: str, vocab_size: int, *, limit: int | None = None) -> tuple[int, ...] | None:
        value = self.raw(name)
        if value is None:
            return None
        if type(value) is not list:
            raise refuse(name, value, "a list of token ids")
        if limit is not None and len(value) > limit:
            raise RequestError(f"{name} may hold at most {limit} entries, found {len(value)}.", param=name)
        return check_ids(name, value, vocab_size)

    def unsupported(self, name: str, neutral: Callable[[Any], bool], why: str) -> None:
        """A known field that this server does not implement: only its neutral values pass."""
        value = self.raw(name)
        if value is not None and not neutral(value):
            raise RequestError(f"{name} is not supported: {why}. Found {shown(value)}.", param=name)


def check_ids(name: str, ids: list[Any], vocab_size: int) -> tuple[int, ...]:
    """Token ids of this vocabulary, or a refusal that shows the first wrong one."""
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise refuse(name, token, f"made of token ids from 0 to {vocab_size - 1}")
    return tuple(ids)
