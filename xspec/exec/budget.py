"""Which drafts a pass verifies whose rows are fewer than the drafts, as each device row has room for them.

One call where the platform's kernels offer it; in torch otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from xspec.exec.rows import DeviceRows
from xspec.verify.admit import admit


def admit_drafts(
    rows: DeviceRows,
    row_ids: Sequence[int],
    verify: Sequence[int],
    signals: torch.Tensor,
    target_rows: int,
    synchronous: bool,
) -> list[int] | torch.Tensor:
    """Drafts of each of row_ids [L] that a pass of `target_rows` rows verifies, by signals [L or more,
    >= max(verify)]: at most verify[i], and one less than its row may still commit.

    [L] int64 on the device, or where that is synchronous a list: reading it waits for nothing.
    """
    if synchronous and rows.fused is not None:
        return rows.fused.admit(row_ids, verify, signals, target_rows)
    lanes, device = len(row_ids), rows.length.device
    room = rows.room(torch.tensor(row_ids, dtype=torch.int64, device=device))
    most = torch.tensor(verify, dtype=torch.int64, device=device)
    caps = torch.minimum(most, (room - 1).clamp_(min=0))
    admitted = admit(signals[:lanes, : max(verify)], caps, lanes, target_rows)
    if not synchronous:
        return admitted
    told: list[int] = admitted.tolist()
    return told
