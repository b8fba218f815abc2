"""Training blocks of DSpark: where they start, what they are fed, what they see and what they must predict.

Integers and masks over packed sequences. Knows nothing about models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Lane:
    """One sequence among the packed rows, and its share of the block rows."""

    first: int  # packed row of its first token
    last: int  # one past its last
    block_first: int  # first of its block rows
    block_last: int
    anchors: torch.Tensor  # [A] int64, positions within the sequence, ascending


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of width B on packed sequences; block rows are block-major, slot k of block a is a * B + k.

    A block anchored at position s of its sequence covers s .. s + B - 1, and slot k predicts the token at
    s + k + 1. Slots whose label would lie past the sequence's end are computed but not supervised.
    """

    lanes: tuple[Lane, ...]
    positions: torch.Tensor  # [M] int64 within the sequence: rotary position of each block row
    rows: torch.Tensor  # [M] int64 packed row of that position (clamped to the sequence): the teacher's
    previous: torch.Tensor  # [M] int64 token at `rows` (teacher forcing; slot 0's is the anchor)
    labels: torch.Tensor  # [M] int64 the token after it; 0 where unsupervised
    supervised: torch.Tensor  # [M] bool: a prefix of every block
    width: int

    @property
    def slots(self) -> torch.Tensor:
        """[M] int64: each row's place in its block, from 0."""
        return torch.arange(self.positions.shape[0], device=self.positions.device) % self.width


def candidate_anchors(length: int, prompt_len: int) -> range:
    """Positions where serving may start a block: an answer token whose successor is one too.

    The first answer token is drawn by the prefill pass, so it is the earliest anchor. Empty where the
    answer has fewer than two tokens.
    """
    return range(prompt_len, length - 1)


def draw_anchors(length: int, prompt_len: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """[min(count, candidates)] int64, uniform without replacement, ascending."""
    candidates = candidate_anchors(length, prompt_len)
    drawn = torch.randperm(len(candidates), generator=generator)[:count]
    return drawn.sort().values + candidates.start


def make_blocks(
    tokens: torch.Tensor,
    spans: Sequence[tuple[int, int]],
    anchors: Sequence[torch.Tensor],
    width: int,
) -> Blocks:
    """Blocks over packed `tokens` [N] int64: of the sequence in rows [first, last), one per anchor position.

    ValueError for an anchor that has no label in its sequence.
    """
    lanes: list[Lane] = []
    positions: list[torch.Tensor] = []
    starts: list[torch.Tensor] = []
    lengths: list[torch.Tensor] = []
    filled = 0
    for (first, last), places in zip(spans, anchors, strict=True):
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < last - first - 1:
            raise ValueError(f"anchors {places.tolist()} in a sequence of {last - first} tokens")
        taken = len(places) * width
        lanes.append(Lane(first, last, filled, filled + taken, places))
        positions.append((places[:, None] + torch.arange(width)).flatten())
        starts.append(torch.full((taken,), first))
        lengths.append(torch.full((taken,), last - first))
        filled += taken
    place, start, length = torch.cat(positions), torch.cat(starts), torch.cat(lengths)
    supervised = place < length - 1
    rows = start + torch.minimum(place, length - 1)
    place, rows, supervised = (part.to(tokens.device) for part in (place, rows, supervised))
    following = rows + supervised.long()
    labels = torch.where(supervised, tokens[following], torch.zeros_like(rows))
    return Blocks(tuple(lanes), place, rows, tokens[rows], labels, supervised, width)


def visible(anchors: torch.Tensor, width: int, context: int) -> torch.Tensor:
    """[A * B, context + A * B] bool: a block row sees the context before its anchor and its own block.

    Context keys come first, in position order. Never the anchor's own target state: in serving it does
    not exist yet when the block is drafted.
    """
    blocks = torch.arange(anchors.shape[0], device=anchors.device).repeat_interleave(width)
    before = torch.arange(context, device=anchors.device)[None, :] < anchors[blocks][:, None]
    return torch.cat((before, blocks[:, None] == blocks[None, :]), dim=1)
