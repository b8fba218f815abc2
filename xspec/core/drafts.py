"""What became of drafts: one row in one round, the tally of many, and the rates read off it.

A draft is a row of a round for which tokens were proposed (vLLM's word). Knows nothing about who proposes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """One draft: tokens proposed, how many of them the target verified, how many it agreed with.

    Only positions that the sequence can still have count: the token that ends it at its limit is always
    the target's own, and what follows a stop does not exist. So accepted <= verified <= proposed.
    """

    proposed: int
    verified: int
    accepted: int

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.verified <= self.proposed:
            raise ValueError(
                f"{self.accepted} drafts accepted of {self.verified} verified and {self.proposed} proposed"
            )

    @staticmethod
    def of_row(*, drafted: int, verify: int, room: int, returned: int) -> DraftCounts:
        """Counts of a row that returned `returned` (at least 1) tokens and could commit `room` at most.

        The last token returned is the target's own draw; all before it were accepted drafts.
        """
        return DraftCounts(
            proposed=min(drafted, room - 1), verified=min(verify, room - 1), accepted=returned - 1
        )

    def until(self, tokens: int) -> DraftCounts:
        """The counts of the same row if its sequence ended at its `tokens`-th token of this round."""
        return DraftCounts(min(self.proposed, tokens), min(self.verified, tokens), min(self.accepted, tokens))


@dataclass(frozen=True, slots=True)
class DraftTotals:
    """Sums over drafts, as every server with vLLM's counters can tell them, and the rates they give."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]  # [i]: drafts whose token i was accepted

    def since(self, before: DraftTotals) -> DraftTotals:
        """What came on top of `before`."""
        earlier = (*before.accepted_per_position, *[0] * len(self.accepted_per_position))
        return DraftTotals(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_position, earlier, strict=False)),
        )

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a round, the target's own included; None without any draft."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the proposed tokens that was accepted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def position_rates(self) -> tuple[float, ...]:
        """[i]: share of all drafts whose token i was accepted; empty without any draft."""
        return tuple(count / self.drafts for count in self.accepted_per_position) if self.drafts else ()

    @property
    def conditional_rates(self) -> tuple[float | None, ...]:
        """[i]: share of the drafts accepted up to token i - 1 whose token i was too; None: no such draft."""
        above = (self.drafts, *self.accepted_per_position)
        pairs = zip(self.accepted_per_position, above, strict=False)
        return tuple(count / total if total else None for count, total in pairs)


class DraftTally:
    """Adds drafts up: those of one request, or of an engine since its start. `width`: most tokens of one."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.verified_tokens = 0
        self.committed_tokens = 0
        self._by_length: dict[int, list[int]] = {}  # tokens proposed -> [j]: drafts with j accepted

    def add(self, counts: DraftCounts, committed: int) -> None:
        """One more draft, which led to `committed` tokens of text."""
        if counts.proposed > self.width:
            raise ValueError(f"{counts.proposed} tokens were proposed where {self.width} are the most")
        self.verified_tokens += counts.verified
        self.committed_tokens += committed
        row = self._by_length.setdefault(counts.proposed, [0] * (counts.proposed + 1))
        row[counts.accepted] += 1

    @property
    def by_length(self) -> Mapping[int, list[int]]:
        """Tokens proposed -> [j]: drafts of which exactly j were accepted; only lengths that occurred."""
        return MappingProxyType(dict(sorted(self._by_length.items())))

    @property
    def histogram(self) -> list[int]:
        """[j], width + 1 entries: drafts of which exactly j tokens were accepted."""
        rows = self._by_length.values()
        return [sum(row[j] for row in rows if j < len(row)) for j in range(self.width + 1)]

    def totals(self) -> DraftTotals:
        histogram = self.histogram
        return DraftTotals(
            drafts=sum(histogram),
            draft_tokens=sum(length * sum(row) for length, row in self._by_length.items()),
            accepted_tokens=sum(j * count for j, count in enumerate(histogram)),
            accepted_per_position=tuple(sum(histogram[i + 1 :]) for i in range(self.width)),
        )
