"""Gumbel noise: exact bits against plain integers, batch independence, and statistics with fixed seeds."""

from __future__ import annotations

import math

import pytest
import torch

from xspec.verify.noise import GumbelNoise, row_keys

CPU = torch.device("cpu")
U32 = 0xFFFFFFFF


def keys_of(*pairs: tuple[int, int]) -> torch.Tensor:
    return torch.tensor([row_keys(seed, choice) for seed, choice in pairs], dtype=torch.int32)


def bits_of(noise: torch.Tensor) -> torch.Tensor:
    """The uniform behind float64 noise: u = 1 - exp(-exp(-G))."""
    return -torch.expm1(-torch.exp(-noise))


def lowbias32(x: int, key: int = 0) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D + key) & U32
    x ^= x >> 15
    x = (x * 0x846CA68B) & U32
    return x ^ (x >> 16)


def reference(seed: int, choice: int, position: int, token: int) -> float:
    """The definition in plain Python integers."""
    first, second = (word & U32 for word in row_keys(seed, choice))
    first = lowbias32((first + position * 0x9E3779B9) & U32)
    second = lowbias32((second + position * 0x85EBCA6B) & U32)
    hashed = lowbias32(((token + 1) * 0x9E3779B9) & U32)
    k = lowbias32(hashed ^ first, second) & 0x7FFFFFFF
    u = k * ((1 - 2**-24) * 2**-31) + 2**-32
    return -math.log(-math.log1p(-u))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, -(2**63), 2**64 + 1, 12345678901234567890123, -(10**30)])
def test_noise_is_its_definition(seed: int) -> None:
    noise = GumbelNoise(5000, CPU)
    positions = torch.tensor([0, 1, 77, 131071, 2**31 - 1])
    got = noise.gumbel(keys_of(*[(seed, 3)] * 5), positions, dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        for token in (0, 1, 2, 255, 256, 4999):
            assert got[row, token].item() == pytest.approx(reference(seed, 3, position, token), rel=1e-13)


def test_row_keys_differ_for_every_seed_and_choice() -> None:
    edge = [0, 1, 2**32, 2**63, 2**64, 2**64 + 1, 2**128, 10**40]
    seeds = sorted({s for e in edge for s in (e, -e, e - 1, -e - 1)})
    keys = [row_keys(seed, choice) for seed in seeds for choice in range(200)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**31) <= word < 2**31 for key in keys for word in key)
    assert row_keys(42, 0) == row_keys(42, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_gets_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    vocab = 50257
    noise = GumbelNoise(vocab, CPU)
    keys = keys_of(*[(seed, seed % 3) for seed in range(33)])
    positions = torch.arange(33) * 37
    together = noise.gumbel(keys, positions, dtype=dtype)
    ids = torch.randint(0, vocab, (33, 77), generator=torch.Generator().manual_seed(1))
    subset = noise.gumbel(keys, positions, ids, dtype=dtype)
    assert torch.equal(subset, together.gather(1, ids))
    for row in (0, 5, 32):
        alone = noise.gumbel(keys[row : row + 1], positions[row : row + 1], dtype=dtype)
        assert torch.equal(alone[0], together[row])
    out = torch.empty_like(together)
    assert noise.gumbel(keys, positions, dtype=dtype, out=out) is out and torch.equal(out, together)
    assert together.isfinite().all()


def test_float32_noise_is_the_float64_noise_rounded() -> None:
    noise = GumbelNoise(49152, CPU)
    keys, positions = keys_of((9, 0)), torch.tensor([4])
    fine = noise.gumbel(keys, positions, dtype=torch.float64)
    coarse = noise.gumbel(keys, positions).double()
    assert (fine - coarse).abs()[fine > 0].max() < 1e-6
    assert (fine - coarse).abs().max() < 0.4  # the far low tail, where u is within 2^-24 of 1


def test_extreme_bits_stay_finite() -> None:
    """k = 0 and k = 2^31 - 1 through the same transform, in float32: no infinity at either end."""

    class Ends(GumbelNoise):
        def _bits(self, *_: torch.Tensor | None) -> torch.Tensor:
            return torch.tensor([[0, 1, 2**31 - 1]], dtype=torch.int32)

    for dtype in (torch.float32, torch.float64):
        ends = Ends(3, CPU).gumbel(keys_of((0, 0)), torch.tensor([0]), dtype=dtype)[0]
        assert ends.isfinite().all()
        assert ends[0].item() == pytest.approx(32 * math.log(2), abs=1e-5)
        assert ends[2].item() < -2.7


def chi_square(counts: torch.Tensor) -> float:
    """Standardised: (X^2 - df) / sqrt(2 df); about N(0, 1) for uniform counts."""
    expected = counts.sum().double() / counts.numel()
    stat = ((counts - expected) ** 2 / expected).sum().item()
    df = counts.numel() - 1
    return (stat - df) / math.sqrt(2 * df)


def pair_counts(a: torch.Tensor, b: torch.Tensor, cells: int = 32) -> torch.Tensor:
    cell = (a * cells).long() * cells + (b * cells).long()
    return torch.bincount(cell.flatten(), minlength=cells * cells)


def uniforms(pairs: list[tuple[int, int]], positions: list[int], vocab: int) -> torch.Tensor:
    noise = GumbelNoise(vocab, CPU).gumbel(keys_of(*pairs), torch.tensor(positions), dtype=torch.float64)
    return bits_of(noise)


def test_uniform_in_every_bit_range() -> None:
    u = uniforms([(7, 0)] * 64, list(range(64)), 16384)
    k = (u * 2**31).long().clamp_(max=2**31 - 1)
    for shift in (23, 15, 7, 0):
        counts = torch.bincount(((k >> shift) & 255).flatten(), minlength=256)
        assert abs(chi_square(counts)) < 5, shift
    ordered = u.flatten().sort().values
    grid = (torch.arange(ordered.numel(), dtype=torch.float64) + 0.5) / ordered.numel()
    assert (ordered - grid).abs().max() * math.sqrt(ordered.numel()) < 1.95  # Kolmogorov, p = 0.001


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64, 4096])
def test_positions_are_independent(lag: int) -> None:
    near = uniforms([(3, 0)] * 64, list(range(64)), 8192)
    far = uniforms([(3, 0)] * 64, list(range(lag, 64 + lag)), 8192)
    assert abs(chi_square(pair_counts(near, far))) < 5


@pytest.mark.parametrize("lag", [1, 2, 7, 256])
def test_neighbouring_ids_are_independent(lag: int) -> None:
    u = uniforms([(11, 1)] * 64, list(range(500, 564)), 8192)
    assert abs(chi_square(pair_counts(u[:, :-lag], u[:, lag:]))) < 5


def test_sequences_over_positions_are_independent_for_one_id() -> None:
    """What one token meets through a long answer: lagged pairs over 65536 positions of 8 ids."""
    positions = torch.arange(65536)
    keys = keys_of((5, 0)).expand(65536, 2)
    ids = torch.tensor([[0, 1, 2, 17, 100, 4095, 30000, 49151]]).expand(65536, 8)
    u = bits_of(GumbelNoise(49152, CPU).gumbel(keys, positions, ids, dtype=torch.float64))
    for lag in (1, 2, 3, 16, 1000):
        assert abs(chi_square(pair_counts(u[:-lag], u[lag:], 16))) < 5, lag
    assert torch.corrcoef(u.T).fill_diagonal_(0).abs().max() < 5 / math.sqrt(65536)


@pytest.mark.parametrize("other", [(1, 0), (-1, 0), (2**32, 0), (0, 1), (0, 2)])
def test_seeds_and_choices_are_independent(other: tuple[int, int]) -> None:
    positions = list(range(64))
    a = uniforms([(0, 0)] * 64, positions, 8192)
    b = uniforms([other] * 64, positions, 8192)
    assert abs(chi_square(pair_counts(a, b))) < 5


def test_consecutive_seeds_at_one_position() -> None:
    """Users count seeds up: the first token of each must not be correlated."""
    keys = keys_of(*[(seed, 0) for seed in range(20000)])
    u = bits_of(GumbelNoise(16, CPU).gumbel(keys, torch.full((20000,), 12), dtype=torch.float64))
    assert abs(chi_square(torch.bincount((u * 64).long().flatten(), minlength=64))) < 5
    assert abs(chi_square(pair_counts(u[:-1], u[1:], 16))) < 5


def test_winner_is_uniform_and_its_tail_is_fine() -> None:
    """1024 draws over 49152 equal logits: winners spread evenly, maxima follow the Gumbel law."""
    vocab, draws = 49152, 1024
    noise = GumbelNoise(vocab, CPU)
    winners, tops, rare = [], [], 0
    for start in range(0, draws, 32):
        g = noise.gumbel(keys_of((8, 0)).expand(32, 2), torch.arange(start, start + 32))
        top = g.max(1)
        winners.append(top.indices)
        tops.append(top.values)
        rare += int((g > 20 * math.log(2)).sum())
    assert abs(chi_square(torch.bincount(torch.cat(winners) * 32 // vocab, minlength=32))) < 4
    expected = draws * vocab * 2.0**-20
    assert abs(rare - expected) < 5 * math.sqrt(expected)
    level = torch.exp(-vocab * torch.exp(-torch.cat(tops).double())).sort().values  # uniform if it is
    grid = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    assert (level - grid).abs().max() * math.sqrt(draws) < 1.95
