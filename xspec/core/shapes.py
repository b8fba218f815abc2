"""Buckets: the only rule for padding rows.

A captured round exists per bucket; a row inside a bucket is free, its edge is a jump in cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bucket:
    """A padded row count that has been (or will be) captured."""

    rows: int


class BucketGrid:
    """Ascending padded row counts. Looking up never invents a size: beyond the last it raises."""

    def __init__(self, rows: Iterable[int]) -> None:
        self._rows = tuple(sorted(set(rows)))
        if not self._rows or self._rows[0] < 1:
            raise ValueError(f"a bucket grid needs positive row counts, got {self._rows}")

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(Bucket(rows) for rows in self._rows)

    @property
    def max_rows(self) -> int:
        return self._rows[-1]

    def fit(self, rows: int) -> Bucket:
        """The smallest bucket that holds `rows`; ValueError past the last one."""
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"{rows} rows do not fit a grid that ends at {self.max_rows}")
        return Bucket(self._rows[bisect_left(self._rows, rows)])

    @staticmethod
    def graph(max_rows: int) -> BucketGrid:
        """xLLM's decode graph grid: 1, 2, 4, 8, then multiples of 16."""
        return BucketGrid([*_upto((1, 2, 4, 8), max_rows), *_steps(16, 16, max_rows)])

    @staticmethod
    def fine(max_rows: int) -> BucketGrid:
        """For machines whose step cost follows the row count closely (CPUs): 4s to 32, 8s to 64, then 16s."""
        small = _upto((1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64), max_rows)
        return BucketGrid([*small, *_steps(64, 16, max_rows)])

    @staticmethod
    def exact(max_rows: int) -> BucketGrid:
        """No padding at all (enable_graph_mode_decode_no_padding)."""
        return BucketGrid(range(1, max_rows + 1))


def _upto(sizes: Iterable[int], max_rows: int) -> list[int]:
    kept = [size for size in sizes if size < max_rows]
    return [*kept, max_rows]


def _steps(start: int, step: int, max_rows: int) -> list[int]:
    return [*range(start, max_rows, step)]


class TargetTiers:
    """Row counts G in which a verify pass over `lanes` padded requests of up to `width` drafts is prepared.

    The full width, lanes * (width + 1), always is one of them: nothing is pruned there. Smaller ones are
    budgets, larger ones padding.
    """

    def __init__(self, extra: Mapping[tuple[int, int], Iterable[int]] | None = None) -> None:
        """`extra`: (lanes, width) -> sizes beside the full width; they must hold the lanes' anchor rows."""
        self._sizes: dict[tuple[int, int], tuple[int, ...]] = {}
        for (lanes, width), rows in (extra or {}).items():
            sizes = sorted({*rows, lanes * (width + 1)})
            if sizes[0] < lanes:
                raise ValueError(f"{sizes[0]} rows cannot hold the anchor rows of {lanes} lanes")
            self._sizes[lanes, width] = tuple(sizes)

    def prepared(self, lanes: int, width: int) -> tuple[int, ...]:
        """All sizes, ascending."""
        return self._sizes.get((lanes, width), (lanes * (width + 1),))

    def of(self, lanes: int, width: int) -> tuple[int, ...]:
        """The budgets among them, ascending, the full width last."""
        return tuple(size for size in self.prepared(lanes, width) if size <= lanes * (width + 1))

    def fit(self, lanes: int, width: int, rows: int | None) -> int:
        """The smallest prepared size of at least `rows`; None, or none so large: the full width."""
        full = lanes * (width + 1)
        if rows is None:
            return full
        return next((size for size in self.prepared(lanes, width) if size >= rows), full)

    @staticmethod
    def pruned(lanes: BucketGrid, rows: BucketGrid, width: int) -> TargetTiers:
        """For every bucket B of `lanes`, the first buckets of `rows` to cover B, 2 B, 3 B and so on."""
        extra = {}
        for b in lanes.buckets:
            multiples = {rows.fit(b.rows * times).rows for times in range(1, width + 1)}
            extra[b.rows, width] = [size for size in multiples if size < b.rows * (width + 1)]
        return TargetTiers(extra)

    @staticmethod
    def listed(lanes: BucketGrid, rows: Iterable[int], width: int) -> TargetTiers:
        """For every bucket of `lanes`, whatever of `rows` is a budget of it."""
        sizes = tuple(rows)
        return TargetTiers(
            {
                (b.rows, width): [size for size in sizes if b.rows <= size < b.rows * (width + 1)]
                for b in lanes.buckets
            }
        )


@dataclass(frozen=True, slots=True)
class RoundShape:
    """The physical size of a round: what its cost depends on.

    `draft_rows` is the padded request capacity of the draft graph (0 in a plain round), `target_rows`
    the padded verify rows, `prefill_tokens` the unpadded tokens of its chunks, `kv_pages` the widest
    page table any decode row of it reads.
    """

    draft_rows: int
    target_rows: int
    prefill_tokens: int
    kv_pages: int
