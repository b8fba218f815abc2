"""Which drafts are verified where rows are fewer than drafts: the device's half of adaptive target verify.

The host fixes the number of rows from what older rounds said; who gets them is decided here, from the
present round's signals, without anything being read back (architecture decision 3). Knows nothing of costs.
"""

from __future__ import annotations

import torch


def admit(signals: torch.Tensor, caps: torch.Tensor, anchors: int, target_rows: int) -> torch.Tensor:
    """signals [L, K] (estimate that draft k is accepted if all before it were), caps [L] drafts a lane may
    verify at most -> drafts admitted per lane [L] int64.

    The first `anchors` lanes are live and keep the row of their last token; the other target_rows - anchors
    rows go to the drafts most likely to be reached and accepted: survival, the cumulative product of a lane's
    signals. Ties go to the earlier position, then to the earlier lane. Every row is used while there are
    drafts: padding would cost the same. Survivals never rise along a lane, so what is admitted is a prefix.
    """
    lanes, width = signals.shape
    chance = signals.nan_to_num(0.0, 1.0, 0.0).clamp(0.0, 1.0)
    survival = chance.cumprod(1).t()  # [K, L]: a stable sort breaks ties by position, then lane
    position = torch.arange(width, device=signals.device)
    survival = survival.masked_fill(position.unsqueeze(1) >= caps.unsqueeze(0), -1.0).flatten()
    order = survival.sort(descending=True, stable=True).indices
    taken = torch.zeros_like(survival, dtype=torch.int64)
    taken[order[: max(0, target_rows - anchors)]] = 1
    return (taken * (survival >= 0.0)).view(width, lanes).sum(0)
