"""Every kernel of a platform equals the reference, in every dtype the platform declares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from xspec.errors import ConfigError
from xspec.kernels import cpu
from xspec.kernels.base import AttentionShape
from xspec.kernels.cpu import CpuKernels, OneDnnLinear
from xspec.kernels.reference import ReferenceKernels
from xspec.kv.layout import KVLayout, Planes
from xspec.kv.pool import KVPool
from xspec.nn.inputs import ForwardInputs, Ragged, Segment
from xspec.nn.rope import Rope, RopeConfig, RopeScaling, inverse_frequencies
from xspec.platform.cpu import CpuPlatform, memory_bytes
from xspec.platform.select import select_platform

DTYPES = sorted(CpuPlatform().abilities.dtypes, key=str)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    scale = expected.abs().max().clamp(min=1.0).item()
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_for_every_row_count(dtype: torch.dtype, bias: bool) -> None:
    """1 to 200 rows against the exact product; odd sizes, so that packed blocks have ragged ends."""
    weight, offset = randn(77, 45, dtype=dtype), randn(77, dtype=dtype, seed=1) if bias else None
    packed = CpuKernels().pack_linear(weight, offset)
    x, add = randn(200, 45, dtype=dtype, seed=2), randn(200, 77, dtype=dtype, seed=3)
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    for rows in range(1, 201):
        close(packed(x[:rows]), exact[:rows], dtype)
        close(packed(x[:rows], add[:rows]), exact[:rows] + add[:rows].double(), dtype)
    before = add.clone()
    packed(x, add)
    assert torch.equal(add, before)  # the residual is an input, not an output


def test_bf16_is_packed_where_the_cpu_allows() -> None:
    linear = CpuKernels().pack_linear(randn(8, 8, dtype=torch.bfloat16))
    assert isinstance(linear, OneDnnLinear) == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rope_silu(dtype: torch.dtype) -> None:
    kernels, reference = CpuKernels(), ReferenceKernels()
    x, weight = randn(9, 48, dtype=dtype) * 5, randn(48, dtype=dtype, seed=1)
    close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(reference.rms_norm(x, weight, 1e-5), exact, dtype)
    heads, per_head = randn(9, 6, 8, dtype=dtype), randn(6, 8, dtype=dtype, seed=1)
    close(kernels.rms_norm(heads, per_head, 1e-5), reference.rms_norm(heads, per_head, 1e-5), dtype)
    assert torch.equal(kernels.rms_norm(heads * 0, per_head, 1e-5), heads * 0)

    weight, bias = randn(20, 48, dtype=dtype, seed=5), randn(20, dtype=dtype, seed=6)
    gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, -1)
    for packed in (kernels.pack_gated(weight, bias), reference.pack_gated(weight, bias)):
        close(packed(x), F.silu(gate) * up, dtype)

    rope = Rope(inverse_frequencies(RopeConfig(1e4), 8), dtype, torch.device("cpu"))
    cos, sin = rope(torch.tensor([0, 1, 5, 99, 3, 3, 8, 20, 50]))
    assert cos.shape == sin.shape == (9, 1, 8) and cos.dtype == sin.dtype == dtype
    wide = randn(9, 10, 8, dtype=dtype, seed=4)
    found, expected = wide.clone(), wide[:, :6].clone()
    kernels.rope_(found[:, :6], cos, sin)  # a slice of a fused buffer, as models pass it
    reference.rope_(expected, cos, sin)
    close(found[:, :6], expected, dtype)
    assert torch.equal(found[:, 6:], wide[:, 6:])
    assert torch.equal(found[0], wide[0])  # position 0 does not turn


def test_rope_rotates_each_pair_by_its_angle() -> None:
    rope = Rope(inverse_frequencies(RopeConfig(100.0), 4), torch.float64, torch.device("cpu"))
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    CpuKernels().rope_(x, *rope(torch.tensor([2])))
    first, second = complex(1, 3), complex(2, 4)  # halves pair up: (0, 2) turns by 2, (1, 3) by 2 / 10
    turned = [first * complex(*_unit(2.0)), second * complex(*_unit(0.2))]
    expected = torch.tensor(
        [turned[0].real, turned[1].real, turned[0].imag, turned[1].imag], dtype=torch.float64
    )
    torch.testing.assert_close(x[0, 0], expected, rtol=0, atol=1e-6)


def _unit(angle: float) -> tuple[float, float]:
    value = torch.tensor(angle, dtype=torch.float64)
    return value.cos().item(), value.sin().item()


def test_rope_scalings() -> None:
    plain = inverse_frequencies(RopeConfig(1e4), 8)
    torch.testing.assert_close(plain, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    linear = RopeConfig(1e4, RopeScaling.LINEAR, factor=4.0)
    torch.testing.assert_close(inverse_frequencies(linear, 8), plain / 4)
    factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
    torch.testing.assert_close(
        inverse_frequencies(RopeConfig(1e4, RopeScaling.FACTORS), 8, factors), plain / factors
    )
    llama3 = RopeConfig(1e4, RopeScaling.LLAMA3, factor=8.0, original_max_position=1024)
    found = inverse_frequencies(llama3, 8)
    assert found[0] == plain[0] and found[1] == plain[1]  # 163 and 16 turns: above high_freq_factor
    torch.testing.assert_close(found[3], plain[3] / 8)  # 0.16 turns: below low_freq_factor
    smooth = (1024 * 0.01 / (2 * torch.pi) - 1) / 3  # 1.63 turns, between
    torch.testing.assert_close(found[2], torch.tensor((1 - smooth) * 0.01 / 8 + smooth * 0.01))


CASES = {  # name: [(sequences, rows each, pages)], KV lengths come from a seed
    "one decode row": [(1, 1, 3)],
    "a batch": [(13, 1, 5)],
    "verify rows": [(4, 6, 4)],
    "a chunk longer than a tile": [(1, 150, 12)],
    "many sequences with long rows": [(2, 70, 6)],
    "everything": [(1, 90, 7), (1, 3, 2), (5, 1, 6), (3, 4, 3)],
}


def make_case(case: str, heads: int, kv_heads: int, dtype: torch.dtype) -> tuple[ForwardInputs, torch.Tensor]:
    """Inputs and a filled slab; table entries past a sequence's length name the scratch page."""
    block_size, head_dim = 16, 8
    generator = torch.Generator().manual_seed(len(case))
    sequences = sum(count for count, _, _ in CASES[case])
    width = max(pages for _, _, pages in CASES[case]) + 2
    pages = torch.randperm(sequences * width, generator=generator).view(sequences, width) + 1
    positions, slots, segments, sequence = [], [], [], 0
    for count, rows, used in CASES[case]:
        segments.append(Segment(sequence, count, rows, used, len(positions)))
        for _ in range(count):
            end = int(torch.randint(rows, used * block_size + 1, (), generator=generator))
            for position in range(end - rows, end):
                positions.append(position)
                slots.append(
                    int(pages[sequence, position // block_size]) * block_size + position % block_size
                )
            pages[sequence, -(-end // block_size) :] = 0
            sequence += 1
    at = torch.tensor(positions)
    inputs = ForwardInputs(at, torch.tensor(slots), at + 1, pages, tuple(segments))
    slab = CpuKernels().kv_slab(sequences * width + 1, block_size, kv_heads, head_dim, dtype)
    return inputs, slab.copy_(randn(*slab.shape, dtype=dtype, seed=7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads,kv_heads", [(6, 2), (3, 3), (4, 1)])
def test_attention(case: str, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    inputs, slab = make_case(case, heads, kv_heads, dtype)
    shape = AttentionShape(heads, kv_heads, 8, 0.3, dtype)
    rows = inputs.positions.shape[0]
    qkv = randn(rows, heads + 2 * kv_heads, 8, dtype=dtype, seed=3)
    twin = slab.clone()
    found = CpuKernels().paged_attention(inputs, shape, slab)
    expected = ReferenceKernels().paged_attention(inputs, shape, twin)
    found.store(slab, qkv[:, heads:])
    expected.store(twin, qkv[:, heads:])
    assert torch.equal(slab, twin)
    before = slab.clone()
    once = found.attend(qkv[:, :heads], slab)
    assert once.shape == (rows, heads * 8)
    close(once, expected.attend(qkv[:, :heads], twin), dtype)
    assert torch.equal(slab, before)
    assert torch.equal(found.attend(qkv[:, :heads], slab), once)  # scratch carries nothing over


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", [CpuKernels(), ReferenceKernels()])
def test_ragged_rows_see_what_they_would_see_alone(
    kernels: CpuKernels | ReferenceKernels, dtype: torch.dtype
) -> None:
    """Four sequences with 3, 1, 0 and 2 rows, and two padding rows, against one segment a row."""
    block, counts, ends, width = 4, [3, 1, 0, 2], [9, 5, 1, 7], 4
    table = torch.arange(1, 13).view(4, 3)
    lanes = [lane for lane, count in enumerate(counts) for _ in range(count)]
    positions = [ends[lane] - count + j for lane, count in enumerate(counts) for j in range(count)]
    flat = [lane * width + j for lane, count in enumerate(counts) for j in range(count)]
    first = [0, 3, 4, 4]
    dense = [min(first[lane] + j, 7) for lane in range(4) for j in range(width)]
    ragged = Ragged(torch.tensor(dense), torch.tensor([*flat, 0, 0]))
    at = torch.tensor([*positions, 0, 0])
    shape = AttentionShape(4, 2, 8, 0.3, dtype)
    slab = CpuKernels().kv_slab(14, block, 2, 8, dtype).copy_(randn(4, 14, block, 8, dtype=dtype, seed=7))
    q = randn(8, 4, 8, dtype=dtype, seed=3)
    inputs = ForwardInputs(at, at, at + 1, table, (Segment(0, 4, width, 3, 0),), ragged)
    found = kernels.paged_attention(inputs, shape, slab).attend(q, slab)
    assert found.shape == (8, 32) and found.isfinite().all()
    alone = ForwardInputs(
        at[:6], at[:6], at[:6] + 1, table[lanes], tuple(Segment(n, 1, 1, 3, n) for n in range(6))
    )
    expected = ReferenceKernels().paged_attention(alone, shape, slab).attend(q[:6], slab)
    close(found[:6], expected, dtype)


@pytest.mark.parametrize("kernels", [CpuKernels(), ReferenceKernels()])
def test_keys_before_the_first_are_never_seen(kernels: CpuKernels | ReferenceKernels) -> None:
    """With first_key 1 a row of n keys mixes the last n - 1; a row whose only key is 0 keeps it."""
    dtype = torch.float64
    slab = kernels.kv_slab(3, 4, 1, 8, dtype).copy_(randn(2, 3, 4, 8, dtype=dtype))
    at = torch.tensor([0, 1, 6])
    segments = tuple(Segment(n, 1, 1, 2, n) for n in range(3))
    inputs = ForwardInputs(at, at, at + 1, torch.tensor([[1, 2]] * 3), segments)
    q = randn(3, 2, 8, dtype=dtype, seed=1)
    shape = AttentionShape(2, 1, 8, 0.3, dtype, first_key=1)
    found = kernels.paged_attention(inputs, shape, slab).attend(q, slab).view(3, 2, 8)
    keys, values = slab[:, 1:].flatten(1, 2)
    for row, seen in enumerate([slice(0, 1), slice(1, 2), slice(1, 7)]):
        expected = torch.softmax(q[row] @ keys[seen].T * 0.3, -1) @ values[seen]
        close(found[row], expected, dtype)


@pytest.mark.parametrize("kernels", [CpuKernels(), ReferenceKernels()])
def test_keys_and_values_are_stored_at_any_slot(kernels: CpuKernels | ReferenceKernels) -> None:
    slab = kernels.kv_slab(3, 4, 1, 8, torch.float64)
    kv = randn(2, 2, 8, dtype=torch.float64)
    kernels.store_kv(slab, kv, torch.tensor([9, 2]))
    assert torch.equal(slab[:, 2, 1], kv[0]) and torch.equal(slab[:, 0, 2], kv[1])
    assert int((slab != 0).any(-1).sum()) == 4


@pytest.mark.parametrize("guesses", [False, True])
@pytest.mark.parametrize("kernels", [CpuKernels(), ReferenceKernels()])
def test_a_guess_that_is_not_finite_is_stored_as_zero(
    kernels: CpuKernels | ReferenceKernels, guesses: bool
) -> None:
    """Row 1 is one; row 0, which does not see it, mixes its own finite values."""
    slab = kernels.kv_slab(2, 4, 1, 8, torch.float64)
    at = torch.tensor([0, 1])
    inputs = ForwardInputs(
        at + 4, at + 4, at + 1, torch.tensor([[1]]), (Segment(0, 1, 2, 1, 0),), guesses=guesses
    )
    kv = randn(2, 2, 8, dtype=torch.float64)
    kv[1, 0, 3], kv[1, 1, 5] = float("nan"), float("-inf")
    shape = AttentionShape(1, 1, 8, 0.3, torch.float64)
    attention = kernels.paged_attention(inputs, shape, slab)
    attention.store(slab, kv)
    expected = kv.nan_to_num(0.0, 0.0, 0.0) if guesses else kv
    torch.testing.assert_close(slab[:, 1, :2].transpose(0, 1), expected, equal_nan=True, rtol=0, atol=0)
    if guesses:
        found = attention.attend(randn(2, 1, 8, dtype=torch.float64, seed=1), slab)
        close(found[0], kv[0, 1], torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_keys_weigh_exactly_nothing(dtype: torch.dtype) -> None:
    """Huge numbers past every length and on the scratch page leave the result bit for bit as it was."""
    inputs, slab = make_case("everything", 4, 2, dtype)
    shape = AttentionShape(4, 2, 8, 0.3, dtype)
    q = randn(inputs.positions.shape[0], 4, 8, dtype=dtype, seed=3)
    visible = torch.zeros(slab.shape[1] * slab.shape[2], dtype=torch.bool)
    for segment in inputs.segments:
        for i in range(segment.count):
            end = int(inputs.kv_lens[segment.first_row + (i + 1) * segment.rows - 1])
            where = torch.arange(end)
            visible[inputs.page_table[segment.first + i, where // 16] * 16 + where % 16] = True
    clean = CpuKernels().paged_attention(inputs, shape, slab).attend(q, slab)
    slab.view(slab.shape[0], -1, 8)[:, ~visible] = 1e4
    assert torch.equal(CpuKernels().paged_attention(inputs, shape, slab).attend(q, slab), clean)


@pytest.mark.parametrize("kernels", [CpuKernels(), ReferenceKernels()])
def test_zeroed_pages_forget_even_nan(kernels: CpuKernels | ReferenceKernels) -> None:
    slab = kernels.kv_slab(6, 4, 2, 8, torch.bfloat16).fill_(1.0)
    slab[:, [1, 4]] = float("nan")
    kernels.zero_pages(slab, torch.tensor([4, 1]))
    assert not slab[:, [1, 4]].any()
    assert (slab[:, [0, 2, 3, 5]] == 1.0).all()


def test_tiles_and_unkept_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "TILE_ROWS", 5)
    monkeypatch.setattr(cpu, "TILE_KV_BYTES", 20_000)
    monkeypatch.setattr(cpu, "KEPT_MASK_BYTES", 0)
    for case in CASES:
        test_attention(case, 6, 2, torch.float64)


def test_pool_and_layout() -> None:
    planes = Planes(3, kv_heads=2, head_dim=8)
    layout = KVLayout(planes, block_size=16, dtype=torch.bfloat16)
    assert layout.token_bytes == 2 * 3 * 2 * 8 * 2
    assert layout.page_bytes == 16 * 192
    assert layout.pages_for(10 * 16 * 192 + 5) == 10
    assert layout.pages_for(-1) == 0
    assert [layout.pages_of(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    pool = KVPool(layout, 10, CpuKernels(), torch.device("cpu"))
    assert (pool.usable_pages, pool.sink_page, len(pool.slabs), pool.bytes) == (8, 9, 3, 10 * 3072)
    assert sum(slab.nbytes for slab in pool.slabs) == pool.bytes
    assert all(slab.dtype == torch.bfloat16 and not slab.any() for slab in pool.slabs)
    with pytest.raises(ConfigError, match="at least 3 pages.*--max_cache_size"):
        KVPool(layout, 2, CpuKernels(), torch.device("cpu"))
    with pytest.raises(ConfigError, match="--block_size=0"):
        KVLayout(planes, block_size=0, dtype=torch.bfloat16)


def test_a_drafter_adds_its_planes_and_state_to_every_page() -> None:
    draft = Planes(2, kv_heads=1, head_dim=4, page_state=10)
    layout = KVLayout(Planes(3, kv_heads=2, head_dim=8), block_size=16, dtype=torch.bfloat16, draft=draft)
    assert layout.token_bytes == 192 + 2 * 2 * 4 * 2
    assert layout.page_bytes == 16 * 224 + 20
    pool = KVPool(layout, 10, CpuKernels(), torch.device("cpu"))
    assert (len(pool.target), len(pool.draft), pool.page_state.shape) == (3, 2, (10, 10))
    assert sum(slab.nbytes for slab in pool.slabs) + pool.page_state.nbytes == pool.bytes


def test_cpu_platform() -> None:
    platform = select_platform("auto")
    assert platform.name == "cpu" and platform.device() == torch.device("cpu")
    assert platform.abilities.default_dtype in platform.abilities.dtypes
    if platform.kernels_name().startswith("native"):  # auto takes them only where they are fast
        assert platform.abilities.default_dtype is torch.bfloat16
    assert platform.abilities.default_graph_backend in platform.abilities.graph_backends
    calls: list[int] = []
    captured = platform.capture(lambda: calls.append(1), rows=64)
    assert calls == [1]  # capturing runs it once, as it does on every platform
    platform.capture(lambda: calls.append(1), rows=65)
    assert calls == [1]  # except where that would only cost time
    captured.replay()
    captured.replay()
    assert calls == [1, 1, 1]
    event = platform.event()
    event.wait()
    assert event.done()
    assert platform.pinned((2, 3), torch.int64).shape == (2, 3)
    assert [bucket.rows for bucket in platform.bucket_grid(10).buckets] == [1, 2, 4, 8, 10]
    free, total = platform.memory_bytes()
    assert 0 < free <= total


@pytest.mark.parametrize(
    "device,reason", [("cuda", "not supported yet"), ("npu:0", "not supported yet"), ("tpu", "not a device")]
)
def test_other_devices_are_refused(device: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"--device={device}.*{reason}|--device={device} is {reason}"):
        select_platform(device)


MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    "cgroup,files,expected",
    [
        ("0::/", {}, (600 * 1024, 1000 * 1024)),
        ("0::/a/b", {"memory.max": "max", "memory.current": "5"}, (600 * 1024, 1000 * 1024)),
        (
            "0::/a/b",
            {
                "a/b/memory.max": "max",
                "a/b/memory.current": "7",
                "a/memory.max": "400000",
                "a/memory.current": "300000",
                "a/memory.stat": "anon 1\ninactive_file 50000\n",
            },
            (150000, 400000),
        ),
        ("0::/", {"memory.max": "1000", "memory.current": "5000"}, (0, 1000)),
        (
            "4:cpu,memory:/pod\n0::/x",
            {
                "memory/pod/memory.limit_in_bytes": "300000",
                "memory/pod/memory.usage_in_bytes": "120000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "1",
            },
            (180000, 300000),
        ),
    ],
)
def test_memory_respects_cgroups(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: tuple[int, int]
) -> None:
    proc = write(tmp_path / "proc", {"meminfo": MEMINFO, "self/cgroup": cgroup + "\n"})
    assert memory_bytes(proc, write(tmp_path / "cgroup", files)) == expected


def test_memory_without_proc(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max_cache_size"):
        memory_bytes(tmp_path, tmp_path)
