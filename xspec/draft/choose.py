"""Which drafter a configuration means, before anything is loaded: shipped, given, or the target itself.

Reads config files only. What a checkpoint holds is the loaders' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from xspec.config import SpeculationConfig
from xspec.draft.checkpoint import check_directory
from xspec.errors import ConfigError
from xspec.models.locate import is_gguf
from xspec.models.looped import LoopedConfig, with_exit_threshold
from xspec.models.registry import LOOPED, read_config
from xspec.models.safetensors_loader import read_json

SHIPPED = {"MTP": "smollm2_135m_mtp", "DSpark": "smollm2_135m_dspark"}
"""Drafters of the embedded model that come with the package, by algorithm."""

SHIPPED_DEFAULT = "MTP"
"""The faster of them at one request."""

LOOPED_STEPS = 4
"""K of a looped target that is given none: it drafts as many tokens as it is asked for."""

USUAL_STEPS = (1, 2, 4, 8)
"""K of a policy that is given no candidates."""

MANY_LOOPS = 5
"""With more loops than these not every d is a candidate unasked."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """`path` None: MTP layers inside the target's checkpoint, or its own first loops. `verify`: drafts
    verified a request.

    `shipped`: it came with the package, for the embedded model. `loops`: what a looped target may draft with,
    ascending. `widths`: the K that a policy may choose; (): what the control at hand says.
    """

    algorithm: str
    path: Path | None
    steps: int
    verify: int
    shipped: bool = False
    loops: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidates:
    """The K and d that --speculation_policy chooses among, ascending; none: those that pay as a rule."""

    steps: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()

    def widths(self, most: int) -> tuple[int, ...]:
        """All K, of up to `most` where they are not given."""
        return self.steps or tuple(sorted({*(k for k in USUAL_STEPS if k < most), most}))

    def loops(self, loops: int) -> tuple[int, ...]:
        """All d of a target with so many loops."""
        every = range(1, loops)
        few = (loops // 8, loops // 4, loops // 2)
        return self.depths or tuple(every if loops <= MANY_LOOPS else sorted({max(1, d) for d in few}))


def choose_drafter(
    config: SpeculationConfig,
    *,
    embedded: bool,
    model: Path | None = None,
    candidates: Candidates | None = None,
    exit_threshold: float = 0.0,
) -> DraftChoice | None:
    """None: plain decoding. `embedded`: the target came as a package; `model`: the target's files.

    `candidates`: a policy chooses among them, None: none does. `exit_threshold`: --early_exit_threshold.
    """
    if config.num_speculative_tokens == 0:
        return None
    algorithm, path = config.speculative_algorithm, _given(config)
    looped = None if model is None else _looped_config(model)
    loops = 1 if looped is None else looped.loops
    if algorithm == "auto" and path is None and candidates is not None and loops > 1:
        algorithm = "Looped"
    if algorithm == "Looped":
        choice = _choose_looped(config, path, loops, candidates)
        if looped is not None:
            _check_full_depth(looped, exit_threshold, str(model))
        return choice
    if config.draft_loops != -1:
        raise ConfigError(
            f"--draft_loops={config.draft_loops}: only --speculative_algorithm=Looped drafts with loops, "
            f"found {algorithm}; allowed: -1"
        )
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
    if steps < 0 and candidates is not None and candidates.steps:
        steps = max(candidates.steps)
    if steps < 0:
        steps = _own_width(algorithm, path, deepest=config.enable_adaptive_draft_step)
    verify = config.target_verify_width
    if verify > steps:
        raise ConfigError(
            f"--target_verify_width={verify}: {steps} tokens are drafted; allowed: -1 (all) or 0 to {steps}"
        )
    widths = () if candidates is None else candidates.widths(steps)
    return DraftChoice(algorithm, path, steps, steps if verify < 0 else verify, shipped, widths=widths)


def loops_of(model: Path) -> int:
    """How often the model at `model` (models/locate.py) runs its layers: D, 1 where they are not looped."""
    config = _looped_config(model)
    return 1 if config is None else config.loops


def _looped_config(model: Path) -> LoopedConfig | None:
    """None: a model that runs its layers once."""
    if is_gguf(model):
        return None
    config = read_config(read_json(model / "config.json"), str(model))
    return config if isinstance(config, LoopedConfig) else None


def _check_full_depth(config: LoopedConfig, asked: float, where: str) -> None:
    """The states that drafting leaves behind are those of all loops: no row may end after fewer."""
    with_exit_threshold(config, asked or None, where)  # refuses what has no gate
    threshold = asked or config.exit_threshold or 1.0
    if threshold < 1.0:
        raise ConfigError(
            f"--early_exit_threshold={threshold:g}{'' if asked else ' (the model says so)'} with "
            "--speculative_algorithm=Looped, whose states are those of full depth; allowed: 1"
        )


def _choose_looped(
    config: SpeculationConfig, path: Path | None, loops: int, candidates: Candidates | None
) -> DraftChoice:
    depth, steps, verify = config.draft_loops, config.num_speculative_tokens, config.target_verify_width
    if loops < 2:
        raise ConfigError(
            "--speculative_algorithm=Looped drafts with the first loops of a looped model "
            f"({', '.join(sorted(LOOPED))}); this one runs its layers once"
        )
    if path is not None:
        raise ConfigError(f"--draft_model={path}: a looped model drafts for itself; allowed: empty")
    if verify != -1 and candidates is None:  # beside a policy it is one of the reasons given at once
        raise ConfigError(f"--target_verify_width={verify}: with Looped all drafts are verified; allowed: -1")
    if candidates is not None:
        steps = max(candidates.steps or USUAL_STEPS) if steps < 0 else steps
        depths = candidates.loops(loops)
        return DraftChoice("Looped", None, steps, steps, loops=depths, widths=candidates.widths(steps))
    depth = loops // 2 if depth < 0 else depth
    if not 1 <= depth < loops:
        raise ConfigError(
            f"--draft_loops={depth}: this model has {loops} loops; "
            f"allowed: -1 or integers from 1 to {loops - 1}"
        )
    steps = LOOPED_STEPS if steps < 0 else steps
    return DraftChoice("Looped", None, steps, steps, loops=(depth,))


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
