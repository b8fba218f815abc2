"""How drafted tokens are picked from a drafter's logits: greedily, or with the target's own noise.

Drafts drawn with the noise that decides the target's token agree with it at least (1 - TV) / (1 + TV)
of the time at temperature 1 (drafter-invariant speculation: Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

import torch

from xspec.draft.heads import selected_probability
from xspec.verify.filters import first_argmax
from xspec.verify.state import SamplingState


class Picker:
    """Implements `exec.calls.Pick`. Greedy rows are picked greedily either way."""

    def __init__(self, sampling: SamplingState, *, probabilistic: bool) -> None:
        self._sampling, self._probabilistic = sampling, probabilistic

    @property
    def greedy(self) -> bool:
        return not self._probabilistic

    def sampled(self, rows: torch.Tensor) -> torch.Tensor:
        """Device rows [R] -> [R] bool: whether their target draws with a temperature."""
        return self._sampling.sampled(rows)

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """logits [R, D], device rows [R], positions [R] of the token picked, ids [D] -> columns [R]."""
        fused = self._sampling.fused_for(logits)
        if fused is not None:
            if not self._probabilistic:
                return fused.argmax(logits)[0]
            return self._sampling.draw(fused, logits, rows, positions, ids)[0]
        if not self._probabilistic:
            return first_argmax(logits)[0]
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        temperature = self._sampling.temperature(rows, dtype)
        wanted = None if ids is None else ids.expand(rows.shape[0], -1)
        noise = self._sampling.gumbel(rows, positions, wanted, dtype=dtype)
        # The same choice as logits / temperature + noise, and the greedy one at temperature 0.
        return first_argmax(noise.mul_(temperature).add_(logits))[0]

    def probability(self, logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """logits [R, D], columns [R] -> [R] float32: softmax probability of what was picked."""
        fused = self._sampling.fused_for(logits)
        if fused is None:
            return selected_probability(logits, columns)
        return fused.selected_probability(logits, columns)
