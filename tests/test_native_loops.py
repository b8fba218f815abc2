"""Drafting by loops as one native call: bit by bit what it is op by op, states and K/V included."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from xspec.draft.base import Draft, DraftContext, LoopWork
from xspec.draft.looped import LoopedDrafter
from xspec.kernels.native import NativeLibrary, Status
from xspec.kernels.native_loops import NativeLoops
from xspec.llm import LLM

PROMPTS = (
    "def main(args):\n    ",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path =",
    "# Copyright (c) 2001\n#\n# All rights reserved.\n\nfor name in sorted(os.listdir(",
)


class Compared:
    """Every draft is made in both ways, and once more as that of a shadow round.

    `kinds` are the lanes and steps drafted.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: set[tuple[int, int]] = set()
        self.fused = 0
        draft, fused = LoopedDrafter.draft, NativeLoops.__call__

        def both(drafter: LoopedDrafter, context: DraftContext, steps: int) -> Draft:
            own = drafter._attached()
            for loops in (LoopWork(context.loops.depth, True), context.loops):
                context = replace(context, loops=loops)
                memory = (own.states, *own.kv)
                before = [tensor.clone() for tensor in memory]
                apart = draft(drafter, replace(context, greedy=None), steps)
                made = [tensor.clone() for tensor in memory]
                for tensor, was in zip(memory, before, strict=True):
                    tensor.copy_(was)
                count = self.fused
                together = draft(drafter, context, steps)
                if self.fused == count:
                    continue
                assert torch.equal(together.tokens, apart.tokens)
                assert torch.equal(together.signals, apart.signals)
                assert all(map(torch.equal, memory, made))
                self.kinds.add((len(apart.tokens), steps))
            return together

        def counted(own: NativeLoops, *given: object) -> tuple[torch.Tensor, torch.Tensor]:
            self.fused += 1
            return fused(own, *given)  # type: ignore[arg-type]

        monkeypatch.setattr(LoopedDrafter, "draft", both)
        monkeypatch.setattr(NativeLoops, "__call__", counted)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, library: NativeLibrary) -> Iterator[Compared]:
    yield Compared(monkeypatch)


def engine(**flags: object) -> LLM:
    usual: dict[str, object] = {
        "model": "ouro-tiny",
        "speculative_algorithm": "Looped",
        "num_speculative_tokens": 3,
        "max_seqs_per_batch": 3,
        "max_model_len": 128,
        "disable_graph_warmup": True,
        "dtype": "bfloat16",
        "cpu_kernels": "native",
        "block_size": 16,
        "max_cache_size": 16 * 2**20,
    }
    return LLM(**{**usual, **flags})


@pytest.mark.parametrize("depths", [1, 3])
def test_equals_the_loops_op_by_op(compared: Compared, depths: int) -> None:
    with engine(draft_loops=depths) as llm:
        greedy = llm.params(temperature=0.0, max_tokens=40, ignore_eos=True)
        for prompt in PROMPTS:
            llm.generate(prompt, greedy)  # one lane, across page borders
        llm.generate(list(PROMPTS), greedy)
        llm.generate(PROMPTS[0], llm.params(temperature=0.8, max_tokens=200, seed=3))  # up to its limit
    assert {lanes for lanes, _ in compared.kinds} >= {1, 3}
    assert compared.fused > 40


def test_noise_is_left_to_the_ops(compared: Compared) -> None:
    with engine(enable_probabilistic_draft=True) as llm:
        llm.generate(PROMPTS[0], llm.params(temperature=1.0, max_tokens=8, seed=3))
    assert compared.fused == 0


def test_calls_that_cannot_be_are_refused(library: NativeLibrary) -> None:
    handle = ctypes.c_void_p()
    assert library.c.xs_loops_create(None, None, ctypes.byref(handle)) == Status.INVALID
    assert library.c.xs_loops_draft(None, None, None, None) == Status.INVALID
