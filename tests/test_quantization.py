"""Quantised weights from file to packed linear: exact values, who decides what is kept how, refusals.

What a product with them is, is test_native_int.py's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_drafters
import tiny_dspark
import torch
from gguf import GGMLQuantizationType as Kind
from paged import PagedRunner
from tiny_gguf import write_gguf

from xspec.config import Config
from xspec.core.request import SamplingParams
from xspec.draft.make import load_drafter
from xspec.engine.build import build_engine
from xspec.errors import ConfigError, UnsupportedError
from xspec.exec.assemble import check_abilities
from xspec.kernels.base import Kernels
from xspec.kernels.cpu import CpuKernels
from xspec.kernels.native import library_path
from xspec.kernels.quantised import Blocks, quantise
from xspec.kernels.reference import ReferenceKernels
from xspec.models.loader import load_target, open_checkpoint
from xspec.models.quantised import block_source
from xspec.platform.cpu import CpuPlatform

CPU = torch.device("cpu")
F64 = torch.float64
SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # kinds of 32 weights a block, that fit tiny models


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Recorder(ReferenceKernels):
    """Keeps what it was asked to pack, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.dense: list[torch.Tensor] = []
        self.blocks: list[tuple[Blocks, bool]] = []  # with: gated

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        self.dense.append(weight)
        return super().pack_linear(weight, bias)

    def pack_gated(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        self.dense.append(weight)
        return super().pack_gated(weight, bias)

    def pack_blocks(self, blocks: Blocks, bias: torch.Tensor | None = None, *, gated: bool = False) -> Any:
        self.blocks.append((blocks, gated))
        return super().pack_blocks(blocks, bias, gated=gated)

    @property
    def bits(self) -> list[int]:
        return [blocks.bits for blocks, _ in self.blocks]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reads(path: Path, names: list[str]) -> torch.Tensor:
    """The named matrices below one another, dequantised."""
    checkpoint = open_checkpoint(path)
    found = []
    for name in names:
        found.append(torch.empty(checkpoint.shapes[name]))
        checkpoint.read(name, found[-1])
    return torch.cat(found)


# -- models --------------------------------------------------------------------------------------------------


LAYER = "model.layers.0."
QKV = [f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv"]
GATE_UP = [f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up")]


@pytest.mark.parametrize("kind", SMALL)
def test_gguf_takes_the_files_blocks(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama-tied", kind=Kind[kind])
    kernels = Recorder()
    load_target(path, kernels, dtype=F64, device=CPU, quantization="gguf")
    assert not kernels.dense
    qkv, output, gate_up, down = kernels.blocks[:4]
    for (blocks, gated), names in (
        (qkv, QKV),
        (output, [f"{LAYER}self_attn.o_proj.weight"]),
        (gate_up, GATE_UP),
        (down, [f"{LAYER}mlp.down_proj.weight"]),
        (kernels.blocks[-1], ["model.embed_tokens.weight"]),  # a tied head
    ):
        assert torch.equal(blocks.dequantised(), reads(path, names))
        assert gated == (names is GATE_UP)
    assert len(kernels.blocks) == 3 * 4 + 1


def test_gguf_leaves_other_types_dense_with_what_they_are_fused_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"v_proj.weight": Kind.F16, "o_proj.weight": Kind.BF16, "up_proj.weight": Kind.Q8_0}
    path = write_gguf(tmp_path / "m.gguf", "llama", kind=Kind.Q4_1, kinds=kinds)
    kernels = Recorder()
    with caplog.at_level("INFO"):
        load_target(path, kernels, dtype=F64, device=CPU, quantization="gguf")
    assert "dequantised, as with none: BF16 (2), F16 (2)" in caplog.text
    assert torch.equal(kernels.dense[0].float(), reads(path, QKV))
    assert len(kernels.dense) == 2 * 2
    gate_up, gated = kernels.blocks[0]
    assert gated and gate_up.bits == 8 and torch.equal(gate_up.dequantised(), reads(path, GATE_UP))


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen3-bias"])
def test_int4_keeps_the_head_in_8_bits(variant: str, tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, variant)
    for quantization, bits in (("int8", 8), ("int4", 4)):
        kernels = Recorder()
        target = load_target(path, kernels, dtype=F64, device=CPU, quantization=quantization)
        layers = tiny.make_config(variant)["num_hidden_layers"]
        assert not kernels.dense and kernels.bits == [*[bits] * 4 * layers, 8]
        table = reads(path, ["model.embed_tokens.weight"])
        assert torch.equal(target.embed(torch.arange(320)), table.double())  # always dense


def test_logits_come_near_the_dense_models(tmp_path: Path) -> None:
    """A random model magnifies every error; what is left is the activations' and, of int8, rounding."""
    path = write_gguf(tmp_path / "m.gguf", "llama", kind=Kind.Q4_1)
    work = [(0, list(range(3, 43)))]

    def logits(quantization: str) -> torch.Tensor:
        kernels = ReferenceKernels()
        target = load_target(path, kernels, dtype=F64, device=CPU, quantization=quantization)
        return PagedRunner(target, kernels, F64, sequences=1, max_tokens=40).forward(work)

    dense = logits("none")
    for quantization in ("gguf", "int8"):
        error = (logits(quantization) - dense).std() / dense.std()
        assert 1e-3 < error < 0.06


@pytest.mark.parametrize("quantization", ["none", "int4", "gguf"])
def test_progress_counts_every_weight_once(quantization: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama-tied", kind=Kind.Q8_0, kinds={"v_proj.weight": Kind.F16})
    seen: list[tuple[int, int]] = []
    load_target(
        path,
        ReferenceKernels(),
        dtype=F64,
        device=CPU,
        quantization=quantization,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0 and len({total for _, total in seen}) == 1


def drafter(
    algorithm: str, path: Path, model: Path, kernels: Recorder, steps: int, quantization: str
) -> None:
    load_drafter(
        algorithm,
        path,
        model=model,
        target=load_target(model, ReferenceKernels(), dtype=F64, device=CPU),
        kernels=kernels,
        dtype=F64,
        device=CPU,
        steps=steps,
        quantization=quantization,
    )


def test_drafters_are_quantised_on_their_own(tmp_path: Path) -> None:
    model = tiny.make_checkpoint(tmp_path / "target")
    path = tiny_drafters.make_mtp(tmp_path / "draft", draft_ids=torch.arange(0, 320, 2))
    dense, kernels = Recorder(), Recorder()
    drafter("MTP", path, model, dense, 3, "none")
    drafter("MTP", path, model, kernels, 3, "int4")
    assert not dense.blocks and not kernels.dense
    assert kernels.bits == [4] * (len(dense.dense) - 1) + [8]  # the last is the reduced head
    for weight, (blocks, _) in zip(dense.dense, kernels.blocks, strict=True):
        assert blocks.q.shape == weight.shape
        assert (blocks.dequantised() - weight).std() < 0.12 * weight.std()


def test_a_drafter_that_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    model = tiny.make_checkpoint(tmp_path / "target", overrides=tiny_dspark.target_config())
    sizes = tiny_dspark.Sizes()
    path = tiny_dspark.make_dspark(tmp_path / "draft", sizes)
    drafter("DSpark", path, model, Recorder(), sizes.block, "none")
    with pytest.raises(
        UnsupportedError, match=r"(?s)--draft_quantization=int8 .*o_proj.weight has rows of 48"
    ):
        drafter("DSpark", path, model, Recorder(), sizes.block, "int8")


# -- refusals ------------------------------------------------------------------------------------------------


def test_gguf_needs_a_gguf_file(tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path)
    with pytest.raises(
        ConfigError, match=r"--quantization=gguf: .* is not a GGUF file; allowed for it: none, int8"
    ):
        load_target(path, ReferenceKernels(), dtype=F64, device=CPU, quantization="gguf")


def test_gguf_needs_a_kept_type(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", kind=Kind.F16)
    with pytest.raises(
        UnsupportedError, match=r"its matrices are F16 \(16\); kept are Q4_0, Q4_1, Q4_K, Q5_0"
    ):
        load_target(path, ReferenceKernels(), dtype=F64, device=CPU, quantization="gguf")


def test_rows_must_be_whole_groups(tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, overrides={"intermediate_size": 72})
    with pytest.raises(
        UnsupportedError, match=r"down_proj.weight has rows of 72 weights; allowed: multiples of 32"
    ):
        load_target(path, ReferenceKernels(), dtype=F64, device=CPU, quantization="int4")


def test_flags_name_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--quantization=int5: allowed: none, int8, int4, gguf"):
        Config.from_mapping({"quantization": "int5"})
    with pytest.raises(ConfigError, match="--draft_quantization=gguf: allowed: auto, none, int8, int4"):
        Config.from_mapping({"draft_quantization": "gguf"})
    with pytest.raises(ConfigError, match="--quantization=fp4: allowed: none, int8, int4, gguf"):
        block_source(open_checkpoint(tiny.make_checkpoint(tmp_path)), "fp4", "quantization")


def test_quantised_weights_need_bf16_and_the_native_kernels() -> None:
    flags = {"quantization": "int4", "draft_quantization": "int8", "dtype": "float32"}
    with pytest.raises(UnsupportedError) as error:
        check_abilities(Config.from_mapping(flags), CpuPlatform("torch"))
    assert [reason.partition(":")[0] for reason in error.value.reasons] == [
        "--quantization=int4 needs --dtype=bfloat16; --dtype=float32",
        "--quantization=int4",
        "--draft_quantization=int8 needs --dtype=bfloat16; --dtype=float32",
        "--draft_quantization=int8",
    ]
    assert "it needs the native kernels" in error.value.reasons[1]
    with pytest.raises(UnsupportedError, match="native kernels"):
        CpuKernels().pack_blocks(quantise(randn(2, 32), 4))
    assert check_abilities(Config.from_mapping({"dtype": "float32"}), CpuPlatform("torch")) is torch.float32


# -- on the native kernels -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native() -> Kernels:
    if library_path() is None:
        pytest.skip("the native library was not built")
    return CpuPlatform("native").kernels()


def test_the_embedded_models_own_blocks(smollm2_gguf: Path, native: Kernels) -> None:
    """Against the same file in bf16: nearly the same distributions over a text the model continues itself."""
    prompt = [504, 3575, 282, 4649, 314, 260, 2240, 28, 284, 357, 314, 253, 1123, 1443, 327, 965, 18]
    models = {
        name: load_target(smollm2_gguf, native, dtype=torch.bfloat16, device=CPU, quantization=name)
        for name in ("none", "gguf")
    }
    runs = {
        name: PagedRunner(model, native, torch.bfloat16, sequences=1, max_tokens=64, block_size=16)
        for name, model in models.items()
    }
    fed, divergence, tokens = prompt, [], list(prompt)
    while len(tokens) < 60:
        dense, kept = (run.forward([(0, fed)]).float().log_softmax(-1) for run in runs.values())
        divergence.append((dense.exp() * (dense - kept)).sum(-1))
        fed = [int(dense[-1].argmax())]
        tokens += fed
    found = torch.cat(divergence)
    assert found.mean() < 0.02 and found.max() < 0.2


def greedy(model: Path, flags: dict[str, Any], prompts: list[list[int]]) -> list[list[int]]:
    async def run() -> list[list[int]]:
        engine = await build_engine(Config.from_mapping({"model": str(model), **flags}))
        try:

            async def one(prompt: list[int]) -> list[int]:
                wanted = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
                return [t async for output in engine.generate(prompt, wanted) for t in output.token_ids]

            return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_speculation_is_lossless_on_the_quantised_target(
    quantization: str, native: Kernels, tmp_path: Path
) -> None:
    """Bit for bit in bf16, drafts being quantised or not: verification uses the weights that decode."""
    model = tiny.make_checkpoint(tmp_path / "target", "qwen3")
    drafter = tiny_drafters.make_mtp(tmp_path / "draft", "qwen3")
    prompts = [list(range(3 + i, 20 + 3 * i)) for i in range(4)]
    flags = {
        "dtype": "bfloat16", "quantization": quantization, "max_seqs_per_batch": 4,
        "max_cache_size": 16 * 2**20, "disable_graph_warmup": True, "cpu_kernels": "native",
    }  # fmt: skip
    plain = greedy(model, {**flags, "num_speculative_tokens": 0}, prompts)
    assert len({tuple(tokens) for tokens in plain}) == len(prompts)
    for draft_quantization in ("none", "int4"):
        drafted = {"draft_model": str(drafter), "num_speculative_tokens": 3}
        found = greedy(model, {**flags, **drafted, "draft_quantization": draft_quantization}, prompts)
        assert found == plain
