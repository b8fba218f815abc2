"""Times kernels against ceilings that are measured in turn with them; all the arithmetic of the result.

Knows nothing of tensors: what runs is a callable, what it does is bytes and floating-point operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xspec_cli.benchlib.stats import median

SAMPLE_MS = 10.0
"""A sample repeats its subject until it takes about so long: timers and wake-ups weigh little then."""

MAX_REPETITIONS = 10_000


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes that have to be read or written at least once; multiplications and additions of products."""

    bytes: int
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)

    def times(self, count: int) -> Work:
        return Work(self.bytes * count, self.flops * count)


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that run together: of no request in particular (requests 0), or `rows` of each request, the last
    of which sees `keys` keys."""

    rows: int
    requests: int = 0
    keys: int = 0

    @property
    def all_rows(self) -> int:
        return self.rows * max(1, self.requests)

    def __str__(self) -> str:
        return f"{self.requests} x {self.rows}, {self.keys} keys" if self.requests else str(self.rows)


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing to time. `run` makes the `calls` calls that one forward pass makes of the kernel."""

    kernel: str
    case: Case
    calls: int
    work: Work  # of all the calls
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine did at one moment with nothing in the way. A copy counts what it reads and writes.

    `matmul_dtype`: the type of the product, "float32" where half types are multiplied no faster.
    """

    read_gb_s: float
    copy_gb_s: float
    matmul_gflop_s: float
    matmul_dtype: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A subject's samples, each beside the ceilings of the same repeat."""

    kernel: str
    case: Case
    calls: int
    work: Work
    samples_ms: tuple[float, ...]
    ceilings: tuple[Ceilings, ...]

    @property
    def ms(self) -> float:
        return median(self.samples_ms)

    @property
    def gb_s(self) -> float:
        return self.work.bytes / self.ms / 1e6

    @property
    def gflop_s(self) -> float:
        return self.work.flops / self.ms / 1e6

    @property
    def memory_floor_ms(self) -> float:
        """What reading the bytes takes at the ceiling."""
        return median([self.work.bytes / ceiling.read_gb_s / 1e6 for ceiling in self.ceilings])

    @property
    def arithmetic_floor_ms(self) -> float:
        """What the products take at the ceiling."""
        return median([self.work.flops / ceiling.matmul_gflop_s / 1e6 for ceiling in self.ceilings])

    @property
    def of_memory_floor(self) -> float:
        """Time over the memory floor: median of the repeats' own ratios, in which drift cancels out."""
        pairs = zip(self.samples_ms, self.ceilings, strict=True)
        return median([ms * 1e6 * ceiling.read_gb_s / self.work.bytes for ms, ceiling in pairs])

    @property
    def of_read(self) -> float:
        return 1.0 / self.of_memory_floor

    @property
    def of_matmul(self) -> float:
        pairs = zip(self.samples_ms, self.ceilings, strict=True)
        return median([self.work.flops / ms / 1e6 / ceiling.matmul_gflop_s for ms, ceiling in pairs])

    def over(self, base: Measured) -> float:
        """Time over that of `base`, which was measured in the same repeats."""
        return median([ms / one for ms, one in zip(self.samples_ms, base.samples_ms, strict=True)])


def measure(
    subjects: Sequence[Subject],
    ceilings: Callable[[], Ceilings],
    *,
    repeats: int,
    wait: Callable[[], None],
    clock_s: Callable[[], float] = time.perf_counter,
) -> list[Measured]:
    """Each repeat measures the ceilings, then every subject once, in an order that turns round.

    `wait` returns when the device has done all that was asked of it.
    """
    repetitions = []
    for subject in subjects:
        _sample_ms(subject, 1, wait, clock_s)  # makes what only a first call makes
        once_ms = _sample_ms(subject, 1, wait, clock_s)
        wanted = math.ceil(SAMPLE_MS / once_ms) if once_ms > 0 else MAX_REPETITIONS
        repetitions.append(max(1, min(MAX_REPETITIONS, wanted)))
    found: list[list[float]] = [[] for _ in subjects]
    tops: list[Ceilings] = []
    for repeat in range(repeats):
        tops.append(ceilings())
        order = range(len(subjects))
        for index in order if repeat % 2 == 0 else reversed(order):
            found[index].append(_sample_ms(subjects[index], repetitions[index], wait, clock_s))
    return [
        Measured(subject.kernel, subject.case, subject.calls, subject.work, tuple(samples), tuple(tops))
        for subject, samples in zip(subjects, found, strict=True)
    ]


def _sample_ms(
    subject: Subject, repetitions: int, wait: Callable[[], None], clock_s: Callable[[], float]
) -> float:
    """Of one `run`."""
    began_s = clock_s()
    for _ in range(repetitions):
        subject.run()
    wait()
    return (clock_s() - began_s) * 1e3 / repetitions


def linear_work(
    rows: int, outs: int, ins: int, columns: int, weight_bytes: int, itemsize: int, *, residual: bool = False
) -> Work:
    """Weight [outs, ins] times `rows` rows, yielding `columns` values a row (half of outs where gated)."""
    moved = rows * (ins + columns * (2 if residual else 1)) * itemsize
    return Work(weight_bytes + moved, 2 * rows * outs * ins)


def attention_work(case: Case, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Work:
    """Of one layer. A request's keys and values are read once, however many of its rows see them."""
    seen = case.rows * case.keys - case.rows * (case.rows - 1) // 2  # a row sees one key more than the last
    kv_bytes = kv_read_bytes(case, kv_heads, head_dim, itemsize)
    rows_bytes = 2 * case.all_rows * heads * head_dim * itemsize
    return Work(kv_bytes + rows_bytes, 4 * case.requests * seen * heads * head_dim)


def kv_read_bytes(case: Case, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Of one layer."""
    return 2 * case.requests * case.keys * kv_heads * head_dim * itemsize


def norm_work(rows: int, columns: int, itemsize: int) -> Work:
    return Work((2 * rows + 1) * columns * itemsize)


def rope_store_work(rows: int, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> Work:
    """Query and key heads are read and written back, key and value heads read and stored; two angles a
    dimension and row."""
    moved = 2 * (heads + kv_heads) + 2 * 2 * kv_heads + 2
    return Work(rows * moved * head_dim * itemsize)


def argmax_work(rows: int, vocab: int, itemsize: int) -> Work:
    return Work(rows * vocab * itemsize)
