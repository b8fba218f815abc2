"""Shows what `xspec bench --kernels` measured: a table of kernels, one of passes, the JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from xspec_cli.benchlib.kernel_timing import Case, Measured
from xspec_cli.benchlib.stats import median

FORMAT_VERSION = 1

Row = tuple[str, ...]


def ceiling_line(measured: Sequence[Measured], compute_threads: int) -> str:
    tops = [top for found in measured for top in found.ceilings]
    read, copy = median([top.read_gb_s for top in tops]), median([top.copy_gb_s for top in tops])
    matmul = median([top.matmul_gflop_s for top in tops])
    return (
        f"ceilings on {compute_threads} compute threads: read {read:.1f} GB/s, copy {copy:.1f} GB/s both "
        f"ways, {tops[0].matmul_dtype} matmul {matmul:.0f} GFLOP/s"
    )


def kernel_table(measured: Sequence[Measured]) -> str:
    """ms of all the calls of a kernel that one pass makes; shares are of the ceilings of the same repeat."""
    head = ("kernel", "calls", "rows", "ms", "GB/s", "of read", "GFLOP/s", "of matmul")
    rows: list[Row] = [head]
    for found in measured:
        products = found.work.flops > 0
        rows.append(
            (
                found.kernel,
                str(found.calls),
                str(found.case),
                _ms(found.ms),
                f"{found.gb_s:.1f}",
                f"{100 * found.of_read:.0f} %",
                f"{found.gflop_s:.1f}" if products else "-",
                f"{100 * found.of_matmul:.0f} %" if products else "-",
            )
        )
    return _aligned(rows)


def pass_table(measured: Sequence[Measured]) -> str:
    """Whole passes against their floors and, where it was measured, against one row of the same keys."""
    head = ("pass", "requests x rows", "ms", "memory floor", "over it", "arithmetic floor", "of one row")
    singles = {(found.kernel, found.case): found for found in measured}
    rows: list[Row] = [head]
    for found in measured:
        one = singles.get((found.kernel, Case(1, 1, found.case.keys)))
        rows.append(
            (
                found.kernel,
                str(found.case),
                _ms(found.ms),
                _ms(found.memory_floor_ms),
                f"{found.of_memory_floor:.2f}",
                _ms(found.arithmetic_floor_ms),
                "-" if one is None else f"{found.over(one):.2f}",
            )
        )
    return _aligned(rows)


def document(
    measured: Sequence[Measured],
    *,
    settings: Mapping[str, Any],
    model: Mapping[str, Any],
    machine: Mapping[str, Any],
    started_at: str,
) -> dict[str, Any]:
    return {
        "format": "xspec bench kernels",
        "version": FORMAT_VERSION,
        "started_at": started_at,
        "settings": dict(settings),
        "model": dict(model),
        "machine": dict(machine),
        "kernels": [dataclasses.asdict(found) for found in measured],
    }


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _aligned(rows: Sequence[Row]) -> str:
    """First column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
