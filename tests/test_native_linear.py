"""The native bf16 linear on every instruction set: exact on integers, close to fp64 on anything.

A row's bits must depend neither on the rows beside it nor on the number of threads.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from xspec.kernels.native import Format, NativeLibrary, Status, Team
from xspec.kernels.native_linear import NativeLinear

PANEL = 32


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small enough that no sum of products leaves the whole numbers of fp32."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    """In fp64, not rounded."""
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if add is None else y + add.double()


def check_close(
    found: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    gated: bool,
) -> None:
    """Within half a step of bf16, and the rounding of a chain of fp32 sums."""
    exact = reference(x, weight, bias, add, gated)
    size = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    if gated:
        gate, up = size.chunk(2, -1)
        size = gate * up + gate + up
    chain = (x.shape[1] + 16) * 2.0**-24 * size + (0 if add is None else add.double().abs() * 2.0**-23)
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    assert ((found.double() - exact).abs() <= exact.abs() * 2.0**-8 + chain).all()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    outs=st.integers(1, 140),
    groups=st.integers(1, 7),
    gated=st.booleans(),
    with_bias=st.booleans(),
    with_add=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_any_shape_is_close_to_fp64(
    team: Team, rows: int, outs: int, groups: int, gated: bool, with_bias: bool, with_add: bool, seed: int
) -> None:
    outs, ins = outs * (2 if gated else 1), groups * 32
    weight = (randn(outs, ins, seed=seed) * 0.2).bfloat16()
    bias = randn(outs, seed=seed + 1) if with_bias else None
    x = randn(rows, ins, seed=seed + 2).bfloat16()
    add = randn(rows, outs // 2 if gated else outs, seed=seed + 3).bfloat16() if with_add else None
    found = NativeLinear(team, weight, bias, gated=gated)(x, add)
    check_close(found, x, weight, bias, add, gated)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 25, 64, 193])
def test_whole_numbers_are_exact_and_rounded_once_to_even(team: Team, rows: int) -> None:
    weight, bias = integers(70, 96, seed=1), integers(70, seed=2)
    x, add = integers(rows, 96, seed=3), integers(rows, 70, seed=4)
    found = NativeLinear(team, weight.bfloat16(), bias.float(), gated=False)(x.bfloat16(), add.bfloat16())
    exact = x @ weight.T + bias + add
    assert (exact.abs() > 256).sum() >= 4 * rows  # many lie between two numbers of bf16, some half-way
    torch.testing.assert_close(found, exact.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(("outs", "ins", "gated"), [(576, 1536, False), (960, 576, False), (3072, 576, True)])
@pytest.mark.parametrize("rows", [3, 200])
def test_sizes_of_a_small_model(team: Team, outs: int, ins: int, gated: bool, rows: int) -> None:
    weight, x = (randn(outs, ins, seed=1) * 0.05).bfloat16(), randn(rows, ins, seed=2).bfloat16()
    check_close(NativeLinear(team, weight, None, gated=gated)(x), x, weight, None, None, gated)


@pytest.mark.parametrize("gated", [False, True])
def test_bits_of_a_row_depend_on_nothing_beside_it(team: Team, gated: bool) -> None:
    weight, bias = randn(76, 320, seed=1).bfloat16(), randn(76, seed=2)
    x, add = randn(230, 320, seed=3).bfloat16(), randn(230, 38 if gated else 76, seed=4).bfloat16()
    linear = NativeLinear(team, weight, bias, gated=gated)
    alone = torch.cat([linear(x[row : row + 1], add[row : row + 1]) for row in range(230)])
    for rows in (*range(2, 27), 33, 48, 100, 191, 192, 193, 230):
        first = (rows * 7) % (231 - rows)
        together = linear(x[first : first + rows], add[first : first + rows])
        assert torch.equal(together, alone[first : first + rows]), rows


def test_bits_do_not_depend_on_threads(team: Team) -> None:
    weight, x = randn(1000, 64, seed=1).bfloat16(), randn(50, 64, seed=2).bfloat16()
    expected = NativeLinear(team, weight, None, gated=False)(x)
    for threads in (1, 3, 5):
        other = NativeLinear(Team(team.library, threads, team.isa), weight, None, gated=False)
        assert all(torch.equal(other(x), expected) for _ in range(5)), threads


@pytest.mark.parametrize("gated", [False, True])
def test_what_is_not_a_number_stays_in_its_row_and_output(team: Team, gated: bool) -> None:
    weight = randn(80, 64, seed=1).bfloat16()
    weight[5] = weight[45] = 0
    weight[5, 7] = weight[45, 7] = 1  # both halves, where gated
    x = randn(9, 64, seed=2).bfloat16()
    clean = NativeLinear(team, weight, None, gated=gated)(x)
    x[2, 7], x[4, 7], x[6, 7] = float("nan"), float("inf"), -float("inf")
    found = NativeLinear(team, weight, None, gated=gated)(x)
    exact = reference(x, weight, None, None, gated)
    assert exact.isnan().any() and exact.isinf().any()
    assert torch.equal(found.isnan(), exact.isnan()) and torch.equal(found.isinf(), exact.isinf())
    assert torch.equal(found[[0, 1, 3, 5, 7, 8]], clean[[0, 1, 3, 5, 7, 8]])
    weight[9, 3] = float("nan")
    spoilt = NativeLinear(team, weight, None, gated=gated)(x)
    assert spoilt[:, 9].isnan().all()
    others = [column for column in range(spoilt.shape[1]) if column != 9]
    assert torch.equal(spoilt[:, others].nan_to_num(7.0), found[:, others].nan_to_num(7.0))


def test_silu_over_the_whole_range(team: Team) -> None:
    gates = torch.cat([torch.linspace(-120, 120, 1021), torch.tensor([-3e38, -1e4, 1e4])])
    x = torch.zeros(1024, 32, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = gates.bfloat16(), 1
    weight = torch.zeros(2, 32, dtype=torch.bfloat16)
    weight[0, 0] = weight[1, 1] = 1
    found = NativeLinear(team, weight, None, gated=True)(x)[:, 0].double()
    exact = F.silu(x[:, 0].double())
    assert ((found - exact).abs() <= exact.abs() * (2.0**-8 + 1e-6) + 1e-36).all()


def test_rows_with_strides_and_a_residual_in_place(team: Team) -> None:
    """Through the C interface: y may be the residual, and what lies beside its columns is left alone."""
    rows, outs, ins = 17, 45, 64
    weight, x = randn(outs, ins, seed=1).bfloat16(), randn(rows, ins + 24, seed=2).bfloat16()[:, :ins]
    y = randn(rows, outs + 10, seed=3).bfloat16()
    before = y.clone()
    linear = NativeLinear(team, weight, None, gated=False)
    expected = linear(x.contiguous(), before[:, :outs])
    status = team.library.c.xs_linear(
        team.handle,
        ctypes.byref(linear.struct),
        x.data_ptr(),
        x.stride(0),
        rows,
        y.data_ptr(),
        y.stride(0),
        y.data_ptr(),
        y.stride(0),
    )
    assert status == Status.OK
    assert torch.equal(y[:, :outs], expected) and torch.equal(y[:, outs:], before[:, outs:])


@pytest.mark.parametrize(("outs", "gated"), [(64, False), (70, False), (96, True), (76, True)])
def test_layout_of_packed_weights(library: NativeLibrary, outs: int, gated: bool) -> None:
    ins = 64
    weight, bias = randn(outs, ins, seed=1).bfloat16(), randn(outs, seed=2)
    half, width = PANEL // 2, outs // 2 if gated else outs
    panels = -(-width // (half if gated else PANEL))
    size = library.c.xs_packed_bytes(Format.BF16, outs, ins, gated)
    assert size == panels * PANEL * ins * 2
    packed = torch.full((size // 2,), 7.0, dtype=torch.bfloat16)
    packed_bias = torch.empty(outs)
    status = library.c.xs_pack_bf16(
        weight.data_ptr(), bias.data_ptr(), outs, ins, gated, packed.data_ptr(), packed_bias.data_ptr()
    )
    assert status == Status.OK
    order = torch.arange(outs)
    if gated:
        order = torch.cat([torch.cat([part, part + width]) for part in torch.arange(width).split(half)])
    assert torch.equal(packed_bias, bias[order])
    rows = packed.view(panels, ins // 2, 2, half, 2).permute(0, 2, 3, 1, 4).reshape(panels * 2, half, ins)
    if gated:
        rows = rows.view(panels, 2, half, ins).transpose(0, 1).reshape(2, panels * half, ins)
        assert torch.equal(rows[:, :width].reshape(outs, ins), weight) and (rows[:, width:] == 0).all()
    else:
        rows = rows.reshape(panels * PANEL, ins)
        assert torch.equal(rows[:outs], weight) and (rows[outs:] == 0).all()
