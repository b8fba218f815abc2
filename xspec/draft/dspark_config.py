"""The dialects of DSpark checkpoints, read into one config; every complaint at once.

Dialects: the published flat layout, its alias keys and nested sections, and that of speculators. Owns keys
and tensor names; knows nothing of kernels. What is not implemented is refused by its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xspec.draft.checkpoint import (
    ID_MAPS,
    check_against_target,
    layer_config,
    open_drafter,
    read_draft_vocabulary,
)
from xspec.draft.dspark_keys import LARGEST, ONLY, DSparkKeys
from xspec.errors import CheckpointError, ConfigError, UnsupportedError
from xspec.models.base import TargetSpec
from xspec.models.blocks import layer_shapes
from xspec.models.checkpoint import Checkpoint, Shapes, check_tensors
from xspec.models.config import DecoderConfig

FLAT = {"Qwen3DSparkModel": "qwen3", "LlamaDSparkModel": "llama"}
"""Architectures of the flat layout, slots read from the anchor on, and the family of their layers."""

GENERIC = ("DSparkDraftModel", "DFlashDraftModel", "DSparkSpeculator")
"""Names under which both slot layouts are exported: the config must say which."""

FAMILIES = ("qwen3", "llama")
MARKOV_HEADS = ("vanilla", "gated")
REGIMES = ("greedy", "sampled")

PREFIX = "model."
FC, HIDDEN_NORM, NORM, MASK = "fc.weight", "hidden_norm.weight", "norm.weight", "mask_embedding"
MARKOV_TABLE, MARKOV_OUTPUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
MARKOV_GATE, CONFIDENCE = "markov_head.gate_proj", "confidence_head.proj"
SHARED = frozenset(
    f"{name}.weight" for name in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")
)
"""Copies of the target's tensors, which a checkpoint may hold: ignored."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """P(slot k is accepted, given those before it) = sigmoid(logit / temperatures[k] + biases[k])."""

    temperatures: tuple[float, ...]
    biases: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    layers: DecoderConfig
    block_size: int
    taps: tuple[int, ...]  # residual streams of the target, 0: its embedding
    mask_token_id: int | None  # None: the tensor `mask_embedding`
    markov_rank: int  # 0: no Markov head
    gated: bool
    confidence: bool
    confidence_with_markov: bool
    calibration: Mapping[str, Calibration]  # by sampling regime; empty: none was fitted


def read_dspark(raw: Mapping[str, Any], tensors: Shapes, where: str, target: TargetSpec) -> DSparkConfig:
    """`raw` is config.json, `tensors` the checkpoint's shapes under bare names. Errors name `where`."""
    speculators = raw.get("speculators_model_type") is not None
    section, family = _speculators_layers(raw, where) if speculators else (raw, _family(raw, where))
    layers = layer_config({**section, "architectures": None}, family, where)
    check_against_target(where, layers.hidden_size, layers.vocab_size, target)
    keys = DSparkKeys(raw, where)
    _check_layout(keys, stated=speculators or set(raw.get("architectures") or ()).isdisjoint(FLAT))
    _refuse_other_masks(keys, section)
    block_size = keys.size("block_size")
    rank = keys.count("markov_rank")
    confidence = keys.flag("enable_confidence_head", f"{CONFIDENCE}.weight" in tensors)
    config = DSparkConfig(
        layers=layers,
        block_size=block_size,
        taps=_taps(keys, speculators, target),
        mask_token_id=None if MASK in tensors else _mask_token(keys, target.vocab_size),
        markov_rank=rank,
        gated=rank > 0 and _markov_head(keys) == "gated",
        confidence=confidence,
        confidence_with_markov=confidence and _confidence_input(keys, tensors, rank, target.hidden_size),
        calibration=_calibration(keys, block_size, confidence),
    )
    keys.finish()
    return config


def open_dspark(path: Path, target: TargetSpec) -> tuple[Checkpoint, DSparkConfig, torch.Tensor | None]:
    """The directory of --draft_model, checked: its tensors under bare names, its config, its draft ids.

    Ids [D] as `read_draft_vocabulary` gives them. The caller closes the checkpoint.
    """
    opened = open_drafter(path)
    try:
        checkpoint = BareNames(opened)
        config = read_dspark(checkpoint.config, checkpoint.shapes, checkpoint.name, target)
        if config.layers.num_layers > len(checkpoint.shapes):  # before listing what a billion layers lack
            raise CheckpointError(
                f"{checkpoint.name}: its config says {config.layers.num_layers} layers, it holds "
                f"{len(checkpoint.shapes)} tensors"
            )
        ids = read_draft_vocabulary(checkpoint, target.vocab_size)
        draft_vocab = target.vocab_size if ids is None else len(ids)
        check_tensors(checkpoint, expected_tensors(config, draft_vocab), SHARED | ID_MAPS)
    except ConfigError:
        opened.close()
        raise
    return checkpoint, config, ids


class BareNames:
    """A Checkpoint whose tensors may be called `model.` something; they are known without it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.name, self.config = checkpoint.name, checkpoint.config
        self._names: dict[str, str] = {}
        for name in checkpoint.shapes:
            other = self._names.setdefault(name.removeprefix(PREFIX), name)
            if other != name:
                raise CheckpointError(f"{self.name} holds both {other} and {name}")
        self.shapes: Shapes = {bare: checkpoint.shapes[name] for bare, name in self._names.items()}

    def read(self, name: str, out: torch.Tensor) -> None:
        self._checkpoint.read(self._names[name], out)

    def close(self) -> None:
        self._checkpoint.close()


def expected_tensors(config: DSparkConfig, draft_vocab: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint under its bare name, apart from shared ones and id maps."""
    hidden, rank = config.layers.hidden_size, config.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        FC: (hidden, len(config.taps) * hidden),
        HIDDEN_NORM: (hidden,),
        NORM: (hidden,),
    }
    for index in range(config.layers.num_layers):
        shapes.update(layer_shapes(config.layers, layer_prefix(index)))
    if config.mask_token_id is None:
        shapes[MASK] = (hidden,)
    if rank:
        shapes[MARKOV_TABLE] = (config.layers.vocab_size, rank)
        shapes[MARKOV_OUTPUT] = (draft_vocab, rank)
    if config.gated:
        shapes[f"{MARKOV_GATE}.weight"] = (rank, hidden + rank)
        shapes[f"{MARKOV_GATE}.bias"] = (rank,)
    if config.confidence:
        shapes[f"{CONFIDENCE}.weight"] = (1, hidden + (rank if config.confidence_with_markov else 0))
        shapes[f"{CONFIDENCE}.bias"] = (1,)
    return shapes


def layer_prefix(index: int) -> str:
    return f"layers.{index}."


def check_steps(config: DSparkConfig, steps: int, where: str) -> None:
    """The slots of a block see each other, so a shorter block is another, untrained function."""
    if steps != config.block_size:
        raise ConfigError(
            f"--num_speculative_tokens={steps}: the drafter {where} was trained on blocks of block_size="
            f"{config.block_size} and is never drafted at another width; allowed: {config.block_size} "
            "(to verify fewer of the drafts, set --target_verify_width)"
        )


def _family(raw: Mapping[str, Any], where: str) -> str:
    """Which family's layers the flat layout has."""
    names = raw.get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else None
    model_type = raw.get("model_type")
    if name in GENERIC and model_type in FAMILIES:
        return str(model_type)
    if name in FLAT:
        if model_type not in (None, FLAT[name]):
            raise CheckpointError(
                f"the drafter {where}: architectures={names!r} has layers of {FLAT[name]!r}, but model_type "
                f"is {model_type!r}"
            )
        return FLAT[name]
    raise UnsupportedError(
        f"the drafter {where} is of an unknown kind",
        [
            f"architectures={names!r} with model_type={model_type!r} (only one of {', '.join(FLAT)}; or one "
            f"of {', '.join(GENERIC)} with model_type {' or '.join(FAMILIES)}; or speculators_model_type "
            "dspark)"
        ],
    )


def _speculators_layers(raw: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """Where the speculators dialect keeps the layers' config, and their family."""
    kind, section = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind != "dspark":
        raise UnsupportedError(
            f"the drafter {where} is of an unknown kind", [f"speculators_model_type={kind!r} (only 'dspark')"]
        )
    if not isinstance(section, Mapping):
        raise CheckpointError(
            f"the drafter {where}: transformer_layer_config must be an object, found {section!r}"
        )
    family = section.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedError(
            f"the drafter {where} asks for what is not implemented",
            [f"transformer_layer_config.model_type={family!r} (only {' or '.join(FAMILIES)})"],
        )
    return {"quantization_config": raw.get("quantization_config"), **section}, str(family)


def _check_layout(keys: DSparkKeys, stated: bool) -> None:
    """Slot k must predict the token after its own, from the anchor on. The other layout drafts rubbish."""
    anchored = keys.get("sample_from_anchor")
    if anchored is False:
        keys.refuse(
            "sample_from_anchor=False: the fill-in layout, 1 + block_size slots of which the anchor's "
            "predicts nothing (only true: slot k predicts the token after it)"
        )
    elif anchored is None and stated:
        keys.refuse(
            "sample_from_anchor is absent, and this dialect is exported with both slot layouts (only true: "
            "slot k predicts the token after it; add the key if that is how it was trained)"
        )
    elif anchored is not None and anchored is not True:
        keys.wrong(f"sample_from_anchor must be true or false, found {anchored!r}")


def _refuse_other_masks(keys: DSparkKeys, section: Mapping[str, Any]) -> None:
    """Blocks see all keys and each other. `section` is the layers' config, which may name a window."""
    for key, allowed in ONLY.items():
        value = keys.get(key)
        if value is not None and value not in allowed:
            keys.refuse(f"{key}={value!r} (only {' or '.join(map(repr, allowed))})")
    window, layer_types = section.get("sliding_window"), section.get("layer_types")
    if window is not None and layer_types is None and section.get("use_sliding_window") is None:
        keys.refuse(
            f"sliding_window={window!r} (only null; or layer_types all full_attention; or use_sliding_window "
            "false)"
        )


def _taps(keys: DSparkKeys, speculators: bool, target: TargetSpec) -> tuple[int, ...]:
    """Residual streams of the target: layer ids count outputs from 0, and -1 is the embedding.

    speculators' ids are one higher, as indices of transformers' `hidden_states`.
    """
    key, shift = ("aux_hidden_state_layer_ids", 0) if speculators else ("target_layer_ids", 1)
    ids, layers = keys.get(key), target.num_layers
    if not isinstance(ids, list) or not ids or any(type(value) is not int for value in ids):
        keys.wrong(f"{key} must be a list of integers, found {ids!r}")
        return ()
    allowed = f"strictly increasing, {-shift} to {layers - 1 - shift}"
    taps = tuple(value + shift for value in ids)
    if any(b <= a for a, b in zip(taps, taps[1:], strict=False)) or taps[0] < 0 or taps[-1] > layers:
        keys.wrong(f"{key}={ids!r} does not suit a target of {layers} layers (allowed: {allowed})")
    elif taps[-1] == layers:
        keys.refuse(
            f"{key}={ids!r} taps the last of {layers} layers: exporters differ in whether that means before "
            f"or after the final norm (only {allowed})"
        )
    count = keys.get("num_target_layers")
    if count not in (None, layers):
        keys.wrong(f"num_target_layers is {count!r}, the target has {layers}")
    width = keys.get("target_hidden_size")
    if width not in (None, target.hidden_size):
        keys.wrong(f"target_hidden_size is {width!r}, the target has {target.hidden_size}")
    return taps


def _mask_token(keys: DSparkKeys, vocab_size: int) -> int:
    value = keys.get("mask_token_id")
    if type(value) is int and 0 <= value < vocab_size:
        return value
    keys.wrong(
        f"mask_token_id must be an id from 0 to {vocab_size - 1} where there is no tensor {MASK}, "
        f"found {value!r}"
    )
    return 0


def _markov_head(keys: DSparkKeys) -> Any:
    kind = keys.get("markov_head_type")
    if kind is not None and kind not in MARKOV_HEADS:
        keys.refuse(f"markov_head_type={kind!r} (only {' or '.join(map(repr, MARKOV_HEADS))})")
    return kind


def _confidence_input(keys: DSparkKeys, tensors: Shapes, rank: int, hidden: int) -> bool:
    """Whether the confidence head also reads the Markov embedding; absent, its width tells."""
    found = tensors.get(f"{CONFIDENCE}.weight")
    with_markov = keys.flag("confidence_head_with_markov", rank > 0 and found == (1, hidden + rank))
    if with_markov and not rank:
        keys.wrong("confidence_head_with_markov is true, but markov_rank is 0: there is no embedding to read")
    return with_markov


def _calibration(keys: DSparkKeys, block_size: int, confidence: bool) -> dict[str, Calibration]:
    table = keys.get("confidence_calibration")
    if table is None:
        return {}
    if not isinstance(table, Mapping) or set(table) - set(REGIMES):
        keys.wrong(f"confidence_calibration must be an object of {' and '.join(REGIMES)}, found {table!r}")
        return {}
    if table and not confidence:
        keys.wrong("there is a confidence_calibration, but no confidence head to calibrate")
    result = {}
    for regime, columns in table.items():
        where = f"confidence_calibration.{regime}"
        columns = columns if isinstance(columns, Mapping) else {}
        temperatures = keys.numbers(f"{where}.temperatures", columns.get("temperatures"), block_size)
        biases = keys.numbers(f"{where}.biases", columns.get("biases"), block_size)
        if min(temperatures) < 1 / LARGEST:
            keys.wrong(f"{where}.temperatures must be positive, found {list(temperatures)}")
        result[regime] = Calibration(temperatures, biases)
    return result
