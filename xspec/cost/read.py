"""Reads JSON values by name and collects every mistake: its place, what was found and what is allowed.

Knows nothing of what the values mean.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

LARGEST_COUNT = 2**31 - 1

Reader = Callable[[Any, str, list[str]], Any]
"""The canonical value of what JSON holds at a place; appends to the mistakes, or raises BadValue with the
last.
"""


class BadValue(Exception):
    """Why a value is refused, in one line with its place."""


def read_json(text: bytes) -> Any:
    """Strict JSON: no key twice in an object, of which one would be ignored, and no NaN or Infinity.

    ValueError; RecursionError where it nests too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = sorted({key for key, _ in pairs if [name for name, _ in pairs].count(key) > 1})
        raise ValueError(f"keys given twice: {', '.join(twice)}")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def read_object(
    raw: Any, readers: Mapping[str, Reader], where: str, mistakes: list[str], needed: Collection[str] = ()
) -> dict[str, Any]:
    """The values of an object that could be read. `where` is empty for the whole document."""
    if not isinstance(raw, Mapping):
        mistakes.append(refusal(where or "the whole", raw, "a JSON object"))
        return {}
    read: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in readers:
            mistakes.append(_at(where, unknown_key(str(key), readers)))
            continue
        try:
            read[key] = readers[key](value, f"{where}.{key}" if where else key, mistakes)
        except BadValue as bad:
            mistakes.append(str(bad))
    mistakes.extend(_at(where, f"{key} is missing") for key in needed if key not in raw)
    return read


def unknown_key(key: str, known: Collection[str]) -> str:
    """`unknown key "x" (did you mean "y"?)`, or with all allowed keys where none is near."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f'did you mean "{near[0]}"?' if near else f"allowed: {', '.join(known)}"
    return f'unknown key "{key}" ({hint})'


def refusal(where: str, found: Any, allowed: str) -> str:
    shown = json.dumps(found, default=repr)
    return f"{where}: found {shown if len(shown) <= 80 else shown[:77] + '...'}; allowed: {allowed}"


def _at(where: str, message: str) -> str:
    return f"{where}: {message}" if where else message


# -- readers --------------------------------------------------------------------------------------


def count(low: int, high: int = LARGEST_COUNT) -> Reader:
    """Integers from `low` to `high`; true and false are none."""

    def read(value: Any, where: str, mistakes: list[str]) -> int:
        if not _whole(value) or not low <= value <= high:
            raise BadValue(refusal(where, value, f"integers from {low} to {high}"))
        return int(value)

    return read


def counts(value: Any, where: str, mistakes: list[str]) -> tuple[int, ...]:
    """Different positive integers, ascending whatever order they were written in."""
    allowed = "a list of different positive integers, not empty"
    if not isinstance(value, list | tuple) or not value or not all(_whole(item) for item in value):
        raise BadValue(refusal(where, value, allowed))
    if min(value) < 1 or max(value) > LARGEST_COUNT or len(set(value)) < len(value):
        raise BadValue(refusal(where, value, allowed))
    return tuple(sorted(value))


def number(low: float, *, above: bool = False) -> Reader:
    """Finite numbers of at least `low`, or `above` it."""

    def read(value: Any, where: str, mistakes: list[str]) -> float:
        found = _finite(value)
        if found is None or found < low or (above and found == low):
            bound = "" if low == -math.inf else f" above {low:g}" if above else f" from {low:g}"
            raise BadValue(refusal(where, value, f"finite numbers{bound}"))
        return found

    return read


def choice(allowed: tuple[str, ...]) -> Reader:
    def read(value: Any, where: str, mistakes: list[str]) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise BadValue(refusal(where, value, ", ".join(f'"{item}"' for item in allowed)))
        return value

    return read


def truth(value: Any, where: str, mistakes: list[str]) -> bool:
    if not isinstance(value, bool):
        raise BadValue(refusal(where, value, "true or false"))
    return value


def text(value: Any, where: str, mistakes: list[str]) -> str:
    if not isinstance(value, str) or not value:
        raise BadValue(refusal(where, value, "text, not empty"))
    return value


def mapping(value: Any, where: str, mistakes: list[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadValue(refusal(where, value, "a JSON object"))
    return dict(value)


def listing(item: Reader, what: str) -> Reader:
    """A list of `what`, not empty, as a tuple of the items that could be read."""

    def read(value: Any, where: str, mistakes: list[str]) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise BadValue(refusal(where, value, f"a list of {what}, not empty"))
        found = []
        for index, held in enumerate(value):
            try:
                found.append(item(held, f"{where}[{index}]", mistakes))
            except BadValue as bad:
                mistakes.append(str(bad))
        return tuple(found)

    return read


def record(make: Callable[..., Any], readers: Mapping[str, Reader], needed: Collection[str]) -> Reader:
    """An object as `make(**values)`; None, with the mistakes told, where a value is wrong or missing."""

    def read(value: Any, where: str, mistakes: list[str]) -> Any:
        before = len(mistakes)
        values = read_object(value, readers, where, mistakes, needed)
        return make(**values) if len(mistakes) == before else None

    return read


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int that no double holds
        return None
