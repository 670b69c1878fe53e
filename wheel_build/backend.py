"""The build backend: setuptools, and wheels that carry the compiled CPU kernels.

    pip wheel .                                     # kernels for every instruction set
    pip wheel . --config-settings=isa=avx2,portable # for these only
    pip wheel . --config-settings=isa=none          # none: a wheel of sources

A wheel holds one library per instruction set (`isa_levels()`, ops/native/instruction_sets.py) and
per entry of `LIBRARIES` (ops/native/build.py). A machine on which the wheel is installed loads the
libraries of one instruction set, and needs no compiler. The libraries use torch's stable ABI and
therefore fit every torch that the project allows.

A wheel whose kernels cannot be compiled is not built: the error names the remedies. A wheel of
sources, an editable install and a checkout compile the kernels on first use. Building a wheel of
sources or an editable install needs only setuptools.

`platform_wheel.py` chooses the wheel's tag.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = (
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
)

_ROOT = Path(__file__).resolve().parents[1]
_NO_KERNELS = "none"
_NEEDED = ("torch", "filelock")  # to compile: torch's headers, and what build.py imports


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """The requirements of setuptools and, if kernels are compiled, of the compilation."""
    needed = build_meta.get_requires_for_build_wheel(config_settings)
    if (config_settings or {}).get("isa") == _NO_KERNELS:
        return needed
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*needed, *(each for each in project["dependencies"] if each.startswith(_NEEDED))]


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Compile the kernels into the tree, pack the wheel, and remove the kernels again.

    Returns:
        The file's name.

    Raises:
        SystemExit: the setting `isa` names an unknown instruction set, or the kernels cannot be
            compiled; the text names the remedies.
    """
    settings = dict(config_settings or {})
    chosen = str(settings.pop("isa", ""))
    folder = _ROOT / "ops" / "native" / "prebuilt"
    shutil.rmtree(folder, ignore_errors=True)
    # setuptools also packs what an earlier build has left in its own folder.
    for left in (_ROOT / "build").glob("lib*/ostinato/ops/native"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        if chosen != _NO_KERNELS:
            _compile([level for level in chosen.split(",") if level])
        return build_meta.build_wheel(wheel_directory, settings, metadata_directory)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(chosen: list[str]) -> None:
    """Put the libraries of these instruction sets into the tree; if none is chosen, of all sets."""
    sys.path.insert(0, str(_ROOT))
    try:
        from ostinato.ops.native import build
        from ostinato.ops.native.instruction_sets import isa_levels
    except ImportError as error:
        raise SystemExit(_advice(error)) from error
    levels = isa_levels()
    if unknown := [level for level in chosen if level not in levels]:
        raise SystemExit(
            f"--config-settings=isa={','.join(chosen)}: unknown: {', '.join(unknown)}; choose from "
            f"{', '.join(levels)}, or {_NO_KERNELS}"
        )
    build.PREBUILT_DIR.mkdir()
    try:
        for level in chosen or levels:
            for library in build.LIBRARIES:
                shutil.copyfile(build.build(library, level), build.prebuilt_path(library, level))
    except (build.NativeBuildError, PackageNotFoundError) as error:
        raise SystemExit(_advice(error)) from error


def _advice(error: Exception) -> str:
    return (
        f"the CPU kernels of the wheel cannot be compiled: {error}\n"
        "Install g++; without build isolation also torch and filelock. Or build a wheel of sources "
        f"with --config-settings=isa={_NO_KERNELS}: it compiles the kernels on first use, so its "
        "user needs a compiler."
    )
