"""The fused native layers against torch in fp64, and the promise that a row's bits are its own.

"As good as torch" is measured, not assumed: against the same bf16 weights computed in fp64, the native
error must stay near that of torch's bf16 path.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from paged import PagedRunner

from xspec.kernels import native
from xspec.kernels.base import AttentionShape, Kernels
from xspec.kernels.cpu import CpuKernels
from xspec.kernels.cpu_native import NativeKernels
from xspec.kernels.native import NativeLibrary, Team
from xspec.kernels.native_layers import NativeLayers
from xspec.models.blocks import Decoder, LayerBuilder, layer_prefix
from xspec.models.config import DecoderConfig
from xspec.models.loader import load_target
from xspec.nn.inputs import ForwardInputs, Segment
from xspec.nn.rope import Rope, inverse_frequencies
from xspec.nn.stack import LayerStack

BF16, CPU = torch.bfloat16, torch.device("cpu")

# Sizes that fit the native kernels: heads of 32 to 128, 1 to 8 query heads a group.
SIZES = {
    "llama": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 1},
    "llama-tied": {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
    "llama-bias": {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1},
    "llama3": {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen2": {"hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 416},
    "qwen3": {"hidden_size": 96, "head_dim": 64, "num_attention_heads": 6},
    "qwen3-bias": {"hidden_size": 64, "head_dim": 96, "intermediate_size": 160},
}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def kernels(team: Team) -> NativeKernels:
    return NativeKernels(team)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights rounded to bf16, so that every path computes the same function."""
    root = tmp_path_factory.mktemp("native")
    return {
        name: tiny.make_checkpoint(root / name, name, dtype=BF16, overrides={**sizes, "num_hidden_layers": 3})
        for name, sizes in SIZES.items()
    }


def load(path: Path, kernels: Kernels, dtype: torch.dtype = BF16) -> Decoder:
    return load_target(path, kernels, dtype=dtype, device=CPU)


def ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.VOCAB_SIZE, (length,), generator=generator).tolist()


TEXTS = [ids(100, seed) for seed in range(4)]

Work = Callable[[PagedRunner], list[torch.Tensor]]


def everything(runner: PagedRunner) -> list[torch.Tensor]:
    """Chunked prefill, decoding, verification and a mixed pass: logits of every row of four texts."""
    at = [0] * len(TEXTS)

    def go(counts: dict[int, int], uniform: bool = False) -> torch.Tensor:
        work = [(i, TEXTS[i][at[i] : at[i] + count]) for i, count in counts.items()]
        for i, count in counts.items():
            at[i] += count
        return runner.forward(work, uniform=uniform)

    return [
        go({0: 40, 1: 7, 2: 33}),
        go({0: 1, 1: 1, 2: 1}, uniform=True),
        go({2: 5, 0: 5, 1: 5}, uniform=True),
        go({0: 3, 1: 1, 3: 50, 2: 2}),
        go({3: 1}),
    ]


def run(path: Path, kernels: Kernels, dtype: torch.dtype = BF16) -> torch.Tensor:
    target = load(path, kernels, dtype)
    runner = PagedRunner(target, kernels, dtype, sequences=4, max_tokens=112, block_size=16)
    return torch.cat(everything(runner)).double()


def rms(error: torch.Tensor) -> float:
    return float(error.pow(2).mean().sqrt())


@pytest.mark.parametrize("variant", SIZES)
def test_as_close_to_the_truth_as_torch(
    checkpoints: dict[str, Path], kernels: NativeKernels, variant: str
) -> None:
    truth = run(checkpoints[variant], CpuKernels(), torch.float64)
    found, torchs = run(checkpoints[variant], kernels), run(checkpoints[variant], CpuKernels())
    assert rms(found - truth) <= 1.25 * rms(torchs - truth)
    assert (found - truth).abs().max() <= 2.0 * (torchs - truth).abs().max()
    assert rms(torchs - truth) < 0.1 * rms(truth)  # or the comparison would say nothing
    assert kernels.row_dependence(16, 64, BF16) == ()


@pytest.mark.parametrize("variant", ["llama", "qwen3-bias"])
def test_fused_or_op_by_op(
    checkpoints: dict[str, Path],
    kernels: NativeKernels,
    variant: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The single ops compute the same; only rotation is torch's there, and so off by a rounding or two."""
    truth = run(checkpoints[variant], CpuKernels(), torch.float64)
    fused = run(checkpoints[variant], kernels)
    calls = []
    monkeypatch.setattr(NativeKernels, "fuse", lambda self, *parts: calls.append(parts))
    apart = run(checkpoints[variant], kernels)
    assert calls and not torch.equal(fused, apart)
    assert rms(apart - truth) <= 1.25 * rms(fused - truth)


def test_small_pages_are_torchs(checkpoints: dict[str, Path], kernels: NativeKernels) -> None:
    """Pages of 4 tokens do not fit: attention falls back, linears stay native, results stay good."""
    own = NativeKernels(kernels._team)
    target = load(checkpoints["llama"], own)
    runner = PagedRunner(target, own, BF16, sequences=4, max_tokens=112, block_size=4)
    found = torch.cat(everything(runner)).double()
    truth = run(checkpoints["llama"], CpuKernels(), torch.float64)
    assert rms(found - truth) < 0.1 * rms(truth)
    (reason,) = own.row_dependence(4, 32, BF16)
    assert "--block_size" in reason


# -- a row's bits are its own ------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_rows_do_not_depend_on_their_company(
    checkpoints: dict[str, Path], kernels: NativeKernels, variant: str
) -> None:
    """Logits of each row of a text: one row at a time, 1 + K at a time, prefilled, beside others."""
    text = TEXTS[0]

    def alone(step: int) -> torch.Tensor:
        target = load(checkpoints[variant], kernels)
        runner = PagedRunner(target, kernels, BF16, sequences=1, max_tokens=112, block_size=16)
        return torch.cat([runner.forward([(0, text[i : i + step])]) for i in range(0, len(text), step)])

    one = alone(1)
    for step in (2, 5, 9, 64, 100):
        assert torch.equal(alone(step), one), step
    target = load(checkpoints[variant], kernels)
    runner = PagedRunner(target, kernels, BF16, sequences=4, max_tokens=112, block_size=16, seed=3)
    parts = everything(runner)
    mine = torch.cat([parts[0][:40], parts[1][:1], parts[2][5:10], parts[3][:3]])
    assert torch.equal(mine, one[: len(mine)])


def test_the_number_of_threads_changes_nothing(checkpoints: dict[str, Path], library: NativeLibrary) -> None:
    one, three = (run(checkpoints["qwen3"], NativeKernels(Team(library, threads))) for threads in (1, 3))
    assert torch.equal(one, three)


def test_calls_from_several_threads_wait_for_each_other(
    checkpoints: dict[str, Path], library: NativeLibrary
) -> None:
    kernels = NativeKernels(Team(library, 2))
    target = load(checkpoints["llama"], kernels)
    x = torch.randn(5, 256).to(BF16)
    expected, found = target.logits(x), []

    def compute() -> None:
        with torch.no_grad():
            found.extend(target.logits(x) for _ in range(50))

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200 and all(torch.equal(one, expected) for one in found)


# -- the stack itself --------------------------------------------------------------------------------


class Stacked:
    """A stack of random layers over a small paged cache."""

    def __init__(
        self, path: Path, kernels: Kernels, *, first_key: int = 0, dtype: torch.dtype = BF16
    ) -> None:
        self.config: DecoderConfig = load(path, CpuKernels()).config
        weights = tiny.make_weights(tiny.make_config(path.name, SIZES[path.name]), dtype=BF16)
        build = LayerBuilder(self.config, lambda name, to: to.copy_(weights[name]), kernels, dtype, CPU)
        config = self.config
        scale = config.head_dim**-0.5
        shape = AttentionShape(config.heads, config.kv_heads, config.head_dim, scale, dtype, first_key)
        layers = [build.layer(layer_prefix(index), shape) for index in range(2)]
        rope = Rope(inverse_frequencies(config.rope, config.head_dim), dtype, CPU)
        norm = build.norm("model.norm.weight", config.hidden_size)
        self.stack = LayerStack(kernels, shape, layers, norm, rope)
        self.slabs = [kernels.kv_slab(8, 16, config.kv_heads, config.head_dim, dtype) for _ in layers]
        self.dtype = dtype

    def residual(self, rows: int, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, self.config.hidden_size, generator=generator).to(BF16).to(self.dtype)


def inputs_of(
    positions: Sequence[int], kv_lens: Sequence[int], pages: Sequence[int] = (3, 5, 1)
) -> ForwardInputs:
    at = torch.tensor(positions, dtype=torch.int64)
    table = torch.tensor([pages])
    slots = table[0][at // 16] * 16 + at % 16
    segment = Segment(0, 1, len(positions), len(pages), 0)
    return ForwardInputs(at, slots, torch.tensor(kv_lens, dtype=torch.int64), table, (segment,))


def test_taps(checkpoints: dict[str, Path], kernels: NativeKernels) -> None:
    """Residual streams after i layers, in the order asked for; asking changes nothing else."""
    own = Stacked(checkpoints["qwen3"], kernels)
    inputs, residual = inputs_of(range(20), range(1, 21)), own.residual(20)
    before = residual.clone()
    plain = own.stack(residual, inputs, own.slabs)
    assert isinstance(own.stack._fused, NativeLayers) and plain.taps == ()
    for taps in ((0,), (1,), (2, 0, 1), (1, 2)):
        streams = own.stack(residual, inputs, own.slabs, taps)
        assert torch.equal(streams.last, plain.last) and torch.equal(streams.residual, plain.residual)
        kept = dict(zip(taps, streams.taps, strict=True))
        assert torch.equal(kept.get(0, before), before) and torch.equal(
            kept.get(2, plain.residual), plain.residual
        )
        if 1 in kept:
            assert not torch.equal(kept[1], before) and not torch.equal(kept[1], plain.residual)
    assert torch.equal(residual, before)
    truth = Stacked(checkpoints["qwen3"], CpuKernels(), dtype=torch.float64)
    exact = truth.stack(truth.residual(20), inputs, truth.slabs, (1,))
    (tap,) = own.stack(residual, inputs, own.slabs, (1,)).taps
    assert rms(tap.double() - exact.taps[0]) < 0.01 * rms(exact.taps[0])


def test_blocks_that_are_not_causal(checkpoints: dict[str, Path], kernels: NativeKernels) -> None:
    """Every row of a block sees all of it, as DSpark drafts; MTP's first key is never seen."""
    for first_key, kv_lens in itertools.product((0, 1), ([24] * 7, range(18, 25))):
        own = Stacked(checkpoints["llama"], kernels, first_key=first_key)
        truth = Stacked(checkpoints["llama"], CpuKernels(), first_key=first_key, dtype=torch.float64)
        results = []
        for stacked in (own, truth):
            stacked.stack(stacked.residual(17, seed=5), inputs_of(range(17), range(1, 18)), stacked.slabs)
            found = stacked.stack(stacked.residual(7), inputs_of(range(17, 24), kv_lens), stacked.slabs)
            results.append(found.last.double())
        assert rms(results[0] - results[1]) < 0.02 * rms(results[1])


@pytest.mark.parametrize("variant", ["llama-bias", "qwen3"])
def test_publish_stores_what_forward_stores(
    checkpoints: dict[str, Path], kernels: NativeKernels, variant: str
) -> None:
    forward, publish = (Stacked(checkpoints[variant], kernels) for _ in range(2))
    inputs = inputs_of([*range(20), 33, 40], [*range(1, 21), 34, 41])
    forward.stack(forward.residual(22), inputs, forward.slabs)
    publish.stack.publish(publish.residual(22), inputs.positions, publish.slabs[0], inputs.slots)
    assert torch.equal(publish.slabs[0], forward.slabs[0]) and forward.slabs[0].count_nonzero() > 0
    assert publish.slabs[1].count_nonzero() == 0


def test_guesses_store_finite_numbers(checkpoints: dict[str, Path], kernels: NativeKernels) -> None:
    """A guess that went wrong must not reach those who cannot even see it; facts are kept as they are."""
    own = Stacked(checkpoints["llama"], kernels)
    own.stack(own.residual(16), inputs_of(range(16), range(1, 17)), own.slabs)
    bad = own.residual(3)
    bad[1] = torch.nan
    inputs = inputs_of([16, 17, 18], [17, 18, 19])
    guessed = own.stack(bad, replace(inputs, guesses=True), own.slabs)
    assert guessed.last[0].isfinite().all() and not guessed.last[1].isfinite().any()
    assert all(slab.isfinite().all() for slab in own.slabs)
    own.stack(bad, inputs, own.slabs)
    assert not own.slabs[0].isfinite().all()


def test_padding_and_nothing(checkpoints: dict[str, Path], kernels: NativeKernels) -> None:
    own = Stacked(checkpoints["llama"], kernels)
    padded = own.stack(own.residual(2), inputs_of([0, 0], [0, 1]), own.slabs)
    assert padded.last.isfinite().all()
    nothing = own.stack(own.residual(0), inputs_of([], []), own.slabs, (0, 1))
    assert nothing.last.shape == nothing.taps[1].shape == (0, 256)


def test_what_does_not_fit_raises(checkpoints: dict[str, Path], kernels: NativeKernels) -> None:
    own = Stacked(checkpoints["llama"], kernels)
    inputs = inputs_of([0], [1])
    with pytest.raises(ValueError, match="residual"):
        own.stack(torch.zeros(1, 96, dtype=BF16), inputs, own.slabs)
    with pytest.raises(ValueError, match="slabs"):
        own.stack(own.residual(1), inputs, own.slabs[:1])


def test_unfit_sizes_are_torchs(library: NativeLibrary) -> None:
    kernels = NativeKernels(Team(library, 1))
    weight = torch.randn(40, 40)
    x = torch.randn(3, 40)
    assert torch.equal(kernels.pack_linear(weight)(x), CpuKernels().pack_linear(weight)(x))
    kernels.pack_linear(weight.to(BF16))
    dtype, inputs = kernels.row_dependence(16, 64, BF16)
    assert "float32" in dtype and "40 inputs" in inputs


def test_torch_compile_traces_the_single_ops(checkpoints: dict[str, Path], library: NativeLibrary) -> None:
    """As operators they stand in a graph without a break, and compute the same bits."""
    kernels = NativeKernels(native.shared_team(library, torch.get_num_threads()))
    own = Stacked(checkpoints["qwen3-bias"], kernels)
    inputs, residual = inputs_of(range(9), range(1, 10)), own.residual(9)

    def single_ops(residual: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        return own.stack._forward(residual, own.slabs, (1,), own.stack._prepare(inputs, own.slabs[0]))

    compiled = torch.compile(single_ops, backend="eager", fullgraph=True)
    with torch.inference_mode():
        expected, streams = single_ops(residual)
        stored = [slab.clone() for slab in own.slabs]
        for slab in own.slabs:
            slab.zero_()
        found, again = compiled(residual)
    assert torch.equal(found, expected) and torch.equal(again[1], streams[1])
    assert all(torch.equal(slab, kept) for slab, kept in zip(own.slabs, stored, strict=True))
