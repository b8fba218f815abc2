"""DSpark: a block of drafts from one non-causal pass over tapped states of the target (arXiv 2607.05147).

Owns the draft layers and what they keep of committed rows: per layer and token one key and one value, in the
target's own slots. Embedding and head are the target's; dialects of checkpoints are dspark_config.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from xspec.draft.base import Draft, DraftContext, DrafterSpec, DraftMemory, Published
from xspec.draft.checkpoint import DraftHead, share_head
from xspec.draft.dspark_config import (
    CONFIDENCE,
    FC,
    HIDDEN_NORM,
    MARKOV_GATE,
    MARKOV_OUTPUT,
    MARKOV_TABLE,
    MASK,
    NORM,
    REGIMES,
    DSparkConfig,
    check_steps,
    layer_prefix,
    open_dspark,
)
from xspec.draft.heads import (
    Block,
    ConfidenceHead,
    GatedMarkov,
    Markov,
    NoMarkov,
    SelectedProbability,
    Signals,
    VanillaMarkov,
)
from xspec.errors import CheckpointError
from xspec.kernels.base import (
    AttentionShape,
    BlockParts,
    ConfidenceParts,
    FusedBlock,
    Kernels,
    PackedLinear,
)
from xspec.kv.layout import Planes
from xspec.models.base import Target
from xspec.models.blocks import LayerBuilder
from xspec.models.quantised import block_source
from xspec.nn.embed import Embedding
from xspec.nn.linear import LinearPart
from xspec.nn.norm import RMSNorm
from xspec.nn.rope import CosSin, Rope, inverse_frequencies
from xspec.nn.stack import LayerStack

PER_ROW = "per row"
"""Every row by the table of its own regime."""


class ContextKV:
    """Keys and values of all L draft layers from the taps of N rows, in one fused linear.

    C = hidden_norm(fc [taps]); a layer's keys and values are its own projections of C, which does not pass
    through the layer's input norm.
    """

    def __init__(
        self,
        kernels: Kernels,
        layers: int,
        shape: AttentionShape,
        fc: PackedLinear,
        hidden_norm: RMSNorm,
        kv: PackedLinear,
        key_norm: RMSNorm | None,
    ) -> None:
        """`kv`: of each layer its keys, then its values."""
        self._kernels, self._layers, self._shape, self._key_norm = kernels, layers, shape, key_norm
        self.fc, self.hidden_norm, self.kv = fc, hidden_norm, kv

    def __call__(self, taps: tuple[torch.Tensor, ...], cos_sin: CosSin) -> torch.Tensor:
        """Residual streams [N, hidden] each -> [L, N, 2 * G, D], keys before values, keys rotated."""
        layers, heads, dim = self._layers, self._shape.kv_heads, self._shape.head_dim
        kv = self.kv(self.hidden_norm(self.fc(torch.cat(taps, 1)))).view(-1, layers, 2, heads, dim)
        keys = kv[:, :, 0].reshape(-1, layers * heads, dim)
        if self._key_norm is not None:
            keys = self._key_norm(keys)
        self._kernels.rope_(keys, *cos_sin)
        both = torch.cat((keys.view(-1, layers, heads, dim), kv[:, :, 1]), 2)
        return both.transpose(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class DSparkModule:
    """The packed weights. `mask` [hidden] stands at all positions of a block but the anchor's."""

    context: ContextKV
    layers: LayerStack
    rope: Rope  # of the context's keys
    mask: torch.Tensor
    markov: Markov
    signals: Signals


class DSparkDrafter:
    """A Drafter (draft/base.py). Its one step count is the block it was trained on."""

    def __init__(
        self,
        config: DSparkConfig,
        module: DSparkModule,
        target: Target,
        kernels: Kernels,
        head: DraftHead,
        fused: FusedBlock | None = None,
    ) -> None:
        """`fused`: the block and its context in one call each, from the same weights."""
        layers = config.layers
        self.spec = DrafterSpec(
            name="dspark",
            steps=(config.block_size,),
            taps=config.taps,
            planes=Planes(layers.num_layers, layers.kv_heads, layers.head_dim),
            block=config.block_size,
        )
        self._module, self._target, self._kernels = module, target, kernels
        self._head, self._fused = head, fused
        self._memory: DraftMemory | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        target: Target,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
        steps: int,
        regime: str | None = PER_ROW,
        quantization: str = "none",
    ) -> DSparkDrafter:
        """Read --draft_model `path`. `steps` must be its block size.

        `regime`: which table of the checkpoint's confidence calibration to use, by default each row's own
        ("greedy" or "sampled"); None: the head's raw word, as fitting a calibration needs it. `quantization`:
        of the linears. ConfigError names what does not fit the formats or the target.
        """
        checkpoint, config, ids = open_dspark(path, target.spec)
        try:
            check_steps(config, steps, checkpoint.name)
            blocks = block_source(checkpoint, quantization, "draft_quantization")
            build = LayerBuilder(config.layers, checkpoint.read, kernels, dtype, device, blocks)
            signals = _signals(config, build, regime, checkpoint.name)
            module = _module(config, build, target, len(ids) if ids is not None else None, signals)
        finally:
            checkpoint.close()
        head = share_head(target, kernels, ids, device, quantised=quantization != "none")
        return cls(config, module, target, kernels, head, _fuse(config, module, kernels, target, head))

    def attach(self, memory: DraftMemory) -> None:
        if len(memory.slabs) != len(self._module.layers):
            raise RuntimeError(
                f"{len(self._module.layers)} draft layers were given {len(memory.slabs)} slabs"
            )
        self._memory = memory

    def bind(self, row: int, last_page: int | None) -> None:
        """Nothing belongs to a row: the context lies in its pages, those of a prefix-cache hit included."""

    def publish(self, published: Published) -> None:
        memory, inputs, fused = self._attached(), published.inputs, self._fused
        slots = published.slots_or(memory.sink_slot)
        if fused is not None and fused.takes(memory.slabs[0]):
            fused.publish(published.hidden.taps, inputs.positions, slots, memory.slabs)
            return
        kv = self._module.context(published.hidden.taps, self._module.rope(inputs.positions))
        for slab, layer_kv in zip(memory.slabs, kv.unbind(0), strict=True):
            self._kernels.store_kv(slab, layer_kv, slots)

    def draft(self, context: DraftContext, steps: int) -> Draft:
        """The block's keys and values lie at p .. p + B - 1 until facts or the next block replace them."""
        if steps not in self.spec.steps:
            raise ValueError(f"a block of {self.spec.block} is never drafted as {steps}")
        slabs, fused, greedy = self._attached().slabs, self._fused, context.greedy
        if fused is not None and greedy is not None and fused.takes(slabs[0]) and fused.knows(greedy.rows):
            return Draft(*fused(greedy.rows, greedy.pages, slabs, context.sampled))
        hidden = self._backbone(context)  # [B, R, H]
        width, lanes = hidden.shape[:2]
        base = self._head.logits(hidden.flatten(0, 1)).view(width, lanes, -1)
        markov, previous = self._module.markov, context.last_tokens
        embedded, logits, columns, tokens = [], [], [], []
        for slot in range(width):
            embedded.append(markov.embed(previous))
            logits.append(markov.bias(base[slot], hidden[slot], embedded[-1]))
            columns.append(context.pick(logits[-1], context.positions + (slot + 1), self._head.ids))
            previous = self._head.tokens(columns[-1])
            tokens.append(previous)
        block = Block(hidden, embedded, logits, columns, context.sampled, context.probability)
        signals = self._module.signals(block)
        return Draft(torch.stack(tokens, 1), signals)

    def _backbone(self, context: DraftContext) -> torch.Tensor:
        """One pass over [anchor, mask, mask ..] of each lane -> [B, R, hidden] after the final norm."""
        memory, module, width = self._attached(), self._module, self.spec.block
        inputs = context.inputs(0, width, False)
        lanes = context.rows.shape[0]
        block = module.mask.repeat(lanes, width, 1)
        block[:, 0] = self._target.embed(context.last_tokens)
        streams = module.layers(block.flatten(0, 1), inputs, memory.slabs)
        hidden = streams.last.view(lanes, width, -1)
        return hidden.transpose(0, 1).contiguous()

    def _attached(self) -> DraftMemory:
        if self._memory is None:
            raise RuntimeError("the DSpark drafter was used before attach()")
        return self._memory


def _module(
    config: DSparkConfig, build: LayerBuilder, target: Target, draft_vocab: int | None, signals: Signals
) -> DSparkModule:
    layers, hidden = config.layers, config.layers.hidden_size
    shape = AttentionShape(layers.heads, layers.kv_heads, layers.head_dim, layers.head_dim**-0.5, build.dtype)
    if config.mask_token_id is None:
        mask = build.vector(MASK, hidden)
    else:
        mask = target.embed(torch.tensor([config.mask_token_id], device=build.device))[0]
    built = tuple(build.layer(layer_prefix(index), shape) for index in range(layers.num_layers))
    rope = Rope(inverse_frequencies(layers.rope, layers.head_dim), build.dtype, build.device)
    return DSparkModule(
        context=_context(config, build, shape),
        layers=LayerStack(build.kernels, shape, built, build.norm(NORM, hidden), rope),
        rope=rope,
        mask=mask,
        markov=_markov(config, build, draft_vocab or layers.vocab_size),
        signals=signals,
    )


def _fuse(
    config: DSparkConfig, module: DSparkModule, kernels: Kernels, target: Target, head: DraftHead
) -> FusedBlock | None:
    embedding, layers, context = target.embedding(), module.layers.fused, module.context
    if embedding is None or layers is None or head.packed is None or config.gated:
        return None
    table, markov = module.markov.parts() or (None, None)
    signals = module.signals
    return kernels.fuse_block(
        BlockParts(
            embedding=embedding,
            mask=module.mask,
            slots=config.block_size,
            layers=layers,
            head=head.packed,
            ids=head.ids,
            markov_table=table,
            markov=markov,
            confidence=signals.parts if isinstance(signals, ConfidenceHead) else None,
            taps=len(config.taps),
            context=context.fc,
            context_norm=context.hidden_norm.weights,
            kv=context.kv,
        )
    )


def _context(config: DSparkConfig, build: LayerBuilder, shape: AttentionShape) -> ContextKV:
    """A second copy of the layers' k and v weights, all under one another: one product instead of many."""
    layers = config.layers
    rows = layers.kv_heads * layers.head_dim
    prefixes = [f"{layer_prefix(index)}self_attn." for index in range(layers.num_layers)]
    parts = tuple(
        LinearPart(f"{prefix}{kind}_proj", rows, layers.qkv_bias) for prefix in prefixes for kind in "kv"
    )
    key_norm = None
    if layers.head_norm:
        weights = [build.vector(f"{prefix}k_norm.weight", layers.head_dim) for prefix in prefixes]
        per_head = torch.stack(weights).repeat_interleave(layers.kv_heads, 0)  # [L * G, D]
        key_norm = RMSNorm(build.kernels, per_head, layers.norm_eps)
    fc = LinearPart(FC.removesuffix(".weight"), layers.hidden_size, False)
    return ContextKV(
        build.kernels,
        layers.num_layers,
        shape,
        build.linear((fc,), len(config.taps) * layers.hidden_size),
        build.norm(HIDDEN_NORM, layers.hidden_size),
        build.linear(parts, layers.hidden_size),
        key_norm,
    )


def _markov(config: DSparkConfig, build: LayerBuilder, draft_vocab: int) -> Markov:
    rank, layers = config.markov_rank, config.layers
    if not rank:
        return NoMarkov(build.dtype)
    rows = torch.empty(layers.vocab_size, rank, dtype=build.dtype, device=build.device)
    build.fill(MARKOV_TABLE, rows)
    output = build.linear((LinearPart(MARKOV_OUTPUT.removesuffix(".weight"), draft_vocab, False),), rank)
    if not config.gated:
        return VanillaMarkov(Embedding(rows), output)
    gate = build.linear((LinearPart(MARKOV_GATE, rank, True),), layers.hidden_size + rank)
    return GatedMarkov(Embedding(rows), output, gate)


def _signals(config: DSparkConfig, build: LayerBuilder, regime: str | None, where: str) -> Signals:
    if not config.confidence:
        return SelectedProbability()
    wide = torch.promote_types(build.dtype, torch.float32)
    width = config.layers.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
    weight = torch.empty(1, width, dtype=wide, device=build.device)
    bias = torch.empty(1, dtype=wide, device=build.device)
    build.fill(f"{CONFIDENCE}.weight", weight)
    build.fill(f"{CONFIDENCE}.bias", bias)
    temperatures = torch.ones(2, config.block_size, dtype=wide, device=build.device)
    offsets = torch.zeros(2, config.block_size, dtype=wide, device=build.device)
    for row, name in enumerate(_tables(config, regime, where)):
        table = config.calibration[name]
        temperatures[row].copy_(torch.tensor(table.temperatures, dtype=wide))
        offsets[row].copy_(torch.tensor(table.biases, dtype=wide))
    return ConfidenceHead(
        ConfidenceParts(weight[0], bias, temperatures, offsets, config.confidence_with_markov)
    )


def _tables(config: DSparkConfig, regime: str | None, where: str) -> tuple[str, ...]:
    """Names of the calibration tables for greedy and for sampled rows; none where nothing is calibrated."""
    known = config.calibration
    if regime is None or not known:
        return ()
    if regime == PER_ROW:
        return tuple(name if name in known else next(iter(known)) for name in REGIMES)
    if regime not in known:
        raise CheckpointError(
            f"the drafter {where}: confidence_calibration has no table for {regime!r}; "
            f"it has {', '.join(known)}"
        )
    return (regime, regime)
