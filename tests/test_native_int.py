"""The native int linears against exact integer products: every format, every instruction set, any shape.

A row's bits must not depend on the rows beside it or on the number of threads.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from xspec.kernels.native import Format, Team
from xspec.kernels.native_blocks import NativeBlocks
from xspec.kernels.quantised import GROUP, Blocks, ReferenceBlocks

# What a blocks' bits, scale type and minima make of it: (bits, scales, minima given).
KINDS = {
    Format.INT8: (8, torch.float16, False),
    Format.INT4: (4, torch.float16, True),
    Format.INT8_WIDE: (8, torch.float32, True),
    Format.INT4_WIDE: (4, torch.float32, True),
}
SHAPES = ((32, 32), (2, 64), (100, 96), (34, 160), (576, 192), (66, 1536))
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 17, 40)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_blocks(kind: Format, outs: int, ins: int, seed: int = 0) -> Blocks:
    bits, dtype, given = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 2**bits, (outs, ins), dtype=torch.uint8, generator=generator)
    scale = (randn(outs, ins // GROUP, seed=seed + 1) * 0.02).to(dtype)
    return Blocks(
        bits, q, scale, (randn(outs, ins // GROUP, seed=seed + 2) * 0.1).to(dtype) if given else None
    )


def check(
    found: torch.Tensor,
    blocks: Blocks,
    bias: torch.Tensor | None,
    gated: bool,
    x: torch.Tensor,
    add: torch.Tensor | None,
) -> None:
    """Against the same operands in exact arithmetic: half a step of bf16, and fp32 sums of what was added."""
    exact = ReferenceBlocks(blocks, bias, gated=gated)(x.double(), None if add is None else add.double())
    values = blocks.dequantised().abs().double()
    size = x.double().abs() @ values.T + blocks.minima().double().abs().repeat_interleave(GROUP, 1).sum(1)
    if gated:
        gate, up = size.chunk(2, -1)
        size = gate * up + gate + up
    allowed = exact.abs() * 2.0**-8 + size * 4e-6
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_equals_exact_integer_products(team: Team, kind: Format, gated: bool) -> None:
    for index, ((outs, ins), extra) in enumerate(itertools.product(SHAPES, (False, True))):
        rows, columns = ROWS[index % len(ROWS)], outs // 2 if gated else outs
        blocks = random_blocks(kind, outs, ins, seed=index)
        bias = randn(outs, seed=9) if extra else None
        add = randn(rows, columns, seed=10).bfloat16() if extra else None
        x = randn(rows, ins, seed=11).bfloat16()
        found = NativeBlocks(team, blocks, bias, gated=gated)(x, add)
        assert found.shape == (rows, columns) and found.dtype == torch.bfloat16
        check(found, blocks, bias, gated, x, add)


@pytest.mark.parametrize(("bits", "minimum"), [(4, None), (8, 0.5)])
def test_every_kind_of_blocks_has_a_format(team: Team, bits: int, minimum: float | None) -> None:
    """Q4_0 has no minima, Q5_1 has them in 8 bits."""
    q = torch.randint(0, 2**bits, (64, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    scale = (randn(64, 3, seed=1) * 0.02).half()
    blocks = Blocks(bits, q, scale, None if minimum is None else torch.full_like(scale, minimum))
    x = randn(5, 96, seed=2).bfloat16()
    check(NativeBlocks(team, blocks, None, gated=False)(x), blocks, None, False, x, None)


def test_minima_past_fp16_stay_exact(team: Team) -> None:
    blocks = Blocks(4, torch.full((32, 32), 9, dtype=torch.uint8), torch.full((32, 1), 60000.0).half())
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    assert NativeBlocks(team, blocks, None, gated=False)(x)[0, 0].item() == pytest.approx(
        60000.0 * 32, rel=2**-8
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_rows_bits_do_not_depend_on_its_neighbours(team: Team, kind: Format, gated: bool) -> None:
    outs, ins = 224, 576
    blocks = random_blocks(kind, outs, ins)
    bias, add = randn(outs, seed=3), randn(400, outs // 2 if gated else outs, seed=4).bfloat16()
    linear = NativeBlocks(team, blocks, bias, gated=gated)
    x = randn(400, ins, seed=5).bfloat16()
    together = linear(x, add)
    alone = torch.cat([linear(x[i : i + 1], add[i : i + 1]) for i in range(40)])
    assert torch.equal(together[:40], alone)
    for rows in range(2, 20):
        assert torch.equal(linear(x[:rows], add[:rows]), alone[:rows])
    assert torch.equal(linear(x[200:], add[200:]), together[200:])
    single = NativeBlocks(Team(team.library, 1, team.isa), blocks, bias, gated=gated)
    assert torch.equal(single(x, add), together)


@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_rounded_as_stated(team: Team, kind: Format) -> None:
    """Through weights that pick single inputs: 127 steps of bf16's 256 tell every q apart."""
    bits, dtype, given = KINDS[kind]
    zero = 0 if given else 2 ** (bits - 1)
    q = torch.full((64, 64), zero, dtype=torch.uint8) + torch.eye(64, dtype=torch.uint8)
    ones = torch.ones(64, 2, dtype=dtype)
    blocks = Blocks(bits, q, ones, torch.zeros_like(ones) if given else None)
    x = torch.cat(
        (randn(30, 64, seed=1), randn(6, 64, seed=2) * 1e-30, randn(6, 64, seed=3) * 1e30)
    ).bfloat16()
    x[3, :32], x[4, 32:] = 0.0, 2.0**-110  # nothing, and less than LEAST
    x[5] = torch.arange(64) - 32.0  # ties
    found = NativeBlocks(team, blocks, None, gated=False)(x)
    assert torch.equal(found, ReferenceBlocks(blocks)(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_greatest_products_do_not_overflow(team: Team, kind: Format, sign: float) -> None:
    bits, dtype, given = KINDS[kind]
    x = torch.full((9, 96), sign, dtype=torch.bfloat16)
    for value in (0, 2**bits - 1):
        scale = torch.ones(48, 3, dtype=dtype)
        minimum = torch.zeros_like(scale) if given else None
        blocks = Blocks(bits, torch.full((48, 96), value, dtype=torch.uint8), scale, minimum)
        found = NativeBlocks(team, blocks, None, gated=False)(x)
        want = sign * 96 * (value if given else value - 2 ** (bits - 1))
        assert torch.equal(found, torch.full_like(found, want))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row_and_shows(team: Team, kind: Format, bad: float) -> None:
    blocks = random_blocks(kind, 64, 96)
    linear = NativeBlocks(team, blocks, None, gated=False)
    x = randn(6, 96, seed=1).bfloat16()
    clean = linear(x)
    x[2, 40] = bad
    found = linear(x)
    assert not found[2].isfinite().any()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(found[kept], clean[kept])


def test_a_residual_may_have_any_stride(team: Team) -> None:
    blocks = random_blocks(Format.INT4, 64, 64)
    linear = NativeBlocks(team, blocks, None, gated=False)
    x, add = randn(5, 200, seed=1).bfloat16(), randn(5, 300, seed=2).bfloat16()
    strided = linear(x[:, 7:71], add[:, 3:67])
    assert torch.equal(strided, linear(x[:, 7:71].contiguous(), add[:, 3:67].contiguous()))
    with pytest.raises(ValueError, match="this linear takes"):
        linear(x[:, :32])
    with pytest.raises(ValueError, match="allowed: "):
        linear(x[:, :64], add[:, :32])
