"""Paged caches, chunks, batches and ragged segments change nothing: fp64 logits equal one dense pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from paged import PagedRunner

from xspec.kernels import cpu
from xspec.kernels.base import Kernels
from xspec.kernels.cpu import CpuKernels
from xspec.kernels.reference import ReferenceKernels
from xspec.models.blocks import Decoder
from xspec.models.loader import load_target
from xspec.nn.inputs import ForwardInputs, Segment

F64 = torch.float64


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.make_checkpoint(root / name, name) for name in ("llama", "qwen2", "qwen3")}


def load(path: Path, kernels: Kernels | None = None) -> Decoder:
    return load_target(path, kernels or CpuKernels(), dtype=F64, device=torch.device("cpu"))


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(
        0, tiny.VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def one_shot(path: Path, ids: list[int]) -> torch.Tensor:
    """The whole text in one pass of the reference kernels, one page."""
    kernels = ReferenceKernels()
    runner = PagedRunner(
        load(path, kernels), kernels, F64, sequences=1, max_tokens=len(ids), block_size=len(ids)
    )
    return runner.forward([(0, ids)])


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill(checkpoints: dict[str, Path], variant: str, chunk: int) -> None:
    ids = prompt(150, seed=3)
    runner = PagedRunner(load(checkpoints[variant]), CpuKernels(), F64, sequences=1, max_tokens=150)
    parts = [runner.forward([(0, ids[at : at + chunk])]) for at in range(0, len(ids), chunk)]
    assert_same(torch.cat(parts), one_shot(checkpoints[variant], ids))


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_batched_greedy_continuation(checkpoints: dict[str, Path], variant: str) -> None:
    """Five prompts of different lengths, decoded together, score and choose as each does in one pass."""
    lengths = [1, 4, 17, 33, 70]
    texts = [prompt(length, seed=length) for length in lengths]
    runner = PagedRunner(load(checkpoints[variant]), CpuKernels(), F64, sequences=5, max_tokens=100)
    logits = [runner.forward([(i, text)]) for i, text in enumerate(texts)]
    for text, scores in zip(texts, logits, strict=True):
        text.append(int(scores[-1].argmax()))
    for _ in range(20):
        batch = runner.forward([(i, text[-1:]) for i, text in enumerate(texts)], uniform=True)
        for i, text in enumerate(texts):
            logits[i] = torch.cat((logits[i], batch[i : i + 1]))
            text.append(int(batch[i].argmax()))
    for text, scores in zip(texts, logits, strict=True):
        assert_same(scores, one_shot(checkpoints[variant], text[:-1]))


def test_mixed_round(checkpoints: dict[str, Path]) -> None:
    """A chunk, a batch of ragged verify rows and a single row in one pass."""
    texts = [prompt(120, seed=i) for i in range(4)]
    runner = PagedRunner(load(checkpoints["qwen3"]), CpuKernels(), F64, sequences=4, max_tokens=128)
    for i, start in enumerate((20, 33, 50)):
        runner.forward([(i, texts[i][:start])])
    ends = {0: 24, 1: 37, 2: 51, 3: 90}
    work = [(i, texts[i][runner.lengths[i] : end]) for i, end in ends.items()]
    found = runner.forward(work)
    start = 0
    for i, rows in work:
        expected = one_shot(checkpoints["qwen3"], texts[i][: ends[i]])[-len(rows) :]
        assert_same(found[start : start + len(rows)], expected)
        start += len(rows)


def test_verify_rows_as_one_segment(checkpoints: dict[str, Path]) -> None:
    texts = [prompt(60, seed=10 + i) for i in range(3)]
    runner = PagedRunner(load(checkpoints["llama"]), CpuKernels(), F64, sequences=3, max_tokens=64)
    for i, start in enumerate((5, 31, 44)):
        runner.forward([(i, texts[i][:start])])
    work = [(i, texts[i][runner.lengths[i] : runner.lengths[i] + 5]) for i in (2, 0, 1)]
    found = runner.forward(work, uniform=True)
    for at, (i, _) in enumerate(work):
        expected = one_shot(checkpoints["llama"], texts[i][: runner.lengths[i]])[-5:]
        assert_same(found[at * 5 : at * 5 + 5], expected)


def test_tiling_changes_nothing(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny tiles and unkept masks take the paths that only long contexts take."""
    ids = prompt(130, seed=5)
    expected = one_shot(checkpoints["llama"], ids)
    monkeypatch.setattr(cpu, "TILE_ROWS", 9)
    monkeypatch.setattr(cpu, "TILE_KV_BYTES", 1)
    monkeypatch.setattr(cpu, "KEPT_MASK_BYTES", 0)
    runner = PagedRunner(load(checkpoints["llama"]), CpuKernels(), F64, sequences=3, max_tokens=140)
    assert_same(runner.forward([(0, ids)]), expected)
    runner.forward([(1, ids[:20]), (2, ids[:77])])
    batch = runner.forward([(1, ids[20:22]), (2, ids[77:79])], uniform=True)
    assert_same(batch, torch.cat((expected[20:22], expected[77:79])))


def test_padding_lanes_disturb_nobody(checkpoints: dict[str, Path]) -> None:
    """Lanes that point at the scratch page, with kv_len 1 or 0, leave real rows alone and stay finite."""
    ids = prompt(30, seed=8)
    target = load(checkpoints["llama"])
    runner = PagedRunner(target, CpuKernels(), F64, sequences=1, max_tokens=40)
    runner.forward([(0, ids[:-1])])
    page = int(runner.table[0, 29 // 4])
    for padding_len in (0, 1):
        table = torch.zeros(3, runner.table.shape[1], dtype=torch.int64)
        table[0] = runner.table[0]
        inputs = ForwardInputs(
            positions=torch.tensor([29, 0, 0]),
            slots=torch.tensor([page * 4 + 29 % 4, 0, 0]),
            kv_lens=torch.tensor([30, padding_len, padding_len]),
            page_table=table,
            segments=(Segment(0, 3, 1, 8, 0),),
        )
        found = target.logits(target.forward(torch.tensor([ids[-1], 0, 0]), inputs, runner.kv).last)
        assert_same(found[:1], one_shot(checkpoints["llama"], ids)[-1:])
        assert found.isfinite().all()


def test_taps_are_residual_streams(checkpoints: dict[str, Path]) -> None:
    ids = prompt(12, seed=2)
    target = load(checkpoints["qwen3"])
    kv = PagedRunner(target, CpuKernels(), F64, sequences=1, max_tokens=12).kv
    positions = torch.arange(12)
    inputs = ForwardInputs(
        positions, positions + 4, positions + 1, torch.tensor([[1, 2, 3]]), (Segment(0, 1, 12, 3, 0),)
    )
    hidden = target.forward(torch.tensor(ids), inputs, kv, taps=(3, 0, 1))
    last, embedding, first = hidden.taps
    assert torch.equal(last, hidden.residual)
    table = tiny.make_weights(tiny.make_config("qwen3"))["model.embed_tokens.weight"]
    assert torch.equal(embedding, table[ids].double())
    assert not torch.equal(first, embedding) and not torch.equal(first, last)
    assert torch.equal(target.forward(torch.tensor(ids), inputs, kv).last, hidden.last)
