"""Drafting and publishing by MTP as one native call each: bit by bit what they are op by op."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from xspec.draft.base import Draft, DraftContext, Published
from xspec.draft.mtp import MtpDrafter
from xspec.kernels.native import NativeLibrary, Status
from xspec.kernels.native_mtp import NativeSteps
from xspec.llm import LLM

PROMPTS = (
    "Count from one to twenty in words.",
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea. It must have four lines and each must rhyme with the one before.",
)


class Compared:
    """Every draft is made in both ways, every pass published in both.

    `widths` are the lanes and steps drafted, `published` the flat rows.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.widths: set[tuple[int, int]] = set()
        self.published: set[int] = set()
        self.fused = 0
        draft, fused = MtpDrafter.draft, NativeSteps.__call__

        def both(drafter: MtpDrafter, context: DraftContext, steps: int) -> Draft:
            apart = draft(drafter, replace(context, greedy=None), steps)
            before = self.fused
            together = draft(drafter, context, steps)
            if self.fused > before:
                assert torch.equal(together.tokens, apart.tokens)
                assert torch.equal(together.signals, apart.signals)
                self.widths.add((apart.tokens.shape[0], steps))
            return together

        def counted(
            own: NativeSteps, rows: object, pages: int, boundary: object, slab: object, steps: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self.fused += 1
            return fused(own, rows, pages, boundary, slab, steps)  # type: ignore[arg-type]

        publish = MtpDrafter.publish

        def published(drafter: MtpDrafter, pass_: Published) -> None:
            own, steps = drafter._attached(), drafter._fused
            memory = (own.boundary, own.memory.page_state, own.slab)
            before = [tensor.clone() for tensor in memory]
            drafter._fused = None
            publish(drafter, pass_)
            apart = [tensor.clone() for tensor in memory]
            for tensor, was in zip(memory, before, strict=True):
                tensor.copy_(was)
            drafter._fused = steps
            publish(drafter, pass_)
            sink = own.memory.sink_page  # may hold anything
            for tensor, other in zip(memory, apart, strict=True):
                now, then = tensor.clone(), other.clone()
                if tensor is own.slab:
                    now[:, sink], then[:, sink] = 0, 0
                elif tensor is own.memory.page_state:
                    now[sink], then[sink] = 0, 0
                assert torch.equal(now, then)
            if steps is not None:
                self.published.add(len(pass_.tokens))

        monkeypatch.setattr(MtpDrafter, "draft", both)
        monkeypatch.setattr(MtpDrafter, "publish", published)
        monkeypatch.setattr(NativeSteps, "__call__", counted)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, library: NativeLibrary) -> Iterator[Compared]:
    yield Compared(monkeypatch)


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_equals_the_steps_op_by_op(compared: Compared, smollm2_gguf: Path, quantization: str) -> None:
    assert smollm2_gguf.is_file()
    flags = {"draft_quantization": quantization, "num_speculative_tokens": 4, "block_size": 16}
    flags |= {"max_cache_size": 24 * 2**20}
    with LLM(
        max_seqs_per_batch=3,
        max_model_len=256,
        disable_graph_warmup=True,
        dtype="bfloat16",
        cpu_kernels="native",
        **flags,
    ) as llm:
        params = [llm.params(temperature=0.0, max_tokens=count) for count in (40, 12, 25)]
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        for chat, own in zip(chats, params, strict=True):
            llm.chat([chat], own)  # one lane, across page borders and up to its limit
        llm.chat(chats, params[0])
    assert {lanes for lanes, _ in compared.widths} >= {1, 3}
    assert compared.fused > 20
    assert len(compared.published) > 3 and max(compared.published) > 15 >= min(compared.published)


def test_noise_is_left_to_the_ops(compared: Compared, smollm2_gguf: Path) -> None:
    assert smollm2_gguf.is_file()
    with LLM(
        max_seqs_per_batch=1,
        max_model_len=128,
        disable_graph_warmup=True,
        dtype="bfloat16",
        cpu_kernels="native",
        enable_probabilistic_draft=True,
    ) as llm:
        llm.generate("Once upon a time", llm.params(temperature=1.0, max_tokens=8, seed=3))
    assert compared.fused == 0


def test_calls_that_cannot_be_are_refused(library: NativeLibrary) -> None:
    handle = ctypes.c_void_p()
    assert library.c.xs_mtp_create(None, None, ctypes.byref(handle)) == Status.INVALID
    assert library.c.xs_mtp_draft(None, None, None, None) == Status.INVALID
    assert library.c.xs_mtp_publish(None, None, None) == Status.INVALID
