"""The keys of a DSpark config, wherever a dialect puts them: aliases, nested sections, contradictions.

Typed access with every complaint at once; what the values mean is dspark_config.py's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xspec.errors import CheckpointError, UnsupportedError
from xspec.models.config import ConfigReader

SECTIONS = ("dspark_config", "dflash_config")
ALIASES = {
    "block_size": ("dspark_block_size",),
    "markov_rank": ("dspark_markov_rank",),
    "mask_token_id": ("dspark_noise_token_id",),
    "target_layer_ids": ("dspark_target_layer_ids",),
    "is_causal": ("causal",),
}
KEYS = (
    *("block_size", "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "sample_from_anchor"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("confidence_calibration", "num_target_layers", "target_hidden_size"),
    *("is_causal", "use_swa", "attention_sink_bias", "projector_type", "attention_mode"),
)
ONLY = {
    "is_causal": (False,),  # a causal block
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "projector_type": ("dspark", "dflash"),
    "attention_mode": ("gqa",),
}
"""What is implemented of the switches that change what a block computes; null is always allowed."""

LARGEST = 1e6
"""Of a calibration: what lies beyond, or is no number, is a mistake."""


class DSparkKeys:
    """Values of the DSpark keys wherever a dialect puts them. `finish` raises once for all complaints."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._where = where
        sections: dict[str, Mapping[str, Any]] = {"": raw}
        wrong: list[str] = []
        for name in SECTIONS:
            section = raw.get(name)
            if isinstance(section, Mapping):
                sections[f"{name}."] = section
            elif section is not None:
                wrong.append(f"{name} must be an object, found {section!r}")
        found = {key: _find(key, sections, wrong) for key in KEYS}
        present = {key: value for key, value in found.items() if value is not None}
        self.reader = ConfigReader({"model_type": raw.get("model_type"), **present})
        for complaint in wrong:
            self.reader.wrong(complaint)

    def get(self, key: str) -> Any:
        return self.reader.raw.get(key)

    def size(self, key: str) -> int:
        return self.reader.size(key)

    def count(self, key: str) -> int:
        """An integer of at least 0; absent is 0."""
        value = self.get(key)
        return 0 if value is None or (type(value) is int and value == 0) else self.reader.size(key)

    def flag(self, key: str, default: bool) -> bool:
        return self.reader.flag(key, default)

    def numbers(self, where: str, column: Any, size: int) -> tuple[float, ...]:
        """A list of `size` reasonable numbers, found at `where`; a single 1 after a complaint."""
        if (
            isinstance(column, list)
            and len(column) == size
            and all(type(value) in (int, float) and abs(value) <= LARGEST for value in column)
        ):
            return tuple(map(float, column))
        self.wrong(f"{where} must be {size} numbers, one a slot of the block, found {column!r}")
        return (1.0,)

    def wrong(self, complaint: str) -> None:
        self.reader.wrong(complaint)

    def refuse(self, complaint: str) -> None:
        self.reader.refuse(complaint)

    def finish(self) -> None:
        try:
            self.reader.finish()
        except UnsupportedError as error:
            what = f"the drafter {self._where} asks for what is not implemented"
            raise UnsupportedError(what, error.reasons) from None
        except CheckpointError as error:
            raise CheckpointError(f"the drafter {self._where}: {error}") from None


def _find(key: str, sections: Mapping[str, Mapping[str, Any]], wrong: list[str]) -> Any:
    """A key given in several places must say the same in all; null says nothing."""
    places = {
        f"{prefix}{name}": section[name]
        for prefix, section in sections.items()
        for name in (key, *ALIASES.get(key, ()))
        if section.get(name) is not None
    }
    values = list(places.values())
    if any(value != values[0] for value in values):
        said = ", ".join(f"{place}={value!r}" for place, value in places.items())
        wrong.append(f"the config contradicts itself: {said}")
    return values[0] if values else None
