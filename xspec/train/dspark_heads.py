"""The two small heads of DSpark: a first-order Markov bias on the logits, and a confidence per slot.

Knows nothing of layers, blocks or losses. DSpark paper, sections on the sequential and confidence heads.
"""

from __future__ import annotations

import torch
from torch import nn

MARKOV_HEADS = ("vanilla", "gated")


class MarkovHead(nn.Module):
    """Bias of slot k from the token before it: W2 z, where z [r] is W1[previous], gated or not.

    W1 reads the whole vocabulary, since any token may come before; W2 has a row per drafted id. W2 starts
    at zero, so that the block predicts alone until the bias has learnt something.
    """

    def __init__(self, vocab_size: int, draft_size: int, hidden_size: int, rank: int, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if gated else None

    def reset(self, generator: torch.Generator) -> None:
        """W1 ~ N(0, 0.5 / sqrt(r)), W2 zero; the gate is left to the caller."""
        with torch.no_grad():
            rank = self.markov_w1.weight.shape[1]
            self.markov_w1.weight.normal_(0.0, 0.5 / rank**0.5, generator=generator)
            self.markov_w2.weight.zero_()

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> W1[previous] [N, r]."""
        embedded: torch.Tensor = self.markov_w1(previous)
        return embedded

    def state(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """z [N, r] of hidden [N, H] (after the final norm) and W1[previous] [N, r]."""
        if self.gate_proj is None:
            return embedded
        gate: torch.Tensor = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded.to(hidden.dtype)), -1)))
        return gate * embedded

    def bias(self, state: torch.Tensor) -> torch.Tensor:
        """z [N, r] -> [N, D], to be added to the base logits."""
        added: torch.Tensor = self.markov_w2(state)
        return added


class ConfidenceHead(nn.Module):
    """Logit of "this slot is accepted, given those before it", from h [N, H] and W1[previous] [N, r].

    In fp32 whatever runs around it: in bf16 high confidences all round to 1. Starts at zero, an even bet.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def reset(self) -> None:
        with torch.no_grad():
            self.proj.weight.zero_()
            self.proj.bias.zero_()

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            logits: torch.Tensor = self.proj(torch.cat((hidden.float(), embedded.float()), dim=-1))
        return logits.squeeze(-1)
