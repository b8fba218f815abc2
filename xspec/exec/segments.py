"""How the rows of a pass are grouped so that attention sizes its work by what rows really read.

Plain ints; the only input is page counts the host knows as bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from xspec.nn.inputs import Segment

SPLIT_SAVES_TOKENS = 2048
"""A further segment costs a handful of calls per layer; it must save reading this many keys."""


def decode_segments(pages: Sequence[int], lanes: int, width: int, block_size: int) -> tuple[Segment, ...]:
    """Segments of `lanes` rows (padding included), `pages` [live] in descending order, `width` rows each.

    A new segment starts where the rest needs at most half the pages and the saving is worth a split.
    """
    counts = [*pages, *([1] * (lanes - len(pages)))]
    starts = [0]
    for i in range(1, lanes):
        widest = counts[starts[-1]]
        saved = (widest - counts[i]) * (lanes - i) * block_size
        if counts[i] * 2 <= widest and saved >= SPLIT_SAVES_TOKENS:
            starts.append(i)
    ends = [*starts[1:], lanes]
    return tuple(
        Segment(first=a, count=b - a, rows=width, pages=counts[a], first_row=a * width)
        for a, b in zip(starts, ends, strict=True)
    )


def chunk_segments(counts: Sequence[int], pages: Sequence[int]) -> tuple[Segment, ...]:
    """One segment per prefill chunk of `counts[i]` rows that reads `pages[i]` pages."""
    segments: list[Segment] = []
    first_row = 0
    for index, (count, read) in enumerate(zip(counts, pages, strict=True)):
        segments.append(Segment(first=index, count=1, rows=count, pages=read, first_row=first_row))
        first_row += count
    return tuple(segments)
