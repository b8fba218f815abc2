"""What `xspec bench --kernels` times: every kind of call that a forward pass makes, then whole passes.

A subject makes all the calls of its kind that one pass makes, each over its own layer's weights or K/V, so
that it meets the caches much as a pass does. Goes through the kernel contract, so it suits every platform.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from xspec.nn.rope import Rope
from xspec.platform.base import Platform
from xspec.progress import Progress
from xspec.verify.filters import first_argmax
from xspec_cli.benchlib.kernel_model import KernelModel, Packed
from xspec_cli.benchlib.kernel_timing import (
    Case,
    Ceilings,
    Measured,
    Subject,
    Work,
    argmax_work,
    attention_work,
    kv_read_bytes,
    linear_work,
    measure,
    norm_work,
    rope_store_work,
)

READ_BYTES = 256 << 20
"""Far more than any cache of a small machine, a few milliseconds of reading."""

MATMUL_SIZE = 2048

TRIAL_SIZE = 512
"""Tells whether a type is multiplied fast: without instructions for it that takes a hundred times as long."""

HOPELESS = 10
"""A type that takes this many times as long at TRIAL_SIZE is not tried at MATMUL_SIZE."""

CEILING_SHOTS = 2

RESIDUAL = frozenset(("output", "down"))
"""Linears that add the residual stream to what they yield."""

LAYERS, FULL = "layers", "layers, head, argmax"
"""The kernels that are whole passes."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """`cases`: requests x rows with their keys; `rows`: row counts of what knows no requests."""

    rows: tuple[int, ...]
    cases: tuple[Case, ...]
    repeats: int


class CeilingMeter:
    """Reading (a sum over fp32), copying and a large square product, by torch on all compute threads.

    Of each the best of a few: a ceiling is what can be had.
    """

    def __init__(self, platform: Platform, dtype: torch.dtype) -> None:
        device = platform.device()
        self._source = torch.ones(READ_BYTES // 4, device=device)
        self._copy = torch.zeros_like(self._source)
        self._platform = platform
        types = dict.fromkeys((dtype, torch.float32) if dtype.itemsize < 4 else (dtype,))
        trials = {one: self._product_s(TRIAL_SIZE, one) for one in types}
        hopeful = [one for one in types if trials[one] < HOPELESS * min(trials.values())]
        best = min(hopeful, key=lambda one: self._product_s(MATMUL_SIZE, one))
        self._square = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device).to(best)
        self()  # first calls touch memory and make primitives

    def __call__(self) -> Ceilings:
        square, flops = self._square, 2 * MATMUL_SIZE**3
        return Ceilings(
            read_gb_s=READ_BYTES / self._seconds(self._source.sum) / 1e9,
            copy_gb_s=2 * READ_BYTES / self._seconds(lambda: self._copy.copy_(self._source)) / 1e9,
            matmul_gflop_s=flops / self._seconds(lambda: square @ square) / 1e9,
            matmul_dtype=str(square.dtype).removeprefix("torch."),
        )

    def _product_s(self, size: int, dtype: torch.dtype) -> float:
        square = torch.ones(size, size, dtype=dtype, device=self._source.device)
        return self._seconds(lambda: square @ square)

    def _seconds(self, run: Callable[[], object]) -> float:
        taken_s = []
        for _ in range(CEILING_SHOTS):
            began_s = time.perf_counter()
            run()
            self._platform.event().wait()
            taken_s.append(time.perf_counter() - began_s)
        return min(taken_s)


@torch.inference_mode()
def measure_kernels(model: KernelModel, plan: Plan, progress: Progress) -> list[Measured]:
    """Group by group; inside a group ceilings and subjects take turns."""
    meter = CeilingMeter(model.platform, model.dtype)
    groups = list(subject_groups(model, plan))
    found: list[Measured] = []
    for index, subjects in enumerate(groups):
        progress("timing kernels", index, len(groups))
        found += measure(subjects(), meter, repeats=plan.repeats, wait=lambda: model.platform.event().wait())
    progress("timing kernels", len(groups), len(groups))
    return found


def subject_groups(model: KernelModel, plan: Plan) -> Iterator[Callable[[], list[Subject]]]:
    """Each makes its subjects when its turn comes, so that their tensors do not live all at once."""
    for name in model.linears:
        yield partial(_each, partial(_linear, model, name), plan.rows)
    yield partial(_each, partial(_all_linears, model), plan.rows)
    yield partial(_each, partial(_attention, model), plan.cases)
    for by_rows in (_norm, _rope_store, _argmax):
        yield partial(_each, partial(by_rows, model), plan.rows)
    # Both kinds of pass in one group: what head and argmax add is read off the difference.
    yield lambda: [_pass(model, case, full=full) for full in (False, True) for case in plan.cases]


def _each(make: Callable[[T], Subject], of: Sequence[T]) -> list[Subject]:
    return [make(each) for each in of]


def _linear_calls(model: KernelModel, name: str, rows: int) -> tuple[Work, list[Callable[[], object]]]:
    """The work and the calls of all linears of a name on the same rows."""
    parts = model.linears[name]
    x = model.random(rows, parts[0].ins)
    add = model.random(rows, parts[0].columns) if name in RESIDUAL else None
    work = Work(0)
    for part in parts:
        work += _work_of(part, rows, model.dtype.itemsize, residual=add is not None)
    return work, [partial(part.linear, x, add) for part in parts]


def _work_of(part: Packed, rows: int, itemsize: int, *, residual: bool) -> Work:
    return linear_work(rows, part.outs, part.ins, part.columns, part.bytes, itemsize, residual=residual)


def _linear(model: KernelModel, name: str, rows: int) -> Subject:
    work, calls = _linear_calls(model, name, rows)
    first = model.linears[name][0]
    return _subject(f"linear {name} [{first.outs}, {first.ins}]", Case(rows), work, calls)


def _all_linears(model: KernelModel, rows: int) -> Subject:
    """In the order of a pass: a weight is read again only after all others."""
    work = Work(0)
    by_name: dict[str, list[Callable[[], object]]] = {}
    for name in model.linears:
        part, by_name[name] = _linear_calls(model, name, rows)
        work += part
    head = by_name.pop("head")
    in_order = [call for layer in zip(*by_name.values(), strict=True) for call in layer]
    return _subject("all linears in turn", Case(rows), work, [*in_order, *head])


def _attention(model: KernelModel, case: Case) -> Subject:
    shape = model.shape
    paged = model.kernels.paged_attention(model.inputs(case), shape, model.slabs[0])
    qkv = model.random(case.all_rows, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    q = qkv[:, : shape.heads]
    work = attention_work(case, shape.heads, shape.kv_heads, shape.head_dim, model.dtype.itemsize)
    calls = [partial(paged.attend, q, slab) for slab in model.slabs]
    return _subject("attention", case, work.times(len(calls)), calls)


def _norm(model: KernelModel, rows: int) -> Subject:
    weight, eps = model.norm.weight, model.norm.eps
    x = model.random(rows, len(weight))
    count = 2 * model.target.spec.num_layers + 1
    work = norm_work(rows, len(weight), model.dtype.itemsize)
    calls = [partial(model.kernels.rms_norm, x, weight, eps)] * count
    return _subject("rms_norm", Case(rows), work.times(count), calls)


def _rope_store(model: KernelModel, rows: int) -> Subject:
    """At position 0, where nothing turns: the same rows can be rotated over and over."""
    shape, kernels = model.shape, model.kernels
    qkv = model.random(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    rotated, kv = qkv[:, : shape.heads + shape.kv_heads], qkv[:, shape.heads :]
    positions = torch.zeros(rows, dtype=torch.int64, device=qkv.device)
    cos, sin = Rope(model.frequencies, model.dtype, qkv.device)(positions)
    slots = torch.arange(rows, device=qkv.device)

    def step(slab: torch.Tensor) -> None:
        kernels.rope_(rotated, cos, sin)
        kernels.store_kv(slab, kv, slots)

    calls = [partial(step, slab) for slab in model.slabs]
    work = rope_store_work(rows, shape.heads, shape.kv_heads, shape.head_dim, model.dtype.itemsize)
    return _subject("rope, store K/V", Case(rows), work.times(len(calls)), calls)


def _argmax(model: KernelModel, rows: int) -> Subject:
    vocab = model.target.spec.vocab_size
    logits = model.random(rows, vocab)
    work = argmax_work(rows, vocab, model.dtype.itemsize)
    return _subject(f"argmax of {vocab}", Case(rows), work, [partial(first_argmax, logits)])


def _pass(model: KernelModel, case: Case, *, full: bool) -> Subject:
    """Its bytes are those of the memory floor: all weights once, each request's K/V once."""
    target, shape = model.target, model.shape
    inputs = model.inputs(case)
    tokens = torch.randint(target.spec.vocab_size, (case.all_rows,), device=inputs.positions.device)
    names = model.linears if full else [name for name in model.linears if name != "head"]
    products = sum(2 * part.outs * part.ins for name in names for part in model.linears[name])
    sizes = (shape.kv_heads, shape.head_dim, model.dtype.itemsize)
    attention = attention_work(case, shape.heads, *sizes).flops
    work = Work(
        model.layer_bytes
        + (model.linears["head"][0].bytes if full else 0)
        + len(model.slabs) * kv_read_bytes(case, *sizes),
        case.all_rows * products + len(model.slabs) * attention,
    )

    def run() -> None:
        hidden = target.forward(tokens, inputs, model.slabs)
        if full:
            first_argmax(target.logits(hidden.last))

    return Subject(FULL if full else LAYERS, case, 1, work, run)


def _subject(kernel: str, case: Case, work: Work, calls: Sequence[Callable[[], object]]) -> Subject:
    def run() -> None:
        for call in calls:
            call()

    return Subject(kernel, case, len(calls), work, run)
