"""Drafters that are watched, and drafters that are hinted at the answer, inside a whole engine.

A recorder keeps what its drafter proposed after each prefix, so that the same prefix can be compared
across schedules: the draft context is right exactly when nothing that happened before shows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import ScriptedDrafter
from test_engine import engine_of

from xspec.core.round import RoundPlan
from xspec.draft.base import Draft, DraftContext, Drafter, Published
from xspec.engine import build
from xspec.engine.engine import AsyncEngine
from xspec.exec.pipeline import Executor
from xspec.exec.slots import Slot
from xspec.platform.base import Event
from xspec.policy.base import Policy

Prefix = tuple[tuple[int, ...], int]
"""(prompt, position of the last token): enough where an answer is a function of its prompt."""


@dataclass(frozen=True)
class Proposal:
    tokens: tuple[int, ...]
    signals: torch.Tensor  # [K]
    logits: torch.Tensor  # [K, D] as they were shown to pick
    last: int  # token it continued
    room: int  # leading columns that the sequence had room to verify


class DraftRecorder:
    """`hints`: what is handed on in place of the proposals, so that a round accepts as often as it likes."""

    def __init__(self, drafter: Drafter, hints: ScriptedDrafter | None = None) -> None:
        self.spec = drafter.spec
        self.drafter, self.hints = drafter, hints
        self.made: dict[Prefix, list[Proposal]] = {}
        self.owners: dict[int, tuple[tuple[int, ...], int]] = {}  # device row -> prompt, longest length

    def attach(self, *memory: Any) -> None:
        self.drafter.attach(*memory)

    def bind(self, row: int, last_page: int | None) -> None:
        self.drafter.bind(row, last_page)

    def publish(self, published: Published) -> None:
        self.drafter.publish(published)

    def draft(self, context: DraftContext, steps: int) -> Draft:
        shown: list[torch.Tensor] = []

        def pick(logits: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
            shown.append(logits.clone())
            return context.pick(logits, positions, ids)

        draft = self.drafter.draft(replace(context, pick=pick), steps)
        logits = torch.stack(shown, 1)  # [R, K, D]
        lanes = zip(
            context.rows.tolist(), context.positions.tolist(), context.last_tokens.tolist(), strict=True
        )
        for lane, (row, position, last) in enumerate(lanes):
            if row in self.owners:
                prompt, max_len = self.owners[row]
                tokens, room = tuple(draft.tokens[lane].tolist()), max_len - position - 2
                made = Proposal(tokens, draft.signals[lane].clone(), logits[lane], last, room)
                self.made.setdefault((prompt, position), []).append(made)
        if self.hints is None:
            return draft
        return Draft(self.hints.draft(context, steps).tokens, draft.signals)


class _Watched:
    """An executor that tells a recorder of binds; runs on the launch thread, where drafts are made."""

    def __init__(self, executor: Executor, recorder: DraftRecorder) -> None:
        self._executor, self._recorder = executor, recorder

    def make_slots(self, count: int) -> list[Slot]:
        return self._executor.make_slots(count)

    def execute(self, plan: RoundPlan, slot: Slot) -> Event:
        for bind in plan.binds:
            if bind.params.speculative:
                self._recorder.owners[bind.row] = (bind.token_ids[: bind.prompt_len], bind.max_len)
            else:
                self._recorder.owners.pop(bind.row, None)
        return self._executor.execute(plan, slot)


@asynccontextmanager
async def watched(
    model: Path, drafter: Path, policy: Policy, hints: ScriptedDrafter | None = None, **flags: Any
) -> AsyncIterator[tuple[AsyncEngine, DraftRecorder]]:
    """An engine with the drafter at `drafter` under watch. Rows are known by the binds of its rounds."""
    recorders: list[DraftRecorder] = []
    make = build.make_drafter

    def make_watched(*parts: Any) -> Drafter:
        recorders.append(DraftRecorder(make(*parts), hints))
        return recorders[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_drafter", make_watched)
        async with engine_of(model, draft_model=str(drafter), **flags) as engine:
            engine._driver.policy = policy
            pipeline: Any = engine._driver.pipeline
            pipeline._executor = _Watched(pipeline._executor, recorders[0])
            yield engine, recorders[0]


def compare(found: DraftRecorder, expected: Mapping[Prefix, list[Proposal]]) -> int:
    """Proposals of `found` that were also `expected`, all equal as far as there was room; how many."""
    compared = 0
    for prefix, proposals in found.made.items():
        for made in proposals:
            if prefix not in expected or made.room < 1:
                continue
            known = expected[prefix][0]
            columns = min(len(made.tokens), len(known.tokens), made.room, known.room)
            assert made.last == known.last, prefix
            assert made.tokens[:columns] == known.tokens[:columns], (prefix, made.tokens, known.tokens)
            torch.testing.assert_close(
                made.logits[:columns], known.logits[:columns], atol=1e-9, rtol=1e-9, msg=str(prefix)
            )
            torch.testing.assert_close(made.signals[:columns], known.signals[:columns], atol=1e-6, rtol=0)
            compared += 1
    return compared
