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
from xspec.kernels.rounds import NO_TOKEN, Chain
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
    def adjusted(self) -> bool:
        return any(group.kind.adjusted for group in self.groups)

    def has(self, mode: Mode) -> bool:
        return any(group.kind.mode is mode for group in self.groups)

    @property
    def penalised(self) -> bool:
        return any(group.kind.penalised for group in self.groups)


@dataclass(frozen=True, slots=True)
class Drawn:
    """`bad` rows had NaN, +inf or nothing but -inf to choose from: their token is a valid id without
    meaning, and the request must fail rather than emit it. Rows past a wrong guess of a chain may have
    NO_TOKEN instead of a token, and have no logprobs."""

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
    chain: Chain | None = None,  # drafts that rows stand on; none is past a wrong one then
) -> Drawn:
    """Draw one token per row. `prefix` matters only to penalties: their counts must follow the draft."""
    if logits.shape != (needs.rows, state.vocab_size):
        want = (needs.rows, state.vocab_size)
        raise ValueError(f"logits {tuple(logits.shape)} do not fit (rows, vocabulary) = {want}")
    fused = state.fused_for(logits)
    if fused is None or needs.adjusted:
        tokens, bad = _draw_groups(logits, rows, positions, state, needs, prefix, chain)
    elif needs.has(Mode.SAMPLED) or needs.has(Mode.FILTERED):
        filtered = needs.has(Mode.FILTERED)
        tokens, bad = state.draw(fused, logits, rows, positions, filtered=filtered, chain=chain)
    else:
        tokens, bad = fused.argmax(logits)
    asked, tops = needs.logprob_rows, needs.logprob_tops
    if asked and chain is not None:
        reached = _reached(chain, tokens)
        tops = tuple(k for row, k in zip(asked, tops, strict=True) if reached[row])
        asked = tuple(row for row in asked if reached[row])
    if not asked:
        return Drawn(tokens, bad)
    at = _index(asked, logits.device)
    return Drawn(tokens, bad, measure(logits[at], tokens[at], asked, tops, windows=state.tuning.windows))


def _reached(chain: Chain, tokens: torch.Tensor) -> list[bool]:
    """Whether each row stands on nothing but right guesses. Reads the device."""
    reached: list[bool] = []
    before = NO_TOKEN
    for offset, fed, token in zip(chain.offsets.tolist(), chain.fed.tolist(), tokens.tolist(), strict=True):
        reached.append(offset == 0 or (reached[-1] and fed == before))
        before = token
    return reached


def _draw_groups(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    state: SamplingState,
    needs: SampleNeeds,
    prefix: torch.Tensor | None,
    chain: Chain | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, bad) of all rows, drawn kind by kind. A lane's rows are all of one kind."""
    tokens = torch.full((needs.rows,), NO_TOKEN, dtype=torch.int64, device=logits.device)
    bad = torch.zeros(needs.rows, dtype=torch.bool, device=logits.device)
    fused = state.fused_for(logits)
    for group in needs.groups:
        if fused is not None and not group.kind.adjusted:
            at = _index(group.flat, logits.device)
            part = None if chain is None else Chain(chain.fed[at], chain.offsets[at])
            tokens[at], bad[at] = state.draw(
                fused, logits[at], rows[at], positions[at], filtered=True, chain=part
            )
            continue
        for chunk in _chunks(group, state, tokens, chain):
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
    kind = group.kind
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


def _chunks(
    group: RowGroup, state: SamplingState, tokens: torch.Tensor, chain: Chain | None
) -> Iterator[tuple[int, ...]]:
    """Plain greedy rows go in one call; the rest in pieces whose buffers stay in cache."""
    if group.kind == Kind(Mode.GREEDY):
        yield group.flat
        return
    size = max(1, state.tuning.chunk_elements // state.vocab_size)
    for wave in _waves(group.flat, tokens, chain):
        for start in range(0, len(wave), size):
            yield wave[start : start + size]


def _waves(flat: tuple[int, ...], tokens: torch.Tensor, chain: Chain | None) -> Iterator[tuple[int, ...]]:
    """All rows at once, or with a chain one row of every lane whose guesses were right so far: each wave is
    made of the `tokens` [N] that those before it drew, and reads the device."""
    if chain is None:
        yield flat
        return
    fed, offsets, members = chain.fed.tolist(), chain.offsets.tolist(), frozenset(flat)
    wave = tuple(row for row in flat if offsets[row] == 0)
    while wave:
        yield wave
        drawn = tokens.tolist()
        right = (row + 1 for row in wave if row + 1 in members and drawn[row] == fed[row + 1])
        wave = tuple(row for row in right if offsets[row] > 0)


def _index(flat: tuple[int, ...], device: torch.device) -> slice | torch.Tensor:
    """A slice (a view, no copy) when the rows are consecutive."""
    if flat[-1] - flat[0] + 1 == len(flat):
        return slice(flat[0], flat[-1] + 1)
    return torch.tensor(flat, dtype=torch.int64, device=device)
