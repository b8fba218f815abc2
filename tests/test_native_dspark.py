"""Drafting a DSpark block and keeping its context as one native call each: what they are op by op."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_dspark
import torch
from tiny_dspark import Sizes

from xspec.draft.base import Draft, DraftContext, Published
from xspec.draft.dspark import DSparkDrafter
from xspec.kernels.native import NativeLibrary, Status
from xspec.kernels.native_dspark import NativeBlock
from xspec.llm import LLM

PROMPTS = (
    "Count from one to twenty in words.",
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea. It must have four lines and each must rhyme with the one before.",
)


class Compared:
    """Every block is drafted in both ways, every pass published in both.

    `lanes` are those drafted together, `regimes` whether some of them were sampled, `published` flat rows.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lanes: set[int] = set()
        self.regimes: set[bool] = set()
        self.published: set[int] = set()
        self.fused = 0
        draft, publish, fused = DSparkDrafter.draft, DSparkDrafter.publish, NativeBlock.__call__

        def both(drafter: DSparkDrafter, context: DraftContext, steps: int) -> Draft:
            apart = draft(drafter, replace(context, greedy=None), steps)
            before = self.fused
            together = draft(drafter, context, steps)
            if self.fused > before:
                assert torch.equal(together.tokens, apart.tokens)
                torch.testing.assert_close(together.signals, apart.signals, rtol=0, atol=2e-6)
                self.lanes.add(len(apart.tokens))
                self.regimes.add(context.sampled is not None and bool(context.sampled.any()))
            return together

        def counted(
            own: NativeBlock, rows: object, pages: int, slabs: Sequence[torch.Tensor], sampled: object
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.fused += 1
            return fused(own, rows, pages, slabs, sampled)  # type: ignore[arg-type]

        def published(drafter: DSparkDrafter, pass_: Published) -> None:
            memory, block = drafter._attached(), drafter._fused
            before = [slab.clone() for slab in memory.slabs]
            drafter._fused = None
            publish(drafter, pass_)
            apart = [slab.clone() for slab in memory.slabs]
            for slab, was in zip(memory.slabs, before, strict=True):
                slab.copy_(was)
            drafter._fused = block
            publish(drafter, pass_)
            for slab, other in zip(memory.slabs, apart, strict=True):
                now, then = slab.clone(), other.clone()
                now[:, memory.sink_page], then[:, memory.sink_page] = 0, 0  # may hold anything
                heads = len(now) // 2
                assert torch.equal(now[heads:], then[heads:])  # values; keys are rounded once, not twice
                torch.testing.assert_close(now[:heads], then[:heads], rtol=2**-6, atol=2**-5)
            if block is not None:
                self.published.add(len(pass_.tokens))

        monkeypatch.setattr(DSparkDrafter, "draft", both)
        monkeypatch.setattr(DSparkDrafter, "publish", published)
        monkeypatch.setattr(NativeBlock, "__call__", counted)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, library: NativeLibrary) -> Iterator[Compared]:
    yield Compared(monkeypatch)


def engine(**flags: object) -> LLM:
    usual: dict[str, object] = {
        "speculative_algorithm": "DSpark",
        "num_speculative_tokens": 5,
        "max_seqs_per_batch": 3,
        "max_model_len": 256,
        "disable_graph_warmup": True,
        "dtype": "bfloat16",
        "cpu_kernels": "native",
        "block_size": 16,
    }
    return LLM(**{**usual, **flags})


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_equals_the_block_op_by_op(compared: Compared, smollm2_gguf: Path, quantization: str) -> None:
    assert smollm2_gguf.is_file()
    with engine(draft_quantization=quantization) as llm:
        params = [llm.params(temperature=0.0, max_tokens=count) for count in (40, 12, 25)]
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        for chat, own in zip(chats, params, strict=True):
            llm.chat([chat], own)  # one lane, across page borders and up to its limit
        llm.chat(chats, params[0])
        llm.chat(chats, llm.params(temperature=0.9, max_tokens=30, seed=5))
    assert compared.lanes >= {1, 3} and compared.regimes == {True, False}
    assert compared.fused > 20
    assert len(compared.published) > 3 and max(compared.published) > 15 >= min(compared.published)


NATIVE = {"head_dim": 32, "inner": 96, "rank": 32}
SIZES = {
    "key-norms-own-ids": Sizes("qwen3", draft_ids=tuple(range(7, 200, 3)), **NATIVE),
    "whole-vocabulary-mask-token": Sizes(mask_embedding=False, **NATIVE),
    "no-confidence": Sizes(confidence=False, **NATIVE),
    "no-markov": Sizes("qwen3", markov=None, layer_ids=(-1, 1, 2), layers=1, **NATIVE),
    "confidence-without-markov": Sizes(with_markov=False, block=3, **NATIVE),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_the_block_of_other_drafters(compared: Compared, tmp_path: Path, sizes: Sizes) -> None:
    model = tiny.make_checkpoint(tmp_path / "target", "llama", overrides=tiny_dspark.target_config())
    drafter = tiny_dspark.make_dspark(tmp_path / "draft", sizes)
    flags = {"model": str(model), "draft_model": str(drafter), "num_speculative_tokens": sizes.block}
    with engine(**flags, max_model_len=96, max_cache_size=2**20) as llm:
        llm.generate(["one", "and another one", "three"], llm.params(temperature=0.0, max_tokens=30))
        llm.generate("once more", llm.params(temperature=0.0, max_tokens=90, ignore_eos=True))
    assert compared.lanes >= {1} and max(compared.lanes) >= 2
    assert compared.fused > 10 and compared.published


def test_noise_is_left_to_the_ops(compared: Compared, smollm2_gguf: Path) -> None:
    assert smollm2_gguf.is_file()
    with engine(max_seqs_per_batch=1, max_model_len=128, enable_probabilistic_draft=True) as llm:
        llm.generate("Once upon a time", llm.params(temperature=1.0, max_tokens=8, seed=3))
    assert compared.fused == 0


def test_calls_that_cannot_be_are_refused(library: NativeLibrary) -> None:
    handle = ctypes.c_void_p()
    assert library.c.xs_dspark_create(None, None, ctypes.byref(handle)) == Status.INVALID
    assert library.c.xs_dspark_draft(None, None, None, None) == Status.INVALID
    assert library.c.xs_dspark_publish(None, None, None) == Status.INVALID
