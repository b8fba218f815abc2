"""Match flags of answers that exist: which of their tokens would each d of a looped target have drafted?

One teacher-forced pass over prompt and answer tells all depths at once, a piece of the sequence at a time, so
that what is held besides the K/V does not grow with its length. Plans nothing and counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from xspec.errors import EngineError
from xspec.exec.assemble import Assembly
from xspec.models.base import LoopedTarget
from xspec.nn.inputs import ForwardInputs, Segment
from xspec.verify.filters import first_argmax

PIECE_ROWS = 256
"""Tokens that run through the loops at once."""

HEAD_ROWS = 64
"""Of those the rows whose logits exist at once: [64, vocabulary]."""


@dataclass(frozen=True, slots=True)
class Told:
    """Of an answer of n tokens. The first one comes from the prompt's rows, which nothing drafts.

    `flags` [n - 1, depths] bool: whether the head after so many loops picks the answer's token i + 1 at its
    token i. `own` [n - 1] bool: whether all loops do, true throughout for the target's own greedy answer but
    for near ties of logits that another batch shape rounds otherwise.
    """

    flags: np.ndarray
    own: np.ndarray


class FlagReader:
    """Reads flags with an idle engine's target and K/V memory, of which nobody may keep anything.

    Flags of a target without layers after its loops are those of rounds with any (K, d). Where there are some
    (Huginn's coda), a draft's K/V of them depends on where its round began; here a piece stands for a round.
    """

    def __init__(self, parts: Assembly) -> None:
        if not parts.drafter.spec.depths:
            raise ValueError("match flags need a looped drafter")
        self.depths = parts.drafter.spec.depths
        self._target = cast(LoopedTarget, parts.target)
        self._kv = parts.pool.target
        self._block_size = parts.pool.layout.block_size
        self._pages = torch.arange(1, parts.pool.usable_pages + 1)
        self._device = self._kv[0].device

    @torch.inference_mode()
    def read(self, prompt: Sequence[int], answer: Sequence[int]) -> Told:
        """To be called on the launch thread. EngineError where the cache cannot hold prompt and answer."""
        fed = torch.tensor([*prompt, *answer[:-1]], device=self._device)
        if len(fed) > len(self._pages) * self._block_size or not len(prompt):
            raise EngineError(f"a sequence of {len(fed)} tokens in {len(self._pages)} pages")
        picks = torch.cat(
            [
                self._piece(fed[first : first + PIECE_ROWS], first, asked=len(prompt))
                for first in range(0, len(fed), PIECE_ROWS)
            ]
        )
        matched = (picks == torch.tensor(answer[1:], device=self._device)[:, None]).cpu().numpy()
        return Told(flags=matched[:, :-1], own=matched[:, -1])

    def _piece(self, tokens: torch.Tensor, first: int, asked: int) -> torch.Tensor:
        """Runs tokens at `first` and on: what each depth, then the whole target, picks after those at `asked`
        and later. [rows, depths + 1]"""
        target, inputs = self._target, self._inputs(first, len(tokens))
        skipped = min(len(tokens), max(0, asked - first))
        state, done, picked = target.begin(tokens, inputs, self._kv), 0, []
        # The last depth last: layers after the loops then keep what plain decoding leaves there.
        for depth in (*self.depths, target.spec.loops):
            state, done = target.run_loops(state, inputs, self._kv, done, depth), depth
            picked.append(self._picks(target.finish(state, inputs, self._kv).last[skipped:]))
        return torch.stack(picked, 1)

    def _picks(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return torch.empty(0, dtype=torch.int64, device=self._device)
        return torch.cat([first_argmax(self._target.logits(part))[0] for part in hidden.split(HEAD_ROWS)])

    def _inputs(self, first: int, count: int) -> ForwardInputs:
        size = self._block_size
        positions = torch.arange(first, first + count)
        pages = -(-(first + count) // size)
        slots = self._pages[positions // size] * size + positions % size
        return ForwardInputs(
            positions=positions.to(self._device),
            slots=slots.to(self._device),
            kv_lens=(positions + 1).to(self._device),
            page_table=self._pages[None, :pages].to(self._device),
            segments=(Segment(first=0, count=1, rows=count, pages=pages, first_row=0),),
        )
