"""The drafter contract. Drafters propose; the target alone decides the text.

A drafter keeps its context (draft KV, boundary states) current in every round, plain ones and prefill
included: `publish` sees every pass of the target. It knows nothing of schedules, slots or graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from xspec.draft.heads import selected_probability
from xspec.kernels.rounds import DraftRows
from xspec.kv.layout import Planes
from xspec.models.base import Hidden
from xspec.nn.inputs import ForwardInputs


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """`steps` are the K it can be asked for; a block drafter has one. 0 is always legal and not listed."""

    name: str
    steps: tuple[int, ...] = ()
    taps: tuple[int, ...] = ()  # target layers whose residual stream it wants (`Target.forward`)
    planes: Planes | None = None  # KV slabs it needs beside the target's
    block: int = 0  # positions, from the last token on, whose draft KV drafting writes (0: none past K)
    depths: tuple[int, ...] = ()  # loops d that a looped target may draft with, ascending; (): not looped

    @property
    def max_steps(self) -> int:
        return max(self.steps, default=0)


@dataclass(frozen=True, slots=True)
class LoopWork:
    """What a round does with the loops of a looped target.

    `depth`: loops that draft, of `DrafterSpec.depths`; 0: a plain round, or a target without loops.
    `shadow`: the round also tells what every depth would have picked.
    """

    depth: int = 0
    shadow: bool = False


NO_LOOPS = LoopWork()


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Where a drafter's context lives, in pages it shares with the target."""

    rows: int  # device rows, padding included
    slabs: tuple[torch.Tensor, ...]  # one per plane of its spec
    page_state: torch.Tensor  # [pages, planes.page_state]
    sink_page: int  # may be written at will, is never read for anybody
    block_size: int
    target_slabs: tuple[torch.Tensor, ...] = ()  # those of the target, for a drafter that is the target

    @property
    def sink_slot(self) -> int:
        return self.sink_page * self.block_size


@dataclass(frozen=True, slots=True)
class GreedyRows:
    """The lanes as the device's kernels know them, where every draft is the likeliest token."""

    rows: DraftRows
    pages: int  # granted to a lane at most


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What drafting may look at: R lanes of device rows, padded lanes last (device row 0).

    `inputs(offset, width, causal)` describes a pass over `width` positions a lane, the first at `offset`
    past the last token (request-major, [R * width] flat rows). Not causal: every row of a lane sees the
    lane's keys up to the end of the block. Positions past what a row may write go to the sink page.
    """

    rows: torch.Tensor  # [R] int64
    last_tokens: torch.Tensor  # [R] int64: committed, not yet run through the target
    positions: torch.Tensor  # [R] int64: position of the last token
    inputs: Callable[[int, int, bool], ForwardInputs]
    pick: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    """pick(logits [R, D], positions [R] of the token picked, ids [D] or None) -> column index [R].

    Greedy, or with --enable_probabilistic_draft the argmax of logits / temperature plus the target's own
    noise for those token ids at that position (greedy rows stay greedy).
    """
    probability: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = selected_probability
    """probability(logits [R, D], columns [R]) -> [R] float32: the softmax probability of what was picked."""
    sampled: torch.Tensor | None = None  # [R] bool: lanes whose target draws with a temperature; None: none
    loops: LoopWork = NO_LOOPS
    greedy: GreedyRows | None = None  # for kernels that draft in one call; None: `pick` may draw noise


@dataclass(frozen=True, slots=True)
class Draft:
    """K proposals per lane; columns beyond a row's limit are dead weight, never wrong."""

    tokens: torch.Tensor  # [R, K] int64, target ids
    signals: torch.Tensor  # [R, K] float32: estimate that token k is accepted if all before it were


@dataclass(frozen=True, slots=True)
class Published:
    """A pass of the target: S sequences with N flat rows, those of one sequence consecutive.

    Of sequence s, the first `committed[s]` rows are facts: tokens that stay, at positions whose KV stays.
    The other rows were rejected (or are padding) and must leave no trace in any context.
    """

    tokens: torch.Tensor  # [N] int64: what each row was fed
    hidden: Hidden
    inputs: ForwardInputs
    rows: torch.Tensor  # [S] device row of each sequence (0: padding)
    lanes: torch.Tensor  # [N] index of each flat row's sequence
    first: torch.Tensor  # [S] flat index of each sequence's first row
    committed: torch.Tensor  # [S] int64
    fact_slots: torch.Tensor | None = None  # [N] KV slots of facts, the sink's of other rows; None: not known

    @property
    def facts(self) -> torch.Tensor:
        """[N] bool: which rows are facts."""
        flat = torch.arange(self.lanes.shape[0], device=self.lanes.device)
        return flat - self.first[self.lanes] < self.committed[self.lanes]

    def slots_or(self, sink_slot: int) -> torch.Tensor:
        """[N] int64: where what is kept of each row may go."""
        if self.fact_slots is not None:
            return self.fact_slots
        return torch.where(self.facts, self.inputs.slots, sink_slot)


class Drafter(Protocol):
    spec: DrafterSpec

    def attach(self, memory: DraftMemory) -> None:
        """Take the memory `spec.planes` asked for, before first use.

        `rows`: device rows, padding included; `slabs`: one per plane; `page_state`: [pages, elements].
        """

    def bind(self, row: int, last_page: int | None) -> None:
        """Device row `row` has a new tenant. `last_page`: last KV page of its prefix-cache hit, if any."""

    def draft(self, context: DraftContext, steps: int) -> Draft:
        """Propose `steps` (one of `spec.steps`) tokens for each lane."""

    def publish(self, published: Published) -> None:
        """Refresh draft context from the target states of committed rows, in every round, plain or not."""
