"""Builds the native kernels beside the Python package; everything else is in pyproject.toml.

They are optional: without a C++17 compiler the install goes through and torch computes. No flag names the
machine that builds: each instruction set has its own files and is chosen when the library is loaded.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("xspec", "kernels", "csrc")
OPTIONS = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
    "-Wno-uninitialized",
)


class BuildLibrary(build_ext):
    """A plain shared library under an extension's name: it has a C interface and no Python in it."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # no PyInit function to export


setup(
    ext_modules=[
        Extension(
            "xspec.kernels._native",
            sorted(path.as_posix() for path in SOURCES.glob("*.cpp")),
            depends=sorted(path.as_posix() for path in SOURCES.glob("*") if path.suffix in (".h", ".inc")),
            language="c++",
            extra_compile_args=list(OPTIONS),
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
)
