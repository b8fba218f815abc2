"""Dialects of DSpark checkpoints: all load to the same drafts; what is not understood is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_dspark
import torch
from draft_rounds import Drafted, DraftRounds
from safetensors.torch import load_file, save_file
from tiny_dspark import BLOCK, DIALECTS, MASK_TOKEN, Sizes, make_dspark

from xspec.draft.dspark import PER_ROW, DSparkDrafter
from xspec.draft.dspark_config import DSparkConfig, open_dspark
from xspec.errors import CheckpointError, ConfigError, UnsupportedError
from xspec.kernels.cpu import CpuKernels
from xspec.models.blocks import Decoder
from xspec.models.loader import load_target

F64 = torch.float64
CPU = torch.device("cpu")
DRAFT_IDS = tuple(range(3, 320, 4))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("target")
    tiny.make_checkpoint(path, overrides=tiny_dspark.target_config())
    return load_target(path, CpuKernels(), dtype=F64, device=CPU)


def load(target: Decoder, path: Path, *, steps: int = BLOCK, regime: str | None = PER_ROW) -> DSparkDrafter:
    kernels = CpuKernels()
    return DSparkDrafter.load(
        path, target=target, kernels=kernels, dtype=F64, device=CPU, steps=steps, regime=regime
    )


def drafts(target: Decoder, path: Path) -> Drafted:
    texts = [[(7 * i + 3) % 320 for i in range(20)], [(5 * i + 11) % 320 for i in range(20)]]
    rounds = DraftRounds(target, load(target, path), CpuKernels(), texts)
    rounds.prefill([(0, 7), (1, 4)])
    return rounds.draft([0, 1], BLOCK)


def read(target: Decoder, path: Path) -> DSparkConfig:
    checkpoint, config, _ = open_dspark(path, target.spec)
    checkpoint.close()
    return config


SIZES = {
    "whole": Sizes(),
    "reduced": Sizes("qwen3", markov="gated", mask_embedding=False, draft_ids=DRAFT_IDS),
    "dflash": Sizes("qwen3", markov=None, confidence=False, mask_embedding=False, layer_ids=(-1, 1)),
}


@pytest.mark.parametrize("name", SIZES)
def test_every_dialect_loads_to_the_same_drafts(target: Decoder, tmp_path: Path, name: str) -> None:
    found = {
        dialect: drafts(target, make_dspark(tmp_path / dialect, SIZES[name], dialect)) for dialect in DIALECTS
    }
    for drafted in found.values():
        assert torch.equal(drafted.draft.tokens, found["flat"].draft.tokens)
        assert torch.equal(drafted.logits, found["flat"].logits)
        assert torch.equal(drafted.draft.signals, found["flat"].draft.signals)
    assert (
        drafts(target, make_dspark(tmp_path / "other", SIZES[name], seed=12)).logits.ne(drafted.logits).all()
    )


def test_what_the_published_layout_says(target: Decoder, tmp_path: Path) -> None:
    config = read(target, make_dspark(tmp_path, SIZES["reduced"]))
    assert (config.block_size, config.taps, config.mask_token_id) == (BLOCK, (1, 3), MASK_TOKEN)
    assert (config.markov_rank, config.gated) == (8, True)
    assert config.confidence and config.confidence_with_markov and config.layers.head_norm
    assert config.calibration == {}


def test_absent_keys_follow_the_tensors(target: Decoder, tmp_path: Path) -> None:
    """A confidence head that is there is used, and its width says what it reads."""
    absent = {"enable_confidence_head": None, "confidence_head_with_markov": None, "markov_head_type": None}
    config = read(target, make_dspark(tmp_path / "a", changes=absent))
    assert config.confidence and config.confidence_with_markov and not config.gated
    config = read(target, make_dspark(tmp_path / "b", Sizes(with_markov=False), changes=absent))
    assert config.confidence and not config.confidence_with_markov
    config = read(target, make_dspark(tmp_path / "c", Sizes(confidence=False), changes=absent))
    assert not config.confidence and not config.confidence_with_markov
    absent["markov_rank"] = None
    config = read(target, make_dspark(tmp_path / "d", SIZES["dflash"], changes=absent))
    assert not config.confidence and config.markov_rank == 0


def test_the_mask_embedding_wins_over_a_mask_token(target: Decoder, tmp_path: Path) -> None:
    """Exporters keep the key of the config they started from."""
    both = make_dspark(tmp_path / "both", changes={"mask_token_id": 7})
    assert read(target, both).mask_token_id is None
    assert torch.equal(drafts(target, both).logits, drafts(target, make_dspark(tmp_path / "one")).logits)
    token = make_dspark(tmp_path / "token", Sizes(mask_embedding=False), changes={"mask_token_id": 7})
    row = target.embed(torch.tensor([7]))[0]
    copied = make_dspark(tmp_path / "copied", tensors={"mask_embedding": row.float()})
    assert torch.equal(drafts(target, token).logits, drafts(target, copied).logits)


def test_a_whole_vocabulary_with_an_id_map_is_the_whole_vocabulary(target: Decoder, tmp_path: Path) -> None:
    identity = {"d2t": torch.zeros(320, dtype=torch.int64)}
    path = make_dspark(tmp_path / "map", changes={"draft_vocab_size": 320}, tensors=identity)
    assert torch.equal(drafts(target, path).logits, drafts(target, make_dspark(tmp_path / "none")).logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_load_heads_included(
    target: Decoder, tmp_path: Path, dtype: torch.dtype
) -> None:
    """A confidence head in bf16 must not be dropped: its signals stay close to those of the fp32 file."""
    expected = drafts(target, make_dspark(tmp_path / "wide"))
    path = make_dspark(tmp_path / "half")
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
    found = drafts(target, path)
    assert torch.allclose(found.draft.signals, expected.draft.signals, atol=0.1)
    assert not torch.equal(found.draft.signals, expected.draft.signals)


def test_sharded_checkpoints_load(target: Decoder, tmp_path: Path) -> None:
    expected = drafts(target, make_dspark(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(drafts(target, tmp_path).logits, expected.logits)


@pytest.mark.parametrize("steps", [1, 4, 6])
def test_another_step_count_than_the_block_is_refused(target: Decoder, tmp_path: Path, steps: int) -> None:
    with pytest.raises(ConfigError) as caught:
        load(target, make_dspark(tmp_path), steps=steps)
    for words in (f"--num_speculative_tokens={steps}", "block_size=5", "allowed: 5", "--target_verify_width"):
        assert words in str(caught.value)


def test_a_regime_without_a_table_is_refused(target: Decoder, tmp_path: Path) -> None:
    table = {"sampled": {"temperatures": [1.0] * BLOCK, "biases": [0.0] * BLOCK}}
    path = make_dspark(tmp_path, changes={"confidence_calibration": table})
    with pytest.raises(CheckpointError, match="no table for 'greedy'; it has sampled"):
        load(target, path, regime="greedy")
    load(target, path)  # every row by its own table, or by the one there is
    load(target, path, regime="sampled")
    load(target, path, regime=None)


def test_windows_and_masks_that_are_switched_off_are_none(target: Decoder, tmp_path: Path) -> None:
    expected = drafts(target, make_dspark(tmp_path / "plain"))
    for index, changes in enumerate(
        (
            {"sliding_window": None, "layer_types": None},
            {"sliding_window": 64},  # layer_types say full_attention
            {"sliding_window": 64, "layer_types": None, "use_sliding_window": False},
            {"is_causal": False, "attention_mode": "gqa", "projector_type": "dspark", "use_swa": None},
        )
    ):
        assert torch.equal(
            drafts(target, make_dspark(tmp_path / str(index), changes=changes)).logits, expected.logits
        )


BAD_TABLE = {"temperatures": [1.0] * 4, "biases": [0.0] * 5}
ZERO_TABLE = {"temperatures": [1.0, 1.0, 0.0, 1.0, 1.0], "biases": [0.0] * 5}
NAN_TABLE = {"temperatures": [1.0] * 5, "biases": [0.0, float("nan"), 0.0, 0.0, 0.0]}

# changes to the flat config of Sizes() -> what the message says
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "fill-in": ({"sample_from_anchor": False}, "sample_from_anchor=False: the fill-in layout"),
    "causal": ({"is_causal": True}, "is_causal=True (only False)"),
    "causal-alias": ({"dflash_config": {"causal": True}}, "is_causal=True (only False)"),
    "window": ({"sliding_window": 2048, "layer_types": None}, "sliding_window=2048 (only null"),
    "window-0": ({"sliding_window": 0, "layer_types": None}, "sliding_window=0 (only null"),
    "window-used": (
        {"sliding_window": 2048, "layer_types": None, "use_sliding_window": True, "max_window_layers": 0},
        "use_sliding_window with sliding_window=2048",
    ),
    "sliding-layers": (
        {"layer_types": ["sliding_attention", "full_attention"]},
        "layer_types ['sliding_attention']",
    ),
    "swa": ({"use_swa": True}, "use_swa=True (only False)"),
    "sink": ({"attention_sink_bias": True}, "attention_sink_bias=True (only False)"),
    "domino": ({"projector_type": "domino"}, "projector_type='domino' (only 'dspark' or 'dflash')"),
    "mla": ({"attention_mode": "mla"}, "attention_mode='mla' (only 'gqa')"),
    "rnn": ({"markov_head_type": "rnn"}, "markov_head_type='rnn' (only 'vanilla' or 'gated')"),
    "last-layer": ({"target_layer_ids": [0, 3]}, "taps the last of 4 layers: exporters differ"),
    "gemma": ({"architectures": ["Gemma4DSparkModel"]}, "architectures=['Gemma4DSparkModel']"),
    "two-names": ({"architectures": ["LlamaDSparkModel", "X"]}, "architectures=['LlamaDSparkModel', 'X']"),
    "list-name": ({"architectures": [["LlamaDSparkModel"]]}, "architectures=[['LlamaDSparkModel']]"),
    "no-name": ({"architectures": None}, "architectures=None with model_type='llama' (only one of Qwen3DSp"),
    "v4": (
        {"architectures": ["DSparkDraftModel"], "model_type": "deepseek_v4"},
        "architectures=['DSparkDraftModel'] with model_type='deepseek_v4'",
    ),
    "unknown-slots": ({"architectures": ["DSparkDraftModel"]}, "sample_from_anchor is absent"),
    "original-dflash": ({"architectures": ["DFlashDraftModel"]}, "sample_from_anchor is absent"),
    "quantised": (
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config (quant_method='fp8')",
    ),
    "eagle": ({"speculators_model_type": "eagle3"}, "speculators_model_type='eagle3' (only 'dspark')"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling of type 'yarn'"),
}

MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no-block": ({"block_size": None}, "block_size must be a positive integer, found nothing"),
    "block-0": ({"block_size": 0}, "block_size must be a positive integer, found 0"),
    "block-float": ({"block_size": 5.0}, "block_size must be a positive integer, found 5.0"),
    "contradiction": (
        {"dspark_config": {"block_size": 7}},
        "the config contradicts itself: block_size=5, dspark_config.block_size=7",
    ),
    "alias-contradiction": ({"dspark_markov_rank": 16}, "markov_rank=8, dspark_markov_rank=16"),
    "nest": ({"dspark_config": [7]}, "dspark_config must be an object, found [7]"),
    "no-taps": ({"target_layer_ids": None}, "target_layer_ids must be a list of integers, found None"),
    "empty-taps": ({"target_layer_ids": []}, "target_layer_ids must be a list of integers, found []"),
    "bool-taps": ({"target_layer_ids": [True]}, "target_layer_ids must be a list of integers, found [True]"),
    "falling-taps": ({"target_layer_ids": [2, 0]}, "(allowed: strictly increasing, -1 to 2)"),
    "twice": ({"target_layer_ids": [1, 1]}, "(allowed: strictly increasing, -1 to 2)"),
    "high": ({"target_layer_ids": [0, 4]}, "does not suit a target of 4 layers"),
    "low": ({"target_layer_ids": [-2, 0]}, "does not suit a target of 4 layers"),
    "other-target": ({"num_target_layers": 36}, "num_target_layers is 36, the target has 4"),
    "other-width": ({"target_hidden_size": 128}, "target_hidden_size is 128, the target has 64"),
    "other-hidden": ({"hidden_size": 96}, "hidden_size is 96, the target (llama) has 64"),
    "other-vocab": ({"vocab_size": 300}, "vocab_size is 300, the target (llama) has 320"),
    "rank": ({"markov_rank": -1}, "markov_rank must be a positive integer, found -1"),
    "rank-0-markov": ({"markov_rank": 0}, "confidence_head_with_markov is true, but markov_rank is 0"),
    "flag": ({"enable_confidence_head": "yes"}, "enable_confidence_head must be true or false, found 'yes'"),
    "anchor": ({"sample_from_anchor": "yes"}, "sample_from_anchor must be true or false, found 'yes'"),
    "anchor-1": ({"sample_from_anchor": 1}, "sample_from_anchor must be true or false, found 1"),
    "huge-block": (
        {"block_size": 2**70, "confidence_calibration": {"greedy": BAD_TABLE}},
        f"greedy.biases must be {2**70} numbers",
    ),
    "family": ({"model_type": "qwen3"}, "has layers of 'llama', but model_type is 'qwen3'"),
    "regime": ({"confidence_calibration": {"warm": {}}}, "an object of greedy and sampled"),
    "table-list": ({"confidence_calibration": [1]}, "an object of greedy and sampled, found [1]"),
    "short-table": (
        {"confidence_calibration": {"greedy": BAD_TABLE}},
        "confidence_calibration.greedy.temperatures must be 5 numbers, one a slot of the block",
    ),
    "zero-table": (
        {"confidence_calibration": {"sampled": ZERO_TABLE}},
        "sampled.temperatures must be positive",
    ),
    "nan-table": ({"confidence_calibration": {"greedy": NAN_TABLE}}, "greedy.biases must be 5 numbers"),
    "empty-table": ({"confidence_calibration": {"greedy": None}}, "greedy.temperatures must be 5 numbers"),
    "gated-lacks": ({"markov_head_type": "gated"}, "missing: markov_head.gate_proj.weight [8, 72]"),
    "rank-tensors": (
        {"markov_rank": 0, "confidence_head_with_markov": False},
        "extra: markov_head.markov_w1.weight [320, 8]",
    ),
    "head-off": ({"enable_confidence_head": False}, "extra: confidence_head.proj.weight [1, 72]"),
    "many-layers": ({"num_hidden_layers": 10**9, "layer_types": None}, "says 1000000000 layers"),
    "draft-vocab": ({"draft_vocab_size": 100}, "there is no tensor d2t [100]"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_implemented_is_refused_by_its_key(target: Decoder, tmp_path: Path, name: str) -> None:
    changes, words = UNSUPPORTED[name]
    with pytest.raises(UnsupportedError) as caught:
        load(target, make_dspark(tmp_path / "drafter", changes=changes))
    assert words in str(caught.value) and str(tmp_path / "drafter") in str(caught.value)


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_wrong_is_named(target: Decoder, tmp_path: Path, name: str) -> None:
    changes, words = MALFORMED[name]
    with pytest.raises(CheckpointError) as caught:
        load(target, make_dspark(tmp_path / "drafter", changes=changes))
    assert words in str(caught.value) and str(tmp_path / "drafter") in str(caught.value)


def test_all_complaints_come_at_once(target: Decoder, tmp_path: Path) -> None:
    changes = {"block_size": 0, "target_layer_ids": [5], "markov_head_type": "rnn", "is_causal": True}
    with pytest.raises(CheckpointError) as caught:
        load(target, make_dspark(tmp_path, changes=changes))
    for words in ("block_size must", "target_layer_ids=[5]", "markov_head_type='rnn'", "is_causal=True"):
        assert words in str(caught.value)


@pytest.mark.parametrize("token", [None, -1, tiny.VOCAB_SIZE, True, "mask"])
def test_a_mask_token_outside_the_vocabulary_is_refused(target: Decoder, tmp_path: Path, token: Any) -> None:
    sizes = Sizes(mask_embedding=False)
    with pytest.raises(CheckpointError) as caught:
        load(target, make_dspark(tmp_path, sizes, changes={"mask_token_id": token}))
    assert (
        f"mask_token_id must be an id from 0 to 319 where there is no tensor mask_embedding, found {token!r}"
        in (str(caught.value))
    )


SPECULATORS: dict[str, tuple[dict[str, Any], type[ConfigError], str]] = {
    "unstated": ({"sample_from_anchor": None}, UnsupportedError, "sample_from_anchor is absent"),
    "fill-in": ({"sample_from_anchor": False}, UnsupportedError, "the fill-in layout"),
    "no-layers": (
        {"transformer_layer_config": None},
        CheckpointError,
        "transformer_layer_config must be an object, found None",
    ),
    "mixtral": (
        {"transformer_layer_config": {"model_type": "mixtral"}},
        UnsupportedError,
        "transformer_layer_config.model_type='mixtral' (only qwen3 or llama)",
    ),
    "truncated": (
        {"transformer_layer_config": {"model_type": "llama", "hidden_size": 64}},
        CheckpointError,
        "intermediate_size must be a positive integer, found nothing",
    ),
    "last-layer": (
        {"aux_hidden_state_layer_ids": [1, 4]},
        UnsupportedError,
        "aux_hidden_state_layer_ids=[1, 4] taps the last of 4 layers",
    ),
    "flat-ids": ({"aux_hidden_state_layer_ids": [-1, 2]}, CheckpointError, "strictly increasing, 0 to 3"),
    "no-ids": (
        {"aux_hidden_state_layer_ids": None, "target_layer_ids": [0, 2]},
        CheckpointError,
        "aux_hidden_state_layer_ids must be a list of integers",
    ),
    "quantised": (
        {"quantization_config": {"quant_method": "fp8"}},
        UnsupportedError,
        "quantization_config (quant_method='fp8')",
    ),
    "window": (
        {
            "transformer_layer_config": {
                **tiny_dspark.flat_config(Sizes()),
                "layer_types": ["sliding_attention"],
            }
        },
        UnsupportedError,
        "layer_types ['sliding_attention']",
    ),
}


@pytest.mark.parametrize("name", SPECULATORS)
def test_refusals_of_the_speculators_dialect(target: Decoder, tmp_path: Path, name: str) -> None:
    changes, kind, words = SPECULATORS[name]
    with pytest.raises(kind) as caught:
        load(target, make_dspark(tmp_path, dialect="speculators", changes=changes))
    assert words in str(caught.value)


def test_the_id_maps_must_agree(target: Decoder, tmp_path: Path) -> None:
    sizes = replace(Sizes(), draft_ids=DRAFT_IDS)
    mask = torch.isin(torch.arange(320), torch.tensor((0, *DRAFT_IDS[1:])))
    with pytest.raises(CheckpointError, match="t2d and d2t select different ids"):
        load(target, make_dspark(tmp_path, sizes, "speculators", tensors={"t2d": mask}))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"fc.weight": None}, "missing: fc.weight [64, 128]"),
        ({"fc.weight": torch.zeros(64, 64)}, "wrong shape: fc.weight is [64, 64], the config says [64, 128]"),
        ({"hidden_norm.weight": None}, "missing: hidden_norm.weight [64]"),
        ({"confidence_head.proj.bias": None}, "missing: confidence_head.proj.bias [1]"),
        ({"confidence_head.proj.weight": torch.zeros(1, 64)}, "confidence_head.proj.weight is [1, 64]"),
        ({"markov_head.markov_w2.weight": torch.zeros(100, 8)}, "markov_head.markov_w2.weight is [100, 8]"),
        ({"layers.2.mlp.up_proj.weight": torch.zeros(48, 64)}, "extra: layers.2.mlp.up_proj.weight [48, 64]"),
        ({"draft_adapter.0.weight": torch.zeros(8, 64)}, "extra: draft_adapter.0.weight [8, 64]"),
        ({"model.fc.weight": torch.zeros(64, 128)}, "holds both"),
        ({"fc.weight": torch.zeros(64, 128, dtype=torch.int8)}, "fc.weight is I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    target: Decoder, tmp_path: Path, tensors: dict[str, torch.Tensor | None], words: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(target, make_dspark(tmp_path, tensors=tensors))
    assert words in str(caught.value)


def test_a_calibration_without_a_head_is_refused(target: Decoder, tmp_path: Path) -> None:
    table = {"greedy": {"temperatures": [1.0] * BLOCK, "biases": [0.0] * BLOCK}}
    with pytest.raises(CheckpointError, match="no confidence head to calibrate"):
        load(
            target,
            make_dspark(tmp_path, Sizes(confidence=False), changes={"confidence_calibration": table}),
        )


def test_a_directory_that_is_not_there(target: Decoder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--draft_model=.*there is no such file"):
        load(target, tmp_path / "nowhere")
