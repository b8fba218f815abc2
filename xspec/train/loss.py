"""What a drafter learns from: the target's exact distribution, seen through a reduced vocabulary.

Rows are taken a few at a time, forward and gradient at once, so that no [rows, D] matrix outlives its chunk.
Knows nothing about how the rows came about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

# Enough rows for a product at full speed; of a 16 k vocabulary a chunk's fp32 matrices take 16 MB each.
CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class DraftHead:
    """The target's head rows a drafter scores with, D of V, frozen."""

    rows: torch.Tensor  # [D, H], the type logits are computed in
    ids: torch.Tensor  # [D] int64, ascending target ids
    columns: torch.Tensor  # [V] int64: the column of a target id, -1 outside D

    @property
    def offsets(self) -> torch.Tensor:
        """`d2t` of a checkpoint: target id = column + offset, [D] int32."""
        return (self.ids - torch.arange(len(self.ids), device=self.ids.device)).to(torch.int32)


def draft_head(head: torch.Tensor, ids: torch.Tensor) -> DraftHead:
    """From the target's whole head [V, H] and the [D] ascending ids drafts may use."""
    columns = torch.full((head.shape[0],), -1, dtype=torch.int64, device=head.device)
    columns[ids] = torch.arange(len(ids), device=head.device)
    return DraftHead(head[ids].contiguous(), ids, columns)


@dataclass(frozen=True, slots=True)
class Teaching:
    """What n rows are taught: the target's states where it chose the row's token, and that token."""

    hidden: torch.Tensor  # [n, H] normed target hidden; [N, H] with `rows`, which may share them
    log_z: torch.Tensor  # [n] or [N] fp32 logsumexp of its full logits
    labels: torch.Tensor  # [n] int64 target ids; those outside D take no part in the cross entropy
    weights: torch.Tensor  # [n] fp32 share of each row in the loss
    rows: torch.Tensor | None = None  # [n] which of hidden and log_z teaches each row; None: its own
    soft: bool = True  # cross entropy with the target's distribution over D; else with the label alone


@dataclass(frozen=True, slots=True)
class Taught:
    """Per row, of drafter q and target p over D."""

    loss: torch.Tensor  # scalar, differentiable
    accept: torch.Tensor  # [n] fp32: sum of min(q, p), what a sampled draft is accepted with
    hit: torch.Tensor  # [n] bool: the drafter's best token is the label
    agree: torch.Tensor  # [n] bool: the drafter's best token is the target's best in D
    cross_entropy: torch.Tensor  # [n] fp32: -sum of p log q, or -log q of the label (0 where it is not in D)
    distance: torch.Tensor  # [n] fp32: L1 distance over the full vocabulary, 2 TV


def cross_entropy_weight(progress: float) -> float:
    """1 for the first 35 % of a run, then falling to 0.1 at 50 %. Total variation takes the rest.

    Its gradient is tiny while q and p barely overlap, so that cross entropy has to come first.
    """
    return 1.0 - 0.9 * min(1.0, max(0.0, (progress - 0.35) / 0.15))


def teach(
    hidden: torch.Tensor,
    head: DraftHead,
    teaching: Teaching,
    ce_weight: float,
    bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> Taught:
    """Weighted sum over rows of ce_weight * CE + (1 - ce_weight) * L1, and what it was made of.

    Soft labels say at every row what the target thinks of every token, which a small set of answers repeats
    too seldom to be learnt from its tokens alone.

    Logits are hidden [n, H] . rows^T, plus x . w^T of the `bias` (x [n, r], w [D, r]), both trained.
    p_D = exp(h . E_D^T - log Z) sums to at most 1, and q is 0 outside D, so over the whole vocabulary
    L1 = sum_D |q - p| + 1 - sum_D p and accept = sum_D min(q, p), exactly.
    """
    x, w = bias if bias is not None else (None, None)
    # Its products choose their types themselves; autocast would round the sums of its rows too.
    with torch.autocast(hidden.device.type, enabled=False):
        loss, *rest = _Teach.apply(hidden, x, w, head, teaching, ce_weight, chunk_rows)
    return Taught(loss, *rest)


_OUT_DTYPES = (torch.float32, torch.bool, torch.bool, torch.float32, torch.float32)


class _Teach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        x: torch.Tensor | None,
        w: torch.Tensor | None,
        head: DraftHead,
        teaching: Teaching,
        ce_weight: float,
        chunk_rows: int,
    ) -> tuple[torch.Tensor, ...]:
        count, dtype = hidden.shape[0], head.rows.dtype
        labels = head.columns[teaching.labels]
        teachers = torch.arange(count, device=hidden.device) if teaching.rows is None else teaching.rows
        order = torch.sort(teachers, stable=True).indices  # a chunk scores rows that share a teacher once
        grad_hidden = torch.empty_like(hidden)
        grad_x = torch.empty_like(x) if x is not None else None
        grad_w = torch.zeros_like(w, dtype=torch.float32) if w is not None else None
        narrow_w = w.to(dtype) if w is not None else None
        outs = tuple(torch.empty(count, dtype=kind, device=hidden.device) for kind in _OUT_DTYPES)
        for part in order.split(chunk_rows):
            logits = (hidden[part].to(dtype) @ head.rows.T).float()
            if x is not None and narrow_w is not None:
                narrow_x = x[part].to(dtype)
                logits += narrow_x @ narrow_w.T
            distinct, places = torch.unique_consecutive(teachers[part], return_inverse=True)
            p = (teaching.hidden[distinct].to(dtype) @ head.rows.T).float()
            p = p.sub_(teaching.log_z[distinct, None]).exp_()
            if len(distinct) < len(part):
                p = p[places]
            found, grad = _chunk(logits, p, labels[part], teaching.weights[part], ce_weight, teaching.soft)
            for out, values in zip(outs, found, strict=True):
                out[part] = values
            grad = grad.to(dtype)
            grad_hidden[part] = (grad @ head.rows).to(hidden.dtype)
            if x is not None and narrow_w is not None and grad_x is not None and grad_w is not None:
                grad_x[part] = (grad @ narrow_w).to(x.dtype)
                grad_w += grad.T @ narrow_x
        accept, hit, agree, cross_entropy, distance = outs
        rows = ce_weight * cross_entropy + (1.0 - ce_weight) * distance
        ctx.save_for_backward(grad_hidden, grad_x, grad_w)
        ctx.mark_non_differentiable(accept, hit, agree, cross_entropy, distance)
        return (rows * teaching.weights).sum(), accept, hit, agree, cross_entropy, distance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = (grad * grad_loss.to(grad.dtype) if grad is not None else None for grad in ctx.saved_tensors)
        return (*grads, None, None, None, None)


def _chunk(
    logits: torch.Tensor,
    p: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    ce_weight: float,
    soft: bool,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Row results and the loss gradient by logits [n, D] fp32, which are overwritten, as is `p`."""
    best, agree, mass = logits.argmax(-1), p.argmax(-1), p.sum(-1)
    log_q = logits.sub_(torch.logsumexp(logits, -1, keepdim=True))
    known = labels >= 0
    places = labels.clamp(min=0)[:, None]
    chosen = log_q.gather(1, places).squeeze(1)
    cross_entropy = -torch.linalg.vecdot(p, log_q) if soft else -chosen * known
    q = log_q.exp_()
    difference = torch.sub(q, p, out=p)
    # min(q, p) = (q + p - |q - p|) / 2, and q sums to 1.
    apart = torch.linalg.vector_norm(difference, 1, -1)
    accept = (1.0 + mass - apart) / 2
    distance = apart + 1.0 - mass
    # CE by logits: q - onehot, or with soft labels q * mass - p.
    if soft:
        ce_share = (ce_weight * weights)[:, None]
        grad = torch.addcmul(difference, q, (mass - 1.0)[:, None]).mul_(ce_share)
    else:
        ce_share = (ce_weight * known * weights)[:, None]
        grad = (q * ce_share).scatter_add_(1, places, -ce_share)
    # L1 by logits: q (s - <q, s>) with s the sign of q - p.
    sign = difference.sign_()
    slope = torch.linalg.vecdot(q, sign)[:, None]
    tv_share = (1.0 - ce_weight) * weights[:, None]
    grad.add_(sign.sub_(slope).mul_(tv_share).mul_(q))
    return (accept, best == labels, best == agree, cross_entropy, distance), grad
