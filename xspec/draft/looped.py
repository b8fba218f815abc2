"""Self-speculation of a looped target: loops 0 to d - 1 draft, verification goes on from there.

Loop l of a token reads only what loops up to l wrote, so the states and the K/V that drafting leaves behind
are those of full decoding: nothing is computed twice (RFC "Adaptive Speculation for Ouro"; seed 000).
Owns the states of one round's rows; knows nothing of schedules, buckets or policies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from xspec.draft.base import Draft, DraftContext, DrafterSpec, DraftMemory, LoopWork, Published
from xspec.kernels.base import FusedLoops, Kernels
from xspec.kernels.rounds import FlatRows
from xspec.models.base import Hidden, LoopedTarget, Target

PickRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(logits [N, V], device rows [N], positions [N] of the token picked, None) -> columns [N]."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A verification pass over G flat rows. `picks` [G, depths]: what the head picks after each depth."""

    hidden: Hidden
    picks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Memory:
    """`states` [depths, rows, steps + 2, state_size]: by depth, device row and offset past the last token.

    The last offset is where padding of the flat axis reads; nothing is ever written there.
    """

    states: torch.Tensor
    kv: tuple[torch.Tensor, ...]


class LoopedDrafter:
    """A Drafter (draft/base.py), and the pass that verifies what it drafted (`resume`)."""

    def __init__(
        self, target: LoopedTarget, steps: int, depths: Sequence[int], fused: FusedLoops | None = None
    ) -> None:
        """`steps`: the largest K; `depths`: loops that may draft, ascending, of 1 to D - 1; `fused`: all
        steps in one call, of the same weights."""
        self.spec = DrafterSpec(name="looped", steps=tuple(range(1, steps + 1)), depths=tuple(depths))
        self._target, self._fused = target, fused
        self._own: _Memory | None = None

    @classmethod
    def load(cls, target: Target, *, kernels: Kernels, steps: int, depths: Sequence[int]) -> LoopedDrafter:
        """`steps` and `depths`, and that every row runs all loops, as `draft.choose` found them to fit."""
        looped = cast(LoopedTarget, target)
        parts = looped.loop_parts()
        return cls(looped, steps, depths, None if parts is None else kernels.fuse_loops(parts))

    def attach(self, memory: DraftMemory) -> None:
        shape = (len(self.spec.depths), memory.rows, self.spec.max_steps + 2, self._target.spec.state_size)
        slab = memory.target_slabs[0]
        states = torch.zeros(shape, dtype=slab.dtype, device=slab.device)
        self._own = _Memory(states, memory.target_slabs)

    def bind(self, row: int, last_page: int | None) -> None:
        """The K/V planes are all the context there is: nothing to do."""

    def publish(self, published: Published) -> None:
        """As `bind`."""

    def draft(self, context: DraftContext, steps: int) -> Draft:
        """K shallow passes with a head, and one without: the last draft needs its first loops too."""
        own, target, fused, greedy = self._attached(), self._target, self._fused, context.greedy
        if fused is not None and greedy is not None and fused.takes(own.kv[0]) and fused.knows(greedy.rows):
            stops = self._stops(context.loops)
            kept = {depth: own.states[self.spec.depths.index(depth)] for depth in stops}
            return Draft(*fused(greedy.rows, greedy.pages, own.kv, steps, stops[-1], kept))
        tokens = context.last_tokens
        picked, signals = [], []
        for step in range(steps + 1):
            inputs = context.inputs(step, 1, True)
            state, done = target.begin(tokens, inputs, own.kv), 0
            for depth in self._stops(context.loops):
                state, done = target.run_loops(state, inputs, own.kv, done, depth), depth
                own.states[self.spec.depths.index(depth), context.rows, step] = state
            if step == steps:
                break
            logits = target.logits(target.finish(state, inputs, own.kv).last)
            tokens = context.pick(logits, context.positions + (step + 1), None)
            picked.append(tokens)
            signals.append(context.probability(logits, tokens))
        return Draft(torch.stack(picked, 1), torch.stack(signals, 1))

    def resume(self, rows: FlatRows, work: LoopWork, pick: PickRows) -> Resumed:
        """Verify what the latest `draft` drafted with work.depth loops; 0: run all loops of all rows.

        In a shadow round also what every depth would have picked. A row's K/V of layers after the loops is
        written last by the last `finish`, as plain decoding leaves it.
        """
        own, target, inputs = self._attached(), self._target, rows.inputs
        kept = [
            own.states[index, rows.owners, rows.offsets]
            for index, depth in enumerate(self.spec.depths)
            if depth == work.depth or (work.shadow and depth < work.depth)
        ]
        state, done = (kept[-1], work.depth) if kept else (target.begin(rows.tokens, inputs, own.kv), 0)
        picks = None
        if work.shadow:
            for depth in self.spec.depths[len(kept) :]:
                state, done = target.run_loops(state, inputs, own.kv, done, depth), depth
                kept.append(state)
            picks = self._picks(kept, rows, pick)
        state = target.run_loops(state, inputs, own.kv, done, target.spec.loops)
        return Resumed(target.finish(state, inputs, own.kv), picks)

    def _picks(self, states: Sequence[torch.Tensor], rows: FlatRows, pick: PickRows) -> torch.Tensor:
        """[G, depths]: what would be drafted after each row if the loops ended at one of the states.

        One head over all of them: its weights are read once.
        """
        target, kv, depths = self._target, self._attached().kv, len(states)
        ends = torch.cat([target.finish(state, rows.inputs, kv).last for state in states])
        owners, positions = rows.owners.repeat(depths), rows.inputs.kv_lens.repeat(depths)
        return pick(target.logits(ends), owners, positions, None).view(depths, -1).t()

    def _stops(self, work: LoopWork) -> Sequence[int]:
        """Depths whose states are kept, the last one being that which drafts."""
        if work.depth not in self.spec.depths:
            raise ValueError(f"depth {work.depth}: prepared are {self.spec.depths}")
        if not work.shadow:
            return (work.depth,)
        return tuple(depth for depth in self.spec.depths if depth <= work.depth)

    def _attached(self) -> _Memory:
        if self._own is None:
            raise RuntimeError("the looped drafter was used before attach()")
        return self._own
