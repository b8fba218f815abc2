"""The embedded model as transformers sees it: the same dequantised tensors, and its own greedy text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xspec.models.loader import open_checkpoint


def reference_model(path: Path) -> Any:
    """transformers' LlamaForCausalLM in fp32 on the tensors that our loader reads from `path`."""
    import transformers

    checkpoint = open_checkpoint(path)
    with torch.device("meta"):
        reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoint.config))
    state = {}
    for name, shape in checkpoint.shapes.items():
        state[name] = torch.empty(shape)
        checkpoint.read(name, state[name])
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    reference.load_state_dict(state, assign=True)
    reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)
    return reference.eval()


@dataclass(frozen=True, slots=True)
class GreedyText:
    """What the reference generates, and the logits that each of its tokens was chosen by."""

    tokens: list[int]
    logits: list[torch.Tensor]

    def beginning(self, count: int) -> GreedyText:
        return GreedyText(self.tokens[:count], self.logits[:count])

    def divergence(self, found: list[int]) -> tuple[int, float] | None:
        """(index, logit gap) of the first token that differs, None where all are equal.

        Up to there both had the same prefix, so the gap says how near a tie the choice was.
        """
        for index, (ours, theirs) in enumerate(zip(found, self.tokens, strict=True)):
            if ours != theirs:
                row = self.logits[index]
                return index, float(row[theirs] - row[ours])
        return None


@torch.no_grad()
def greedy_text(reference: Any, prompt: list[int], count: int) -> GreedyText:
    """`count` tokens by the reference's cached decoding, end of text or not."""
    tokens: list[int] = []
    logits: list[torch.Tensor] = []
    step = reference(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    while True:
        logits.append(step.logits[0, -1].clone())
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == count:
            return GreedyText(tokens, logits)
        step = reference(torch.tensor([tokens[-1:]]), past_key_values=step.past_key_values, use_cache=True)
