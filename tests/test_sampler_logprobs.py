"""Log-probabilities: values, ranking with ties, ragged k, prompt scoring."""

from __future__ import annotations

import math

import pytest
import torch

from xspec.core.request import SamplingParams, TokenLogprob
from xspec.core.round import RowBind
from xspec.verify.logprobs import measure, ranked, score
from xspec.verify.sampler import draw, needs_of
from xspec.verify.state import SamplingState

CPU = torch.device("cpu")


@pytest.mark.parametrize("windows", [(), (8,), (64, 1024)])
@pytest.mark.parametrize("vocab", [5, 100, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_ranking_breaks_ties_by_lowest_id(vocab: int, ties: bool, windows: tuple[int, ...]) -> None:
    x = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    x = x.round() if ties else x
    count = min(20, vocab)
    values, ids = ranked(x, count, windows=windows)
    for row in range(6):
        want = sorted(range(vocab), key=lambda i: (-x[row, i].item(), i))[:count]
        assert ids[row].tolist() == want
        assert values[row].tolist() == [x[row, i].item() for i in want]


def test_ties_that_overflow_the_window() -> None:
    x = torch.zeros(2, 500)
    x[1, 400] = 1.0
    ids = ranked(x, 20, windows=(64,))[1]
    assert ids.tolist() == [list(range(20)), [400, *range(19)]]


def test_worked_example_with_ragged_k() -> None:
    logits = torch.tensor([[8.0, 4.0, 2.0, 2.0]], dtype=torch.float64).log().expand(3, 4)
    result = measure(logits, torch.tensor([3, 0, 2]), (1, 4, 6), (0, 1, 3))
    tokens = result.unpack([3, 0, 2])
    assert [t.token_id for t in tokens] == [3, 0, 2] and result.rows == (1, 4, 6)
    assert [[i for i, _ in t.top] for t in tokens] == [[], [0], [0, 1, 2]]
    half, quarter, eighth = (math.log(2.0**-n) for n in (1, 2, 3))
    assert [t.logprob for t in tokens] == pytest.approx([eighth, half, eighth])
    assert [lp for _, lp in tokens[2].top] == pytest.approx([half, quarter, eighth])


def test_a_top_wider_than_the_vocabulary_is_cut() -> None:
    (token,) = measure(torch.zeros(1, 3), torch.tensor([1]), (0,), (20,)).unpack([1])
    assert [i for i, _ in token.top] == [0, 1, 2] and token.logprob == pytest.approx(-math.log(3))


def test_draw_reports_the_raw_distribution() -> None:
    """Bias, temperature and penalties move the choice, never the reported numbers."""
    logits = torch.tensor([[3.0, 2.0, 1.0], [0.0, 0.0, 9.0], [3.0, 2.0, 1.0]])
    params = [
        SamplingParams(temperature=0.0, logit_bias={2: 50.0}, logprobs=1),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=5.0, top_k=1, frequency_penalty=2.0, logprobs=0),
    ]
    state = SamplingState(4, 3, CPU)
    for row, p in enumerate(params, 1):
        state.bind(row, RowBind(row, row, p, 7, 0, 1, (0, 0, 0), (), max_len=1000))
    drawn = draw(logits, torch.tensor([1, 2, 3]), torch.tensor([3, 3, 3]), state, needs_of(params))
    assert drawn.tokens.tolist() == [2, 2, 1]  # the last: 3 - 2 * 2 against 2
    assert drawn.logprobs is not None and drawn.logprobs.rows == (0, 2)
    raw = torch.log_softmax(logits.double(), 1)
    biased, penalised = drawn.logprobs.unpack([2, 1])
    assert biased.logprob == pytest.approx(raw[0, 2].item(), abs=1e-6)
    assert [i for i, _ in biased.top] == [0] and biased.top[0][1] == pytest.approx(raw[0, 0].item(), abs=1e-6)
    assert penalised == TokenLogprob(1, pytest.approx(raw[2, 1].item(), abs=1e-6), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("top", [0, 1, 20])
def test_prompt_scores(dtype: torch.dtype, top: int) -> None:
    logits = (torch.randn(7, 4099, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    targets = torch.randint(0, 4099, (7,), generator=torch.Generator().manual_seed(6))
    result = score(logits, targets, top)
    want = torch.log_softmax(logits.double(), 1)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for row, token in enumerate(result.unpack(targets.tolist())):
        assert token.token_id == targets[row]
        assert token.logprob == pytest.approx(want[row, targets[row]].item(), rel=tolerance, abs=tolerance)
        assert len(token.top) == top
        for i, lp in token.top:
            assert lp == pytest.approx(want[row, i].item(), rel=tolerance, abs=tolerance)
        assert [lp for _, lp in token.top] == sorted((lp for _, lp in token.top), reverse=True)


def test_masked_ids_have_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0]])
    (token,) = score(logits, torch.tensor([1]), 3).unpack([1])
    assert token.logprob == -math.inf
    assert token.top == ((0, pytest.approx(-math.log(2))), (2, pytest.approx(-math.log(2))), (1, -math.inf))
