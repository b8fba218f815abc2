"""The formats of an MTP drafter: an exported directory, or MTP layers inside the target's own checkpoint.

Reads names, sizes and keys, and refuses what the drafter cannot do; builds nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xspec.draft.checkpoint import D2T, T2D, layer_config, open_drafter
from xspec.errors import CheckpointError, ConfigError, UnsupportedError
from xspec.models.blocks import layer_prefix, layer_shapes
from xspec.models.checkpoint import Checkpoint, Shapes, check_tensors
from xspec.models.config import MTP_LAYERS, DecoderConfig
from xspec.models.locate import is_gguf
from xspec.models.safetensors_loader import WEIGHTS, SafetensorsCheckpoint

SUFFIX = "_mtp"
EXPORTED_WEIGHTS = (WEIGHTS, "mtp_layer_parameters.safetensors")
QUANTISATION = ("quantization_config", "compression_config")


class HiddenState(enum.Enum):
    """Which state of a model is meant: its residual stream, or that after its final norm."""

    NORMED = "normed"
    RESIDUAL = "residual"


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Where the parts lie: linears and norms without `.weight`, the decoder layer by its prefix."""

    embedding_norm: str
    hidden_norm: str
    join: str
    norm: str
    layer: str


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """`layer` describes the one decoder layer, `target_hidden` what feeds it first, `step_hidden` then."""

    layer: DecoderConfig
    names: MtpNames
    target_hidden: HiddenState
    step_hidden: HiddenState


def open_mtp(path: Path | None, model: Path) -> tuple[Checkpoint, MtpConfig]:
    """The checkpoint that holds the drafter, and what it says. `path` None: inside the target's, `model`."""
    if path is not None:
        checkpoint = open_drafter(path, EXPORTED_WEIGHTS)
        read = _exported
    elif is_gguf(model):
        raise ConfigError(
            f"--speculative_algorithm=MTP without --draft_model looks for MTP layers inside --model={model}, "
            "but a GGUF file holds none that can be read: give --draft_model, or a safetensors directory"
        )
    else:
        checkpoint = SafetensorsCheckpoint(model)
        read = _bundled
    try:
        return checkpoint, read(checkpoint)
    except ConfigError:
        checkpoint.close()
        raise


# The first name is ours and xLLM's, the second that of Qwen3.5 exports; the norm goes by three names.
_EXPORTED_ROLES = {
    "embedding_norm": ("model.enorm", "model.pre_fc_norm_embedding"),
    "hidden_norm": ("model.hnorm", "model.pre_fc_norm_hidden"),
    "join": ("model.eh_proj", "model.fc"),
    "norm": ("model.shared_head.norm", "model.norm", "model.final_norm"),
}
_EXPORTED_COPIES = frozenset(
    {"model.embed_tokens.weight", "lm_head.weight", "model.lm_head.weight", "model.shared_head.head.weight"}
)
_ROTATION = "model.rot.weight"


def _exported(checkpoint: Checkpoint) -> MtpConfig:
    """One MTP layer on its own: model_type `<family>_mtp`, the decoder layer under model.layers.0."""
    raw, where = checkpoint.config, checkpoint.name
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type.endswith(SUFFIX):
        raise CheckpointError(
            f"{where}/config.json: model_type {model_type!r} is no MTP drafter; allowed: <family>{SUFFIX}, "
            f"for instance llama{SUFFIX}"
        )
    reasons = []
    for key in ("num_hidden_layers", MTP_LAYERS):
        if raw.get(key, 1) not in (None, 1):
            reasons.append(f"{key} is {raw[key]!r}: one MTP layer is used for every step, allowed: 1")
    if _ROTATION in checkpoint.shapes:
        reasons.append(f"{_ROTATION}: it serves a target whose hidden states are rotated, which none here is")
    if reasons:
        raise UnsupportedError(f"the MTP drafter {where} asks for what is not implemented", reasons)
    layer = layer_config(_plain(raw), model_type.removesuffix(SUFFIX), f"{where}/config.json")
    names = MtpNames(
        layer=layer_prefix(0),
        **{role: _one_of(checkpoint, role, choices) for role, choices in _EXPORTED_ROLES.items()},
    )
    check_tensors(checkpoint, _shapes(layer, names), _EXPORTED_COPIES | {D2T, T2D})
    return _config(checkpoint, layer, names)


def _bundled(checkpoint: Checkpoint) -> MtpConfig:
    """DeepSeek's way: layer num_hidden_layers of the target's checkpoint is the MTP layer."""
    raw, where = checkpoint.config, checkpoint.name
    layer = layer_config(raw, str(raw.get("model_type")), f"{where}/config.json")
    if layer.mtp_layers == 0:
        raise CheckpointError(
            f"--speculative_algorithm=MTP without --draft_model: {where}/config.json has no {MTP_LAYERS}, "
            "so the target brings no MTP layer; give --draft_model"
        )
    if layer.mtp_layers > 1:
        reason = f"{MTP_LAYERS} is {layer.mtp_layers}: one MTP layer is used for every step, allowed: 1"
        raise UnsupportedError(f"the MTP layers of {where} ask for what is not implemented", [reason])
    prefix = layer_prefix(layer.num_layers)
    names = MtpNames(
        embedding_norm=f"{prefix}enorm",
        hidden_norm=f"{prefix}hnorm",
        join=f"{prefix}eh_proj",
        norm=f"{prefix}shared_head.norm",
        layer=prefix,
    )
    rest = frozenset(name for name in checkpoint.shapes if not name.startswith(prefix))
    copies = {f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"}
    check_tensors(checkpoint, _shapes(layer, names), rest | copies)
    return _config(checkpoint, layer, names)


def _config(checkpoint: Checkpoint, layer: DecoderConfig, names: MtpNames) -> MtpConfig:
    return MtpConfig(
        layer=layer,
        names=names,
        target_hidden=_hidden_state(checkpoint, "target_hidden", HiddenState.NORMED),
        step_hidden=_hidden_state(checkpoint, "step_hidden", HiddenState.RESIDUAL),
    )


def _plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the target's reader would trip over although it means nothing here.

    Exports empty the quantisation section when they dequantise, and name architectures as they please.
    """
    return {
        key: value
        for key, value in raw.items()
        if key != "architectures" and not (key in QUANTISATION and value in ("", {}))
    }


def _one_of(checkpoint: Checkpoint, role: str, choices: tuple[str, ...]) -> str:
    found = [name for name in choices if f"{name}.weight" in checkpoint.shapes]
    if len(found) != 1:
        names = ", ".join(f"{name}.weight" for name in choices)
        held = f"holds {len(found)} of them" if found else "holds none of them"
        raise CheckpointError(
            f"{checkpoint.name}: exactly one of {names} must be its {role.replace('_', ' ')}; it {held}"
        )
    return found[0]


def _shapes(layer: DecoderConfig, names: MtpNames) -> Shapes:
    hidden = layer.hidden_size
    return {
        f"{names.embedding_norm}.weight": (hidden,),
        f"{names.hidden_norm}.weight": (hidden,),
        f"{names.join}.weight": (hidden, 2 * hidden),
        f"{names.norm}.weight": (hidden,),
        **layer_shapes(layer, names.layer),
    }


def _hidden_state(checkpoint: Checkpoint, key: str, default: HiddenState) -> HiddenState:
    value = checkpoint.config.get(key)
    if value is None:
        return default
    allowed = [state.value for state in HiddenState]
    if value not in allowed:
        raise CheckpointError(
            f"{checkpoint.name}/config.json: {key} is {value!r}; allowed: {', '.join(allowed)}"
        )
    return HiddenState(value)
