"""Draws in native code: noise against its fp64 definition, tokens proved by their margin, bits exact.

A token must not depend on the instruction set, the threads, the rows beside it, or the way it is drawn.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from xspec.core.request import SamplingParams
from xspec.core.round import RowBind
from xspec.draft.heads import selected_probability
from xspec.exec.pick import Picker
from xspec.kernels.native import NativeLibrary, Team
from xspec.kernels.native_draws import NativeDraws
from xspec.verify.filters import first_argmax
from xspec.verify.noise import GumbelNoise, row_keys
from xspec.verify.sampler import draw, needs_of
from xspec.verify.state import SamplingState

CPU = torch.device("cpu")
WIDTHS = (1, 7, 8, 15, 16, 17, 4095, 4096, 4097, 16384, 50257)
NOISE_ERROR = 4e-6
"""Of the native noise below 23, its last bits and those of u near 1 left out: five roundings of fp32."""


@pytest.fixture(scope="module")
def draws(team: Team) -> NativeDraws:
    return NativeDraws(team)


def keys_of(count: int) -> torch.Tensor:
    return torch.tensor([row_keys(seed, seed % 3) for seed in range(count)], dtype=torch.int32)


def logits_of(rows: int, width: int, scale: float = 4.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def tempered(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    wide = logits.float()
    return (wide - wide.amax(1, keepdim=True)) / temperatures[:, None]


def test_noise_is_its_definition(draws: NativeDraws) -> None:
    keys, positions, vocab = keys_of(8), torch.tensor([0, 1, 77, 4096, 131071, 2**31 - 1, 9, 10]), 20000
    exact = GumbelNoise(vocab, CPU).gumbel(keys, positions, dtype=torch.float64)
    found = draws.gumbel(keys, positions, None, vocab, None)
    assert found.isfinite().all()
    usual = exact > -1.0  # below, u is so near 1 that fp32 holds few of its bits, here as in torch
    assert (found.double() - exact).abs()[usual].max() < NOISE_ERROR
    torch_noise = GumbelNoise(vocab, CPU).gumbel(keys, positions)
    assert (found - torch_noise).abs().max() < 1e-5 + 0.05 * (~usual).any()


def test_noise_is_the_same_for_whomever(draws: NativeDraws, library: NativeLibrary) -> None:
    """Whole rows, some ids, one row alone, one thread, plain loops, memory given: the same bits."""
    keys, positions, vocab = keys_of(5), torch.arange(5) * 1009, 9001
    whole = draws.gumbel(keys, positions, None, vocab, None)
    ids = torch.randint(0, vocab, (5, 61), generator=torch.Generator().manual_seed(3))
    assert torch.equal(draws.gumbel(keys, positions, ids, vocab, None), whole.gather(1, ids))
    assert torch.equal(draws.gumbel(keys[3:4], positions[3:4], None, vocab, None)[0], whole[3])
    plain = NativeDraws(Team(library, 1, "portable")).gumbel(keys, positions, None, vocab, None)
    assert torch.equal(plain, whole)
    out = torch.empty_like(whole)
    assert draws.gumbel(keys, positions, None, vocab, out) is out and torch.equal(out, whole)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_draw_is_the_argmax_of_tempered_logits_and_noise(draws: NativeDraws, width: int) -> None:
    """To the bit with the native noise, which shows that columns left out unseen could not have won; and
    with exact noise the token drawn is within rounding of the best."""
    heats = torch.tensor([1e-30, 0.01, 0.3, 0.7, 1.0, 1.0, 2.0, 50.0])
    rows = torch.tensor([3, 1, 7, 0, 2, 4, 5, 6])
    keys, positions = keys_of(8), torch.arange(8) * 7919
    exact = GumbelNoise(width, CPU).gumbel(keys[rows], positions, dtype=torch.float64)
    noise = draws.gumbel(keys[rows], positions, None, width, None)
    for scale, seed in itertools.product((0.0, 0.5, 8.0), range(2)):
        logits = logits_of(8, width, scale, seed)
        columns, bad = draws.draw(logits, heats, keys, rows, positions)
        x = tempered(logits, heats[rows])
        assert torch.equal(columns, first_argmax(x + noise)[0]) and not bad.any()
        score = x.double() + exact
        short = score.amax(1) - score.gather(1, columns[:, None])[:, 0]
        assert (short <= 2 * NOISE_ERROR + 1e-6 * x.gather(1, columns[:, None])[:, 0].abs()).all()


def test_columns_may_stand_for_any_ids(draws: NativeDraws) -> None:
    ids = torch.randperm(5000, generator=torch.Generator().manual_seed(1))[:777].sort().values
    keys, rows, positions = keys_of(4), torch.tensor([2, 2, 0, 3]), torch.tensor([5, 6, 5, 5])
    logits, heats = logits_of(4, 777, 1.0), torch.ones(4)
    noise = draws.gumbel(keys[rows], positions, ids.expand(4, -1), 5000, None)
    columns, _ = draws.draw(logits, heats, keys, rows, positions, ids)
    assert torch.equal(columns, first_argmax(tempered(logits, heats) + noise)[0])


def test_rows_do_not_know_each_other(draws: NativeDraws, library: NativeLibrary) -> None:
    """Greedy and sampled rows together, alone, and by one thread."""
    heats = torch.tensor([0.0, 1.0, 0.5, 0.0, 1.5, 1.0, 0.0, 0.9])
    keys, rows, positions, logits = keys_of(8), torch.arange(8), torch.arange(8) * 31, logits_of(8, 30011)
    together, _ = draws.draw(logits, heats, keys, rows, positions)
    greedy = heats == 0.0
    assert torch.equal(together[greedy], logits[greedy].argmax(1))
    assert torch.equal(draws.argmax(logits)[0], first_argmax(logits)[0])
    alone = [
        draws.draw(logits[at], heats, keys, rows[at], positions[at])[0]
        for at in (slice(n, n + 1) for n in range(8))
    ]
    assert torch.equal(torch.cat(alone), together)
    one = NativeDraws(Team(library, 1, draws._team.isa)).draw(logits, heats, keys, rows, positions)[0]
    assert torch.equal(one, together)
    wide = torch.zeros(8, 30100, dtype=torch.bfloat16)
    wide[:, :30011] = logits
    assert torch.equal(draws.draw(wide[:, :30011], heats, keys, rows, positions)[0], together)


def test_bad_rows_yield_a_valid_column(draws: NativeDraws) -> None:
    logits = logits_of(6, 100)
    logits[0, 7], logits[1, 50], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, ::2] = float("-inf")
    logits[4] = float("-inf")
    logits[4, 99] = 1.0
    args = (torch.ones(6), keys_of(6), torch.arange(6), torch.arange(6))
    columns, bad = draws.draw(logits, *args)
    assert bad.tolist() == [True, True, True, False, False, False]
    assert columns[:2].tolist() == [7, 50] and 0 <= columns[2] < 100
    assert columns[3] % 2 == 1 and columns[4] == 99
    assert draws.argmax(logits)[1].tolist() == bad.tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_selected_probability(draws: NativeDraws, width: int) -> None:
    logits = logits_of(5, width)
    columns = torch.randint(0, width, (5,), generator=torch.Generator().manual_seed(2))
    columns[0] = logits[0].argmax()
    exact = torch.softmax(logits.double(), 1).gather(1, columns[:, None])[:, 0]
    found = draws.selected_probability(logits, columns)
    # A sum of many numbers in fp32, one after another in the plain loops.
    assert ((found / exact).log().abs() < 2e-4).all()
    assert torch.allclose(found, selected_probability(logits, columns), rtol=2e-4)
    assert torch.equal(draws.selected_probability(logits[1:2], columns[1:2]), found[1:2])


def test_what_does_not_fit_is_refused(draws: NativeDraws) -> None:
    logits, keys, rows = logits_of(2, 30), keys_of(2), torch.arange(2)
    with pytest.raises(ValueError, match="bfloat16"):
        draws.argmax(logits.float())
    with pytest.raises(ValueError, match="do not name the columns"):
        draws.draw(logits, torch.ones(2), keys, rows, rows, torch.arange(29))
    with pytest.raises(ValueError, match="contiguous"):
        draws.draw(logits, torch.ones(2), keys, torch.arange(4)[::2], rows)
    with pytest.raises(ValueError, match="out"):
        draws.gumbel(keys, rows, None, 30, torch.empty(2, 29))


# -- through the sampler and the picker ------------------------------------------------------------------

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=20),
    SamplingParams(temperature=1.0, logit_bias={5: 3.0}),
    SamplingParams(temperature=0.0, logit_bias={9: 50.0}),
)


def state_of(kinds: tuple[SamplingParams, ...], vocab: int, fused: NativeDraws | None) -> SamplingState:
    state = SamplingState(len(kinds) + 1, vocab, CPU, fused=fused)
    for row, params in enumerate(kinds, start=1):
        state.bind(row, RowBind(row, row, params, row * 77, 0, 3, (1, 2, 3), (), max_len=100))
    return state


@pytest.mark.parametrize("kinds", [KINDS, KINDS[:2], KINDS[:1] * 3, KINDS[1:2] * 3, KINDS[1:3]])
def test_the_sampler_draws_the_same_tokens(draws: NativeDraws, kinds: tuple[SamplingParams, ...]) -> None:
    """Of 300 positions: the noise of both differs in its last bits, which decides none of these."""
    vocab = 2003
    native, torch_state = state_of(kinds, vocab, draws), state_of(kinds, vocab, None)
    rows, needs = torch.arange(1, len(kinds) + 1), needs_of(kinds)
    for at in range(300 // len(kinds)):
        logits, positions = logits_of(len(kinds), vocab, 3.0, at), torch.full((len(kinds),), at + 3)
        a, b = (draw(logits, rows, positions, state, needs) for state in (native, torch_state))
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.bad, b.bad)


def test_a_temperature_that_counts_as_none_is_none_among_others(draws: NativeDraws) -> None:
    """Of equal logits the least noise would choose, and only where a neighbour is drawn with noise."""
    kinds = (SamplingParams(temperature=5e-6), SamplingParams(temperature=1.0))
    assert kinds[0].greedy
    state, logits = state_of(kinds, 2003, draws), torch.zeros(2, 2003, dtype=torch.bfloat16)
    for at in range(5):
        rows, positions = torch.tensor([1, 2]), torch.full((2,), at)
        assert draw(logits, rows, positions, state, needs_of(kinds)).tokens[0] == 0
        assert Picker(state, probabilistic=True)(logits, rows, positions, None)[0] == 0


def test_no_rows_at_all(draws: NativeDraws) -> None:
    none, keys = torch.zeros(0, dtype=torch.int64), keys_of(1)
    logits = logits_of(1, 30)[:0]
    assert draws.argmax(logits)[0].shape == (0,)
    assert draws.draw(logits, torch.ones(1), keys, none, none)[0].shape == (0,)
    assert draws.selected_probability(logits, none).shape == (0,)
    assert draws.gumbel(keys[:0], none, None, 30, None).shape == (0, 30)


@pytest.mark.parametrize("probabilistic", [False, True])
def test_the_picker_picks_the_same_columns(draws: NativeDraws, probabilistic: bool) -> None:
    kinds = (KINDS[0], KINDS[1], SamplingParams(temperature=0.4))
    pickers = [Picker(state_of(kinds, 2003, fused), probabilistic=probabilistic) for fused in (draws, None)]
    rows, ids = torch.tensor([3, 1, 2]), torch.arange(0, 2003, 3)
    for at in range(60):
        positions = torch.full((3,), at)
        for columns in (None, ids):
            logits = logits_of(3, 2003 if columns is None else len(ids), 2.0, at)
            a, b = (picker(logits, rows, positions, columns) for picker in pickers)
            assert torch.equal(a, b)
            p, q = (picker.probability(logits, a) for picker in pickers)
            assert torch.allclose(p, q, rtol=2e-4)


def test_drafts_drawn_with_the_targets_noise_are_its_tokens(draws: NativeDraws) -> None:
    """The same logits, over the whole vocabulary or a part of it that holds the token: the same token."""
    kinds = (SamplingParams(temperature=0.8),)
    state = state_of(kinds, 2003, draws)
    picker, needs, row = Picker(state, probabilistic=True), needs_of(kinds), torch.tensor([1])
    for at in range(40):
        logits, positions = logits_of(1, 2003, 2.0, at), torch.tensor([at])
        token = draw(logits, row, positions, state, needs).tokens
        assert torch.equal(picker(logits, row, positions, None), token)
        ids = torch.cat((torch.arange(0, 2003, 5), token)).unique()
        if logits.argmax() in ids:
            assert torch.equal(ids[picker(logits[:, ids], row, positions, ids)], token)
