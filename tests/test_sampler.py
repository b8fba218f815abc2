"""The draw against a slow numpy oracle, alone against in a batch, and against exact distributions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from xspec.core.request import SamplingParams
from xspec.core.round import RowBind
from xspec.errors import RequestError
from xspec.verify.sampler import Drawn, draw, needs_of
from xspec.verify.state import SamplingState, Tuning

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
KNIFE_EDGE = 1e-9
Batch = tuple[int, list[tuple[Any, ...]], np.ndarray]  # vocab, (params, prompt, answer, ...) rows, logits


def bind_row(
    state: SamplingState,
    row: int,
    params: SamplingParams,
    prompt: list[int],
    answer: list[int] = [],  # noqa: B006 - never mutated
    *,
    seed: int = 0,
    choice: int = 0,
    stops: tuple[int, ...] = (),
) -> None:
    state.bind(
        row,
        RowBind(row, 100 + row, params, seed, choice, len(prompt), (*prompt, *answer), stops, max_len=1000),
    )


def draw_rows(
    state: SamplingState,
    logits: torch.Tensor,
    rows: list[int],
    positions: list[int],
    params: list[SamplingParams | None],
    prefix: torch.Tensor | None = None,
) -> Drawn:
    return draw(logits, torch.tensor(rows), torch.tensor(positions), state, needs_of(params), prefix)


class KnifeEdge(Exception):
    """Rounding alone could decide this case, so the oracle has no opinion."""


def sure(clear: bool) -> None:
    if not clear:
        raise KnifeEdge


# -- oracle ------------------------------------------------------------------------------------------


def oracle_logits(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int], stops: tuple[int, ...]
) -> np.ndarray:
    x = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if len(answer) < params.min_tokens:
        for token in stops:
            x[token] = -math.inf
    for token in set(prompt) | set(answer):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(answer):
        x[token] -= answer.count(token) * params.frequency_penalty
        x[token] -= params.presence_penalty
    return x


def oracle_survivors(tempered: np.ndarray, params: SamplingParams) -> list[int]:
    """Ids that min-p, top-k and top-p leave, one rule after the other, ties kept."""
    alive = [i for i in range(len(tempered)) if tempered[i] > -math.inf]
    weight = {i: math.exp(tempered[i] - max(tempered)) for i in alive}
    for w in weight.values():
        sure(w == params.min_p or abs(w - params.min_p) > KNIFE_EDGE)
    alive = [i for i in alive if weight[i] >= params.min_p]
    if params.top_k > 0:
        ranked = sorted((tempered[i] for i in alive), reverse=True)
        alive = [i for i in alive if tempered[i] >= ranked[min(params.top_k, len(ranked)) - 1]]
    if params.top_p < 1.0:
        total = math.fsum(weight[i] for i in alive)
        edge = -math.inf
        before = 0.0
        for i in sorted(alive, key=lambda i: -tempered[i]):
            sure(before == 0.0 or abs(before - params.top_p * total) > KNIFE_EDGE)
            if before == 0.0 or before < params.top_p * total:
                edge = tempered[i]
            before += weight[i]
        alive = [i for i in alive if tempered[i] >= edge]
    return alive


def oracle_token(x: np.ndarray, params: SamplingParams, noise: np.ndarray) -> int:
    if params.greedy:
        return int(np.argmax(x))
    tempered = x / params.temperature
    ranked = sorted(((tempered[i] + noise[i], -i) for i in oracle_survivors(tempered, params)), reverse=True)
    sure(len(ranked) < 2 or ranked[0][0] - ranked[1][0] > KNIFE_EDGE * max(1.0, abs(ranked[0][0])))
    return -ranked[0][1]


@st.composite
def any_params(draw_: Any, vocab: int) -> SamplingParams:
    def either(neutral: Any, other: st.SearchStrategy[Any]) -> Any:
        return draw_(st.one_of(st.just(neutral), other))

    penalty = st.sampled_from([-2.0, -0.5, 0.3, 1.7])
    bias = st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([-100.0, -3.5, 2.0, 100.0]), max_size=5)
    return SamplingParams(
        temperature=either(1.0, st.sampled_from([0.0, 1e-6, 1e-5, 1e-3, 0.2, 0.7, 1.5, 5.0])),
        top_k=either(0, st.integers(1, vocab + 3)),
        top_p=either(1.0, st.sampled_from([0.0, 1e-12, 0.1, 0.5, 0.9, 0.999, 0.9999999])),
        min_p=either(0.0, st.sampled_from([1e-300, 1e-6, 0.03, 0.2, 1.0])),
        presence_penalty=either(0.0, penalty),
        frequency_penalty=either(0.0, penalty),
        repetition_penalty=either(1.0, st.sampled_from([0.5, 1.3, 2.0])),
        logit_bias=either({}, bias),
        min_tokens=either(0, st.integers(1, 6)),
    )


@st.composite
def any_batch(draw_: Any) -> Batch:
    vocab = draw_(st.sampled_from([1, 2, 7, 40, 300]))
    token = st.integers(0, vocab - 1)
    row = st.tuples(
        any_params(vocab),
        st.lists(token, min_size=1, max_size=6),  # prompt
        st.lists(token, max_size=6),  # answer
        st.lists(token, max_size=min(3, vocab - 1), unique=True).map(tuple),  # stop ids
        st.integers(-(2**70), 2**70),  # seed
        st.integers(0, 3),  # choice
    )
    rows = draw_(st.lists(row, min_size=1, max_size=5))
    rng = np.random.default_rng(draw_(st.integers(0, 2**32)))
    logits = rng.normal(size=(len(rows), vocab)) * draw_(st.sampled_from([0.1, 1.0, 8.0]))
    if draw_(st.booleans()):
        logits = np.round(logits)  # ties everywhere
    return vocab, rows, logits


@settings(max_examples=150, deadline=None)
@given(any_batch(), st.sampled_from([(), (3,), (16, 64)]))
def test_equals_the_oracle(batch: Batch, windows: tuple[int, ...]) -> None:
    vocab, rows, logits = batch
    tuning = Tuning(windows=windows, chunk_elements=2 * vocab)
    state = SamplingState(len(rows) + 1, vocab, CPU, dtype=torch.float64, tuning=tuning)
    want = []
    for n, (params, prompt, answer, stops, seed, choice) in enumerate(rows):
        bind_row(state, n + 1, params, prompt, answer, seed=seed, choice=choice, stops=stops)
        position = torch.tensor([len(prompt) + len(answer)])
        noise = state.gumbel(torch.tensor([n + 1]), position, dtype=torch.float64)[0].numpy()
        x = oracle_logits(logits[n], params, prompt, answer, stops)
        try:
            want.append(oracle_token(x, params, noise))
        except KnifeEdge:
            reject()
    positions = [len(r[1]) + len(r[2]) for r in rows]
    flat, given_logits = list(range(1, len(rows) + 1)), torch.from_numpy(logits)
    before = given_logits.clone()
    drawn = draw_rows(state, given_logits, flat, positions, [r[0] for r in rows])
    assert drawn.tokens.tolist() == want
    assert not drawn.bad.any() and torch.equal(given_logits, before)


# -- state -------------------------------------------------------------------------------------------

PENALISED = SamplingParams(
    temperature=0.0, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2
)


def adjusted(state: SamplingState, row: int, prefix: list[int] | None = None) -> torch.Tensor:
    x = torch.linspace(-2, 2, state.vocab_size, dtype=torch.float64).unsqueeze(0)
    state.penalise(x, torch.tensor([row]), None if prefix is None else torch.tensor([prefix]))
    return x[0]


def test_advance_rebinding_and_prefix_agree() -> None:
    """Tokens count the same whether they were advanced, came with a rebind, or are a drafted prefix."""
    prompt, answer = [1, 2, 2], [3, 3, 9, 1]
    state = SamplingState(6, 12, CPU, dtype=torch.float64)
    bind_row(state, 1, PENALISED, prompt)
    state.advance(torch.tensor([1, 0]), torch.tensor([[3, 3, 9], [5, -1, -1]]), torch.tensor([3, 0]))
    state.advance(torch.tensor([0, 1]), torch.tensor([[7, 7, 7], [1, 8, 8]]), torch.tensor([0, 1]))
    bind_row(state, 2, PENALISED, prompt, answer)
    bind_row(state, 3, PENALISED, prompt, answer[:2])
    bind_row(state, 4, PENALISED, prompt)
    want = oracle_logits(np.linspace(-2, 2, 12), PENALISED, prompt, answer, ())
    drafted = adjusted(state, 3, [9, 1, -1]), adjusted(state, 4, answer)
    for got in (adjusted(state, 1), adjusted(state, 2), *drafted):
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=1e-12)
    assert torch.equal(adjusted(state, 1), adjusted(state, 2))
    bind_row(state, 1, PENALISED, [4])  # the row's next tenant inherits nothing
    np.testing.assert_allclose(
        adjusted(state, 1).numpy(), oracle_logits(np.linspace(-2, 2, 12), PENALISED, [4], [], ()), atol=1e-12
    )


def test_padding_row_is_neutral() -> None:
    state = SamplingState(3, 5, CPU, dtype=torch.float64)
    bind_row(state, 1, PENALISED, [0])
    state.advance(torch.tensor([0, 0]), torch.tensor([[1], [-1]]), torch.tensor([1, 0]))
    assert torch.equal(adjusted(state, 0), torch.linspace(-2, 2, 5, dtype=torch.float64))


def test_counts_are_allocated_only_for_penalised_rows() -> None:
    state = SamplingState(3, 5, CPU)
    bind_row(state, 1, GREEDY, [0])
    state.advance(torch.tensor([1]), torch.tensor([[2]]), torch.tensor([1]))
    assert state._counts is None
    with pytest.raises(ValueError, match="before any was bound"):
        draw_rows(state, torch.zeros(1, 5), [1], [1], [PENALISED])


def test_prefix_in_a_draw() -> None:
    """Verification rows of one request: each sees the counts of the drafts before it."""
    state = SamplingState(2, 4, CPU, dtype=torch.float64)
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    bind_row(state, 1, params, [0])
    logits = torch.tensor([[0.0, 2.5, 2.0, 1.0]], dtype=torch.float64).expand(4, 4)
    prefix = torch.tensor([[-1, -1, -1], [1, -1, -1], [1, 2, -1], [1, 2, 1]])
    drawn = draw_rows(state, logits, [1] * 4, [1, 2, 3, 4], [params] * 4, prefix)
    assert drawn.tokens.tolist() == [1, 2, 1, 2]  # 2.5 | 1.5 2 | 1.5 1 1 | .5 1 1: ties go to the lowest id


def test_min_tokens_follow_the_position() -> None:
    state = SamplingState(2, 4, CPU)
    params = SamplingParams(temperature=0.0, min_tokens=2)
    bind_row(state, 1, params, [0, 0, 0], stops=(3, 1, 999))
    logits = torch.tensor([[0.0, 2.0, 1.0, 3.0]]).expand(4, 4)
    drawn = draw_rows(state, logits, [1] * 4, [3, 4, 5, 6], [params] * 4)
    assert drawn.tokens.tolist() == [2, 2, 3, 3]


def test_rebinding_forgets_bias_and_stops() -> None:
    state = SamplingState(2, 4, CPU)
    heavy = SamplingParams(temperature=0.0, logit_bias={0: 50.0, 1: 40.0, 2: 30.0}, min_tokens=5)
    light = replace(heavy, logit_bias={3: 1.0}, min_tokens=5)
    logits = torch.tensor([[0.0, 1.0, 2.0, 2.5]])
    bind_row(state, 1, heavy, [0], stops=(0,))
    assert draw_rows(state, logits, [1], [1], [heavy]).tokens.tolist() == [1]
    bind_row(state, 1, light, [0], stops=(3,))
    assert draw_rows(state, logits, [1], [1], [light]).tokens.tolist() == [2]
    bind_row(state, 1, replace(light, logit_bias={}), [0])
    assert draw_rows(state, logits, [1], [1], [light]).tokens.tolist() == [3]


def test_refusals() -> None:
    state = SamplingState(2, 4, CPU)
    with pytest.raises(RequestError, match="token 4.*0 to 3") as refused:
        bind_row(state, 1, SamplingParams(logit_bias={4: 1.0}), [0])
    assert refused.value.param == "logit_bias"
    for row in (0, 2, -1):
        with pytest.raises(ValueError, match="not a sampling row"):
            bind_row(state, row, GREEDY, [0])
    with pytest.raises(ValueError, match="do not fit"):
        draw_rows(state, torch.zeros(2, 4), [1], [1], [GREEDY])


# -- one rule, whatever the batch ----------------------------------------------------------------------

MIXED = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(top_k=40),
    SamplingParams(top_k=3000, top_p=0.8),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.05, temperature=1.3),
    SamplingParams(temperature=0.2, top_p=0.9, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(top_k=5, logit_bias={7: 5.0}),
    SamplingParams(temperature=1e-5, min_tokens=50),
    SamplingParams(top_p=0.5, min_p=1e-4, top_k=100),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [503, 49152, 50257])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_alone_equals_batch_bit_for_bit(dtype: torch.dtype, vocab: int, threads: int) -> None:
    params: list[SamplingParams | None] = [*MIXED, *MIXED[::-1], None, *MIXED[1:4]]
    count = len(params)
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(count, vocab, dtype=torch.float64, generator=generator) * 2.5).to(dtype)
    state = SamplingState(count + 1, vocab, CPU, dtype=dtype if dtype == torch.float64 else torch.float32)
    rows = [0 if p is None else n + 1 for n, p in enumerate(params)]
    positions = [10 + n for n in range(count)]
    asked = [p and replace(p, logprobs=n % 4) for n, p in enumerate(params)]
    for row, p in zip(rows, asked, strict=True):
        if p is not None:
            bind_row(state, row, p, [1, 2, 3], [4, 5, 5], seed=row, stops=(2,))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = draw_rows(state, logits, rows, positions, asked)
        assert together.logprobs is not None
        packed = together.logprobs.unpack(together.tokens[torch.tensor(together.logprobs.rows)].tolist())
        scored = dict(zip(together.logprobs.rows, packed, strict=True))
        for n in range(count):
            one = slice(n, n + 1)
            alone = draw_rows(state, logits[one], rows[one], positions[one], asked[one])
            assert alone.tokens[0] == together.tokens[n], asked[n]
            if asked[n] is not None:
                assert alone.logprobs is not None
                assert alone.logprobs.unpack(alone.tokens.tolist()) == [scored[n]]
    finally:
        torch.set_num_threads(before)
    assert not together.bad.any()


def test_seeds_reproduce_and_choices_differ() -> None:
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).expand(24, 5000)
    params = SamplingParams()

    def text(seed: int, choice: int, row: int) -> list[int]:
        state = SamplingState(8, 5000, CPU)
        bind_row(state, row, params, [0], seed=seed, choice=choice)
        return draw_rows(state, logits, [row] * 24, list(range(1, 25)), [params] * 24).tokens.tolist()

    assert text(5, 0, 1) == text(5, 0, 7)
    texts = [text(seed, choice, 1) for seed in (5, 6, -5, 2**64 + 5) for choice in range(4)]
    assert len({tuple(t) for t in texts}) == 16
    assert all(len(set(t)) > 15 for t in texts)  # positions differ too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("vocab", [5, 1024, 2048, 2049, 49152, 50257])
def test_greedy_is_the_first_argmax(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(17, vocab, generator=generator).to(dtype)
    logits[0] = 0  # all tie
    logits[1] = -5
    logits[1, vocab - 1] = 5  # the very last id
    logits[2, vocab // 2] = logits[2, vocab - 1] = 9
    logits[3, 0] = -math.inf  # a masked id is no failure
    state = SamplingState(2, vocab, CPU)
    drawn = draw_rows(state, logits, [0] * 17, [0] * 17, [None] * 17)
    assert drawn.tokens.tolist() == logits.double().numpy().argmax(1).tolist()
    assert not drawn.bad.any()


# -- hostile numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [30, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bad_rows_are_flagged_and_leave_others_alone(dtype: torch.dtype, vocab: int) -> None:
    nan, inf = math.nan, math.inf
    clean = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits = clean.repeat(6, 1)
    logits[1, vocab - 1], logits[2, 3], logits[3], logits[4] = nan, inf, -inf, nan
    logits[5, 5:] = -inf
    want_bad = [False, True, True, True, True, False]
    for params in MIXED:
        params = replace(params, logit_bias={k: v for k, v in params.logit_bias.items() if k < vocab})
        state = SamplingState(2, vocab, CPU)
        bind_row(state, 1, params, [1, 2], [3], seed=4, stops=(2,))
        drawn = draw_rows(state, logits, [1] * 6, [3] * 6, [params] * 6)
        assert drawn.bad.tolist() == want_bad, params
        assert ((drawn.tokens >= 0) & (drawn.tokens < vocab)).all()
        assert drawn.tokens[0] == draw_rows(state, clean, [1], [3], [params]).tokens[0]
        assert drawn.tokens[5] < 5


def test_masking_everything_is_bad() -> None:
    state = SamplingState(2, 2, CPU)
    params = SamplingParams(min_tokens=3)
    bind_row(state, 1, params, [0], stops=(0, 1))
    drawn = draw_rows(state, torch.zeros(2, 2), [1, 1], [3, 4], [params] * 2)
    assert drawn.bad.tolist() == [True, False]


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0, 1e4])
def test_extreme_temperatures(temperature: float, scale: float) -> None:
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(2)) * scale
    for extra in ({}, {"top_p": 1e-9}, {"top_p": 0.9}, {"min_p": 0.9}, {"top_k": 2}):
        params = SamplingParams(temperature=temperature, **extra)  # type: ignore[arg-type]
        state = SamplingState(2, 3000, CPU)
        bind_row(state, 1, params, [0])
        drawn = draw_rows(state, logits, [1] * 64, list(range(64)), [params] * 64)
        assert not drawn.bad.any()
        if extra.get("top_p") == 1e-9 or scale / temperature >= 1e7:
            assert torch.equal(drawn.tokens, logits.argmax(1))


# -- distributions ---------------------------------------------------------------------------------------

SHAPES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=1.0, top_k=4),
    SamplingParams(temperature=1.5, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=2.0, top_k=6, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=1.0, presence_penalty=1.0, logit_bias={2: 1.0}),
]


@pytest.mark.parametrize("params", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_histogram_is_the_exact_distribution(params: SamplingParams, dtype: torch.dtype) -> None:
    """100,000 positions of one seed: chi-square against the oracle's softmax over its survivors."""
    draws = 100_000
    logits = np.array([1.0, 0.2, -0.5, 2.0, 1.3, -2.0, 0.0, 1.9, -1.0, 0.6])
    prompt, answer = [1, 3], [3, 8, 8]
    x = oracle_logits(logits, params, prompt, answer, ()) / params.temperature
    alive = oracle_survivors(x, params)
    p = np.exp(x[alive] - max(x))
    p /= p.sum()
    state = SamplingState(2, 10, CPU, dtype=dtype)
    bind_row(state, 1, params, prompt, answer, seed=31, choice=2)
    flat = torch.from_numpy(logits).to(dtype).expand(draws, 10)
    drawn = draw_rows(state, flat, [1] * draws, list(range(5, draws + 5)), [params] * draws).tokens.numpy()
    counts = np.bincount(drawn, minlength=10)
    assert counts[[i for i in range(10) if i not in alive]].sum() == 0
    stat = ((counts[alive] - draws * p) ** 2 / (draws * p)).sum()
    df = len(alive) - 1
    assert stat < df + 5 * math.sqrt(2 * df), (stat, df)
    if df:  # consecutive tokens are independent: the pair table against the product
        pairs = np.zeros((10, 10))
        np.add.at(pairs, (drawn[:-1], drawn[1:]), 1)
        want = (draws - 1) * np.outer(p, p)
        stat = ((pairs[np.ix_(alive, alive)] - want) ** 2 / want).sum()
        assert stat < (df + 1) ** 2 + 5 * math.sqrt(2) * (df + 1), stat
