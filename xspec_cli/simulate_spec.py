"""`xspec simulate` by costs of (K, d): every fixed pair and the policies of --speculation_policy, over match
flags that were recorded. No model, no device, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from xspec.core.shapes import BucketGrid
from xspec.cost.bundle import Bundle
from xspec.errors import ConfigError
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.make_spec import ACCEPTANCE_EMA, GOODPUT
from xspec.policy.spec_config import AdaptiveSpecConfig
from xspec.policy.spec_files import FLAG, check_fit, load_spec_config
from xspec.sim.compare import Contender
from xspec.sim.looped import LoopedRecorded, fixed_pairs, read_flags, speculation_contender
from xspec_cli.flags_resolve import Launch
from xspec_cli.simulate_flags import SYNTHETIC

POSITIONS_ONLY = ("policy_config", "trace", "acceptance", *SYNTHETIC)
"""Flags that say nothing of (K, d)."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """What chooses (K, d). `config` None: only goodput can, with its default settings."""

    geometry: CandidateGeometry
    config: AdaptiveSpecConfig | None


def pairs_of(costs: Bundle, launch: Launch) -> Pairs:
    """ConfigError or UnsupportedError where table and --adaptive_spec_config do not fit each other."""
    pairs, file = costs.effective.geometry.pairs, launch.config.speculation.adaptive_spec_config
    depths = tuple(sorted({depth for _, depth in pairs if depth is not None}))
    if not depths:
        raise ConfigError(
            f"--cost_table={launch.value('cost_table')}: costs of K without loops, for which no match flags "
            "are recorded; allowed: costs of (K, d), of draft_step or of target_verify"
        )
    config = load_spec_config(file) if file else None
    # Only the idealized model reads the number of loops, and only where nothing was measured.
    loops = depths[-1] + 1 if config is None or config.model.loops is None else config.model.loops
    lanes = BucketGrid(costs.effective.geometry.request_buckets)
    geometry = CandidateGeometry(lanes, tuple(sorted({steps for steps, _ in pairs})), depths, loops)
    if config is not None:
        check_fit(config, geometry, f"{FLAG}={file}")
    return Pairs(geometry, config)


def recorded_flags(launch: Launch, pairs: Pairs) -> LoopedRecorded:
    """The population of --match_flags. ConfigError if it is not given, or of other depths."""
    stray = [name for name in POSITIONS_ONLY if name in launch.given]
    if stray:
        raise ConfigError(
            "\n".join(
                f"--{name} is not read with costs of (K, d), which --match_flags=FILE says all of"
                for name in stray
            )
        )
    file = str(launch.value("match_flags"))
    if not file:
        raise ConfigError(
            "--match_flags=FILE is needed with costs of (K, d): which drafts match, as xspec calibrate "
            "--match_flags_output writes it"
        )
    try:
        recorded = read_flags(Path(file).expanduser(), pairs.geometry.max_steps)
    except ConfigError as error:
        raise ConfigError(f"--match_flags={error}") from error
    missing = [depth for depth in pairs.geometry.depths if depth not in recorded.depths]
    if missing:
        raise ConfigError(
            f"--match_flags={file}: has depths {_listed(recorded.depths)}, but costs are of depths "
            f"{_listed(pairs.geometry.depths)}; allowed: flags of all of these"
        )
    return _of_depths(recorded, pairs.geometry.depths)


def _of_depths(recorded: LoopedRecorded, depths: tuple[int, ...]) -> LoopedRecorded:
    """Without the depths that nothing drafts with: policies take flags in the order of their own."""
    columns = [recorded.depths.index(depth) for depth in depths]
    streams = tuple(replace(stream, flags=stream.flags[:, columns]) for stream in recorded.streams)
    return replace(recorded, streams=streams, depths=depths)


def spec_contenders(costs: Bundle, pairs: Pairs) -> Iterator[Contender]:
    """Plain rounds and every pair with costs; then what adapts."""
    measured = {f"{steps}@{depth}" for steps, depth in costs.effective.geometry.pairs}
    for contender in fixed_pairs(pairs.geometry):
        if contender.name == "plain" or contender.name in measured:
            yield contender
    for policy in (ACCEPTANCE_EMA, GOODPUT) if pairs.config is not None else (GOODPUT,):
        yield speculation_contender(policy, pairs.config, costs.table, pairs.geometry)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
