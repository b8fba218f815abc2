"""Fused stacks of every kind of layer and rotation, and loops over them, at random sizes.

The yardstick is the reference in fp64: the native error must stay near that of the reference in bf16. What a
row yields must not depend on how many rows, or loops, a call has.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from xspec.kernels.base import AttentionShape, Kernels, PackedLinear
from xspec.kernels.cpu_native import NativeKernels
from xspec.kernels.native import Team
from xspec.kernels.native_layers import NativeLayers
from xspec.kernels.quantised import quantise
from xspec.kernels.reference import ReferenceKernels
from xspec.nn.attention import GroupedAttention
from xspec.nn.inputs import ForwardInputs, Segment
from xspec.nn.mlp import SwiGLU
from xspec.nn.norm import RMSNorm
from xspec.nn.rope import Rope, RopeConfig, Rotation, TableRope, inverse_frequencies
from xspec.nn.stack import DecoderLayer, Layer, LayerStack, NormedSumLayer, SandwichLayer

BF16, F64, CPU = torch.bfloat16, torch.float64, torch.device("cpu")
BLOCK, PAGES, SEQUENCES = 16, 4, 3
KINDS = PLAIN, SANDWICH, SUMS = "plain", "sandwich", "sums"
# Rows of each sequence, pass by pass: prefill in chunks, a ragged pass, decoding, verification.
PASSES = ((21, 3, 0), (4, 0, 33), (1, 1, 1), (3, 5, 2), (1, 0, 1))
CASES = range(24)  # 8 of each kind of layer


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def native(team: Team) -> NativeKernels:
    return NativeKernels(team)


@dataclass
class Case:
    """A random model: its sizes and what it is made of."""

    seed: int
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        self.kind, turn = KINDS[self.seed % len(KINDS)], self.seed // len(KINDS) % 8
        self.bits = (0, 0, 4, 8)[turn % 4]  # 0: bf16
        self.loops = (2, 1, 3, 0, 1, 2, 0, 3)[turn]  # 0: no norm behind the layers, which then run once
        self.table, self.head_norm = turn % 2 == 1, turn // 2 % 2 == 1
        pick = random.Random(self.seed)
        self.dim, self.kv_heads, group = pick.choice((32, 64, 96)), pick.randint(1, 3), pick.randint(1, 3)
        self.heads, self.hidden = self.kv_heads * group, 32 * pick.randint(2, 6)
        self.inner, self.layers = 32 * pick.randint(2, 6), pick.randint(1, 3)
        self.bias = pick.random() < 0.5

    def stack(self, kernels: Kernels, dtype: torch.dtype) -> LayerStack:
        return Builder(self, kernels, dtype).stack()

    def states(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.hidden, generator=torch.Generator().manual_seed(self.seed)).to(BF16)


class Builder:
    """The model on one kind of kernels: weights rounded to bf16, so that all compute the same function."""

    def __init__(self, case: Case, kernels: Kernels, dtype: torch.dtype) -> None:
        self.case, self.kernels, self.dtype = case, kernels, dtype
        self.generator = torch.Generator().manual_seed(case.seed)

    def random(self, *shape: int, scale: float, mean: float = 0.0) -> torch.Tensor:
        return (mean + scale * torch.randn(shape, generator=self.generator)).to(BF16)

    def linear(self, outs: int, ins: int, gated: bool = False) -> PackedLinear:
        weight = self.random(outs, ins, scale=ins**-0.5)
        bias = self.random(outs, scale=0.2).to(self.dtype) if self.case.bias else None
        if self.case.bits:
            return self.kernels.pack_blocks(quantise(weight, self.case.bits), bias, gated=gated)
        pack = self.kernels.pack_gated if gated else self.kernels.pack_linear
        return pack(weight.to(self.dtype), bias)

    def norm(self, *shape: int) -> RMSNorm:
        return RMSNorm(self.kernels, self.random(*shape, scale=0.2, mean=1.0).to(self.dtype), 1e-5)

    def layer(self) -> DecoderLayer:
        case = self.case
        rotated, all_heads = case.heads + case.kv_heads, case.heads + 2 * case.kv_heads
        attention = GroupedAttention(
            self.kernels,
            self.shape(),
            self.linear(all_heads * case.dim, case.hidden),
            self.linear(case.hidden, case.heads * case.dim),
            self.norm(rotated, case.dim) if case.head_norm else None,
        )
        mlp = SwiGLU(self.linear(2 * case.inner, case.hidden, True), self.linear(case.hidden, case.inner))
        inner = Layer(self.norm(case.hidden), attention, self.norm(case.hidden), mlp)
        if case.kind == PLAIN:
            return inner
        behind = (self.norm(case.hidden), self.norm(case.hidden))
        return SandwichLayer(inner, *behind) if case.kind == SANDWICH else NormedSumLayer(inner, *behind)

    def shape(self) -> AttentionShape:
        case = self.case
        return AttentionShape(case.heads, case.kv_heads, case.dim, case.dim**-0.5, self.dtype)

    def rope(self) -> Rotation:
        frequencies = inverse_frequencies(RopeConfig(1e4), self.case.dim)
        if not self.case.table:
            return Rope(frequencies, self.dtype, CPU)
        angles = torch.outer(torch.arange(30.0), frequencies)  # positions from 30 on turn as the last
        return TableRope(angles.cos(), angles.sin(), self.dtype)

    def stack(self) -> LayerStack:
        layers = [self.layer() for _ in range(self.case.layers)]
        norm = self.norm(self.case.hidden) if self.case.loops else None
        return LayerStack(self.kernels, self.shape(), layers, norm, self.rope())


class Cache:
    """K/V of three sequences over shuffled pages, and how far each has come."""

    def __init__(self, case: Case, kernels: Kernels, dtype: torch.dtype) -> None:
        pages = torch.randperm(SEQUENCES * PAGES, generator=torch.Generator().manual_seed(case.seed))
        self.table = pages.view(SEQUENCES, PAGES)
        self.slabs = [
            kernels.kv_slab(SEQUENCES * PAGES, BLOCK, case.kv_heads, case.dim, dtype)
            for _ in range(case.layers * max(1, case.loops))
        ]
        self.lengths = [0] * SEQUENCES

    def inputs(self, counts: Sequence[int]) -> ForwardInputs:
        """Of the next so many rows of each sequence."""
        owners = [index for index, count in enumerate(counts) for _ in range(count)]
        at = torch.tensor([self.lengths[i] + k for i, count in enumerate(counts) for k in range(count)])
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        slots = self.table[owners, at // BLOCK] * BLOCK + at % BLOCK
        segments = [
            Segment(index, 1, count, PAGES, sum(counts[:index]))
            for index, count in enumerate(counts)
            if count
        ]
        return ForwardInputs(at, slots, at + 1, self.table, tuple(segments))


def yields(stack: LayerStack, cache: Cache, state: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """[loops, N, hidden]: what each loop yields."""
    inputs = cache.inputs(counts)
    prepared = stack.prepare(inputs, cache.slabs[0])
    return torch.stack(tuple(stack.loop(state, inputs, cache.slabs, prepared)))


def everything(case: Case, stack: LayerStack, cache: Cache, dtype: torch.dtype) -> torch.Tensor:
    states = case.states(sum(map(sum, PASSES))).to(dtype).split([sum(counts) for counts in PASSES])
    found = [yields(stack, cache, *work) for work in zip(states, PASSES, strict=True)]
    return torch.cat(found, 1)


def rms(error: torch.Tensor) -> float:
    return float(error.double().pow(2).mean().sqrt())


def run(case: Case, kernels: Kernels, dtype: torch.dtype) -> torch.Tensor:
    stack = case.stack(kernels, dtype)
    assert isinstance(stack._fused, NativeLayers) == isinstance(kernels, NativeKernels)
    return everything(case, stack, Cache(case, kernels, dtype), dtype).double()


@functools.cache
def references(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp64 and in bf16."""
    truth, half = (run(Case(seed), ReferenceKernels(), dtype) for dtype in (F64, BF16))
    return truth, half


@pytest.mark.parametrize("seed", CASES)
def test_as_close_to_the_truth_as_the_reference(native: NativeKernels, seed: int) -> None:
    found, (truth, half) = run(Case(seed), native, BF16), references(seed)
    for ours, theirs, true in zip(found, half, truth, strict=True):
        assert rms(ours - true) <= 1.25 * rms(theirs - true)
        assert (ours - true).abs().max() <= 2.0 * (theirs - true).abs().max()
        assert rms(theirs - true) < 0.1 * rms(true)  # or the comparison would say nothing


@pytest.mark.parametrize("seed", CASES)
def test_a_row_and_a_loop_are_the_same_alone(native: NativeKernels, seed: int) -> None:
    """Together, and row by row with a call a loop: the same bits, also of the keys and values."""
    case = Case(seed)
    stack = case.stack(native, BF16)
    together, alone = Cache(case, native, BF16), Cache(case, native, BF16)
    found = everything(case, stack, together, BF16)
    states = iter(case.states(found.shape[1]).split(1))
    rows = []
    for counts in PASSES:
        for index in (i for i, count in enumerate(counts) for _ in range(count)):
            inputs, state = alone.inputs([int(i == index) for i in range(SEQUENCES)]), next(states)
            each = []
            for first in range(0, len(alone.slabs), case.layers):
                state = stack(state, inputs, alone.slabs[first : first + case.layers]).last
                each.append(state)
            rows.append(torch.stack(each))
    assert torch.equal(found, torch.cat(rows, 1))
    assert all(map(torch.equal, together.slabs, alone.slabs))
    assert all(slab.count_nonzero() for slab in together.slabs)


@pytest.mark.parametrize("kind", [SANDWICH, SUMS])
def test_streams(native: NativeKernels, kind: str) -> None:
    """Taps and the stream before the final norm; asking for them changes nothing else."""
    seed = next(s for s in CASES if (c := Case(s)).kind == kind and c.loops and c.layers > 1 and not c.bits)
    case = Case(seed)
    stack, exact = case.stack(native, BF16), case.stack(ReferenceKernels(), F64)
    cache, truth = Cache(case, native, BF16), Cache(case, ReferenceKernels(), F64)
    inputs, state = cache.inputs((17, 0, 3)), case.states(20)
    slabs = cache.slabs[: case.layers]
    plain = stack(state, inputs, slabs)
    streams = stack(state, inputs, slabs, (case.layers, 0, 1))
    assert torch.equal(streams.last, plain.last) and torch.equal(streams.residual, plain.residual)
    assert torch.equal(streams.taps[0], plain.residual) and torch.equal(streams.taps[1], state)
    wanted = exact(state.double(), inputs, truth.slabs[: case.layers], (1,))
    for found, true in ((streams.taps[2], wanted.taps[0]), (streams.residual, wanted.residual)):
        assert rms(found - true) < 0.02 * rms(true)


def test_what_does_not_loop(native: NativeKernels) -> None:
    case = Case(next(s for s in CASES if Case(s).loops == 0 and Case(s).layers > 1))
    fused = case.stack(native, BF16)._fused
    cache = Cache(case, native, BF16)
    assert fused is not None
    with pytest.raises(ValueError, match="without a final norm"):
        fused.loop(case.states(1), cache.inputs((1, 0, 0)), cache.slabs)
    case = Case(next(s for s in CASES if Case(s).loops > 1 and Case(s).layers > 1))
    stack, cache = case.stack(native, BF16), Cache(case, native, BF16)
    inputs = cache.inputs((1, 0, 0))
    with pytest.raises(ValueError, match="slabs do not fit"):
        list(stack.loop(case.states(1), inputs, cache.slabs[:-1], None))
    assert list(stack.loop(case.states(1), inputs, [], None)) == []
