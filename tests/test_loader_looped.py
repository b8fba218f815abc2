"""Loading looped checkpoints: published sizes and defaults as they are, everything else is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_looped
import torch
from safetensors.torch import load_file

from xspec.errors import CheckpointError, ConfigError, UnsupportedError
from xspec.kernels.cpu import CpuKernels
from xspec.models import huginn, nanbeige, ouro
from xspec.models.base import Target
from xspec.models.loader import load_target
from xspec.models.looped import LoopedConfig, LoopedDecoder
from xspec.models.registry import LOOPED, read_config

FAMILIES = tuple(tiny_looped.WRITERS)


def load(path: Path, **kwargs: Any) -> Target:
    return load_target(path, CpuKernels(), dtype=torch.float32, device=torch.device("cpu"), **kwargs)


def edit(path: Path, **changes: Any) -> None:
    config = tiny_looped.read_config(path)
    if "loops" in changes:
        changes = {tiny_looped.LOOPS_KEY[config["model_type"]]: changes["loops"]}
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def counts(raw: dict[str, Any]) -> tuple[int, int]:
    """(tensors, parameters) that a published config asks for."""
    config = read_config(raw, "here")
    assert isinstance(config, LoopedConfig)
    shapes = LOOPED[config.model_type].tensor_shapes(config)
    return len(shapes), sum(math.prod(shape) for shape in shapes.values())


OURO = {
    "architectures": ["OuroForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig"},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5632,
    "layer_types": ["full_attention"] * 24,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "model_type": "ouro",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 49152,
}
NANBEIGE = {
    "architectures": ["NanbeigeForCausalLM"],
    "model_type": "nanbeige",
    "vocab_size": 166144,
    "hidden_size": 3072,
    "intermediate_size": 10752,
    "num_hidden_layers": 22,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-05,
    "rope_theta": 70000000.0,
    "num_loops": 2,
    "loop_loss_weights": [],
    "loop_share_kv": False,
    "skip_loop_final_norm": False,
    "tie_word_embeddings": False,
    "bos_token_id": 166100,
    "eos_token_id": 166101,
    "pad_token_id": 0,
}


def test_published_sizes() -> None:
    assert counts(OURO) == (269, 1_434_652_673)
    assert counts({**OURO, "num_hidden_layers": 48, "layer_types": None}) == (533, 2_667_974_657)
    assert counts(NANBEIGE)[0] == 22 * 9 + 3
    tensors, parameters = counts({"model_type": "huginn_raven", "architectures": ["RavenForCausalLM"]})
    assert tensors == 8 * 9 + 4  # of a block: 4 norms, 2 + 1 of attention, 2 of the MLP
    table = 4096 * 48 * 2
    assert parameters - table == 65536 * 5280 + 8 * (4 * 5280**2 + 3 * 17920 * 5280 + 6 * 5280) + (
        2 * 5280**2 + 5280
    )


def test_published_defaults() -> None:
    config = ouro.read_config(OURO)
    assert (config.loops, config.exit_threshold, config.qkv_bias, config.head_norm) == (4, 1.0, False, False)
    assert ouro.read_config({**OURO, "total_ut_steps": 3, "early_exit_threshold": None}).loops == 3
    config = nanbeige.read_config(NANBEIGE)
    assert (config.loops, config.exit_threshold, config.rope.theta, config.norm_eps) == (2, None, 7e7, 1e-5)
    assert nanbeige.read_config({**NANBEIGE, "num_loops": None}).loops == 1
    raven = huginn.read_config({"model_type": "huginn_raven"})
    assert (raven.loops, raven.num_layers, raven.prelude_layers, raven.coda_layers) == (32, 4, 2, 2)
    assert (raven.hidden_size, raven.heads, raven.head_dim, raven.max_position) == (5280, 55, 96, 4096)
    assert raven.embed_scale == math.sqrt(5280) and raven.qkv_bias and raven.tied_head


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_checkpoint_loads_as_it_says(family: str, tmp_path: Path) -> None:
    path = tiny_looped.WRITERS[family](tmp_path / "m", loops=5)
    target = load(path)
    assert isinstance(target, LoopedDecoder)
    spec = target.spec
    assert (spec.model_type, spec.loops, spec.num_layers) == (family, 5, 2)
    outer = 3 if family == "huginn_raven" else 0
    assert spec.outer_layers == outer and spec.planes.count == 10 + outer
    assert spec.state_size == (128 if outer else 64)
    weights = load_file(path / "model.safetensors")
    expected = tiny_looped.tensor_shapes(tiny_looped.read_config(path))
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_wrong_tensor_is_listed(family: str, tmp_path: Path) -> None:
    path = tiny_looped.WRITERS[family](tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    missing = {
        "ouro": "model.layers.1.input_layernorm_2.weight",
        "huginn_raven": "transformer.coda.1.attn.qk_bias",
        "nanbeige": "model.layers.1.mlp.up_proj.weight",
    }[family]
    bent = {"ouro": "model.early_exit_gate.weight", "huginn_raven": "transformer.adapter.weight"}
    wrong = bent.get(family, "model.norm.weight")
    del weights[missing]
    weights[wrong] = torch.zeros(7)
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(16)
    tiny.write_weights(path, weights)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    said = str(caught.value)
    assert f"missing: {missing} [" in said
    assert "extra: model.layers.0.self_attn.q_norm.weight [16]" in said
    assert f"wrong shape: {wrong} is [7], the config says [" in said


def test_a_gate_and_a_rotary_table_must_be_there(tmp_path: Path) -> None:
    for name, write in (("model.early_exit_gate.bias", "ouro"), ("freqs_cis", "huginn_raven")):
        path = tiny_looped.WRITERS[write](tmp_path / write)
        weights = load_file(path / "model.safetensors")
        del weights[name]
        tiny.write_weights(path, weights)
        with pytest.raises(CheckpointError, match=f"missing: {name}"):
            load(path)


def test_a_stored_tied_head_is_tolerated(tmp_path: Path) -> None:
    path = tiny_looped.write_huginn(tmp_path / "m")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    tiny.write_weights(path, weights)
    assert load(path).spec.loops == 4


SWITCHES: list[tuple[str, dict[str, Any], str]] = [
    ("ouro", {"attention_bias": True}, "attention_bias=True (only False)"),
    ("ouro", {"mlp_bias": True}, "mlp_bias=True (only False)"),
    ("ouro", {"early_exit_step": 2}, "early_exit_step=2 (only None)"),
    ("ouro", {"early_exit_step": 0}, "early_exit_step=0 (only None)"),
    ("ouro", {"qk_norm": True}, "qk_norm=True: a key that is not known here"),
    ("ouro", {"loop_embedding": "sine"}, "loop_embedding='sine': a key that is not known here"),
    ("ouro", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1: a key that is not known here"),
    ("ouro", {"layer_types": ["sliding_attention"]}, "layer_types ['sliding_attention']"),
    ("ouro", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("ouro", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
    ("nanbeige", {"qk_layernorm": True}, "qk_layernorm=True (only False)"),
    ("nanbeige", {"emb_neighbor_num": 3}, "emb_neighbor_num=3 (only None)"),
    ("nanbeige", {"insert_ngram_layer_idx": [0]}, "insert_ngram_layer_idx=[0] (only [])"),
    ("nanbeige", {"ngram_insert_all_layers": True}, "ngram_insert_all_layers=True (only False)"),
    ("nanbeige", {"loop_loss_weights": [0.5]}, "loop_loss_weights=[0.5] (only [])"),
    ("nanbeige", {"skip_loop_final_norm": True}, "skip_loop_final_norm=True (only False)"),
    ("nanbeige", {"enable_double_loop_split": True}, "enable_double_loop_split=True (only False)"),
    ("nanbeige", {"loop_middle_layers": 1}, "loop_middle_layers=1 (only None)"),
    ("nanbeige", {"loop_share_kv": True}, "loop_share_kv=True (only False)"),
    ("nanbeige", {"enable_hyper_connection": True}, "enable_hyper_connection=True (only False)"),
    ("nanbeige", {"enable_mhc": True}, "enable_mhc=True (only False)"),
    ("nanbeige", {"enable_depth_attention": True}, "enable_depth_attention=True (only False)"),
    ("nanbeige", {"loop_gate": 1}, "loop_gate=1: a key that is not known here"),
    ("huginn_raven", {"injection_type": "add"}, "injection_type='add' (only 'linear')"),
    ("huginn_raven", {"block_class_name": "PreNormBlock"}, "block_class_name='PreNormBlock'"),
    ("huginn_raven", {"norm_class_name": "LayerNorm"}, "norm_class_name='LayerNorm'"),
    ("huginn_raven", {"mlp_class_name": "BaseMLP"}, "mlp_class_name='BaseMLP' (only 'GatedMLP')"),
    ("huginn_raven", {"nonlin_name": "GELU"}, "nonlin_name='GELU' (only 'SiLU')"),
    ("huginn_raven", {"bias": True}, "bias=True (only False)"),
    ("huginn_raven", {"test_time_noise": 0.1}, "test_time_noise=0.1 (only 0)"),
    ("huginn_raven", {"num_key_value_heads": 2}, "num_key_value_heads=2 (only 4)"),
    ("huginn_raven", {"n_layers": 9}, "n_layers=9 (only 5)"),
    ("huginn_raven", {"padded_vocab_size": 384}, "padded_vocab_size=384 (only 320)"),
    ("huginn_raven", {"rope_scaling": {"factor": 2}}, "a key that is not known here"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), SWITCHES)
def test_switches_are_refused_by_name(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tiny_looped.WRITERS[family](tmp_path / "m", **changes)
    with pytest.raises(UnsupportedError) as caught:
        load(path)
    assert any(reason in found for found in caught.value.reasons)


def test_all_complaints_at_once(tmp_path: Path) -> None:
    path = tiny_looped.write_nanbeige(tmp_path / "a", qk_layernorm=True, enable_mhc=True, hidden_act="relu")
    with pytest.raises(UnsupportedError) as caught:
        load(path)
    assert len(caught.value.reasons) == 3
    path = tiny_looped.write_huginn(tmp_path / "b")
    edit(path, n_heads=0, bias=True, rope_base="x", mean_recurrence=-1)
    with pytest.raises(CheckpointError) as malformed:
        load(path)
    for part in ("n_heads must be", "rope_base must be", "mean_recurrence must be", "bias=True"):
        assert part in str(malformed.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_say_nothing(family: str, tmp_path: Path) -> None:
    """Files of training and of transformers hold many; switched-off unknown ones are no reason either."""
    noise = {"_name_or_path": "here", "unknown_feature": False, "unknown_size": None, "unknown_list": []}
    path = tiny_looped.WRITERS[family](tmp_path / "m", **noise, output_attentions=False, id2label={"0": "A"})
    assert load(path).spec.model_type == family


MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("ouro", {"loops": 0}, "total_ut_steps must be a positive integer, found 0"),
    ("ouro", {"early_exit_threshold": 1.5}, "early_exit_threshold must be above 0 and at most 1"),
    ("ouro", {"early_exit_threshold": 0}, "early_exit_threshold must be a positive number"),
    ("ouro", {"loops": 10**9}, "2 layers in 1000000000 loops"),
    ("nanbeige", {"loops": "two"}, "num_loops must be a positive integer, found 'two'"),
    ("huginn_raven", {"n_heads": 5}, "n_embd (64) must be an even multiple of n_heads (5)"),
    ("huginn_raven", {"n_layers_in_coda": 10**9, "n_layers": 10**9 + 3}, "1000000000 after them"),
    ("huginn_raven", {"init_values": [1]}, "init_values must be an object"),
    ("huginn_raven", {"init_values": {"embed_scale": "big"}}, "embed_scale must be a positive number"),
    ("huginn_raven", {"tie_word_embeddings": False}, "tie_word_embeddings differs from tie_embeddings=True"),
]


@pytest.mark.parametrize(("family", "changes", "complaint"), MALFORMED)
def test_malformed_configs(family: str, changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = tiny_looped.WRITERS[family](tmp_path / "m")
    edit(path, **changes)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert complaint in str(caught.value)


# ---- --early_exit_threshold

WITHOUT_A_GATE: list[Callable[[Path], Path]] = [
    tiny_looped.write_nanbeige,
    tiny_looped.write_huginn,
    tiny.make_checkpoint,
]


@pytest.mark.parametrize("write", WITHOUT_A_GATE)
def test_a_threshold_needs_a_gate(write: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="--early_exit_threshold=0.5 cannot be had") as caught:
        load(write(tmp_path / "m"), early_exit_threshold=0.5)
    assert "has no exit gate" in caught.value.reasons[0]


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.01, math.nan])
def test_a_threshold_out_of_range(threshold: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--early_exit_threshold=.* above 0 and at most 1"):
        load(tiny_looped.write_ouro(tmp_path / "m"), early_exit_threshold=threshold)
