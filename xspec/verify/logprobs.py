"""Log-probabilities under the model's raw distribution, for rows that ask for them.

The chosen token is always reported, inside its top-k or not; equal logits rank by lowest id. Knows
nothing about how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from xspec.core.request import TokenLogprob
from xspec.verify.filters import WINDOWS, mass, top_window


@dataclass(frozen=True, slots=True)
class Logprobs:
    """L rows, each with the k it asked for (`tops`), on the device until read back with the tokens."""

    rows: tuple[int, ...]  # flat rows of the draw, ascending
    tops: tuple[int, ...]
    chosen: torch.Tensor  # [L]
    top_ids: torch.Tensor  # [L, max(tops)] int64, likeliest first
    top: torch.Tensor  # [L, max(tops)]

    def unpack(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Host values given the L chosen tokens; reads the device."""
        chosen, ids, tops = self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist()
        return [
            TokenLogprob(int(token), chosen[i], tuple(zip(ids[i][:k], tops[i][:k], strict=True)))
            for i, (token, k) in enumerate(zip(tokens, self.tops, strict=True))
        ]


def measure(
    logits: torch.Tensor,  # [L, vocab] raw
    tokens: torch.Tensor,  # [L] chosen or scored ids
    rows: tuple[int, ...],
    tops: tuple[int, ...],
    *,
    windows: tuple[int, ...] = WINDOWS,
) -> Logprobs:
    """Log-softmax in float32 (float64 for float64 logits) at the chosen ids and the likeliest ones."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    high = x.amax(1, keepdim=True)
    normaliser = high + mass(x - high).log_()
    chosen = x.gather(1, tokens.unsqueeze(1)) - normaliser
    width = min(max(tops, default=0), x.shape[1])
    values, ids = ranked(x, width, windows=windows)
    return Logprobs(rows, tuple(min(k, width) for k in tops), chosen.squeeze(1), ids, values - normaliser)


def score(
    logits: torch.Tensor, target_ids: torch.Tensor, top: int, *, windows: tuple[int, ...] = WINDOWS
) -> Logprobs:
    """Prompt scoring: each row's logits [L, vocab] against the token that follows it [L]."""
    count = logits.shape[0]
    return measure(logits, target_ids, tuple(range(count)), (top,) * count, windows=windows)


def ranked(
    x: torch.Tensor, count: int, *, windows: tuple[int, ...] = WINDOWS
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row (values, ids), ties by lowest id."""
    if count == 0:
        return x[:, :0], torch.zeros(x.shape[0], 0, dtype=torch.int64, device=x.device)
    for size in windows:
        if size <= count or size * 2 > x.shape[1]:
            continue
        values, ids = top_window(x, size)
        # Every tie of the last reported value is inside the window, so it can be ranked there.
        if bool((values[:, count - 1] > values[:, -1]).all()):
            ids, order = ids.sort(dim=1)
            values, place = values.gather(1, order).sort(dim=1, descending=True, stable=True)
            return values[:, :count], ids.gather(1, place[:, :count])
    values, ids = x.sort(dim=1, descending=True, stable=True)
    return values[:, :count], ids[:, :count]
