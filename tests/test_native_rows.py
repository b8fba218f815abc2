"""The native ops over rows against torch: norm, rotation with cache write, highest value, log of summed exps.

Every instruction set, odd widths, values that are not finite, and rows that share a page between threads.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_slab import bits, cache_of, interleaved

from xspec.kernels.native import ISAS, CRopeStore, NativeLibrary, Team, check

BF16 = torch.bfloat16
WIDTHS = (1, 5, 16, 31, 32, 33, 64, 96, 129, 576, 1000)


@pytest.fixture(scope="module", params=ISAS)
def team(request: pytest.FixtureRequest, library: NativeLibrary) -> Team:
    if library.isa(request.param) is None:
        pytest.skip(f"this machine has no {request.param}")
    return Team(library, 3, request.param)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(found: torch.Tensor, exact: torch.Tensor, steps: float = 1.0, floor: float = 1e-30) -> None:
    """Within so many roundings to bf16."""
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 * steps + floor).all()


def rms_norm(team: Team, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y, (heads, columns) = torch.empty_like(x), weight.shape
    call, rows = team.library.c.xs_rms_norm, x.numel() // weight.numel()
    check(
        call(team.handle, x.data_ptr(), weight.data_ptr(), 1e-5, y.data_ptr(), rows, heads, columns), "norm"
    )
    return y


@pytest.mark.parametrize("columns", WIDTHS)
def test_rms_norm(team: Team, columns: int) -> None:
    for rows, scale in ((1, 1.0), (7, 1e-4), (40, 300.0)):
        x, weight = (randn(rows, 1, columns, seed=1) * scale).to(BF16), randn(1, columns, seed=2).to(BF16)
        found = rms_norm(team, x, weight)
        wide = x.double()
        exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        near(found, exact, steps=2.1)
        alone = torch.cat([rms_norm(team, row.unsqueeze(0), weight) for row in x])
        assert torch.equal(bits(alone), bits(found))


def rotated(
    qkv: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """In fp64, but for the roundings that rms_norm promises."""
    x = qkv.double()
    if norm is not None:
        x = (x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).to(BF16) * norm
        x = x.double()
    first, second = x.chunk(2, -1)
    return x * cos.double().unsqueeze(1) + torch.cat((second, first), -1) * sin.double().unsqueeze(1)


class RopeCase:
    """N rows of H query, G key and G value heads, and the slots their keys and values go to."""

    def __init__(self, rows: int, heads: int, kv_heads: int, dim: int, block: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, pages = heads, -(-rows // block) + 2
        self.qkv = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator).to(BF16)
        angles = torch.rand(rows, dim // 2, generator=generator) * 50
        self.cos = torch.cat((angles.cos(), angles.cos()), 1)
        self.sin = torch.cat((-angles.sin(), angles.sin()), 1)
        self.slots = torch.randperm(pages * block, generator=generator)[:rows]
        self.plain = torch.randn(2 * kv_heads, pages, block, dim, generator=generator).to(BF16)
        self.norm = torch.rand(heads + kv_heads, dim, generator=generator).to(BF16)
        self.generator = generator

    def run(
        self, team: Team, *, norm: bool = False, finite: bool = False, queries: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What becomes of qkv, and of the slab."""
        qkv, slab = self.qkv.clone(), interleaved(self.plain)
        step = CRopeStore(
            qkv=qkv.data_ptr(),
            stride=qkv.stride(0),
            rows=len(qkv),
            heads=self.heads,
            cos=self.cos.data_ptr(),
            sin=self.sin.data_ptr(),
            head_norm=self.norm.data_ptr() if norm else None,
            eps=1e-5,
            slots=self.slots.data_ptr(),
            finite=finite,
            store_queries=queries,
            cache=cache_of(slab),
        )
        check(team.library.c.xs_rope_store(team.handle, ctypes.byref(step)), "xs_rope_store")
        return qkv, slab

    def stored(self, kv: torch.Tensor) -> torch.Tensor:
        """The slab after kv [N, 2 * G, D] went to the slots."""
        plain = self.plain.clone()
        plain.view(plain.shape[0], -1, plain.shape[3])[:, self.slots] = kv.transpose(0, 1)
        return interleaved(plain)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 7, 33]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([32, 64, 96, 128, 256]),
    block=st.sampled_from([16, 32, 48]),
    norm=st.booleans(),
    queries=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rope_store(
    team: Team,
    rows: int,
    kv_heads: int,
    group: int,
    dim: int,
    block: int,
    norm: bool,
    queries: bool,
    seed: int,
) -> None:
    case = RopeCase(rows, kv_heads * group, kv_heads, dim, block, seed)
    qkv, slab = case.run(team, norm=norm, queries=queries)
    heads, turned = case.heads, case.heads + kv_heads
    exact = rotated(case.qkv[:, :turned], case.norm if norm else None, case.cos, case.sin)
    # A sum of two products that cancel keeps their rounding errors, in fp32 and (normalised) bf16.
    start = 0 if queries else heads
    near(qkv[:, start:turned], exact[:, start:], floor=3e-2 if norm else 1e-5)
    assert torch.equal(qkv[:, turned:], case.qkv[:, turned:])
    if not queries:
        assert torch.equal(qkv[:, :heads], case.qkv[:, :heads])
    assert torch.equal(slab, case.stored(qkv[:, heads:]))


def test_rope_store_makes_guesses_finite(team: Team) -> None:
    case = RopeCase(20, 4, 2, 64, 16, seed=3)
    for value in (float("nan"), float("inf"), float("-inf")):
        case.qkv[torch.rand(case.qkv.shape, generator=case.generator) < 0.02] = value
    qkv, slab = case.run(team, finite=True)
    assert torch.equal(slab, case.stored(qkv[:, 4:].nan_to_num(0.0, 0.0, 0.0))) and slab.isfinite().all()
    raw, kept = case.run(team)
    assert torch.equal(bits(raw), bits(qkv)) and not raw[:, 4:].isfinite().all()
    assert torch.equal(bits(kept), bits(case.stored(raw[:, 4:])))


def test_threads_share_pages_without_tearing(team: Team) -> None:
    """Threads take 8 rows at a time; here the next 8 are the other halves of the same pairs of tokens."""
    case = RopeCase(4096, 1, 2, 64, 16, seed=4)
    even = torch.arange(0, 4096, 2).view(-1, 8)
    case.slots = torch.stack((even, even + 1), 1).reshape(-1)
    want = case.stored(case.run(team)[0][:, 1:])
    for _ in range(60):
        assert torch.equal(case.run(team)[1], want)


def reduced(team: Team, x: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Index and value of the highest, log of the summed exps, of the first columns of x."""
    rows, c = len(x), team.library.c
    index, value, total = torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows)
    arguments = (team.handle, x.data_ptr(), x.stride(0), rows, columns)
    check(c.xs_argmax(*arguments, index.data_ptr(), value.data_ptr()), "xs_argmax")
    check(c.xs_logsumexp(*arguments, total.data_ptr()), "xs_logsumexp")
    return index, value, total


def row_kinds(columns: int, seed: int) -> torch.Tensor:
    """[9, columns + 3] of every kind: plain, all negative, coarse (ties), zeros of both signs, infinities."""
    x = randn(9, columns + 3, seed=seed) * 3
    some = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    x[1] = -x[1].abs() - 0.5
    x[2] = x[2].round().clamp(-1, 1)
    x[3] = torch.where(some[3], -0.0, 0.0)
    x[4] = torch.where(some[4], -1.0, -0.0)
    x[5][some[5]] = float("inf")
    x[6][some[6]] = float("-inf")
    x[7] = float("-inf")
    x[8] = x[8] * 1e37
    return x.to(BF16)


def first_highest(x: torch.Tensor) -> torch.Tensor:
    """[N]; torch's argmax names no order among equals."""
    columns = torch.arange(x.shape[1])
    return torch.where(x == x.max(1, keepdim=True).values, columns, x.shape[1]).min(1).values


def allowed(team: Team) -> float:
    """Error of a log of sums: one long chain of fp32 additions, or many short ones."""
    return 2e-4 if team.isa == "portable" else 5e-6


@pytest.mark.parametrize("columns", [1, 2, 15, 33, 64, 127, 128, 200, 1111, 4096])
def test_argmax_and_logsumexp(team: Team, columns: int) -> None:
    for seed in range(4):
        x = row_kinds(columns, seed)
        index, value, total = reduced(team, x, columns)
        wide = x[:, :columns].double()
        assert torch.equal(index, first_highest(wide))
        assert torch.equal(value, wide.float().gather(1, index.unsqueeze(1)).squeeze(1))
        torch.testing.assert_close(total.double(), wide.logsumexp(1), rtol=1e-6, atol=allowed(team))


@pytest.mark.parametrize("pattern", [0x7FC0, 0x7F81, -0x40, -0x7F])  # NaN of both signs, quiet and signalling
def test_nan_counts_as_highest(team: Team, pattern: int) -> None:
    for columns, place in ((40, 7), (64, 63), (33, 32), (5, 0), (1000, 500)):
        x = randn(3, columns, seed=columns).to(BF16)
        x[1, place:] = float("inf")
        bits(x)[1, place] = pattern
        bits(x)[1, columns - 1] = pattern
        index, value, total = reduced(team, x, columns)
        assert index[1] == place and value[1].isnan() and total[1].isnan()
        assert torch.equal(index[::2], x[::2].float().argmax(1)) and total[::2].isfinite().all()


def test_a_vocabulary_of_logits(team: Team) -> None:
    x = (randn(6, 49152, seed=8) * 4).to(BF16)
    index, value, total = reduced(team, x, 49152)
    assert torch.equal(value, x.float().max(1).values)
    assert torch.equal(index, first_highest(x))
    torch.testing.assert_close(total.double(), x.double().logsumexp(1), rtol=0, atol=allowed(team))
    for row in range(6):
        alone = reduced(team, x[row : row + 1], 49152)
        assert index[row] == alone[0] and value[row] == alone[1] and total[row] == alone[2]
