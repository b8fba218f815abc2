"""Adaptive speculation configs as files and presets, and whether one fits an engine."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from pathlib import Path

from xspec.cost.read import read_json
from xspec.errors import ConfigError, UnsupportedError
from xspec.policy.geometry import CandidateGeometry
from xspec.policy.spec_config import AdaptiveSpecConfig, parse_spec_config

FLAG = "--adaptive_spec_config"

PRESETS = ("huginn_0125", "nanbeige4.2_3b", "ouro_1.4b")
"""Shipped in `calib_configs/`, by file name without its ending."""


def load_spec_config(file: str) -> AdaptiveSpecConfig:
    """The config that the flag names: a preset's name, or the path of a file. ConfigError says what is wrong
    with it, UnsupportedError everything that is."""
    where = f"{FLAG}={file}"
    if file in PRESETS:
        return preset(file)
    try:
        content = read_json(Path(file).expanduser().read_bytes())
    except OSError as error:
        presets = ", ".join(PRESETS)
        raise ConfigError(
            f"{where}: cannot be read: {error.strerror or error}; allowed: a file, or a preset: {presets}"
        ) from error
    except (ValueError, RecursionError) as error:  # JSON and encoding errors are ValueErrors
        raise ConfigError(f"{where}: not JSON: {error}") from error
    return parse_spec_config(content, where)


def preset(name: str) -> AdaptiveSpecConfig:
    """One of PRESETS. Its numbers are published ones, see its `provenance`."""
    file = importlib.resources.files("calib_configs") / f"{name}.json"
    return parse_spec_config(read_json(file.read_bytes()), f"calib_configs/{name}.json")


def check_fit(config: AdaptiveSpecConfig, geometry: CandidateGeometry, where: str) -> None:
    """UnsupportedError with every candidate that the engine cannot run, and why."""
    reasons = list(_misfits(config, geometry))
    if reasons:
        raise UnsupportedError(f"{where} does not fit this engine", reasons)


def _misfits(config: AdaptiveSpecConfig, geometry: CandidateGeometry) -> Iterator[str]:
    loops = config.model.loops
    if loops != geometry.loops:
        found = "no loops" if loops is None else f"{loops} loops"
        has = "is not looped" if geometry.loops is None else f"has {geometry.loops}"
        yield f"model.loops: the candidates are for {found}, the target of this launch {has}"
    for index, one in enumerate(config.ranges):
        for j, candidate in enumerate(one.candidates):
            where = f"ranges[{index}].candidates[{j}] ({candidate})"
            if candidate.draft_steps not in geometry.steps:
                prepared = ", ".join(map(str, geometry.steps))
                yield (
                    f"{where}: draft_steps {candidate.draft_steps} is not prepared; allowed: {prepared} (see "
                    "--num_speculative_tokens)"
                )
            depth = candidate.draft_loops
            if loops == geometry.loops and depth is not None and depth not in geometry.depths:
                allowed = ", ".join(map(str, geometry.depths))
                yield f"{where}: draft_loops {depth} is none of this drafter's; allowed: {allowed}"
