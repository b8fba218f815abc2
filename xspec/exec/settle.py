"""What becomes of a pass's draws: acceptance, the commit to the device rows, and what the host is told.

One call where the platform's kernels offer it; in torch otherwise.
"""

from __future__ import annotations

import torch

from xspec.exec.calls import DrawRows
from xspec.exec.rows import DeviceRows
from xspec.kernels.rounds import NO_TOKEN, FlatRows, Settled, Told
from xspec.verify.accept import accept
from xspec.verify.sampler import Drawn


def settle(
    rows: DeviceRows,
    flat: FlatRows,
    lives: int,
    drawing: DrawRows,
    drawn: Drawn,
    drafts: torch.Tensor | None,
    width: int,
    told: Told,
) -> Settled:
    """Commit what the first `lives` lanes of `flat` drew, with up to `width` of drafts [lives or more, K]."""
    if rows.fused is not None and drawing.live is None:
        return rows.fused.settle(flat, lives, drawn.tokens, drawn.bad, drafts, width, told)
    row_ids = flat.row_ids[:lives]
    if drafts is None:
        drafts = drawn.tokens.new_empty((lives, 0))
    draws = drawing.rectangle(drawn.tokens, lives, width, NO_TOKEN)
    accepted = accept(draws, drafts[:lives, :width], rows.room(row_ids))
    rows.advance(row_ids, accepted.last, accepted.counts)
    # A bad draw ends what a row yields; what was rejected may be bad, nobody will ever see it.
    good = ~drawing.rectangle(drawn.bad, lives, width, False)
    kept = torch.minimum(accepted.counts, good.to(torch.int64).cumprod(1).sum(1))
    told.put(accepted.tokens, kept, kept < accepted.counts)
    counts = torch.zeros_like(flat.row_ids)
    counts[:lives] = accepted.counts
    return Settled(accepted.tokens, counts)
