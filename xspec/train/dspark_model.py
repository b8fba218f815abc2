"""The trainable DSpark drafter: context from target taps, a parallel block, Markov and confidence heads.

Parameters carry the names of the published flat layout. Embedding and head are the target's, frozen and
handed in. Knows nothing about losses, optimisers or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from xspec.train.dspark_blocks import Blocks, visible
from xspec.train.dspark_heads import ConfidenceHead, MarkovHead
from xspec.train.layers import DecoderLayer, LayerSizes, RMSNorm, initialise

KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DSparkSizes:
    layer: LayerSizes
    vocab: int
    draft_vocab: int
    taps: int  # how many tapped layers feed the context
    layers: int
    block: int
    markov_rank: int
    gated: bool = False


class DSparkModel(nn.Module):
    """Context rows enter attention as keys and values only; block rows carry the residual stream."""

    def __init__(self, sizes: DSparkSizes, generator: torch.Generator, final_norm: torch.Tensor) -> None:
        """Random but for the final norm, which starts as the target's ([H]), and the zeroed heads."""
        super().__init__()
        layer = sizes.layer
        self.sizes = sizes
        self.fc = nn.Linear(sizes.taps * layer.hidden, layer.hidden, bias=False)
        self.hidden_norm = RMSNorm(layer.hidden, layer.norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(layer) for _ in range(sizes.layers))
        self.norm = RMSNorm(layer.hidden, layer.norm_eps)
        self.mask_embedding = nn.Parameter(torch.empty(layer.hidden))
        self.markov_head = MarkovHead(
            sizes.vocab, sizes.draft_vocab, layer.hidden, sizes.markov_rank, sizes.gated
        )
        self.confidence_head = ConfidenceHead(layer.hidden, sizes.markov_rank)
        initialise(self, generator)
        with torch.no_grad():
            self.mask_embedding.normal_(0.0, 0.02, generator=generator)
            self.norm.weight.copy_(final_norm)
        self.markov_head.reset(generator)
        self.confidence_head.reset()

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """Residual streams [N, m, H] of the tapped layers -> C [N, H], shared by all draft layers."""
        return self.hidden_norm(self.fc(taps.flatten(1).to(self.fc.weight.dtype)))

    def context_keys_values(self, context: torch.Tensor, positions: torch.Tensor) -> list[KeysValues]:
        """C [N, H] at positions [N] -> per layer keys and values [N, kv_heads, D].

        C passes no input norm: it is normalised already, and the same for every layer.
        """
        return [layer.self_attn.keys_values(context, positions) for layer in self._layers()]

    def block_inputs(self, anchors: torch.Tensor) -> torch.Tensor:
        """Embeddings of the anchor tokens [A, H] -> inputs of their blocks [A * B, H]: anchor, then masks."""
        masks = self.mask_embedding.expand(anchors.shape[0], self.sizes.block - 1, -1)
        return torch.cat((anchors.to(masks.dtype)[:, None], masks), dim=1).flatten(0, 1)

    def hidden(self, inputs: torch.Tensor, context: list[KeysValues], blocks: Blocks) -> torch.Tensor:
        """Block inputs [M, H] -> [M, H] after the final norm, given the context of all packed rows."""
        masks = [
            visible(lane.anchors.to(inputs.device), blocks.width, lane.last - lane.first)
            for lane in blocks.lanes
        ]
        residual = inputs
        for layer, (context_keys, context_values) in zip(self._layers(), context, strict=True):
            attention = layer.self_attn
            x = layer.input_layernorm(residual)
            queries = attention.queries(x, blocks.positions)
            keys, values = attention.keys_values(x, blocks.positions)
            attended = []
            for lane, mask in zip(blocks.lanes, masks, strict=True):
                if lane.block_first == lane.block_last:
                    continue
                packed, own = slice(lane.first, lane.last), slice(lane.block_first, lane.block_last)
                attended.append(
                    attention.mix(
                        queries[own],
                        torch.cat((context_keys[packed], keys[own])),
                        torch.cat((context_values[packed], values[own])),
                        mask,
                    )
                )
            if attended:
                residual = layer.finish(residual, torch.cat(attended))
        return self.norm(residual)

    def _layers(self) -> list[DecoderLayer]:
        return list(self.layers)  # type: ignore[arg-type]
