"""The native code under the compiler's sanitizers: no access out of place, no undefined step, no race."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SOURCES = REPO / "xspec" / "kernels" / "csrc"
NATIVE = Path(__file__).resolve().parent / "native"
MAIN, DRAWS, ROWS = (NATIVE / f"{name}_main.cpp" for name in ("stack", "draw", "rows"))

pytestmark = pytest.mark.slow


ADDRESS, THREAD = "address,undefined", "thread"


class Sanitized:
    """The native sources compiled with `-fsanitize=kind`, each once; `link` adds a driver."""

    def __init__(self, folder: Path, kind: str) -> None:
        compiler = shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        self._folder, self._compiler = folder, compiler
        self._options = ["-std=c++17", "-O1", "-g", "-w", f"-fsanitize={kind}", "-pthread", f"-I{SOURCES}"]
        self._options.append("-fno-sanitize-recover=all")
        probe = folder / "probe.cpp"
        probe.write_text("int main() { return 0; }\n")
        if self._run(str(probe), "-o", str(folder / "probe")).returncode:
            pytest.skip(f"this compiler has no -fsanitize={kind}")
        with ThreadPoolExecutor(2) as pool:
            self._objects = list(pool.map(self._compile, sorted(SOURCES.glob("*.cpp"))))

    def link(self, driver: Path) -> Path:
        program = self._folder / f"{driver.parent.name}_{driver.stem}"
        done = self._run(self._compile(driver), *self._objects, "-o", str(program))
        assert done.returncode == 0, done.stderr
        return program

    def _compile(self, source: Path) -> str:
        to = str(self._folder / f"{source.stem}.o")
        done = self._run("-c", str(source), "-o", to)
        assert done.returncode == 0, done.stderr
        return to

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self._compiler, *self._options, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Sanitized:
    return Sanitized(tmp_path_factory.mktemp("address"), ADDRESS)


@pytest.fixture(scope="module")
def thread(tmp_path_factory: pytest.TempPathFactory) -> Sanitized:
    return Sanitized(tmp_path_factory.mktemp("thread"), THREAD)


def run(program: Path, seed: int, rounds: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), str(seed), str(rounds)], capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("driver", "kind", "rounds"),
    [
        (MAIN, "address", 60),
        (MAIN, "thread", 15),
        (DRAWS, "address", 150),
        (DRAWS, "thread", 60),
        (ROWS, "address", 3000),  # one thread alone calls it
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else str(value),
)
def test_random_passes(driver: Path, kind: str, rounds: int, request: pytest.FixtureRequest) -> None:
    program = request.getfixturevalue(kind).link(driver)
    for seed in range(3):
        done = run(program, seed, rounds)
        assert done.returncode == 0 and done.stdout == "ok\n", f"{done.stdout}\n{done.stderr}"


def test_the_address_sanitizer_sees_a_page_too_many(address: Sanitized, tmp_path: Path) -> None:
    """A driver whose page table names a page past the slab must be caught, or the test above says nothing."""
    text = MAIN.read_text()
    for right, wrong in (
        ("pages = sequences * width + 1;", "pages = sequences * width;"),
        ("shuffled(static_cast<size_t>(pages - 1))", "shuffled(static_cast<size_t>(pages))"),
        ("i < pages - 1; ++i) shuffled", "i < pages; ++i) shuffled"),
    ):
        assert right in text
        text = text.replace(right, wrong)
    source = tmp_path / MAIN.name
    source.write_text(text)
    done = run(address.link(source), 1, 20)
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr
