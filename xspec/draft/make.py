"""Which drafter an algorithm's name means. The only module that knows them all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from xspec.draft.base import Drafter
from xspec.draft.dspark import DSparkDrafter
from xspec.draft.looped import LoopedDrafter
from xspec.draft.mtp import MtpDrafter
from xspec.errors import ConfigError
from xspec.kernels.base import Kernels
from xspec.models.base import Target

ALGORITHMS = ("MTP", "DSpark", "Looped")


def load_drafter(
    algorithm: str,
    path: Path | None,
    *,
    model: Path,
    target: Target,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    steps: int,
    quantization: str = "none",
    loops: Sequence[int] = (),
) -> Drafter:
    """--speculative_algorithm (any case) over --draft_model `path`, up to --num_speculative_tokens `steps`.

    `path` None: what the target's own files at `model` bring. `quantization`: of its linears, see
    models.quantised. `loops`: what a looped target may draft with. The drafter still has to be attached.
    ConfigError names the flag or the checkpoint's key that does not fit.
    """
    if target.spec.loops > 1 and algorithm.lower() != "looped":
        raise ConfigError(
            f"--speculative_algorithm={algorithm}: a looped target ({target.spec.model_type}) has no such "
            "drafter; allowed: Looped"
        )
    match algorithm.lower():
        case "looped":
            return LoopedDrafter.load(target, kernels=kernels, steps=steps, depths=loops)
        case "mtp":
            return MtpDrafter.load(
                path,
                model=model,
                target=target,
                kernels=kernels,
                dtype=dtype,
                device=device,
                steps=steps,
                quantization=quantization,
            )
        case "dspark":
            if path is None:
                raise ConfigError(f"--speculative_algorithm={algorithm} needs --draft_model=DIR")
            return DSparkDrafter.load(
                path,
                target=target,
                kernels=kernels,
                dtype=dtype,
                device=device,
                steps=steps,
                quantization=quantization,
            )
    raise ConfigError(f"--speculative_algorithm={algorithm}: allowed: {', '.join(ALGORITHMS)}")
