"""The target's draw on every row: y = argmax(log p + noise) after bias, penalties and filters.

Greedy is the case without noise. A drawn token is a function of the row's logits, settings, key and
position alone (architecture decision 7). Knows nothing about drafts beyond the ids of a prefix.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from xspec.core.request import SamplingParams
from xspec.verify.filters import candidates, first_argmax
from xspec.verify.logprobs import Logprobs, measure
from xspec.verify.state import SamplingState


class Mode(enum.Enum):
    GREEDY = "greedy"
    SAMPLED = "sampled"
    FILTERED = "filtered"


@dataclass(frozen=True, slots=True)
class Kind:
    """Which steps a row needs. Rows of one kind are drawn together."""

    mode: Mode
    penalised: bool = False
    biased: bool = False
    held: bool = False  # min_tokens may still mask its stop ids
    open_tail: bool = False  # top-p without top-k: needs the mass of the whole row

    @property
    def adjusted(self) -> bool:
        return self.penalised or self.biased or self.held

    @property
    def plain(self) -> bool:
        """Nothing but a temperature."""
        return self.mode is not Mode.FILTERED and not self.adjusted


@dataclass(frozen=True, slots=True)
class RowGroup:
    kind: Kind
    flat: tuple[int, ...]  # flat rows, ascending
    top_k_cap: int = 0  # largest top_k if every row has one, else 0


@dataclass(frozen=True, slots=True)
class SampleNeeds:
    """What the host knows of the rows of one call, so that nothing is computed that no row needs."""

    rows: int
    groups: tuple[RowGroup, ...]
    logprob_rows: tuple[int, ...] = ()
    logprob_tops: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        return all(group.kind.plain for group in self.groups)

    @property
    def penalised(self) -> bool:
        return any(group.kind.penalised for group in self.groups)


@dataclass(frozen=True, slots=True)
class Drawn:
    """`bad` rows had NaN, +inf or nothing but -inf to choose from: their token is a valid id without
    meaning, and the request must fail rather than emit it."""

    tokens: torch.Tensor  # [N] int64
    bad: torch.Tensor  # [N] bool
    logprobs: Logprobs | None = None


def needs_of(params_list: Sequence[SamplingParams | None]) -> SampleNeeds:
    """Needs of flat rows with these params, in order; None is a padding row."""
    flat: dict[Kind, list[int]] = {}
    for row, params in enumerate(params_list):
        flat.setdefault(_kind(params), []).append(row)
    asked = [(row, p.logprobs) for row, p in enumerate(params_list) if p and p.logprobs is not None]
    groups = []
    for kind, rows in flat.items():
        ks = [p.top_k if (p := params_list[row]) is not None else 0 for row in rows]
        cap = max(ks) if kind.mode is Mode.FILTERED and min(ks) > 0 else 0
        groups.append(RowGroup(kind, tuple(rows), cap))
    return SampleNeeds(
        rows=len(params_list),
        groups=tuple(groups),
        logprob_rows=tuple(row for row, _ in asked),
        logprob_tops=tuple(k for _, k in asked),
    )


def _kind(params: SamplingParams | None) -> Kind:
    if params is None:
        return Kind(Mode.GREEDY)
    mode = Mode.GREEDY if params.greedy else Mode.FILTERED if params.filtered else Mode.SAMPLED
    return Kind(
        mode=mode,
        penalised=params.penalised,
        biased=bool(params.logit_bias),
        held=params.min_tokens > 0,
        open_tail=mode is Mode.FILTERED and params.top_p < 1.0 and params.top_k <= 0,
    )


def draw(
    logits: torch.Tensor,  # [N, vocab], not modified
    rows: torch.Tensor,  # [N] device rows
    positions: torch.Tensor,  # [N] index of the token being drawn
    state: SamplingState,
    needs: SampleNeeds,
    prefix: torch.Tensor | None = None,  # [N, W] drafted ids before the drawn one, -1 padded
) -> Drawn:
    """Draw one token per row. `prefix` matters only to penalties: their counts must follow the draft."""
    if logits.shape != (needs.rows, state.vocab_size):
        want = (needs.rows, state.vocab_size)
        raise ValueError(f"logits {tuple(logits.shape)} do not fit (rows, vocabulary) = {want}")
    fused = state.fused_for(logits)
    if fused is not None and needs.plain:
        sampled = any(group.kind.mode is Mode.SAMPLED for group in needs.groups)
        tokens, bad = state.draw(fused, logits, rows, positions) if sampled else fused.argmax(logits)
    else:
        tokens, bad = _draw_groups(logits, rows, positions, state, needs, prefix)
    if not needs.logprob_rows:
        return Drawn(tokens, bad)
    asked = _index(needs.logprob_rows, logits.device)
    logprobs = measure(
        logits[asked], tokens[asked], needs.logprob_rows, needs.logprob_tops, windows=state.tuning.windows
    )
    return Drawn(tokens, bad, logprobs)


def _draw_groups(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingState,
    needs: SampleNeeds,
    prefix: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, bad) of all rows, drawn kind by kind."""
    tokens = torch.empty(needs.rows, dtype=torch.int64, device=logits.device)
    bad = torch.empty(needs.rows, dtype=torch.bool, device=logits.device)
    for group in needs.groups:
        for chunk in _chunks(group, state):
            if len(chunk) == needs.rows:
                return _draw_group(logits, rows, positions, state, group, prefix)
            at = _index(chunk, logits.device)
            drafted = None if prefix is None else prefix[at]
            tokens[at], bad[at] = _draw_group(logits[at], rows[at], positions[at], state, group, drafted)
    return tokens, bad


def _draw_group(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingState,
    group: RowGroup,
    prefix: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, bad) of rows that need the same steps."""
    kind, fused = group.kind, state.fused_for(logits)
    if fused is not None and kind.plain:
        return state.draw(fused, logits, rows, positions)
    if kind.mode is Mode.GREEDY and not kind.adjusted:
        tokens, high = first_argmax(logits)
        return tokens, ~high.isfinite()
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    work = state.scratch.take("work", logits.shape[0], dtype).copy_(logits)
    if kind.biased:
        state.add_bias(work, rows)
    if kind.held:
        state.hold_stops(work, rows, positions)
    if kind.penalised:
        state.penalise(work, rows, prefix)
    if kind.mode is Mode.GREEDY:
        tokens, high = first_argmax(work)
        return tokens, ~high.isfinite()
    # Measured from the maximum, a tiny temperature overflows to -inf only, never to NaN.
    high = work.amax(1, keepdim=True)
    work.sub_(high).div_(state.temperature(rows, dtype))
    bad = ~high.isfinite().squeeze(1)
    if kind.mode is Mode.SAMPLED:
        noise = state.scratch.take("noise", logits.shape[0], dtype)
        state.gumbel(rows, positions, dtype=dtype, out=noise)
        return first_argmax(work.add_(noise))[0], bad
    return _draw_filtered(work, rows, positions, state, group), bad


def _draw_filtered(
    work: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, state: SamplingState, group: RowGroup
) -> torch.Tensor:
    """Noise is drawn for the candidates alone wherever they are few; it is the same noise."""
    scratch = state.scratch.take("noise", work.shape[0], work.dtype)
    survivors = candidates(
        work,
        state.rules(rows, work.dtype),
        windows=state.tuning.windows,
        top_k_cap=group.top_k_cap,
        open_tail=group.kind.open_tail,
        scratch=scratch,
    )
    tokens = torch.empty_like(rows)
    for part in survivors:
        at = slice(None) if part.index is None else part.index
        noise = state.gumbel(rows[at], positions[at], part.ids, dtype=work.dtype)
        score = noise.add_(part.logits)
        if part.ids is None:
            tokens[at] = first_argmax(score)[0]
        else:
            beaten = score < score.amax(1, keepdim=True)
            tokens[at] = part.ids.masked_fill(beaten, state.vocab_size).amin(1)
    return tokens


def _chunks(group: RowGroup, state: SamplingState) -> Iterator[tuple[int, ...]]:
    """Plain greedy rows go in one call; the rest in pieces whose buffers stay in cache."""
    size = max(1, state.tuning.chunk_elements // state.vocab_size)
    if group.kind == Kind(Mode.GREEDY):
        size = len(group.flat)
    for start in range(0, len(group.flat), size):
        yield group.flat[start : start + size]


def _index(flat: tuple[int, ...], device: torch.device) -> slice | torch.Tensor:
    """A slice (a view, no copy) when the rows are consecutive."""
    if flat[-1] - flat[0] + 1 == len(flat):
        return slice(flat[0], flat[-1] + 1)
    return torch.tensor(flat, dtype=torch.int64, device=device)
