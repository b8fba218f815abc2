"""Multi-token prediction: one decoder layer over [embedding; hidden], used again for every step.

Owns the boundary states and what is written into the draft slab; embedding and head are the target's.
The pair of token t + 1 and the target's hidden of position t lies at position t + 1, so that draft K/V is
valid exactly where the target's is. Position 0 has no pair, and its key is never seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from xspec.draft.base import Draft, DraftContext, DrafterSpec, DraftMemory, Published
from xspec.draft.checkpoint import DraftHead, check_against_target, read_draft_vocabulary, share_head
from xspec.draft.mtp_config import HiddenState, MtpConfig, open_mtp
from xspec.errors import ConfigError
from xspec.kernels.base import AttentionShape, FusedSteps, Kernels, PackedLinear, StepParts
from xspec.kernels.rounds import Carried, FusedCarry
from xspec.kv.layout import Planes
from xspec.models.base import Hidden, Target
from xspec.models.blocks import LayerBuilder
from xspec.models.quantised import block_source
from xspec.nn.linear import LinearPart
from xspec.nn.norm import RMSNorm
from xspec.nn.rope import Rope, inverse_frequencies
from xspec.nn.stack import LayerStack

MAX_STEPS = 16


@dataclass(frozen=True, slots=True)
class MtpModule:
    """The packed weights: x = join([enorm(embedding); hnorm(hidden)]), then the layer, then its norm.

    `pair_norm` is both norms at once: one weight row for the embedding, one for the hidden state.
    """

    pair_norm: RMSNorm
    join: PackedLinear
    layers: LayerStack  # of one layer
    carry: FusedCarry | None  # None: `carry_states` does it


@dataclass(frozen=True, slots=True)
class _Context:
    """`boundary` [rows, hidden]: the target's hidden state of the last position published, per device row.

    `memory.page_state` [pages, hidden] holds the same of each full page's last position.
    """

    boundary: torch.Tensor
    slab: torch.Tensor
    memory: DraftMemory


class MtpDrafter:
    """A Drafter (draft/base.py). DeepSeek-V3 report, section 2.2, with one module for all depths."""

    def __init__(
        self,
        config: MtpConfig,
        module: MtpModule,
        target: Target,
        head: DraftHead,
        steps: int,
        fused: FusedSteps | None = None,
    ) -> None:
        """`fused`: all steps in one call, from the same weights."""
        layer = config.layer
        self.spec = DrafterSpec(
            name="mtp",
            steps=tuple(range(1, steps + 1)),
            planes=Planes(1, layer.kv_heads, layer.head_dim, page_state=layer.hidden_size),
        )
        self._config, self._module = config, module
        self._target, self._head, self._fused = target, head, fused
        self._context: _Context | None = None

    @classmethod
    def load(
        cls,
        path: Path | None,
        *,
        model: Path,
        target: Target,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        steps: int,
        quantization: str = "none",
    ) -> MtpDrafter:
        """Read --draft_model `path`, or with None the MTP layer that the target's files at `model` bring.

        `steps`: the largest K; `quantization`: of the linears. ConfigError names what does not fit the
        formats or the target.
        """
        if not 1 <= steps <= MAX_STEPS:
            raise ConfigError(
                f"--num_speculative_tokens={steps}: allowed with MTP: integers from 1 to {MAX_STEPS}"
            )
        checkpoint, config = open_mtp(path, model)
        try:
            layer = config.layer
            check_against_target(checkpoint.name, layer.hidden_size, layer.vocab_size, target.spec)
            ids = read_draft_vocabulary(checkpoint, layer.vocab_size)
            blocks = block_source(checkpoint, quantization, "draft_quantization")
            module = _build(config, LayerBuilder(layer, checkpoint.read, kernels, dtype, device, blocks))
        finally:
            checkpoint.close()
        head = share_head(target, kernels, ids, device, quantised=quantization != "none")
        fused = _fuse(config, module, kernels, target, head)
        return cls(config, module, target, head, steps, fused)

    def attach(self, memory: DraftMemory) -> None:
        (slab,) = memory.slabs
        state = memory.page_state
        self._context = _Context(state.new_zeros(memory.rows, state.shape[1]), slab, memory)

    def bind(self, row: int, last_page: int | None) -> None:
        own = self._attached()
        if last_page is None:
            own.boundary[row].zero_()
        else:
            own.boundary[row].copy_(own.memory.page_state[last_page])

    def draft(self, context: DraftContext, steps: int) -> Draft:
        """Step j runs the pair of the newest token and its hidden state at position p + j - 1."""
        own, module, fused, greedy = self._attached(), self._module, self._fused, context.greedy
        if fused is not None and greedy is not None and fused.takes(own.slab) and fused.knows(greedy.rows):
            return Draft(*fused(greedy.rows, greedy.pages, own.boundary, own.slab, steps))
        tokens, hidden = context.last_tokens, own.boundary[context.rows]
        picked, signals = [], []
        for step in range(steps):
            inputs = context.inputs(step, 1, True)
            streams = module.layers(self._pair(tokens, hidden), inputs, (own.slab,))
            state = Hidden(streams.last, streams.residual)
            logits = self._head.logits(state.last)
            columns = context.pick(logits, context.positions + (step + 1), self._head.ids)
            tokens, hidden = self._head.tokens(columns), _state(state, self._config.step_hidden)
            picked.append(tokens)
            signals.append(context.probability(logits, columns))
        return Draft(torch.stack(picked, 1), torch.stack(signals, 1))

    def publish(self, published: Published) -> None:
        own, module, fused = self._attached(), self._module, self._fused
        states = _state(published.hidden, self._config.target_hidden)  # [N, hidden]
        if fused is not None and fused.takes(own.slab):
            fused.publish(published.tokens, _carried(published, states, own), own.slab)
            return
        if module.carry is None:
            before, slots = carry_states(published, states, own.boundary, own.memory)
        else:
            before, slots = module.carry(_carried(published, states, own))
        pairs = self._pair(published.tokens, before)
        module.layers.publish(pairs, published.inputs.positions, own.slab, slots)

    def _pair(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[N] tokens, [N, hidden] states of the positions before them -> [N, hidden], the layer's input."""
        module = self._module
        pair = torch.stack((self._target.embed(tokens), hidden), 1)  # [N, 2, hidden]
        return module.join(module.pair_norm(pair).flatten(1))

    def _attached(self) -> _Context:
        if self._context is None:
            raise RuntimeError("the MTP drafter was used before attach()")
        return self._context


def _build(config: MtpConfig, build: LayerBuilder) -> MtpModule:
    layer, names = config.layer, config.names
    hidden = layer.hidden_size
    shape = AttentionShape(
        layer.heads, layer.kv_heads, layer.head_dim, layer.head_dim**-0.5, build.dtype, first_key=1
    )
    norms = [build.vector(f"{name}.weight", hidden) for name in (names.embedding_norm, names.hidden_norm)]
    rope = Rope(inverse_frequencies(layer.rope, layer.head_dim), build.dtype, build.device)
    layers = (build.layer(names.layer, shape),)
    norm = build.norm(f"{names.norm}.weight", hidden)
    return MtpModule(
        pair_norm=RMSNorm(build.kernels, torch.stack(norms), layer.norm_eps),
        join=build.linear((LinearPart(names.join, hidden, False),), 2 * hidden),
        layers=LayerStack(build.kernels, shape, layers, norm, rope),
        carry=build.kernels.fuse_carry(),
    )


def _fuse(
    config: MtpConfig, module: MtpModule, kernels: Kernels, target: Target, head: DraftHead
) -> FusedSteps | None:
    embedding, layers = target.embedding(), module.layers.fused
    if embedding is None or layers is None or head.packed is None:
        return None
    normed = config.step_hidden is HiddenState.NORMED
    pair_norm = module.pair_norm.weights
    return kernels.fuse_steps(
        StepParts(embedding, pair_norm, module.join, layers, head.packed, head.ids, normed)
    )


def _carried(published: Published, states: torch.Tensor, own: _Context) -> Carried:
    return Carried(
        states,
        own.boundary,
        own.memory.page_state,
        published.rows,
        published.first,
        published.committed,
        published.inputs,
        own.memory.block_size,
        own.memory.sink_slot,
    )


def carry_states(
    published: Published, states: torch.Tensor, boundary: torch.Tensor, memory: DraftMemory
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move boundary [rows, hidden] and page states on over a pass with states [N, hidden].

    Returns the state before each row [N, hidden], and where its pair is stored [N]: rows that are no facts,
    and position 0, go to the sink.
    """
    inputs, lanes, rows = published.inputs, published.lanes, published.rows
    offsets = torch.arange(lanes.shape[0], device=lanes.device) - published.first[lanes]
    facts = offsets < published.committed[lanes]

    # Each row goes with the state of the row before it, a sequence's first with its boundary.
    starts = boundary[rows]  # [S, hidden]
    before = torch.cat((states[:1], states[:-1]))
    before = torch.where((offsets == 0).unsqueeze(1), starts[lanes], before)
    kept = facts & (inputs.positions > 0)
    slots = inputs.slots.where(kept, inputs.slots.new_full((), memory.sink_slot))

    # A page's last state is kept with the page: a prefix-cache hit ends there.
    ends = facts & ((inputs.positions + 1) % memory.block_size == 0)
    pages = (inputs.slots // memory.block_size).where(ends, inputs.slots.new_full((), memory.sink_page))
    memory.page_state.index_copy_(0, pages, states)

    last = (published.first + published.committed - 1).clamp(min=0)
    moved = (published.committed > 0).unsqueeze(1)
    boundary.index_copy_(0, rows, torch.where(moved, states[last], starts))
    return before, slots


def _state(hidden: Hidden, which: HiddenState) -> torch.Tensor:
    return hidden.last if which is HiddenState.NORMED else hidden.residual
