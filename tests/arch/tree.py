"""The project's own Python files, for the tests of this folder."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("conf", "ops", "models", "graphs", "runtime", "api", "benchmarks")


def package_files() -> list[Path]:
    """Every module in the folders of the package and in `ostinato/`."""
    return sorted(
        file
        for folder in ("ostinato", *FOLDERS)
        for file in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in file.parts
    )


def source_files() -> list[Path]:
    """Every module, and every C++ source of the kernels."""
    native = ROOT / "ops" / "native"
    return sorted([*package_files(), *native.rglob("*.cpp"), *native.rglob("*.h")])


def name_of(file: Path) -> str:
    """Path from the root of the repository, for messages."""
    return file.relative_to(ROOT).as_posix()


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
