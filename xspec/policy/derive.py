"""Ordered candidates and their thresholds, from what rounds cost and how often drafts were accepted offline.

How acceptance will move is not known, only where it was: all match rates are taken to move together, by one
shift z of their logits (0: as measured). Along z one pair after the other is the best; a chain of them in
which the next one also costs more a round is what a range gets. Own derivation from the RFC's cost formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xspec.cost.looped import acceptance_of, off_acceptance, rate_of
from xspec.policy.spec_config import Candidate

Pair = tuple[int, int | None]
"""(K, d)."""

SHIFTS = tuple(z / 10.0 for z in range(-50, 51))
SHIFT_SPREAD = 1.5
"""How far acceptance is expected to move, in logits: what wins near z = 0 counts most."""

CERTAIN = 1e-4


@dataclass(frozen=True, slots=True)
class Cell:
    """A pair at one batch size: ms of its round and of a plain one, the match rate behind its acceptance."""

    pair: Pair
    ms: float
    plain_ms: float
    rate: float

    def acceptance(self, shift: float) -> float:
        inside = min(max(self.rate, CERTAIN), 1.0 - CERTAIN)
        moved = 1.0 / (1.0 + (1.0 - inside) / inside * math.exp(-shift))
        return acceptance_of(moved, self.pair[0])

    def worth(self, shift: float) -> float:
        """Tokens per ms of one request, (1 + K a) / T."""
        return (1.0 + self.pair[0] * self.acceptance(shift)) / self.ms

    @property
    def off(self) -> float:
        return off_acceptance(self.pair[0], self.ms, self.plain_ms)


def derive_candidates(
    acceptance: Mapping[Pair, float],
    round_ms: Callable[[Pair], float | None],
    plain_ms: float,
    *,
    dead_band: float = 0.02,
    most: int = 4,
) -> tuple[tuple[Candidate, ...], int, bool]:
    """(candidates in order, place of the best at the measured acceptance, whether plain rounds beat all).

    `acceptance`: accepted / proposed drafts as measured, of every pair to choose from; `round_ms`: of one
    batch size, None where it was not measured (the pair is left out). `up` of a candidate is where the next
    one promises `dead_band` more, `down` where the one before does. ValueError without any pair.
    """
    cells = []
    for pair, rate in acceptance.items():
        ms = round_ms(pair)
        if ms is not None:
            cells.append(Cell(pair, ms, plain_ms, rate_of(rate, pair[0])))
    if not cells:
        raise ValueError("candidates need at least one pair with acceptance and cost")
    chain = _separated(_chain(cells, most), dead_band)
    best = max(range(len(chain)), key=lambda j: chain[j].worth(0.0))
    candidates = []
    for j, cell in enumerate(chain):
        before, after = (chain[j - 1] if j else None), (chain[j + 1] if j + 1 < len(chain) else None)
        up = None if after is None else _crossing(cell, after, 1.0 + dead_band)
        down = None if before is None else _crossing(before, cell, 1.0 / (1.0 + dead_band))
        candidates.append(
            Candidate(
                draft_steps=cell.pair[0],
                draft_loops=cell.pair[1],
                up=None if up is None else round(cell.acceptance(up), 4),
                down=None if down is None else round(cell.acceptance(down), 4),
                off=round(max(cell.off, 0.0), 4),
                acceptance=round(max(acceptance[cell.pair], CERTAIN), 4),
            )
        )
    return tuple(candidates), best, chain[best].worth(0.0) <= 1.0 / plain_ms


def _chain(cells: Sequence[Cell], most: int) -> list[Cell]:
    """The pairs with ascending cost, and each better than the last from some shift on, that are worth most.

    Worth: the best of the chain at every shift, weighed by how likely that shift is. Greedily: first the best
    pair as measured, if it beats plain rounds, then the one that adds most, until `most` are found or none
    adds anything.
    """
    weights = [math.exp(-0.5 * (z / SHIFT_SPREAD) ** 2) for z in SHIFTS]
    worths = {cell.pair: [cell.worth(z) for z in SHIFTS] for cell in cells}
    first = max(cells, key=lambda cell: cell.worth(0.0))
    chain = [first] if first.worth(0.0) > 1.0 / first.plain_ms else []
    best = [max([1.0 / first.plain_ms, *(one.worth(z) for one in chain)]) for z in SHIFTS]
    while len(chain) < most:
        added = []
        for cell in cells:
            fits = cell not in chain and _ordered([*chain, cell])
            better = (max(w - b, 0.0) * k for w, b, k in zip(worths[cell.pair], best, weights, strict=True))
            added.append(sum(better) if fits else 0.0)
        top = max(range(len(cells)), key=added.__getitem__)
        if added[top] <= 0.0:
            break
        chain = sorted([*chain, cells[top]], key=lambda cell: cell.ms)
        best = [max(b, w) for b, w in zip(best, worths[cells[top].pair], strict=True)]
    # where plain rounds win at every shift, probes still need the pair that comes nearest
    return chain or [max(cells, key=lambda cell: cell.worth(SHIFTS[-1]) * cell.plain_ms)]


def _ordered(cells: Sequence[Cell]) -> bool:
    """Whether in order of cost each pair overtakes the one before as acceptance grows."""
    chain = sorted(cells, key=lambda cell: cell.ms)
    return all(
        one.ms < two.ms and _crossing(one, two, 1.0) is not None
        for one, two in zip(chain, chain[1:], strict=False)
    )


def _separated(chain: Sequence[Cell], dead_band: float) -> list[Cell]:
    """Without candidates that could not be told apart from the next: with too narrow a way between."""
    kept = list(chain)
    while len(kept) > 1:
        for j, (one, two) in enumerate(zip(kept, kept[1:], strict=False)):
            up, down = _crossing(one, two, 1.0 + dead_band), _crossing(one, two, 1.0 / (1.0 + dead_band))
            below = _crossing(kept[j - 1], one, 1.0 / (1.0 + dead_band)) if j else None
            wide = up is not None and down is not None and (below is None or _clear(one, below, up))
            if not wide:
                del kept[j if one.worth(0.0) < two.worth(0.0) else j + 1]
                break
        else:
            break
    return kept


def _clear(cell: Cell, down: float, up: float) -> bool:
    """Whether thresholds, as they are written, leave a band between them."""
    return round(cell.acceptance(up), 4) - round(cell.acceptance(down), 4) >= 0.01


def _crossing(one: Cell, two: Cell, ratio: float) -> float | None:
    """The shift from which on `two` is worth `ratio` times what `one` is; None: it is so everywhere or
    nowhere in reach, or the other way round."""

    def lead(z: float) -> float:
        return two.worth(z) - ratio * one.worth(z)

    low, high = SHIFTS[0], SHIFTS[-1]
    if lead(low) >= 0.0 or lead(high) <= 0.0:
        return None
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if lead(middle) < 0.0 else (low, middle)
    return (low + high) / 2.0
