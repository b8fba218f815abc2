"""Logits equal transformers' on every family, in fp32 to 1e-4, and on the SmolLM2 weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from paged import PagedRunner
from smollm2 import reference_model

from xspec.kernels.cpu import CpuKernels
from xspec.models.blocks import Decoder
from xspec.models.loader import decoder_config, load_target, open_checkpoint

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype) -> Decoder:
    return load_target(path, CpuKernels(), dtype=dtype, device=CPU)


def one_shot(target: Decoder, dtype: torch.dtype, ids: list[int], *, block_size: int = 16) -> torch.Tensor:
    runner = PagedRunner(target, CpuKernels(), dtype, sequences=1, max_tokens=len(ids), block_size=block_size)
    return runner.forward([(0, ids)])


def random_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, tiny.VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(autouse=True)
def no_grad() -> object:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("variant", tiny.FAMILIES)
def test_tiny_logits(variant: str, tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, variant)
    reference, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = random_ids(150)
    expected = reference(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.5  # flat logits would agree by accident
    found = one_shot(load(path, torch.float32), torch.float32, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    wide = one_shot(load(path, torch.float64), torch.float64, ids)
    assert wide.dtype == torch.float64
    expected_wide = reference.double()(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(wide, expected_wide, rtol=0, atol=1e-4)
    half = one_shot(load(path, torch.bfloat16), torch.bfloat16, ids)
    assert half.dtype == torch.bfloat16
    assert (half.double() - wide).abs().mean() < 0.05 * wide.std()


@pytest.mark.parametrize("variant", ["llama3", "qwen2", "qwen3"])
def test_a_directory_saved_by_transformers(variant: str, tmp_path: Path) -> None:
    """Its own config.json (rope_parameters, layer_types) and tensor names are accepted as they come."""
    tiny.make_checkpoint(tmp_path / "a", variant)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    reference.save_pretrained(tmp_path / "b")
    ids = random_ids(40)
    found = one_shot(load(tmp_path / "b", torch.float32), torch.float32, ids)
    torch.testing.assert_close(found, reference(torch.tensor([ids])).logits[0], rtol=0, atol=1e-4)


def test_bf16_norms_round_as_transformers_do() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        generator = torch.Generator().manual_seed(0)
        reference = LlamaRMSNorm(48, eps=1e-5).to(dtype)
        reference.weight.copy_(torch.randn(48, generator=generator))
        x = torch.randn(33, 48, generator=generator).to(dtype) * 3
        found = CpuKernels().rms_norm(x, reference.weight, 1e-5)
        torch.testing.assert_close(found, reference(x), rtol=0, atol=0 if dtype != torch.float32 else 1e-6)


PROMPT_IDS = (
    [504, 3575, 282, 4649, 314],  # The capital of France is
    [
        1604,
        3987,
        46477,
        24,
        94,
        727,
        472,
        585,
        304,
        2067,
        216,
        34,
        42,
        448,
        1003,
        304,
        198,
    ],  # def fibonacci(n):
    [1, 4093, 198, 19161, 253, 421, 30614, 563, 5249, 30, 2, 198, 1, 520, 9531, 198],  # a chat turn
    [6403, *([1980, 253, 655, 28, 281, 253, 1666, 1869, 2025, 28, 665, 4161, 253, 15731, 617, 4027] * 12)],
)


def test_smollm2_logits(smollm2_gguf: Path) -> None:
    """Against transformers on the same dequantised tensors."""
    path = smollm2_gguf
    config = decoder_config(open_checkpoint(path))
    reference = reference_model(path)
    target = load(path, torch.float32)
    assert (config.heads, config.kv_heads, config.num_layers, config.tied_head) == (9, 3, 30, True)
    for ids in PROMPT_IDS:
        expected = reference(torch.tensor([ids])).logits[0]
        found = one_shot(target, torch.float32, ids)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
