"""Top-k, top-p and min-p in native code: what they leave, by definition; the same tokens for everybody."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native_draws import draws, keys_of, logits_of, tempered
from test_sampler_filters import RULES, rules_of, survivors

from xspec.kernels.native import NativeLibrary, Team
from xspec.kernels.native_draws import NativeDraws
from xspec.kernels.rounds import Chain, RowFilters
from xspec.verify.filters import candidates

__all__ = ["draws"]  # fixtures

POSITIONS = 24
Rules = list[tuple[int, float, float]]


def filters_of(rules: Rules) -> tuple[torch.Tensor, RowFilters]:
    """Temperatures (1) and filters, laid out as in a table of settings."""
    k, p, m = zip(*rules, strict=True)
    reals = torch.stack((torch.ones(len(rules)), torch.tensor(p), torch.tensor(m)), 1)
    ints = torch.stack((torch.tensor(k), torch.zeros(len(rules), dtype=torch.int64)), 1)
    return reals[:, 0], RowFilters(ints[:, 0], reals[:, 1], reals[:, 2])


def left(x: torch.Tensor, rules: Rules) -> list[set[int]]:
    """Ids that the filters leave of tempered logits x [R, D], by a full sort in fp64."""
    return [set(row) for row in survivors(candidates(x.double(), rules_of(rules), windows=()), len(rules))]


def drawn(
    draws: NativeDraws, logits: torch.Tensor, rules: Rules, heats: torch.Tensor | None = None
) -> torch.Tensor:
    """Every row at POSITIONS positions, [R, POSITIONS]."""
    temperatures, filters = filters_of(rules)
    if heats is not None:
        temperatures.copy_(heats)
    rows = torch.arange(len(rules)).repeat_interleave(POSITIONS)
    positions = torch.arange(POSITIONS).repeat(len(rules))
    keys = keys_of(len(rules))
    columns, bad = draws.draw(logits[rows], temperatures, keys, rows, positions, None, filters)
    assert not bad.any()
    return columns.view(len(rules), POSITIONS)


@pytest.mark.parametrize("scale", [0.02, 1.0, 5.0])
@pytest.mark.parametrize("vocab", [50, 4099, 20011])
def test_the_best_of_what_the_filters_leave(draws: NativeDraws, vocab: int, scale: float) -> None:
    """To the bit, with the noise of whole rows: thresholds are wrong for none of the columns that matter."""
    heats = torch.linspace(0.3, 1.7, len(RULES))
    logits, keys = logits_of(len(RULES), vocab, scale, vocab), keys_of(len(RULES))
    x = tempered(logits, heats)
    found = drawn(draws, logits, RULES, heats)
    for row, ids in enumerate(left(x, RULES)):
        where = torch.tensor(sorted(ids))
        noise = draws.gumbel(
            keys[row].expand(POSITIONS, 2), torch.arange(POSITIONS), where.expand(POSITIONS, -1), vocab, None
        )
        assert torch.equal(found[row], where[(x[row, where] + noise).argmax(1)]), RULES[row]


def test_ties_at_the_boundary_stay(draws: NativeDraws) -> None:
    """0 and -0 are equal; so are logits whose difference the temperature rounds away."""
    logits = torch.tensor([[1.0, 0.0, -0.0, 0.0, -0.5]] * 3, dtype=torch.bfloat16)
    found = drawn(draws, logits, [(2, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, math.exp(-1.2))])
    assert [set(row) for row in found.tolist()] == [{0, 1, 2, 3}] * 3
    small = torch.tensor([[256.0, 2.0**-30, -(2.0**-30), 0.0, -300.0]], dtype=torch.bfloat16)
    heats = torch.tensor([256.0])
    assert len(tempered(small, heats)[0].unique()) == 3
    assert set(drawn(draws, small, [(2, 1.0, 0.0)], heats)[0].tolist()) == {0, 1, 2, 3}


def test_a_part_of_the_mass_that_is_reached_exactly(draws: NativeDraws) -> None:
    """Four equal logits, half of the mass: all of them, as ties. Two beside a lower one: those two."""
    logits = torch.tensor([[3.0, 3.0, 3.0, 3.0], [3.0, 3.0, -300.0, -300.0]], dtype=torch.bfloat16)
    found = drawn(draws, logits, [(0, 0.5, 0.0), (0, 0.999, 0.0)])
    assert [set(row) for row in found.tolist()] == [{0, 1, 2, 3}, {0, 1}]


def test_columns_that_are_masked(draws: NativeDraws) -> None:
    logits = logits_of(4, 300)
    logits[:, 5:] = -math.inf
    found = drawn(draws, logits, [(50, 1.0, 0.0), (0, 0.9999, 0.0), (0, 1.0, 1e-30), (3, 0.0, 0.0)])
    assert (found < 5).all() and (found[3] == logits[3].argmax()).all()
    found = drawn(draws, logits, [(0, 0.9, 0.0)] * 4, torch.full((4,), 1e-30))
    assert torch.equal(found, logits.argmax(1, keepdim=True).expand(4, POSITIONS))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), vocab=st.integers(1, 9000), scale=st.sampled_from([0.0, 0.1, 2.0, 9.0]))
def test_rows_do_not_know_each_other(library: NativeLibrary, seed: int, vocab: int, scale: float) -> None:
    """Any instruction set, one thread or three, alone or among others, with a chain or without one."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(RULES), generator=generator)
    rules = [RULES[at] for at in order]
    temperatures, filters = filters_of(rules)
    temperatures.copy_(torch.rand(len(rules), generator=generator).mul_(2.0))
    temperatures[:2] = 0.0
    keys, rows = keys_of(len(rules)), torch.arange(len(rules))
    logits = logits_of(len(rules), vocab, scale, seed)
    plain = NativeDraws(Team(library, 1, "portable"))
    together, _ = plain.draw(logits, temperatures, keys, rows, rows, None, filters)
    for isa, threads in (("", 3), ("avx2", 1)):
        if library.isa(isa) is None:
            continue
        own = NativeDraws(Team(library, threads, isa))
        assert torch.equal(own.draw(logits, temperatures, keys, rows, rows, None, filters)[0], together)
        zeros = torch.zeros_like(rows)
        chained = own.draw(logits, temperatures, keys, rows, rows, None, filters, Chain(zeros, zeros))
        assert torch.equal(chained[0], together)
        for row in rows.tolist():
            at = slice(row, row + 1)
            alone = own.draw(logits[at], temperatures, keys, rows[at], rows[at], None, filters)[0]
            assert alone.item() == together[row]


def test_bad_rows_take_their_argmax(draws: NativeDraws) -> None:
    logits = logits_of(3, 100)
    logits[0, 7], logits[1, 50], logits[2] = float("nan"), float("inf"), float("-inf")
    temperatures, filters = filters_of([(5, 0.9, 0.1)] * 3)
    rows = torch.arange(3)
    columns, bad = draws.draw(logits, temperatures, keys_of(3), rows, rows, None, filters)
    assert bad.all() and columns[:2].tolist() == [7, 50] and 0 <= columns[2] < 100


def test_what_does_not_fit_is_refused(draws: NativeDraws) -> None:
    logits, keys, rows = logits_of(2, 30), keys_of(2), torch.arange(2)
    temperatures, filters = filters_of(RULES[:2])
    loose = RowFilters(filters.top_k, filters.top_p.contiguous(), filters.min_p)
    with pytest.raises(ValueError, match="one stride"):
        draws.draw(logits, temperatures, keys, rows, rows, None, loose)
    with pytest.raises(ValueError, match="does not fit 2 rows"):
        draws.draw(logits, temperatures, keys, rows, rows, None, None, Chain(rows[:1], rows))
    with pytest.raises(ValueError, match="are its tokens"):
        draws.draw(logits, temperatures, keys, rows, rows, torch.arange(30), None, Chain(rows, rows))
