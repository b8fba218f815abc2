"""What a decoder-only transformer is, normalised from config.json, with every complaint at once.

A switch that is not implemented is refused by its name; nothing is assumed that changes the numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from xspec.errors import CheckpointError, UnsupportedError
from xspec.nn.rope import RopeConfig, RopeScaling

MTP_LAYERS = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The llama-shaped transformers: pre-norm, rotary, grouped-query attention, SwiGLU."""

    model_type: str
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # qk-norm
    mtp_layers: int = 0  # MTP drafter layers that lie after the model's own in the same checkpoint


ConfigT = TypeVar("ConfigT", bound=DecoderConfig)


class ConfigReader:
    """Typed access to config.json. `finish` raises once for everything wrong or unsupported."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.model_type = str(raw.get("model_type"))
        self._wrong: list[str] = []
        self._unsupported: list[str] = []

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; absent or null means `default`, which None makes an error."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self._wrong.append(f"{key} must be a positive integer, found {_shown(self.raw, key)}")
        return 1

    def number(self, source: Mapping[str, Any], key: str, default: float | None = None) -> float:
        """A positive finite number of `source` (config.json itself or its rope section)."""
        value = source.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        self._wrong.append(f"{key} must be a positive number, found {_shown(source, key)}")
        return 1.0

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._wrong.append(f"{key} must be true or false, found {value!r}")
            return default
        return value

    def wrong(self, complaint: str) -> None:
        self._wrong.append(complaint)

    def refuse(self, complaint: str) -> None:
        self._unsupported.append(complaint)

    def finish(self) -> None:
        what = f"config of model_type {self.model_type!r}"
        if self._wrong:
            complaints = [*self._wrong, *self._unsupported]
            raise CheckpointError(f"{what} is malformed:\n" + "\n".join(f"  - {line}" for line in complaints))
        if self._unsupported:
            raise UnsupportedError(f"{what} asks for what is not implemented", self._unsupported)

    def rope(self) -> RopeConfig:
        """rope_parameters (newer) or rope_theta and rope_scaling (older); unknown kinds are refused."""
        section, name = self.raw.get("rope_parameters"), "rope_parameters"
        if section is None:
            section, name = self.raw.get("rope_scaling") or {}, "rope_scaling"
        if not isinstance(section, Mapping):
            self.wrong(f"{name} must be an object, found {section!r}")
            section = {}
        if any(isinstance(value, Mapping) for value in section.values()):
            self.refuse(f"{name} differs per layer type ({', '.join(map(str, section))})")
            section = {}
        for source in (section, self.raw):
            if source.get("partial_rotary_factor") not in (None, 1, 1.0):
                self.refuse(f"partial_rotary_factor={source['partial_rotary_factor']!r} (only 1.0)")
        theta = self.number(section if "rope_theta" in section else self.raw, "rope_theta", 1e4)
        kind = section.get("rope_type", section.get("type", "default"))
        match kind:
            case "default":
                return RopeConfig(theta)
            case "linear":
                return RopeConfig(theta, RopeScaling.LINEAR, factor=self.number(section, "factor"))
            case "llama3":
                return self._llama3_rope(theta, section)
        self.refuse(f"{name} of type {kind!r} (known: default, linear, llama3)")
        return RopeConfig(theta)

    def _llama3_rope(self, theta: float, section: Mapping[str, Any]) -> RopeConfig:
        low, high = self.number(section, "low_freq_factor"), self.number(section, "high_freq_factor", 4.0)
        if high <= low:
            self.wrong(f"high_freq_factor ({high}) must be above low_freq_factor ({low})")
        return RopeConfig(
            theta,
            RopeScaling.LLAMA3,
            factor=self.number(section, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=int(self.number(section, "original_max_position_embeddings")),
        )


def read_decoder(
    raw: Mapping[str, Any],
    *,
    head_dim: Callable[[ConfigReader, int, int], int] | None = None,
    **switches: Callable[[ConfigReader], bool],
) -> DecoderConfig:
    """The keys all families share. `switches` name bool fields of DecoderConfig and say how to read them."""
    return read_decoder_as(DecoderConfig, raw, head_dim=head_dim, check=None, **switches)


def read_decoder_as(
    kind: type[ConfigT],
    raw: Mapping[str, Any],
    *,
    head_dim: Callable[[ConfigReader, int, int], int] | None = None,
    check: Callable[[ConfigReader], None] | None = None,
    **fields: Callable[[ConfigReader], Any],
) -> ConfigT:
    """As `read_decoder`, for a config with more fields: `fields` say how to read them.

    `check` may add complaints of its own.
    """
    config = ConfigReader(raw)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        config.wrong(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    dim = (head_dim or derived_head_dim)(config, hidden, heads)
    if dim % 2:
        config.wrong(f"head_dim must be even for rotary positions, found {dim}")
    refuse_unimplemented(config)
    if check is not None:
        check(config)
    decoder = kind(
        model_type=config.model_type,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        inner_size=config.size("intermediate_size"),
        num_layers=config.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        max_position=config.size("max_position_embeddings"),
        norm_eps=config.number(raw, "rms_norm_eps", 1e-6),
        rope=config.rope(),
        tied_head=config.flag("tie_word_embeddings"),
        mtp_layers=config.size(MTP_LAYERS) if raw.get(MTP_LAYERS) not in (None, 0) else 0,
        **{name: read(config) for name, read in fields.items()},
    )
    config.finish()
    return decoder


def derived_head_dim(config: ConfigReader, hidden: int, heads: int) -> int:
    """head_dim where the config has it, else an even share of the hidden size."""
    if config.raw.get("head_dim") is not None:
        return config.size("head_dim")
    if hidden % heads:
        config.wrong(
            f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}); head_dim is absent"
        )
    return max(1, hidden // heads)


def explicit_head_dim(config: ConfigReader, hidden: int, heads: int) -> int:
    """head_dim of a family where deriving it would be a guess."""
    return config.size("head_dim")


def refuse_unimplemented(config: ConfigReader) -> None:
    """What no family implements, by the keys they share."""
    raw = config.raw
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        config.refuse(f"hidden_act={raw['hidden_act']!r} (only silu)")
    if raw.get("pretraining_tp") not in (None, 0, 1):
        config.refuse(f"pretraining_tp={raw['pretraining_tp']!r} (only 1)")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None:
            section = raw[key]
            method = section.get("quant_method") if isinstance(section, Mapping) else section
            config.refuse(f"{key} (quant_method={method!r}): only plain float weights and GGUF are read")
    _refuse_sliding_window(config)
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list):
        config.refuse(f"architectures={architectures!r} (only a list of names)")
    elif architectures and not any(str(name).endswith("ForCausalLM") for name in architectures):
        config.refuse(f"architectures={architectures!r} (only ...ForCausalLM)")


def _refuse_sliding_window(config: ConfigReader) -> None:
    """Many configs carry a window that is switched off; only one in use is refused."""
    raw = config.raw
    layer_types = raw.get("layer_types")
    if isinstance(layer_types, list):
        other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if other:
            config.refuse(f"layer_types {other} (only full_attention)")
        return
    layers = raw.get("num_hidden_layers")
    first = raw.get("max_window_layers", 28)
    in_use = raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None
    if in_use and not (isinstance(layers, int) and isinstance(first, int) and first >= layers):
        config.refuse(f"use_sliding_window with sliding_window={raw.get('sliding_window', 4096)!r}")


def _shown(source: Mapping[str, Any], key: str) -> str:
    return repr(source[key]) if key in source else "nothing"
