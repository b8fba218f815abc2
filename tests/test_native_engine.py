"""Engines on the native kernels: which kernels run, what is refused, and bf16 text under any schedule."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
from scripted import ScriptedDrafter
from test_engine import LOAD, engine_of, run, tokens
from test_lossless import Scheduled, speculating

from xspec.engine.engine import AsyncEngine
from xspec.errors import ConfigError
from xspec.kernels import native
from xspec.kernels.cpu import CpuKernels
from xspec.kernels.cpu_native import NativeKernels
from xspec.kernels.native import library_path, load_library
from xspec.platform.cpu import NATIVE, CpuPlatform
from xspec.platform.select import select_platform

SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 32


@pytest.fixture(scope="module")
def built() -> None:
    path = library_path()
    if path is None:
        pytest.skip("the native library was not built")
    if load_library(path).isa() not in NATIVE:
        pytest.skip("this machine runs the portable loops alone")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tiny") / "llama", "llama", overrides=SIZES)


BF16 = {"dtype": "bfloat16", "batch_invariant": True}

SCHEDULES: dict[str, dict[str, Any]] = {
    "two slots": {},
    "eager": {"enable_graph": False},
    "tiny chunks": {"max_tokens_per_chunk_for_prefill": 5, "max_tokens_per_batch": 24},
    "few rows": {"max_seqs_per_batch": 3, "block_size": 16},
}


async def drawn(engine: AsyncEngine) -> list[tuple[int, ...]]:
    results = await asyncio.gather(*(run(engine, prompt, **values) for _, prompt, values in LOAD))
    return [tokens(outputs) for outputs in results]


async def alone(model: Path) -> list[tuple[int, ...]]:
    """Every request by itself, row by row."""
    flags = {"enable_schedule_overlap": False, "enable_prefix_cache": False, "enable_graph": False}
    async with engine_of(model, **BF16, **flags) as engine:
        return [tokens(await run(engine, prompt, **values)) for _, prompt, values in LOAD]


@pytest.fixture(scope="module")
def plain(model: Path, built: None) -> list[tuple[int, ...]]:
    return asyncio.run(alone(model))


@pytest.mark.parametrize("schedule", SCHEDULES)
async def test_bf16_text_does_not_depend_on_schedule_or_speculation(
    model: Path, plain: Sequence[tuple[int, ...]], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in half precision, where one bit of difference sooner or later changes a token."""
    flags = {**BF16, **SCHEDULES[schedule]}
    async with engine_of(model, **flags) as engine:
        assert engine.server_info()["kernels"].startswith("native ")
        assert await drawn(engine) == plain
    policy = Scheduled([7, 1, 0, 3, 16, 2], [None, None, 0, 4])
    texts = [[*prompt, *text] for (_, prompt, _), text in zip(LOAD, plain, strict=True)]
    drafter = ScriptedDrafter(texts, right=0.7)
    async with speculating(model, policy, drafter, monkeypatch, **flags) as engine:
        assert await drawn(engine) == plain
    assert policy.accepted > policy.proposed / 10


async def test_a_text_that_fills_the_context_under_wide_drafts(
    model: Path, built: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts past the last position have no page, and the table no entry for one."""
    flags = {**BF16, "max_model_len": 48, "block_size": 16}
    load = [(prompt, {**values, "max_tokens": 48, "ignore_eos": True}) for _, prompt, values in LOAD[:6]]
    async with engine_of(model, **flags) as engine:
        plain = [tokens(await run(engine, prompt, **values)) for prompt, values in load]
    texts = [[*prompt, *text] for (prompt, _), text in zip(load, plain, strict=True)]
    assert all(len(text) == 48 for text in texts)
    policy = Scheduled([16, 7])
    async with speculating(model, policy, ScriptedDrafter(texts, right=0.8), monkeypatch, **flags) as engine:
        outputs = await asyncio.gather(*(run(engine, prompt, **values) for prompt, values in load))
        assert [tokens(each) for each in outputs] == plain
    assert policy.accepted > policy.proposed / 10


async def refusal(model: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        async with engine_of(model, **{"dtype": "bfloat16", **flags}):
            pass
    return str(refused.value)


async def test_batch_invariance_is_refused_where_it_does_not_hold(
    model: Path, built: None, tmp_path: Path
) -> None:
    assert "torch" in await refusal(model, batch_invariant=True, cpu_kernels="torch")
    assert "float32" in await refusal(model, batch_invariant=True, dtype="float32")
    assert "--block_size" in await refusal(model, batch_invariant=True, block_size=8)
    odd = tiny.make_checkpoint(tmp_path / "odd", "llama", overrides={**SIZES, "intermediate_size": 80})
    found = await refusal(odd, batch_invariant=True)
    assert "80 inputs" in found and "--batch_invariant=true" in found
    async with engine_of(odd, dtype="bfloat16") as engine:  # without the promise torch fills in
        assert len(tokens(await run(engine, [5, 6, 7], temperature=0.0))) > 0


async def test_other_dtypes_stay_with_torch(model: Path, built: None) -> None:
    prompt = LOAD[0][1]
    texts = []
    for kernels in ("native", "torch"):
        async with engine_of(model, dtype="float64", cpu_kernels=kernels) as engine:
            texts.append([o.text for o in await run(engine, prompt, temperature=0.0)])
    assert texts[0] == texts[1]


def test_which_kernels(built: None) -> None:
    platform = select_platform("cpu")
    kernels = platform.kernels()
    assert isinstance(kernels, NativeKernels) and platform.kernels() is kernels
    assert platform.kernels_name() == kernels.name
    assert platform.abilities.quantization_gap == ""
    torchs = select_platform("cpu", "torch")
    assert isinstance(torchs.kernels(), CpuKernels) and torchs.kernels_name() == "torch"
    assert torchs.abilities.quantization_gap
    with pytest.raises(ConfigError, match="--cpu_kernels=gpu.*native"):
        select_platform("cpu", "gpu")


def test_an_install_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """torch computes, and one line says so; asked for by name, the native kernels are refused."""
    assert library_path(tmp_path) is None
    monkeypatch.setattr(native, "library_path", lambda: None)
    with caplog.at_level(logging.INFO, "xspec"):
        assert isinstance(CpuPlatform().kernels(), CpuKernels)
    assert len(caplog.records) == 1 and "not built" in caplog.text
    with pytest.raises(ConfigError, match="--cpu_kernels=native.*not built"):
        CpuPlatform("native")


def test_a_library_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"no library")
    assert library_path(tmp_path) == broken
    monkeypatch.setattr(native, "library_path", lambda: broken)
    with caplog.at_level(logging.INFO, "xspec"):
        assert isinstance(CpuPlatform().kernels(), CpuKernels)
    assert len(caplog.records) == 1
    with pytest.raises(ConfigError, match="--cpu_kernels=native"):
        CpuPlatform("native")


def test_the_portable_loops_are_not_taken_unasked(built: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.NativeLibrary, "isa", lambda self, name="": "portable")
    assert isinstance(CpuPlatform().kernels(), CpuKernels)
    assert isinstance(CpuPlatform("native").kernels(), NativeKernels)
