"""Quantised weights as values: GGUF blocks read exactly, unlike parts stacked, float weights quantised."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from test_quantization import SMALL, randn, reads
from tiny_gguf import write_gguf

from xspec.kernels.quantised import GROUP, Blocks, ReferenceBlocks, quantise, stack
from xspec.models.gguf_blocks import kept_kinds, read_blocks
from xspec.models.gguf_loader import GgufCheckpoint


@pytest.mark.parametrize("kind", sorted(kept_kinds()), ids=lambda kind: kind.name)
def test_kept_blocks_hold_exactly_the_files_values(kind: Kind) -> None:
    """Of random bytes, so that every field of a block takes every value."""
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(kind.value)
    stored = random.integers(0, 256, (5, 512 // size, block_bytes), dtype=np.uint8)
    halves = random.standard_normal((5, 512 // size, 2)).astype(np.float16)
    width = 4 if kind in (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K) else 2
    stored[..., :width] = halves.view(np.uint8)[..., :width]
    flat = stored.reshape(5, -1)
    blocks = read_blocks(flat, kind)
    assert torch.equal(blocks.dequantised(), torch.from_numpy(gguf.dequantize(flat, kind)))
    assert blocks.q.dtype == torch.uint8 and int(blocks.q.max()) < 2**blocks.bits
    assert blocks.scale.dtype == (torch.float32 if kind.name.endswith("_K") else torch.float16)


@pytest.mark.parametrize("variant", ["llama-tied", "qwen3"])
@pytest.mark.parametrize("kind", SMALL)
def test_a_checkpoints_blocks_are_what_it_reads(kind: str, variant: str, tmp_path: Path) -> None:
    """In Hugging Face's order of rows: files of arch llama hold q and k interleaved."""
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", variant, kind=Kind[kind]))
    matrices = [name for name, shape in checkpoint.shapes.items() if len(shape) == 2]
    for name in matrices:
        blocks = checkpoint.blocks(name)
        assert blocks is not None and torch.equal(blocks.dequantised(), reads(tmp_path / "m.gguf", [name])), (
            name
        )
    assert checkpoint.blocks("model.norm.weight") is None
    assert checkpoint.kinds() == {kind: len(matrices)}


def test_unlike_parts_are_stacked_exactly() -> None:
    parts = {
        "q4_0": Blocks(4, torch.arange(64, dtype=torch.uint8).view(2, 32) % 16, randn(2, 1).half()),
        "q4_1": quantise(randn(3, 32, seed=1), 4),
        "int8": quantise(randn(4, 32, seed=2), 8),
        "wide": Blocks(4, torch.full((1, 32), 7, dtype=torch.uint8), randn(1, 1), randn(1, 1, seed=3)),
    }
    for first, one in parts.items():
        for second, two in parts.items():
            found = stack([one, two, one])
            assert torch.equal(
                found.dequantised(), torch.cat([part.dequantised() for part in (one, two, one)])
            ), (first, second)
    both = stack([parts["int8"], parts["int8"]])
    assert both.minimum is None and both.scale.dtype == torch.float16  # alike ones stay narrow
    assert stack([parts["q4_1"], parts["q4_1"]]).scale.dtype == torch.float16
    assert stack([parts["q4_0"], parts["int8"]]).bits == 8


def test_int8_errs_by_half_a_step() -> None:
    weight = randn(40, 96)
    weight[3], weight[4, :32] = 0.0, 1e-9
    blocks = quantise(weight, 8)
    steps = weight.view(40, 3, GROUP).abs().amax(-1) / 127
    error = (blocks.dequantised() - weight).view(40, 3, GROUP).abs().amax(-1)
    assert (error <= steps * 0.51 + 1e-8).all()
    assert blocks.minimum is None and blocks.q.min() >= 1  # -127 to 127


def test_int4_beats_rounding_to_an_even_grid() -> None:
    """Least squares over every group, and weights that lie on a grid come back as they are."""
    weight = randn(300, 96) * torch.tensor([1.0, 0.01, 30.0]).repeat_interleave(32)
    blocks = quantise(weight, 4)
    groups = weight.view(300, 3, GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    even = ((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low
    error = (blocks.dequantised().view_as(groups) - groups).square().sum(-1)
    grid_error = (even - groups).square().sum(-1)
    assert error.sum() < 0.93 * grid_error.sum()
    assert (error <= grid_error * 1.02).all()
    assert torch.equal(quantise(weight, 4).q, blocks.q)
    on_grid = Blocks(4, blocks.q, blocks.scale, blocks.minimum).dequantised()
    torch.testing.assert_close(quantise(on_grid, 4).dequantised(), on_grid, rtol=0, atol=2e-3 * 30)
    flat = torch.full((2, 32), 0.25)
    assert torch.equal(quantise(flat, 4).dequantised(), flat)


def test_a_product_is_near_the_dense_one() -> None:
    """What quantising the activations costs: about a percent of the outputs' size."""
    blocks = quantise(randn(200, 256, seed=1), 4)
    x = randn(50, 256, seed=2).double()
    dense = x @ blocks.dequantised().double().T
    error = (ReferenceBlocks(blocks)(x) - dense).std() / dense.std()
    assert 0.001 < error < 0.01
