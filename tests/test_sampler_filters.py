"""Filters: windows against the full sort, ties, and the reductions under them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xspec.verify.filters import Candidates, FilterRules, candidates, first_argmax, mass, top_window

RULES = [  # top_k, top_p, min_p
    (0, 0.9, 0.0),
    (0, 0.5, 0.0),
    (0, 0.99999, 0.0),
    (0, 1.0, 0.02),
    (7, 1.0, 0.0),
    (40, 0.8, 0.0),
    (200, 0.95, 0.001),
    (0, 0.9, 0.2),
    (1, 0.1, 1.0),
    (0, 0.0, 0.0),
    (10**6, 0.7, 0.0),
    (64, 1.0, 0.0),
    (10**6, 0.9, 1e-300),  # min_p rounds to 0 in float32
    (0, 0.9, 1e-300),
]


def rules_of(rows: list[tuple[int, float, float]], dtype: torch.dtype = torch.float64) -> FilterRules:
    k, p, m = zip(*rows, strict=True)
    return FilterRules(torch.tensor(k), torch.tensor(p, dtype=dtype), torch.tensor(m, dtype=dtype))


def survivors(parts: list[Candidates], rows: int) -> list[dict[int, float]]:
    """Per row: id -> logit of everything not cut. Every row must appear exactly once."""
    found: dict[int, dict[int, float]] = {}
    for part in parts:
        index = range(rows) if part.index is None else part.index.tolist()
        for at, row in enumerate(index):
            assert row not in found
            values = part.logits[at]
            ids = torch.arange(len(values)) if part.ids is None else part.ids[at]
            kept = values > -math.inf
            found[row] = dict(zip(ids[kept].tolist(), values[kept].tolist(), strict=True))
    return [found[row] for row in range(rows)]


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x - x.amax(1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [4099, 8192])
def test_windows_equal_the_full_sort(vocab: int, ties: bool, scale: float, dtype: torch.dtype) -> None:
    x = torch.randn(len(RULES), vocab, dtype=dtype, generator=torch.Generator().manual_seed(vocab)) * scale
    x = shifted((x * 4).round() / 4 if ties else x)
    rules = rules_of(RULES, dtype)
    full = survivors(candidates(x, rules, windows=()), len(RULES))
    for windows in ((64,), (64, 1024), (5, 17, 300, 2000)):
        assert survivors(candidates(x, rules, windows=windows), len(RULES)) == full
    assert all(full) and full[9].keys() == set((x[9] == 0).nonzero().squeeze(1).tolist())


def test_top_k_cap_sizes_the_window_without_changing_the_result() -> None:
    x = shifted(torch.randn(3, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    rules = rules_of([(300, 0.9, 0.0), (2, 1.0, 0.0), (50, 1.0, 0.1)])
    full = survivors(candidates(x, rules, windows=()), 3)
    capped = candidates(x, rules, top_k_cap=300, open_tail=False)
    assert survivors(capped, 3) == full and len(capped) == 1 and capped[0].logits.shape == (3, 320)


@pytest.mark.parametrize("vocab", [2, 50, 4096])
def test_a_top_k_past_the_vocabulary_leaves_the_rest_in_force(vocab: int) -> None:
    x = shifted(torch.randn(3, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    full = survivors(candidates(x, rules_of([(0, 0.9, 0.0)] * 3), windows=()), 3)
    assert all(len(row) > 1 or vocab == 2 for row in full)
    for k in (vocab, vocab + 1, 10**6):
        rules = rules_of([(k, 0.9, 0.0)] * 3)
        assert survivors(candidates(x, rules, top_k_cap=k, open_tail=False), 3) == full


def test_one_huge_top_k_does_not_send_the_batch_to_a_full_sort() -> None:
    x = shifted(torch.randn(2, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    parts = candidates(x, rules_of([(5, 1.0, 0.0), (10**6, 1.0, 0.0)]), top_k_cap=10**6, open_tail=False)
    assert [part.logits.shape for part in parts] == [(1, 64), (1, 4096)]
    assert [len(row) for row in survivors(parts, 2)] == [5, 4096]


def test_every_boundary_tie_is_kept() -> None:
    x = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]] * 3, dtype=torch.float64)
    kept = survivors(candidates(x, rules_of([(2, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, math.exp(-1.5))])), 3)
    assert [sorted(row) for row in kept] == [[0, 1, 2, 3]] * 3


def test_mass_reached_exactly_ends_the_nucleus() -> None:
    """Weights 1, 1/2, 1/2 (exact): half of the mass is reached with the first token, so it is alone."""
    x = torch.tensor([[0.0, math.log(0.5), math.log(0.5)]], dtype=torch.float64)
    assert x.exp().tolist() == [[1.0, 0.5, 0.5]]
    assert survivors(candidates(x, rules_of([(0, 0.5, 0.0)])), 1)[0].keys() == {0}


def test_top_p_renormalises_after_top_k_and_min_p() -> None:
    """Weights 8, 4, 2, 1, 1. Alone, p = 0.7 needs 11.2: {8, 4}. After top-k 2, 0.7 * 12 = 8.4: {8, 4};
    0.66 * 12 = 7.92: {8}. After min-p 0.2, the remainder is 14: 0.58 * 14 = 8.12: {8, 4}."""
    x = torch.tensor([[8.0, 4.0, 2.0, 1.0, 1.0]], dtype=torch.float64).log().expand(4, 5)
    rules = rules_of([(0, 0.7, 0.0), (2, 0.7, 0.0), (2, 0.66, 0.0), (0, 0.58, 0.2)])
    kept = survivors(candidates(shifted(x), rules), 4)
    assert [sorted(row) for row in kept] == [[0, 1], [0, 1], [0], [0, 1]]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5), st.sampled_from([3, 130, 1025, 4099]), st.sampled_from([1, 2, 64, 130]), st.booleans()
)
def test_top_window_is_topk(rows: int, vocab: int, size: int, ties: bool) -> None:
    size = min(size, vocab)
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows * vocab + size))
    x = x.round() if ties else x
    values, ids = top_window(x, size)
    assert torch.equal(values, x.topk(size, dim=1).values) and torch.equal(x.gather(1, ids), values)
    assert all(len(set(row)) == size for row in ids.tolist())


@pytest.mark.parametrize("vocab", [1, 63, 64, 2047, 2048, 5000, 49152])
def test_reductions(vocab: int) -> None:
    x = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)).round()
    ids, high = first_argmax(x)
    assert ids.tolist() == x.numpy().argmax(1).tolist() and torch.equal(high, x.amax(1))
    want = x.double().exp().sum(1, keepdim=True)
    torch.testing.assert_close(mass(x).double(), want, rtol=1e-5, atol=0)
    assert torch.equal(mass(x)[4:5], mass(x[4:5]))
