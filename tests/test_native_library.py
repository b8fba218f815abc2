"""Loading the native library, its team across a fork, its memory, and its ops as torch operators."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from xspec.errors import EngineError
from xspec.kernels import native
from xspec.kernels.cpu_native import NativeKernels
from xspec.kernels.native import HUGE_PAGE_BYTES, NativeLibrary, Team
from xspec.kernels.native_linear import NativeLinear

BF16 = torch.bfloat16


def test_another_build_is_refused(library: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(native, "VERSION", native.VERSION + 1)
        with pytest.raises(EngineError, match="install it again"):
            NativeLibrary(library.path)
    with monkeypatch.context() as patch:
        patch.setattr(native, "STRUCTS", (*native.STRUCTS[1:], native.CLinear))
        with pytest.raises(EngineError, match="install it again"):
            NativeLibrary(library.path)
    assert NativeLibrary(library.path).isa("no such set") is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told(library: NativeLibrary) -> None:
    """Its copy of the team has no threads: a call must fail, not wait forever."""
    kernels = NativeKernels(Team(library, 2))
    x, weight = torch.randn(2, 256).to(BF16), torch.randn(32, 256).to(BF16)
    linear = kernels.pack_linear(weight)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            linear(x)
        except EngineError as error:
            status = 0 if "fork" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert linear(x).isfinite().all()


def test_buffers_lie_side_by_side_and_never_overlap(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "CHUNK_BYTES", 4096)
    memory = native.Memory(library)
    sizes = [1, 64, 65, 1000, 3000, 9000, 5, 0, 4096, 7]
    buffers = [memory.take(size) for size in sizes]
    for value, buffer in enumerate(buffers):
        buffer.fill_(value)
    for value, (size, buffer) in enumerate(zip(sizes, buffers, strict=True)):
        assert buffer.shape == (size,) and bool((buffer == value).all())
        assert size == 0 or buffer.data_ptr() % 64 == 0
    gaps = [b.data_ptr() - a.data_ptr() for a, b in zip(buffers, buffers[1:], strict=False)]
    assert gaps[:3] == [64, 64, 128]
    zeros = memory.zeros((2, 3, 16, 32), BF16)
    assert zeros.shape == (2, 3, 16, 32) and zeros.dtype == BF16 and zeros.count_nonzero() == 0
    assert zeros.data_ptr() % HUGE_PAGE_BYTES == 0


class SlowMemory:
    """Addresses in place of memory, so slow to cut that another thread gets in between."""

    def __init__(self, addresses: range) -> None:
        self.addresses = addresses

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, part: slice) -> SlowMemory:
        time.sleep(0.005)
        return SlowMemory(self.addresses[part])


def test_engines_that_load_at_the_same_time_share_no_buffer(library: NativeLibrary) -> None:
    memory = native.Memory(library)
    memory._left = SlowMemory(range(1 << 20))  # type: ignore[assignment]
    taken: list[int] = []

    def load() -> None:
        for _ in range(4):
            taken.extend(memory.take(64).addresses)  # type: ignore[attr-defined]

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 16 * 64


STARVED = """
import resource
from xspec.errors import EngineError
from xspec.kernels.native import Team, library_path, load_library

library = load_library(library_path())
used = 4096 * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    Team(library, 4096)
except (EngineError, MemoryError) as error:
    print("refused:", error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_threads_the_system_does_not_have_are_an_error(library: NativeLibrary) -> None:
    """Those that were started end; the process does not."""
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("refused: xs_team_create"), done.stderr


def test_the_operators_are_as_declared(library: NativeLibrary) -> None:
    """Fake results have the shapes of real ones; nothing is written but what the schema says."""
    team = native.shared_team(library, torch.get_num_threads())
    NativeKernels(team)
    weight, x = torch.randn(64, 32).to(BF16), torch.randn(3, 32).to(BF16)
    packed = NativeLinear(team, weight, None, gated=True)._packed
    slab = torch.randn(2, 4, 16, 32).to(BF16)
    where = (torch.tensor([0, 0, 1]), torch.tensor([3, 4, 20]), torch.tensor([[1, 2], [3, 1]]))
    calls = {
        "linear": (x, *packed, None, 0, True, 64),
        "rms_norm": (x, weight[0], 1e-5),
        "store_kv": (slab, torch.randn(3, 2, 32).to(BF16), torch.tensor([1, 17, 63]), True),
        "paged_attention": (torch.randn(3, 2, 32).to(BF16), slab, *where, 0, 0.2),
    }
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(torch.ops.xspec, name), arguments)
