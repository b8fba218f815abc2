"""Rows that stand on drafts: drawn as far as the drafts are right, and no token, fact or logprob differs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native_rounds import table_of

from xspec.core.request import SamplingParams
from xspec.core.round import PageGrant, RowBind
from xspec.exec.calls import DrawRows, VerifyPass
from xspec.exec.flat_rows import verify_rows
from xspec.exec.rows import DeviceRows
from xspec.exec.runner import Runner
from xspec.exec.settle import settle
from xspec.kernels.native import NativeLibrary, Team
from xspec.kernels.native_draws import NativeDraws
from xspec.kernels.native_rows import NativeRows
from xspec.kernels.rounds import NO_TOKEN, Chain, Told
from xspec.models.base import Hidden
from xspec.verify.sampler import Drawn, Mode, SampleNeeds, draw, needs_of
from xspec.verify.state import SamplingState

CPU = torch.device("cpu")
VOCAB, BLOCK, PAGES, PROMPT = 83, 4, 8, 5
EXAMPLES = settings(max_examples=60, deadline=None)
FORMS = pytest.mark.parametrize("form", ["native", "bf16", "fp64"])

KINDS = (
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6, logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=20, min_p=0.01, logprobs=0),
    SamplingParams(temperature=1.0, logit_bias={5: 3.0}),
    SamplingParams(temperature=0.0, logit_bias={9: 2.0}, min_tokens=3),
    SamplingParams(temperature=0.9, min_tokens=4, top_p=0.95),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.5, logprobs=1),
    SamplingParams(temperature=0.0, presence_penalty=1.5),
    SamplingParams(temperature=0.0),
)


@dataclass(frozen=True)
class Pass:
    """A verify pass over some lanes whose drafts are right about two times of three."""

    rows: DeviceRows
    state: SamplingState
    params: list[SamplingParams]  # of each live lane
    passed: VerifyPass
    drafts: torch.Tensor
    lives: int
    counts: list[int]  # flat rows of each live lane

    def needs(self, counts: list[int]) -> SampleNeeds:
        return needs_of(
            [params for params, count in zip(self.params, counts, strict=True) for _ in range(count)]
        )

    @property
    def width(self) -> int:
        return self.drafts.shape[1]

    def prefix(self, drawing: DrawRows) -> torch.Tensor:
        return Runner._prefix(self.drafts[: self.lives], drawing.lanes, drawing.offsets)

    def draw(self, drawing: DrawRows, chain: Chain | None) -> Drawn:
        counts = self.counts if drawing.live is None else [self.width + 1] * self.lives
        args = (drawing.logits, drawing.owners, drawing.positions, self.state, self.needs(counts))
        return draw(*args, self.prefix(drawing), chain)


def pass_of(seed: int, form: str, library: NativeLibrary) -> Pass:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if form == "fp64" else torch.bfloat16
    native = library if form == "native" else None

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    lives, width = pick(1, 5), pick(1, 5)
    lanes = lives + pick(0, 2)
    rows = DeviceRows(lives, PAGES, BLOCK, CPU, sink_page=99)
    fused = None
    if native is not None:
        rows.fused = NativeRows(native, table_of(rows))
        fused = NativeDraws(Team(native, 2))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    state = SamplingState(lives + 1, VOCAB, CPU, dtype=exact, fused=fused)
    kinds = [KINDS[pick(0, len(KINDS) - 1)] for _ in range(lives)]
    for row, kind in enumerate(kinds, start=1):
        ids = tuple(pick(0, VOCAB - 1) for _ in range(PROMPT + pick(0, 3)))
        bound = RowBind(row, row, kind, pick(0, 99), 0, PROMPT, ids, (1, 2, 3), PROMPT + pick(4, 12))
        rows.bind(bound)
        state.bind(row, bound)
        rows.grant(PageGrant(row, 0, tuple(range(row * PAGES, (row + 1) * PAGES))))
        rows.last_token[row] = ids[-1]
    counts = [pick(1, width + 1) for _ in range(lives)]
    given_counts = torch.tensor([*counts, *([0] * (lanes - lives))])
    total = sum(counts) + pick(0, 3)
    row_ids = torch.tensor([*range(1, lives + 1), *([0] * (lanes - lives))])
    drafts = torch.randint(0, VOCAB, (lanes, width), generator=generator)
    logits = (torch.randn(total, VOCAB, generator=generator) * 2.5).to(dtype)
    if pick(0, 3) == 0:
        logits[pick(0, total - 1), 3] = torch.nan
    hidden = Hidden(torch.zeros(0), torch.zeros(0))
    call = verify_rows(rows, row_ids, drafts, given_counts, total)
    made = Pass(rows, state, kinds, VerifyPass(call(False, PAGES, ()), hidden, logits), drafts, lives, counts)
    for step in range(width):  # right ones are what the target draws after those before
        drawing = made.passed.flat(sum(counts))
        tokens = drawing.rectangle(made.draw(drawing, None).tokens, lives, width, 0)
        right = torch.rand(lives, generator=generator) < 0.67
        drafts[:lives, step] = torch.where(right, tokens[:, step], drafts[:lives, step])
    passed = VerifyPass(call(False, PAGES, ()), hidden, logits)
    return Pass(rows, state, kinds, passed, drafts, lives, counts)


def reachable(made: Pass, tokens: torch.Tensor) -> list[bool]:
    """By flat row, from the tokens of a full draw."""
    found: list[bool] = []
    for lane, count in enumerate(made.counts):
        own = tokens[len(found) : len(found) + count].tolist()
        right = [int(draft) == token for draft, token in zip(made.drafts[lane], own, strict=False)]
        found += [all(right[:at]) for at in range(count)]
    return found


@EXAMPLES
@given(seed=st.integers(0, 2**31))
@FORMS
def test_what_is_drawn_is_what_a_full_draw_draws(library: NativeLibrary, form: str, seed: int) -> None:
    """Every row that its drafts lead to, and no other one that is drawn with noise."""
    made = pass_of(seed, form, library)
    drawing, needs = made.passed.flat(sum(made.counts)), made.needs(made.counts)
    full, lazy = (made.draw(drawing, chain) for chain in (None, drawing.chain()))
    reached = reachable(made, full.tokens)
    at = torch.tensor(reached)
    assert torch.equal(lazy.tokens[at], full.tokens[at]) and torch.equal(lazy.bad[at], full.bad[at])
    assert not lazy.bad[lazy.tokens == NO_TOKEN].any()
    noisy = [row for group in needs.groups if group.kind.mode is not Mode.GREEDY for row in group.flat]
    assert (lazy.tokens[noisy] != NO_TOKEN).sum() == sum(reached[row] for row in noisy)
    wanted = [(index, row) for index, row in enumerate(needs.logprob_rows) if reached[row]]
    if full.logprobs is None or lazy.logprobs is None:
        assert full.logprobs is lazy.logprobs and not wanted
        return
    assert lazy.logprobs.rows == tuple(row for _, row in wanted)
    whole = full.logprobs.unpack(full.tokens[list(full.logprobs.rows)].tolist())
    part = lazy.logprobs.unpack(lazy.tokens[list(lazy.logprobs.rows)].tolist())
    assert str(part) == str([whole[index] for index, _ in wanted])  # as text: NaN equals itself


def settled(made: Pass, drawing: DrawRows, drawn: Drawn) -> list[list[object]]:
    """What a pass commits, tells, and leaves of the rows, which are put back."""
    rows, width = made.rows, made.width
    before = [rows.last_token.clone(), rows.length.clone()]
    told = Told(torch.full((8, width + 1), 7), torch.full((8,), 7), torch.zeros(8, dtype=torch.bool))
    result = settle(rows, made.passed.rows, made.lives, drawing, drawn, made.drafts, width, told)
    found = [result.tokens, result.counts, told.tokens, told.counts, told.bad, rows.last_token, rows.length]
    values = [tensor.tolist() for tensor in found]
    rows.last_token.copy_(before[0])
    rows.length.copy_(before[1])
    return values


@EXAMPLES
@given(seed=st.integers(0, 2**31))
@FORMS
def test_what_is_committed_does_not_differ(library: NativeLibrary, form: str, seed: int) -> None:
    """Nor where row counts are decided on the device, and every lane shows its full width of rows."""
    made = pass_of(seed, form, library)
    flat, dense = made.passed.flat(sum(made.counts)), made.passed.dense(made.lives, made.width)
    assert flat.live is None and dense.live is not None
    expected = settled(made, flat, made.draw(flat, None))
    for drawing, chain in ((flat, flat.chain()), (dense, None), (dense, dense.chain())):
        assert settled(made, drawing, made.draw(drawing, chain)) == expected
