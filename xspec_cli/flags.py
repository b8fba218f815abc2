"""The one flag table: every flag of an engine, in the order of xLLM's help sections.

Parser, help, JSON files and docs/flags.md are all read off it. Its rows live in the `flags_*` data
modules; the config sections own kinds, defaults and allowed values of the flags that are honoured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from xspec_cli import flags_execution, flags_scaling, flags_serving
from xspec_cli.flags_types import Flag, Rule, Status

__all__ = ["Flag", "Rule", "Status", "by_category", "engine_flags", "table"]


def engine_flags() -> tuple[Flag, ...]:
    """Every row."""
    return (*flags_serving.FLAGS, *flags_scaling.FLAGS, *flags_execution.FLAGS)


@functools.cache
def table() -> Mapping[str, Flag]:
    """Every row by name."""
    return MappingProxyType({flag.name: flag for flag in engine_flags()})


def by_category(flags: Iterable[Flag]) -> dict[str, list[Flag]]:
    """Rows grouped under their help sections, order kept."""
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        groups.setdefault(flag.category, []).append(flag)
    return groups
