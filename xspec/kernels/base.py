"""The kernel contract: same signatures on every platform, parity-tested against `reference.py`.

N rows, H query heads, G KV heads, D head size, P pages a table row. Nothing here knows a model family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from xspec.kernels.quantised import Blocks
    from xspec.kernels.rounds import Carried, DraftRows, FusedCarry, FusedDraws, FusedRows, RowTable
    from xspec.nn.inputs import ForwardInputs


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the attention of every layer of a model has in common. `scale` multiplies q . k.

    Keys before `first_key` are never seen (MTP has no key 0), unless a row has no later one.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    first_key: int = 0


class PackedLinear(Protocol):
    """A weight laid out for this device."""

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """[N, in] -> a new [N, out]: x @ weight.T + bias, plus `add` [N, out] where given (a residual)."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    weight: torch.Tensor  # [hidden]; of heads [H + G, D], query heads first
    eps: float


@dataclass(frozen=True, slots=True)
class OutputNorms:
    """Norms behind the sublayers f of a layer: r += norm(f(r)), or with `of_sums` r = norm(r + f(r))."""

    attention: NormWeights
    mlp: NormWeights
    of_sums: bool


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A pre-norm decoder layer: r += output(attention(qkv(norm(r)))), r += down(gate_up(norm(r)))."""

    input_norm: NormWeights
    qkv: PackedLinear
    head_norm: NormWeights | None
    output: PackedLinear
    mlp_norm: NormWeights
    gate_up: PackedLinear  # from `pack_gated`
    down: PackedLinear
    output_norms: OutputNorms | None = None


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of every position, [positions, D] fp32; later positions turn as the last.

    Both halves of a head turn by the same angle; the sines of the first are negated.
    """

    cos: torch.Tensor
    sin: torch.Tensor


Rotary = torch.Tensor | RotaryTable
"""How far a position turns a head: [D / 2] fp32 radians a position, or a table."""


class FusedLayers(Protocol):
    """Decoder layers as one call of the device."""

    def takes(self, slab: torch.Tensor) -> bool:
        """Whether it reads pages as they lie in `slab`."""

    def forward(
        self,
        residual: torch.Tensor,
        inputs: ForwardInputs,
        slabs: Sequence[torch.Tensor],
        kept: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """residual [N, hidden], not modified -> (after the final norm, residual streams by layer count).

        `kept`: after how many layers (1: after the first) the stream is wanted; the last always is.
        Writes the rows' K/V into `slabs`, one per layer.
        """

    def loop(
        self, residual: torch.Tensor, inputs: ForwardInputs, slabs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Layers and final norm as often as `slabs`, one per layer and loop, go round: what each loop yields.

        A loop reads what the one before it yielded. Only of layers that were fused with a norm.
        """

    def publish(
        self, residual: torch.Tensor, positions: torch.Tensor, slab: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write only the first layer's keys and values of residual [N, hidden], attending to nothing."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a step of multi-token prediction is made of (`draft.mtp`), as packed by the same kernels."""

    embedding: torch.Tensor  # [vocab, hidden]
    pair_norm: NormWeights  # [2, hidden]
    join: PackedLinear
    layers: FusedLayers  # of one layer, with its norm
    head: PackedLinear
    ids: torch.Tensor | None  # [D] token of each column; None: the column
    of_normed: bool  # whether the state behind the norm goes on to the next step, or the one before it


class FusedSteps(Protocol):
    """Drafting by multi-token prediction: every step picks the likeliest token."""

    def takes(self, slab: torch.Tensor) -> bool:
        """Whether it reads pages as they lie in `slab`."""

    def knows(self, rows: DraftRows) -> bool:
        """Whether they are rows of the same kernels."""

    def __call__(
        self, rows: DraftRows, pages: int, boundary: torch.Tensor, slab: torch.Tensor, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [L, steps] int64 and the softmax probability of each, float32.

        `rows` of L lanes, whose tables are granted `pages` pages at most; boundary [table rows, hidden]: the
        states before their last tokens. Writes the K/V of the steps into `slab`.
        """

    def publish(self, tokens: torch.Tensor, carried: Carried, slab: torch.Tensor) -> None:
        """Carry on as `FusedCarry` does; store the K/V of the pairs of tokens [N] and states before."""


@dataclass(frozen=True, slots=True)
class ConfidenceParts:
    """sigmoid((w . [h ; e] + b) / T + o) in fp32: of hidden state h and, `with_markov`, embedding e."""

    weight: torch.Tensor  # [hidden] or [hidden + rank]
    bias: torch.Tensor  # [1]
    temperatures: torch.Tensor  # [2, slots] of greedy lanes and of sampled ones
    offsets: torch.Tensor  # [2, slots]
    with_markov: bool


@dataclass(frozen=True, slots=True)
class BlockParts:
    """What drafting a block is made of (`draft.dspark`), as packed by the same kernels."""

    embedding: torch.Tensor  # [vocab, hidden]
    mask: torch.Tensor  # [hidden]
    slots: int
    layers: FusedLayers  # with their norm
    head: PackedLinear
    ids: torch.Tensor | None  # [D] token of each column; None: the column
    markov_table: torch.Tensor | None  # [vocab, rank]; None: slots do not know each other's tokens
    markov: PackedLinear | None
    confidence: ConfidenceParts | None  # None: the softmax probability
    taps: int
    context: PackedLinear  # [N, taps * hidden] -> [N, hidden]
    context_norm: NormWeights
    kv: PackedLinear  # [N, hidden] -> [N, layers * 2 * G * D], keys of a layer before its values


class FusedBlock(Protocol):
    """Drafting a block, every slot the likeliest token, and keeping its context."""

    def takes(self, slab: torch.Tensor) -> bool:
        """Whether it reads pages as they lie in `slab`."""

    def knows(self, rows: DraftRows) -> bool:
        """Whether they are rows of the same kernels."""

    def __call__(
        self, rows: DraftRows, pages: int, slabs: Sequence[torch.Tensor], sampled: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [L, slots] int64 and how likely each is accepted, float32.

        `rows` of L lanes, whose tables are granted `pages` pages at most; sampled [L] bool: lanes whose
        target draws with a temperature. Writes the block's K/V into `slabs`, one per layer.
        """

    def publish(
        self,
        taps: Sequence[torch.Tensor],
        positions: torch.Tensor,
        slots: torch.Tensor,
        slabs: Sequence[torch.Tensor],
    ) -> None:
        """Store the context's K/V of taps [N, hidden] each at slots [N]."""


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What the first loops of a looped target draft with (`draft.looped`), where each reads what the one
    before it yielded and the head reads the same."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: FusedLayers  # of one loop, with its norm
    head: PackedLinear  # [N, hidden] -> [N, vocab]


class FusedLoops(Protocol):
    """Drafting by loops: every step picks the likeliest token."""

    def takes(self, slab: torch.Tensor) -> bool:
        """Whether it reads pages as they lie in `slab`."""

    def knows(self, rows: DraftRows) -> bool:
        """Whether they are rows of the same kernels."""

    def __call__(
        self,
        rows: DraftRows,
        pages: int,
        slabs: Sequence[torch.Tensor],
        steps: int,
        depth: int,
        kept: Mapping[int, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [L, steps] int64 and the softmax probability of each, float32, by `depth` loops.

        `rows` of L lanes, whose tables are granted `pages` pages at most; `slabs` of all loops and layers.
        The states after so many loops, by `kept`, at steps 0 to `steps`: [table rows, steps + 1 or more,
        hidden] each.
        """


class PagedAttention(Protocol):
    """One forward pass's view of the paged cache, prepared once and used by every layer."""

    def store(self, slab: torch.Tensor, kv: torch.Tensor) -> None:
        """Write kv [N, 2 * G, D] (keys, then values) at the rows' slots.

        Of a pass with guesses, 0 for what is not finite: a wrong draft must not reach those who cannot
        even see it. A row that is right shows in its own logits that it went wrong.
        """

    def attend(self, q: torch.Tensor, slab: torch.Tensor) -> torch.Tensor:
        """Grouped-query attention: q [N, H, D] over the pages of each row's sequence -> [N, H * D].

        Row n sees the first kv_lens[n] keys of its sequence, so decode, ragged verification (see
        nn.inputs.Ragged), a block that is not causal and chunked prefill are the same call. Keys past
        kv_lens[n] weigh exactly 0, which hides any finite number; pages that hold NaN or infinity must be
        zeroed before reuse. A row with kv_lens 0 (padding) yields finite numbers that mean nothing.
        """


class Kernels(Protocol):
    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Lay out weight [out, in] (and bias [out]) for repeated use; the caller drops its own copy."""

    def pack_gated(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Of weight [2 * F, in], gate above up: x [N, in] -> silu(gate(x)) * up(x) [N, F]."""

    def pack_blocks(
        self, blocks: Blocks, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> PackedLinear:
        """Of a quantised weight, as ReferenceBlocks computes it. UnsupportedError where that is not built."""

    def fuse(
        self,
        layers: Sequence[LayerWeights],
        shape: AttentionShape,
        rotary: Rotary,
        norm: NormWeights | None,
    ) -> FusedLayers | None:
        """All `layers` and the final norm, if any, as one call; None where this device runs them op by op."""

    def fuse_rows(self, table: RowTable) -> FusedRows | None:
        """The bookkeeping of rounds over these rows in a few calls; None where this device has none."""

    def fuse_draws(self, dtype: torch.dtype) -> FusedDraws | None:
        """Draws from logits of `dtype` in one call each; None where torch draws."""

    def fuse_carry(self) -> FusedCarry | None:
        """What a drafter with boundary states carries on after a pass, in one call; None: torch does it."""

    def fuse_steps(self, parts: StepParts) -> FusedSteps | None:
        """Draft steps of multi-token prediction in one call; None where this device runs them op by op."""

    def fuse_block(self, parts: BlockParts) -> FusedBlock | None:
        """Drafting a block in one call; None where this device runs it op by op."""

    def fuse_loops(self, parts: LoopParts) -> FusedLoops | None:
        """Drafting by loops in one call; None where this device runs it op by op."""

    def row_dependence(self, block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[str, ...]:
        """Why a row's result may depend, in its last bits, on the rows beside it; empty: it never does.

        Of everything packed so far and of attention over such pages.
        """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last axis; weight broadcasts against x.

        Half types are normalised in fp32, rounded, then multiplied by weight; fp64 stays fp64.
        """

    def rope_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate halves (NeoX) in place. heads [N, *, D]; cos, sin [N, 1, D], sin's first half negated."""

    def kv_slab(
        self, pages: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """One plane's zeroed K/V storage in the layout this platform's attention reads."""

    def store_kv(self, slab: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Write kv [N, 2 * G, D] (keys, then values) at flat slots [N], outside of any forward pass.

        Where a slot occurs twice, either row may stay.
        """

    def zero_pages(self, slab: torch.Tensor, pages: torch.Tensor) -> None:
        """Clear whole pages (int64 ids) of one plane."""

    def paged_attention(
        self, inputs: ForwardInputs, shape: AttentionShape, slab: torch.Tensor
    ) -> PagedAttention:
        """Prepare what every layer of this forward pass shares: masks, page ids, work tiles.

        `slab` is any plane of the cache the pass runs on; only its layout matters here.
        """
