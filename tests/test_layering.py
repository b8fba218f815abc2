"""The floor table of the architecture, held by reading every import.

A module imports lower floors, and on its own floor only what the table lists above it. The checks are
functions of a source tree, so that each of them is also shown to fail on a tree that breaks it.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PACKAGES = ("xspec", "xspec_cli")

# Packages or modules by floor, in order; the longest matching name decides. `nn.inputs` stands apart: kernels
# are written against it, and the layers of nn against kernels.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "xspec",
        "xspec.errors",
        "xspec.threads",
        "xspec.progress",
        "xspec.setting",
        "xspec.config",
        "xspec.core",
    ),
    ("xspec.text", "xspec.cost", "xspec.policy", "xspec.sched")
    + ("xspec.metrics_families", "xspec.metrics_speculation", "xspec.metrics", "xspec.trace", "xspec.sim"),
    ("xspec.nn.inputs", "xspec.kernels", "xspec.platform", "xspec.dist", "xspec.kv", "xspec.nn"),
    ("xspec.models", "xspec.verify", "xspec.draft"),
    ("xspec.exec", "xspec.calib", "xspec.train"),
    ("xspec.engine",),
    ("xspec.llm", "xspec.server", "xspec_cli"),
)
TORCH_FREE_FLOORS = 2
LINE_CAP = 380

# Words that name a device or something only one kind of device has.
DEVICE_WORDS = frozenset(
    ("cuda", "cudnn", "cublas", "cudagraph", "cudagraphs", "flashinfer", "npu", "ascend", "aclgraph", "atb")
    + ("hccl", "nccl", "rocm", "hip", "xpu", "mps", "mkldnn", "onednn", "amx")
)
NAMES_DEVICES = ("xspec.platform", "xspec.kernels")
# Flag names and choices are a user's words; the table and the config that holds them must spell them. So must
# `threads` the environment variables of the math libraries, which are set before any platform is imported.
SPELLS_FLAGS = re.compile(r"xspec\.config|xspec\.setting|xspec\.threads|xspec_cli\.flags(_\w+)?")

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "aiohttp",
    "jinja2",
    "prometheus_client",
)


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    imports: frozenset[str]  # absolute dotted names, of modules or of names inside them
    text: str
    tree: ast.Module


def read_modules(root: Path, packages: Sequence[str] = PACKAGES) -> dict[str, Module]:
    modules = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            modules[name] = Module(name, path, frozenset(imports_of(tree, name, is_package)), text, tree)
    return modules


def imports_of(tree: ast.Module, name: str, is_package: bool) -> Iterator[str]:
    """Everything imported anywhere in a module: inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".") if is_package else name.split(".")[:-1]
                kept = above[: len(above) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                yield f"{base}.{alias.name}"


def place_of(module: str, floors: Sequence[Sequence[str]] = FLOORS) -> tuple[int, int] | None:
    """(floor, position on it) of the table entry that covers a module; only `xspec` itself is no prefix."""
    best: tuple[int, int] | None = None
    length = -1
    for floor, entries in enumerate(floors):
        for position, entry in enumerate(entries):
            covers = module == entry or (entry != "xspec" and module.startswith(entry + "."))
            if covers and len(entry) > length:
                best, length = (floor, position), len(entry)
    return best


def edges(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Module -> project modules it imports. A package's own ancestors say nothing and are left out."""
    found: dict[str, set[str]] = {}
    for module in modules.values():
        targets = set()
        for name in module.imports:
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name and name != module.name and not module.name.startswith(name + "."):
                targets.add(name)
        found[module.name] = targets
    return found


def unplaced(modules: Mapping[str, Module]) -> list[str]:
    return [name for name in modules if place_of(name) is None and not is_bare_package(modules[name])]


def is_bare_package(module: Module) -> bool:
    """An __init__.py that holds nothing, such as that of nn, which spans two entries."""
    return module.path.name == "__init__.py" and not module.text.strip()


def upward(modules: Mapping[str, Module]) -> list[str]:
    found = []
    for name, targets in edges(modules).items():
        for target in sorted(targets):
            here, there = place_of(name), place_of(target)
            if here is not None and there is not None and there > here:
                found.append(
                    f"{name} (floor {here[0]}.{here[1]}) imports {target} (floor {there[0]}.{there[1]})"
                )
    return found


def cycles(modules: Mapping[str, Module]) -> list[str]:
    """Import cycles between modules, each as one path."""
    graph = edges(modules)
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


def torch_below(modules: Mapping[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        place = place_of(module.name)
        low = place is not None and place[0] < TORCH_FREE_FLOORS
        if low and any(name.split(".")[0] == "torch" for name in module.imports):
            found.append(module.name)
    return found


def devices_named(modules: Mapping[str, Module]) -> list[str]:
    found = []
    for module in modules.values():
        if SPELLS_FLAGS.fullmatch(module.name) or any(
            module.name == entry or module.name.startswith(entry + ".") for entry in NAMES_DEVICES
        ):
            continue
        prose = docstrings(module.tree)
        for node in ast.walk(module.tree):
            for word in words_of(node, prose) & DEVICE_WORDS:
                found.append(f"{module.name}:{getattr(node, 'lineno', 0)} names {word}")
    return found


def docstrings(tree: ast.Module) -> set[int]:
    """ids of the string nodes that are statements of their own: prose, which may name anything."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def words_of(node: ast.AST, prose: set[int]) -> set[str]:
    match node:
        case ast.Constant(value=str(text)) if id(node) not in prose:
            names = [text]
        case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text):
            names = [text]
        case ast.keyword(arg=str(text)):
            names = [text]
        case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
            names = [text]
        case ast.Import(names=aliases):
            names = [alias.name for alias in aliases]
        case ast.ImportFrom(module=base, names=aliases):
            names = [base or "", *(alias.name for alias in aliases)]
        case _:
            names = []
    return {word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def too_long(root: Path, folders: Sequence[str]) -> list[str]:
    found = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > LINE_CAP:
                found.append(f"{path.relative_to(root)}: {lines} lines")
    return found


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_modules(REPO)


CHECKS = (unplaced, upward, cycles, torch_below, devices_named)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_tree_keeps_the_table(check, modules: dict[str, Module]) -> None:
    assert len(modules) > 20
    assert check(modules) == []


def test_files_stay_short() -> None:
    assert too_long(REPO, (*PACKAGES, "benchmarks", "examples")) == []


@pytest.mark.parametrize(
    ("check", "files", "expected"),
    [
        (unplaced, {"xspec/nowhere.py": "x = 1\n"}, ["xspec.nowhere"]),
        (
            upward,
            {
                "xspec/core/a.py": "import typing\nif typing.TYPE_CHECKING:\n    import xspec.sched.b\n",
                "xspec/sched/b.py": "",
            },
            ["xspec.core.a (floor 0.6) imports xspec.sched.b (floor 1.3)"],
        ),
        (
            upward,
            {"xspec/policy/a.py": "def f():\n    from ..sched import b\n", "xspec/sched/b.py": ""},
            ["xspec.policy.a (floor 1.2) imports xspec.sched.b (floor 1.3)"],
        ),
        (
            cycles,
            {"xspec/core/a.py": "from . import b\n", "xspec/core/b.py": "from xspec.core.a import name\n"},
            ["xspec.core.a -> xspec.core.b -> xspec.core.a"],
        ),
        (
            torch_below,
            {"xspec/policy/a.py": "import torch.nn\n", "xspec/nn/b.py": "import torch\n"},
            ["xspec.policy.a"],
        ),
        (
            devices_named,
            {
                "xspec/exec/a.py": '"""May say cuda."""\nx = "cuda:0"  # cuda\n',
                "xspec/exec/b.py": "def f(t):\n    return t.is_cuda or use_npu_kernel()\n",
                "xspec/kernels/c.py": 'x = "mkldnn"\n',
                "xspec/config.py": 'x = "cuda"\n',
            },
            ["xspec.exec.a:2 names cuda", "xspec.exec.b:2 names cuda", "xspec.exec.b:2 names npu"],
        ),
    ],
    ids=["unplaced", "upward-typing", "upward-same-floor", "cycle", "torch", "devices"],
)
def test_each_check_can_fail(check, files: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert sorted(check(read_modules(tmp_path, ["xspec"]))) == expected


def test_a_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "xspec").mkdir()
    (tmp_path / "xspec" / "a.py").write_text("x = 1\n" * (LINE_CAP + 1))
    (tmp_path / "xspec" / "b.py").write_text("x = 1\n" * LINE_CAP)
    assert too_long(tmp_path, ["xspec"]) == [f"xspec/a.py: {LINE_CAP + 1} lines"]


def test_places() -> None:
    assert place_of("xspec.nn.inputs") == (2, 0)
    assert place_of("xspec.nn.linear") == (2, 5)
    assert place_of("xspec.text.tokenizer") == (1, 0)
    assert place_of("xspec.textual") is None
    assert place_of("xspec_cli.main") == (6, 2)


# Each module is imported in a forked child, so none sees what another loaded; `preload` is paid for once.
LONE_IMPORTS = """
import importlib, json, os, sys
names, preload, forbidden = json.load(sys.stdin)
for name in preload:
    importlib.import_module(name)
for name in names:
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            importlib.import_module(name)
            said = "".join(f" loads {heavy}" for heavy in forbidden if heavy in sys.modules)
        except BaseException as error:
            said = f" {type(error).__name__}: {error}"
        os.write(write, said.encode()[:4000])
        os._exit(0)
    os.close(write)
    said = b"".join(iter(lambda: os.read(read, 4096), b"")).decode()
    os.close(read)
    os.wait()
    if said:
        print(name + ":" + said)
"""


def lone_imports(
    names: Sequence[str], preload: Sequence[str], forbidden: Sequence[str], cwd: Path = REPO
) -> str:
    task = json.dumps([list(names), list(preload), list(forbidden)])
    done = subprocess.run(
        [sys.executable, "-c", LONE_IMPORTS], input=task, capture_output=True, text=True, cwd=cwd, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def on_low_floor(name: str) -> bool:
    place = place_of(name)
    return place is not None and place[0] < TORCH_FREE_FLOORS


def test_low_floors_import_alone_and_without_torch(modules: dict[str, Module]) -> None:
    names = [name for name in modules if on_low_floor(name)]
    assert "xspec" in names and "xspec.policy.base" in names
    assert lone_imports(names, [], ["torch", "transformers"]) == ""


def test_high_floors_import_alone(modules: dict[str, Module]) -> None:
    names = [name for name in modules if not on_low_floor(name)]
    assert "xspec.engine.api" in names
    assert lone_imports(names, ["torch", "aiohttp", "tokenizers"], ["transformers"]) == ""


def test_lone_import_reports_what_breaks(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_here\n")
    (tmp_path / "loads.py").write_text("import decimal\n")
    assert lone_imports(["broken", "loads"], [], ["decimal"], cwd=tmp_path) == (
        "broken: ModuleNotFoundError: No module named 'no_such_module_here'\nloads: loads decimal\n"
    )


@pytest.mark.parametrize("owner", ["xspec", "tests"])
async def test_the_loop_guard_catches_our_blocking_calls(loop_guard: None, owner: str) -> None:
    """The guard of conftest.py: it raises for a sleep in a file below xspec/, not for one in a test."""
    source = compile("import time\ndef nap():\n    time.sleep(0.001)\n", str(REPO / owner / "nap.py"), "exec")
    space: dict[str, object] = {}
    exec(source, space)
    nap = space["nap"]
    assert callable(nap)
    if owner == "tests":
        nap()
        return
    with pytest.raises(Exception, match="Blocking call to time.sleep"):
        nap()


def test_the_command_line_starts_light() -> None:
    """Start-up time, by its cause: --help must not pay for libraries it does not use."""
    script = f"import sys, xspec_cli.main; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=REPO, timeout=120
    )
    assert done.stdout.strip() == "[]", done.stderr
