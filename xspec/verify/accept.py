"""Acceptance: how many of the target's own draws each row commits.

Draws are final tokens whatever the drafts say (architecture decision 7); drafts only decide how many
of them one round may use. Knows nothing about sampling, drafters or pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a round commits. Rows with count 0 commit nothing; their `last` is a valid id without meaning."""

    counts: torch.Tensor  # [R] int64, 1 .. K + 1 (0 where limits is 0)
    tokens: torch.Tensor  # [R, K + 1] int64, -1 beyond the count
    last: torch.Tensor  # [R] int64, the last committed token


def accept(draws: torch.Tensor, drafts: torch.Tensor, limits: torch.Tensor) -> Accepted:
    """draws [R, K + 1] (-1 past those a row has, at least one), drafts [R, K] (-1: no draft), limits [R]
    tokens a row may still commit.

    Draw t + 1 is valid only if draft t, which it was computed after, equals draw t. A draft without a
    draw after it was not verified: being right by chance makes no token of it.
    """
    width = draws.shape[1]
    agreed = (draws[:, : width - 1] == drafts) & (draws[:, 1:] >= 0)
    agreed = agreed.to(torch.int64).cumprod(1).sum(1)
    counts = torch.minimum(agreed + 1, limits.to(torch.int64)).clamp_(min=0)
    lane = torch.arange(width, device=draws.device)
    tokens = draws.masked_fill(lane >= counts.unsqueeze(1), -1)
    last = draws.gather(1, (counts - 1).clamp_(min=0).unsqueeze(1)).squeeze(1)
    return Accepted(counts=counts, tokens=tokens, last=last)
