"""A drafter that knows the answers: proposes the right token as often as it is told, else a wrong one.

It stands in for drafters of any quality where a test needs full, partial or no acceptance. What it
proposes depends on its script, the row's position and last token alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from xspec.draft.base import Draft, DraftContext, DrafterSpec, DraftMemory, Published


class ScriptedDrafter:
    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        right: float,
        steps: Sequence[int] = range(1, 17),
        block: int = 0,
        wrong: int | None = None,
    ) -> None:
        """`texts`: prompt and answer of every request; `right`: how often a proposal follows them.

        `wrong`: what it proposes otherwise; None: the token before the right one.
        """
        self.spec = DrafterSpec("scripted", steps=tuple(steps), block=block)
        self._texts = texts
        self._right, self._wrong = right, wrong
        self.published: dict[int, list[int]] = {}  # positions of facts by device row, since its last bind

    def attach(self, memory: DraftMemory) -> None:
        return None

    def bind(self, row: int, last_page: int | None) -> None:
        self.published[row] = []

    def draft(self, context: DraftContext, steps: int) -> Draft:
        lanes = zip(context.last_tokens.tolist(), context.positions.tolist(), strict=True)
        tokens = torch.tensor([self._continue(last, position, steps) for last, position in lanes])
        return Draft(tokens, torch.full(tokens.shape, self._right))

    def publish(self, published: Published) -> None:
        facts = published.facts.tolist()
        rows = published.rows[published.lanes].tolist()
        positions = published.inputs.positions.tolist()
        for fact, row, position in zip(facts, rows, positions, strict=True):
            if fact:
                self.published[row].append(position)

    def _continue(self, last: int, position: int, steps: int) -> list[int]:
        for text in self._texts:
            if position < len(text) and text[position] == last:
                ahead = [*text[position + 1 : position + 1 + steps], *([0] * steps)][:steps]
                return [
                    token if self._is_right(position + j) else self._miss(token)
                    for j, token in enumerate(ahead)
                ]
        return [1] * steps

    def _miss(self, token: int) -> int:
        return max(0, token - 1) if self._wrong is None else self._wrong

    def _is_right(self, position: int) -> bool:
        digest = hashlib.blake2b(position.to_bytes(4, "little"), digest_size=4).digest()
        return int.from_bytes(digest, "little") / 2**32 < self._right
