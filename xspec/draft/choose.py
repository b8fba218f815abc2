"""Which drafter a configuration means, before anything is loaded: shipped, given, or the target's own.

Reads config files only. What a checkpoint holds is the loaders' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from xspec.config import SpeculationConfig
from xspec.draft.checkpoint import check_directory
from xspec.errors import ConfigError
from xspec.models.safetensors_loader import read_json

SHIPPED = {"MTP": "smollm2_135m_mtp", "DSpark": "smollm2_135m_dspark"}
"""Drafters of the embedded model that come with the package, by algorithm."""

SHIPPED_DEFAULT = "MTP"
"""The faster of them at one request."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """`path` None: MTP layers inside the target's checkpoint. `verify`: drafts verified a request.

    `shipped`: it came with the package, for the embedded model.
    """

    algorithm: str
    path: Path | None
    steps: int
    verify: int
    shipped: bool = False


def choose_drafter(config: SpeculationConfig, *, embedded: bool) -> DraftChoice | None:
    """None: plain decoding. `embedded`: the target is the model that comes as a package."""
    if config.num_speculative_tokens == 0:
        return None
    algorithm, path = config.speculative_algorithm, _given(config)
    shipped = path is None and embedded
    if path is not None:
        algorithm = _algorithm_of(path) if algorithm == "auto" else algorithm
    elif shipped:
        algorithm = SHIPPED_DEFAULT if algorithm == "auto" else algorithm
        path = shipped_drafter(algorithm)
    elif algorithm == "DSpark" or (algorithm == "auto" and config.num_speculative_tokens > 0):
        raise ConfigError(
            f"--num_speculative_tokens={config.num_speculative_tokens} with --speculative_algorithm="
            f"{algorithm} needs --draft_model=DIR for this model (xspec train makes one); MTP layers inside "
            "the model's own checkpoint are used with --speculative_algorithm=MTP"
        )
    elif algorithm == "auto":
        return None
    steps = config.num_speculative_tokens
    if steps < 0:
        steps = _own_width(algorithm, path, deepest=config.enable_adaptive_draft_step)
    verify = config.target_verify_width
    if verify > steps:
        raise ConfigError(
            f"--target_verify_width={verify}: {steps} tokens are drafted; allowed: -1 (all) or 0 to {steps}"
        )
    return DraftChoice(algorithm, path, steps, steps if verify < 0 else verify, shipped)


def shipped_drafter(algorithm: str) -> Path:
    return Path(str(resources.files("xspec") / "drafters" / SHIPPED[algorithm]))


def _given(config: SpeculationConfig) -> Path | None:
    if not config.draft_model:
        return None
    path = Path(config.draft_model).expanduser()
    check_directory(path)
    return path


def _algorithm_of(path: Path) -> str:
    """DSpark drafters say how wide their block is, in one dialect or another; MTP ones never do."""
    raw = read_json(path / "config.json")
    nests = ("dspark_config", "dflash_config")
    block = any("block_size" in key for key in raw) or any(nest in raw for nest in nests)
    return "DSpark" if block or raw.get("speculators_model_type") else "MTP"


def _own_width(algorithm: str, path: Path | None, *, deepest: bool) -> int:
    """The width a drafter's config names: the block of a DSpark drafter, what an MTP one recommends.

    `deepest`: the most steps an MTP drafter is good for at all (max_speculative_tokens), where it says so:
    the depth is chosen round by round then.
    """
    raw = read_json(path / "config.json") if path is not None else {}
    nested = {**raw.get("dflash_config", {}), **raw.get("dspark_config", {}), **raw}
    keys = ("block_size", "dspark_block_size") if algorithm == "DSpark" else ("num_speculative_tokens",)
    if deepest and algorithm == "MTP":
        keys = ("max_speculative_tokens", *keys)
    for key in keys:
        if isinstance(nested.get(key), int) and nested[key] > 0:
            return int(nested[key])
    where = path or "the target's checkpoint"
    raise ConfigError(
        f"--num_speculative_tokens=-1 takes the width from the drafter, but {where} names none "
        f"({' or '.join(keys)}): set --num_speculative_tokens"
    )
