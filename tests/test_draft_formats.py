"""Drafter checkpoints: every format of one drafter drafts the same, what does not fit is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_drafters
import torch
from draft_rounds import DraftRounds
from safetensors.torch import load_file, save_file

from xspec.draft.mtp import MtpDrafter
from xspec.errors import CheckpointError, ConfigError, UnsupportedError
from xspec.kernels.cpu import CpuKernels
from xspec.models.blocks import Decoder
from xspec.models.loader import load_target

F64 = torch.float64
CPU = torch.device("cpu")
KERNELS = CpuKernels()
TEXT = [7, 300, 12, 99, 4, 250, 31, 8, 77, 160]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    return {name: tiny.make_checkpoint(root / name, name) for name in ("llama", "qwen2", "qwen3")}


def target_at(path: Path) -> Decoder:
    return load_target(path, KERNELS, dtype=F64, device=CPU)


def load_mtp(path: Path | None, model: Path, target: Decoder | None = None) -> MtpDrafter:
    return MtpDrafter.load(
        path,
        model=model,
        target=target or target_at(model),
        kernels=KERNELS,
        dtype=F64,
        device=CPU,
        steps=3,
    )


def mtp_logits(path: Path | None, model: Path) -> torch.Tensor:
    """What a drafter thinks after a prefill and one round: [3 steps, D]."""
    target = target_at(model)
    rounds = DraftRounds(target, load_mtp(path, model, target), KERNELS, [TEXT])
    rounds.prefill([(0, 5)])
    rounds.verify([0], 3, [2])
    return rounds.draft([0], 3).logits[:, 0]


def edit_config(path: Path, **changes: Any) -> Path:
    """Change keys of path/config.json; ... drops one."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> Path:
    """Replace tensors of path/model.safetensors (`.` written as `__`); None drops one."""
    tensors = load_file(path / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path / "model.safetensors")
    return path


# -- MTP: formats that load --------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_every_mtp_format_is_the_same_drafter(variant: str, models: dict[str, Path], tmp_path: Path) -> None:
    model = models[variant]
    expected = mtp_logits(tiny_drafters.make_mtp(tmp_path / "ours", variant), model)
    assert expected.std() > 0.1
    for names in tiny_drafters.EXPORTS:
        path = tiny_drafters.make_mtp(tmp_path / names, variant, names=names)
        assert torch.equal(mtp_logits(path, model), expected), names

    config = tiny_drafters.mtp_config(variant)
    tensors = tiny_drafters.exported_names(tiny_drafters.mtp_weights(variant), "xllm")
    exported = "mtp_layer_parameters.safetensors"
    for index in (None, "model.safetensors.index.json", f"{exported}.index.json"):
        path = tmp_path / f"file-{index}"
        tiny_drafters.write_directory(path, config, tensors, file=exported, index=index)
        assert torch.equal(mtp_logits(path, model), expected), index

    bundled = tiny_drafters.make_bundled(tmp_path / "bundled", variant)
    assert torch.equal(mtp_logits(None, bundled), expected)
    without = tiny_drafters.make_bundled(tmp_path / "without", variant, copies=False)
    assert torch.equal(mtp_logits(None, without), expected)


def test_copies_of_embedding_and_head_are_ignored(models: dict[str, Path], tmp_path: Path) -> None:
    plain = tiny_drafters.make_mtp(tmp_path / "plain")
    full = tiny_drafters.make_mtp(tmp_path / "full")
    wrong = torch.full((tiny.VOCAB_SIZE, 64), 3.0)
    edit_tensors(
        full,
        model__embed_tokens__weight=wrong,
        lm_head__weight=wrong + 1,
        model__shared_head__head__weight=wrong + 2,
    )
    assert torch.equal(mtp_logits(full, models["llama"]), mtp_logits(plain, models["llama"]))


def test_what_an_export_leaves_in_its_config_is_no_obstacle(models: dict[str, Path], tmp_path: Path) -> None:
    plain = tiny_drafters.make_mtp(tmp_path / "plain")
    odd = tiny_drafters.make_mtp(
        tmp_path / "odd",
        architectures=["LlamaMtpModel"],
        quantization_config="",
        num_nextn_predict_layers=1,
        first_k_dense_replace=0,
    )
    assert torch.equal(mtp_logits(odd, models["llama"]), mtp_logits(plain, models["llama"]))


@pytest.mark.parametrize("key", ["target_hidden", "step_hidden"])
def test_a_bundled_drafter_has_the_hidden_keys_too(key: str, tmp_path: Path) -> None:
    other = {"target_hidden": "residual", "step_hidden": "normed"}[key]
    default = mtp_logits(None, tiny_drafters.make_bundled(tmp_path / "default"))
    changed = mtp_logits(None, tiny_drafters.make_bundled(tmp_path / "changed", **{key: other}))
    assert (default - changed).abs().max() > 1e-3


def test_the_layer_may_have_another_shape_than_the_targets(models: dict[str, Path], tmp_path: Path) -> None:
    """Only what is shared must match: a qwen3 layer serves a llama target."""
    path = tiny_drafters.make_mtp(tmp_path / "draft", "qwen3")
    drafter = load_mtp(path, models["llama"])
    assert drafter.spec.planes is not None and drafter.spec.planes.head_dim == 32
    assert mtp_logits(path, models["llama"]).shape == (3, tiny.VOCAB_SIZE)


def test_a_whole_vocabulary_with_an_identity_map(models: dict[str, Path], tmp_path: Path) -> None:
    plain = tiny_drafters.make_mtp(tmp_path / "plain")
    for name, maps in (
        ("no map", {}),
        ("d2t", {"d2t": torch.zeros(tiny.VOCAB_SIZE, dtype=torch.int64)}),
        ("t2d", {"d2t": torch.zeros(320, dtype=torch.int32), "t2d": torch.ones(320, dtype=torch.bool)}),
    ):
        path = tiny_drafters.make_mtp(tmp_path / name, draft_vocab_size=tiny.VOCAB_SIZE)
        edit_tensors(path, **maps)
        assert torch.equal(mtp_logits(path, models["llama"]), mtp_logits(plain, models["llama"])), name


def test_a_mask_beside_the_id_map(models: dict[str, Path], tmp_path: Path) -> None:
    ids = torch.tensor([0, 5, 6, 319])
    path = tiny_drafters.make_mtp(tmp_path / "draft", draft_ids=ids)
    whole = mtp_logits(tiny_drafters.make_mtp(tmp_path / "whole"), models["llama"])
    mask = torch.zeros(tiny.VOCAB_SIZE, dtype=torch.bool)
    mask[ids] = True
    edit_tensors(path, t2d=mask)
    torch.testing.assert_close(mtp_logits(path, models["llama"])[0], whole[0, ids], rtol=0, atol=1e-12)
    mask[7] = True
    edit_tensors(path, t2d=mask)
    with pytest.raises(CheckpointError, match="t2d and d2t select different ids"):
        load_mtp(path, models["llama"])


# -- MTP: the target's own loader ---------------------------------------------------------------------------


def test_a_target_with_mtp_layers_is_the_same_target(models: dict[str, Path], tmp_path: Path) -> None:
    probe = torch.randn(4, 64, generator=torch.Generator().manual_seed(1), dtype=F64)
    bundled = target_at(tiny_drafters.make_bundled(tmp_path / "bundled"))
    assert bundled.spec == target_at(models["llama"]).spec
    assert torch.equal(bundled.logits(probe), target_at(models["llama"]).logits(probe))


@pytest.mark.parametrize("announced", [0, None, ...])
def test_layers_the_config_does_not_announce_stay_extra(announced: Any, tmp_path: Path) -> None:
    path = edit_config(tiny_drafters.make_bundled(tmp_path / "m"), num_nextn_predict_layers=announced)
    with pytest.raises(CheckpointError, match=r"extra: model\.layers\.2\.enorm\.weight \[64\]"):
        target_at(path)


def test_only_the_announced_layers_are_let_through(tmp_path: Path) -> None:
    path = tiny_drafters.make_bundled(tmp_path / "m")
    edit_tensors(path, model__layers__3__enorm__weight=torch.ones(64))
    with pytest.raises(CheckpointError) as error:
        target_at(path)
    assert re.findall(r"extra: (\S+)", str(error.value)) == ["model.layers.3.enorm.weight"]
    target_at(edit_config(path, num_nextn_predict_layers=2))
    target_at(edit_config(path, num_nextn_predict_layers=10**12))  # a number costs nothing


@pytest.mark.parametrize("value", [-1, "1", 1.5, True])
def test_a_malformed_count_of_mtp_layers(value: Any, tmp_path: Path) -> None:
    path = edit_config(tiny_drafters.make_bundled(tmp_path / "m"), num_nextn_predict_layers=value)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers must be a positive integer"):
        target_at(path)


# -- MTP: what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"hidden_size": 128},
            CheckpointError,
            "wrong shape: model.enorm.weight is [64], the config says [128]",
        ),
        ({"vocab_size": 319}, CheckpointError, "vocab_size is 319, the target (llama) has 320"),
        (
            {"model_type": "llama"},
            CheckpointError,
            "model_type 'llama' is no MTP drafter; allowed: <family>_mtp",
        ),
        ({"model_type": None}, CheckpointError, "model_type None is no MTP drafter"),
        ({"model_type": ["llama_mtp"]}, CheckpointError, "model_type ['llama_mtp'] is no MTP drafter"),
        ({"model_type": "_mtp"}, CheckpointError, "needs a layer of '', which is not implemented"),
        (
            {"model_type": "deepseek_v3_mtp"},
            CheckpointError,
            "'deepseek_v3_mtp' needs a layer of 'deepseek_v3', which is not implemented; known: llama, qwen2",
        ),
        ({"model_type": "glm4_moe_mtp"}, CheckpointError, "needs a layer of 'glm4_moe'"),
        (
            {"num_hidden_layers": 3},
            UnsupportedError,
            "num_hidden_layers is 3: one MTP layer is used for every",
        ),
        ({"num_nextn_predict_layers": 2}, UnsupportedError, "num_nextn_predict_layers is 2: one MTP layer"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            UnsupportedError,
            "quantization_config (quant_method='fp8'): only plain float weights",
        ),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act='gelu' (only silu)"),
        ({"target_hidden": "raw"}, CheckpointError, "target_hidden is 'raw'; allowed: normed, residual"),
        (
            {"step_hidden": ["normed"]},
            CheckpointError,
            "step_hidden is ['normed']; allowed: normed, residual",
        ),
        ({"intermediate_size": 97}, CheckpointError, "model.layers.0.mlp.down_proj.weight is [64, 96]"),
        ({"rms_norm_eps": -1}, CheckpointError, "rms_norm_eps must be a positive number, found -1"),
        ({"draft_vocab_size": 16}, CheckpointError, "there is no tensor d2t [16] that maps its ids"),
        ({"draft_vocab_size": 321}, CheckpointError, "draft_vocab_size is 321; allowed: integers from 1 to"),
        ({"draft_vocab_size": 0}, CheckpointError, "draft_vocab_size is 0; allowed: integers from 1 to"),
        ({"draft_vocab_size": "16"}, CheckpointError, "draft_vocab_size is '16'; allowed"),
        ({"draft_vocab_size": True}, CheckpointError, "draft_vocab_size is True; allowed"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_config_that_does_not_fit(
    changes: dict[str, Any], kind: type[ConfigError], message: str, models: dict[str, Path], tmp_path: Path
) -> None:
    path = edit_config(tiny_drafters.make_mtp(tmp_path / "draft"), **changes)
    with pytest.raises(kind, match=re.escape(message)) as error:
        load_mtp(path, models["llama"])
    assert str(path) in str(error.value)  # which of the two checkpoints is meant


def test_a_drafter_of_another_target(models: dict[str, Path], tmp_path: Path) -> None:
    """A consistent checkpoint whose sizes are not the target's: all of them are named."""
    small = {"hidden_size": 32, "vocab_size": 100}
    model = tiny.make_checkpoint(tmp_path / "small", overrides=small)
    path = tiny_drafters.make_mtp(tmp_path / "draft")
    with pytest.raises(CheckpointError) as error:
        load_mtp(path, model)
    assert str(error.value) == (
        f"the drafter {path} was not made for this target:\n"
        "  - hidden_size is 64, the target (llama) has 32\n"
        "  - vocab_size is 320, the target (llama) has 100"
    )


IDS = torch.tensor([0, 5, 6, 319])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__enorm__weight": None},
            "exactly one of model.enorm.weight, model.pre_fc_norm_embedding.weight",
        ),
        ({"model__norm__weight": None}, "model.final_norm.weight must be its norm; it holds none of them"),
        ({"model__final_norm__weight": torch.ones(64)}, "must be its norm; it holds 2 of them"),
        (
            {"model__layers__0__mlp__up_proj__weight": None},
            "missing: model.layers.0.mlp.up_proj.weight [96, 64]",
        ),
        (
            {"model__eh_proj__weight": torch.ones(64, 64)},
            "model.eh_proj.weight is [64, 64], the config says [64, 128]",
        ),
        ({"model__eh_proj__bias": torch.ones(64)}, "extra: model.eh_proj.bias [64]"),
        (
            {"model__layers__0__self_attn__kv_a_proj_with_mqa__weight": torch.ones(8, 64)},
            "extra: model.layers.0.self_attn.kv_a",
        ),
        (
            {"model__layers__1__input_layernorm__weight": torch.ones(64)},
            "extra: model.layers.1.input_layernorm",
        ),
        (
            {"model__rot__weight": torch.eye(64)},
            "model.rot.weight: it serves a target whose hidden states are rotated",
        ),
        ({"model__enorm__weight": torch.ones(64, dtype=torch.int8)}, "model.enorm.weight is I8"),
        (
            {"model__eh_proj__weight": torch.ones(64, 128).to(torch.float8_e4m3fn)},
            "model.eh_proj.weight is F8_E4M3",
        ),
        ({"d2t": torch.zeros(4)}, "d2t is F32 (an id map: integers)"),
        ({"d2t": torch.tensor([0, 4, 4])}, "d2t has shape [3], the config says [4]"),
        ({"d2t": torch.tensor([0, 4, 4, 317])}, "d2t maps draft id 3 to 320; allowed: 0 to 319"),
        ({"d2t": torch.tensor([-1, 4, 4, 4])}, "d2t maps draft id 0 to -1; allowed: 0 to 319"),
        (
            {"d2t": torch.tensor([0, 4, 3, 316])},
            "strictly increasing ids, but maps draft ids 1 and 2 to 5 and 5",
        ),
        ({"d2t": torch.tensor([0, 4, 2, 316])}, "but maps draft ids 1 and 2 to 5 and 4"),
        ({"d2t": None}, "there is no tensor d2t [4] that maps its ids"),
        ({"t2d": torch.zeros(4, dtype=torch.bool)}, "t2d has shape [4], the config says [320]"),
    ],
)
def test_tensors_that_do_not_fit(
    changes: dict[str, torch.Tensor | None], message: str, models: dict[str, Path], tmp_path: Path
) -> None:
    path = edit_tensors(tiny_drafters.make_mtp(tmp_path / "draft", draft_ids=IDS), **changes)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        load_mtp(path, models["llama"])
    assert str(path) in str(error.value)


def test_an_id_map_without_its_size(models: dict[str, Path], tmp_path: Path) -> None:
    path = edit_config(tiny_drafters.make_mtp(tmp_path / "draft", draft_ids=IDS), draft_vocab_size=...)
    with pytest.raises(CheckpointError, match="holds d2t, but its config has no draft_vocab_size"):
        load_mtp(path, models["llama"])


def test_places_without_a_drafter(models: dict[str, Path], tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(tiny_drafters.mtp_config()))
    (bare / "pytorch_model.bin").write_bytes(b"x")
    for path, message in (
        (tmp_path / "absent", "there is no such file or directory"),
        (gguf, "is a file; allowed: a directory"),
        (tmp_path / "empty", "has no config.json; the directory holds nothing"),
        (
            bare,
            r"neither model\.safetensors nor .*mtp_layer_parameters\.safetensors nor .*pytorch_model\.bin",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_mtp(path, models["llama"])


def test_targets_that_bring_no_drafter(models: dict[str, Path], tmp_path: Path) -> None:
    target = target_at(models["llama"])
    with pytest.raises(ConfigError, match="without --draft_model: .* has no num_nextn_predict_layers"):
        load_mtp(None, models["llama"], target)
    with pytest.raises(ConfigError, match=r"but a GGUF file holds none that can be read: give --draft_model"):
        load_mtp(None, tmp_path / "model.gguf", target)
    two = tiny_drafters.make_bundled(tmp_path / "two", num_nextn_predict_layers=2)
    with pytest.raises(
        UnsupportedError, match="num_nextn_predict_layers is 2: one MTP layer is used for every"
    ):
        load_mtp(None, two, target)
    bare = tiny_drafters.make_bundled(tmp_path / "bare", num_nextn_predict_layers=1)
    edit_tensors(bare, model__layers__2__eh_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.eh_proj\.weight \[64, 128\]"):
        load_mtp(None, bare, target)
