"""Top-k, top-p and min-p as one threshold per row on tempered logits, and the reductions they need.

A threshold keeps every tie at the boundary, so the candidate set never depends on sort order or on
the batch. Definitions follow vLLM: min-p against the likeliest token, then top-k, then top-p over
what those two left. Knows nothing about noise, requests or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

WINDOWS = (64, 1024, 8192)
"""Leading candidates looked at before a full sort. Trying them needs host reads: a CPU's bargain only."""

_ARGMAX_GROUP = 1024
_SUM_GROUP = 64


@dataclass(frozen=True, slots=True)
class FilterRules:
    """Per-row settings, each [F]; top_k 0, top_p 1 and min_p 0 are neutral."""

    top_k: torch.Tensor  # int64
    top_p: torch.Tensor  # work dtype
    min_p: torch.Tensor  # work dtype

    def rows(self, index: torch.Tensor) -> FilterRules:
        return FilterRules(self.top_k[index], self.top_p[index], self.min_p[index])


@dataclass(frozen=True, slots=True)
class Candidates:
    """Survivors of some rows: ids [n, M] with tempered logits [n, M], -inf for what was cut.

    `index` are the rows among those given to `candidates`; `ids` None means the vocabulary in order.
    """

    index: torch.Tensor | None  # [n] int64; None: all rows
    ids: torch.Tensor | None
    logits: torch.Tensor


def first_argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lowest id of the maximum [N], maximum [N]); a NaN counts as maximum, as in torch.

    Two levels: group maxima vectorise in every dtype, an index-tracking reduction does not.
    """
    vocab = x.shape[1]
    if vocab < 2 * _ARGMAX_GROUP:
        ids = x.argmax(1)
        return ids, x.gather(1, ids.unsqueeze(1)).squeeze(1)
    groups = vocab // _ARGMAX_GROUP
    whole = groups * _ARGMAX_GROUP
    tops = x[:, :whole].unflatten(1, (groups, _ARGMAX_GROUP)).amax(2)
    if whole < vocab:
        tops = torch.cat((tops, x[:, whole:].amax(1, keepdim=True)), 1)
    # The last group is read as the last full span: earlier ids in it are below the maximum.
    start = (tops.argmax(1, keepdim=True) * _ARGMAX_GROUP).clamp_(max=vocab - _ARGMAX_GROUP)
    span = x.gather(1, start + torch.arange(_ARGMAX_GROUP, device=x.device))
    offset = span.argmax(1, keepdim=True)
    return (start + offset).squeeze(1), span.gather(1, offset).squeeze(1)


def mass(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Sum of exp(x) per row [N, 1], added in an order that does not depend on the number of rows.

    A single-row sum may be split across threads; sums of short groups never are.
    """
    weights = torch.exp(x, out=out)
    groups = x.shape[1] // _SUM_GROUP
    whole = groups * _SUM_GROUP
    partial = weights[:, :whole].unflatten(1, (groups, _SUM_GROUP)).sum(2)
    tail = weights[:, whole:].sum(1, keepdim=True)
    return partial.sum(1, keepdim=True) + tail


def top_window(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `size` largest (values descending, ids); which ties sit at the end is unspecified.

    The largest `size` values lie in the `size` groups with the largest maxima, so only those are
    sorted. Groups are strided (ids c, c + G, c + 2G, ...) because their maxima then vectorise.
    """
    vocab = x.shape[1]
    group = 16 if size <= 128 else 8
    groups = vocab // group
    if size * 2 > groups:
        values, ids = x.topk(size, dim=1)
        return values, ids
    whole = groups * group
    maxima = x[:, :whole].unflatten(1, (group, groups)).amax(1)
    best = maxima.topk(size, dim=1, sorted=False).indices
    spans = best.unsqueeze(1) + torch.arange(0, whole, groups, device=x.device).unsqueeze(1)
    ids = spans.flatten(1)
    if whole < vocab:
        tail = torch.arange(whole, vocab, device=x.device).expand(x.shape[0], -1)
        ids = torch.cat((ids, tail), 1)
    values, place = x.gather(1, ids).topk(size, dim=1)
    return values, ids.gather(1, place)


def candidates(
    x: torch.Tensor,
    rules: FilterRules,
    *,
    windows: tuple[int, ...] = WINDOWS,
    top_k_cap: int = 0,
    open_tail: bool = True,
    scratch: torch.Tensor | None = None,
) -> list[Candidates]:
    """Cut x [F, vocab] (tempered, row maximum 0) by `rules`.

    Rows decided within a window come back with their few ids; the rest, or all without windows, in
    full width. `top_k_cap` bounds every row's top_k (0: unknown or off) and sizes the first window;
    `open_tail` says whether some row has top-p without top-k, which needs the mass of the whole row.
    """
    vocab = x.shape[1]
    total = mass(x, scratch) if open_tail else x.new_zeros(x.shape[0], 1)
    first = (top_k_cap // 32 + 1) * 32
    if top_k_cap and first <= max(windows, default=0):
        windows = (first, *(w for w in windows if w > first))
    found: list[Candidates] = []
    index: torch.Tensor | None = None  # rows still undecided; None: all
    for size in windows:
        if size * 2 > vocab:
            break
        values, ids = top_window(x, size)
        cut = _threshold(values, rules, total, vocab)
        done = (cut > values[:, -1:]).squeeze(1)
        kept = values.masked_fill(values < cut, float("-inf"))
        if bool(done.all()):
            found.append(Candidates(index, ids, kept))
            return found
        ready, left = done.nonzero().squeeze(1), (~done).nonzero().squeeze(1)
        if ready.numel():
            found.append(Candidates(ready if index is None else index[ready], ids[ready], kept[ready]))
        index = left if index is None else index[left]
        x, total, rules = x[left], total[left], rules.rows(left)
    cut = _threshold(x.sort(dim=1, descending=True).values, rules, total, vocab)
    found.append(Candidates(index, None, x.masked_fill(x < cut, float("-inf"))))
    return found


def _threshold(top: torch.Tensor, rules: FilterRules, total: torch.Tensor, vocab: int) -> torch.Tensor:
    """Lowest kept value [F, 1] given the leading values `top` [F, M], descending from 0.

    A result above the window's end is exact; at or below it, the window was too short to tell.
    """
    size = top.shape[1]
    none = float("-inf")
    k = rules.top_k.unsqueeze(1)
    limited = k > 0
    kth = top.gather(1, (k - 1).clamp(min=0, max=size - 1))
    floor = torch.maximum(kth.masked_fill(~limited, none), rules.min_p.log().unsqueeze(1))
    before = top.exp().masked_fill_(top < floor, 0.0).cumsum(1)
    # Renormalise over what min-p and top-k left; without them, over the mass beyond the window too.
    untouched = ~limited & (floor == none)
    left = torch.where(untouched, total, before[:, -1:])
    before = before.roll(1, 1)
    before[:, 0] = 0.0
    p = rules.top_p.unsqueeze(1)
    kept = (before < p * left) & (top >= floor)
    nucleus = top.masked_fill(~kept, float("inf")).amin(1, keepdim=True)
    cut = torch.where(p < 1.0, torch.maximum(nucleus, floor), floor)
    cut = torch.minimum(cut, top[:, :1])  # a vanishing top_p still keeps the likeliest
    # A floor that reaches past the window leaves `left` short of mass, so nothing below it counts.
    known = (floor > top[:, -1:]) | untouched
    return cut if size == vocab else torch.where(known, cut, top[:, -1:])
