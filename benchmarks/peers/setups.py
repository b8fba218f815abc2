"""Named configurations of the peers, and how the process of each is started and loaded.

A kind is an engine with its driver and its virtual environment; a setup is a kind with options of its driver.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xspec.errors import ConfigError
from xspec.models.locate import locate_model

REPO = Path(__file__).resolve().parents[2]
PACKAGE = "benchmarks.peers.drivers"


@dataclass(frozen=True, slots=True)
class Kind:
    """`weights` is what the engine reads; `folder` its virtual environment, empty for the project's own."""

    driver: str
    weights: str  # own, gguf, hf or openvino
    folder: str = ""


KINDS: Mapping[str, Kind] = {
    "xspec": Kind("xspec_driver", "own"),
    "vllm": Kind("vllm_driver", "hf", "vllm"),
    "llamacpp": Kind("llamacpp_driver", "gguf", "llamacpp"),
    "hf": Kind("transformers_driver", "hf", "hf"),
    "openvino": Kind("openvino_driver", "openvino", "openvino"),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """One line of the table."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


PLAIN: Mapping[str, Any] = {"num_speculative_tokens": 0}
ADAPTIVE: Mapping[str, Any] = {"speculative_algorithm": "MTP", "enable_adaptive_draft_step": True}
GGUF: Mapping[str, Any] = {"quantization": "gguf"}

NAMED: Mapping[str, Setup] = {
    setup.name: setup
    for setup in (
        Setup("xspec-plain", "xspec", PLAIN),
        Setup("xspec-adaptive", "xspec", ADAPTIVE),
        Setup("xspec-gguf", "xspec", {**GGUF, **PLAIN}),
        Setup("xspec-gguf-adaptive", "xspec", {**GGUF, **ADAPTIVE}),
        Setup("vllm", "vllm"),
        Setup("vllm-ngram", "vllm", {"ngram": 4}),
        Setup("llamacpp", "llamacpp"),
        Setup("hf", "hf"),
        Setup("hf-lookup", "hf", {"lookup": 4}),
        Setup("openvino", "openvino"),
        Setup("openvino-lookup", "openvino", {"lookup": 4}),
    )
}


@dataclass(frozen=True, slots=True)
class Places:
    """Where everything lies. `peers` holds a virtual environment a kind; empty `gguf`: the embedded model."""

    peers: Path
    gguf: str
    hf: Path
    openvino: Path
    tables: Path
    pythons: Mapping[str, str] = field(default_factory=dict)  # by kind, instead of the folder in `peers`


@dataclass(frozen=True, slots=True)
class Limits:
    """What every engine is told alike."""

    threads: int
    concurrency: int  # most requests at once
    max_model_len: int


def parse_setup(text: str) -> Setup:
    """`NAME` of a known one, or `NAME=KIND[:option=value,...]` for one's own."""
    name, given, rest = text.partition("=")
    if not given:
        if name not in NAMED:
            raise ConfigError(f"--config {text}: allowed: {', '.join(NAMED)}, or NAME=KIND:option=value,...")
        return NAMED[name]
    kind, _, listed = rest.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, listed.split(",")):
        option, equals, value = part.partition("=")
        if not (option and equals):
            raise ConfigError(f"--config {text}: {part} is no option=value")
        options[option] = _value(value)
    if not name or kind not in KINDS:
        raise ConfigError(f"--config {text}: kind {kind or 'missing'}; allowed: {', '.join(KINDS)}")
    return Setup(name, kind, options)


def _value(text: str) -> str | int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def parse_setups(texts: list[str]) -> list[Setup]:
    """Those of every --config, whose commas part names but belong to the options of one's own setup."""
    setups = [
        parse_setup(part) for text in texts for part in ([text] if "=" in text else text.split(",")) if part
    ]
    names = [setup.name for setup in setups]
    if len(set(names)) < len(names) or not names:
        raise ConfigError(f"--config {' '.join(names)}: allowed: at least one, each name once")
    return setups


def command(setup: Setup, places: Places) -> list[str]:
    """How its driver is started. ConfigError where its environment is missing."""
    kind = KINDS[setup.kind]
    python = Path(places.pythons.get(setup.kind) or sys.executable)
    if kind.folder and setup.kind not in places.pythons:
        python = places.peers / kind.folder / "bin" / "python"
    if not python.is_file():
        raise ConfigError(
            f"{setup.name}: there is no {python}; benchmarks/peers/README.md tells how to make it, "
            f"--python {setup.kind}=PATH names another"
        )
    return [str(python), "-m", f"{PACKAGE}.{kind.driver}"]


def load_options(setup: Setup, places: Places, limits: Limits) -> dict[str, Any]:
    """Options of the load message. ConfigError where the weights are missing."""
    more: dict[str, Any] = {}
    match KINDS[setup.kind].weights:
        case "own":  # xspec finds the embedded model by the empty name, and its drafters with it
            model = places.gguf
            more["tables"] = str(places.tables.absolute())
        case "gguf":
            model = str(locate_model(places.gguf).absolute())
        case weights:
            folder = places.hf if weights == "hf" else places.openvino
            if not folder.is_dir():
                raise ConfigError(f"{setup.name}: there is no {folder}; benchmarks/peers/README.md makes it")
            model = str(folder.absolute())
    return {
        "model": model,
        "threads": limits.threads,
        "concurrency": limits.concurrency,
        "max_model_len": limits.max_model_len,
        **more,
        **setup.options,
    }


def environment(threads: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Of a driver: it finds this package, sees only local files, and its libraries the number of threads."""
    kept = {name: value for name, value in environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    return kept | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
