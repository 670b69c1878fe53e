"""The build backend: setuptools, and wheels that carry the compiled CPU kernels.

    pip wheel .                                     # kernels for every instruction set
    pip wheel . --config-settings=isa=avx2,portable # for these only

A wheel holds one library per instruction set and per entry of `LIBRARIES` (ops/native/build.py).
The machine that runs it picks one, so its user needs no compiler. The libraries use torch's stable
ABI and therefore fit every torch that the project allows. If there is no compiler or no torch at
build time, the wheel holds the sources alone. They are then compiled on first use, as in an
editable install and in a checkout, which need setuptools alone to be made.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
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
_NEEDED = ("torch", "filelock")  # to compile: torch's headers, and what build.py imports


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    """The project's own requirements on the packages that compiling needs."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [each for each in project["dependencies"] if each.startswith(_NEEDED)]
    return [*build_meta.get_requires_for_build_wheel(config_settings), *needed]


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Compiles the kernels into the tree, packs the wheel, removes them again; the file's name."""
    settings = dict(config_settings or {})
    levels = [level for level in str(settings.pop("isa", "")).split(",") if level]
    sys.path.insert(0, str(_ROOT))
    from ostinato.ops.native import build, instruction_sets

    folder = build.PREBUILT_DIR
    shutil.rmtree(folder, ignore_errors=True)
    # setuptools packs whatever an earlier build has left in its own folder.
    shutil.rmtree(_ROOT / "build" / "lib" / "ostinato" / "ops" / "native", ignore_errors=True)
    try:
        folder.mkdir()
        for level in levels or instruction_sets.isa_levels():
            for library in build.LIBRARIES:
                shutil.copyfile(build.build(library, level), build.prebuilt_path(library, level))
    except (build.NativeBuildError, PackageNotFoundError) as error:
        print(f"the wheel has no compiled CPU kernels: {error}", file=sys.stderr)
        shutil.rmtree(folder)
    else:
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        settings["--build-option"] = [f"--plat-name={platform}"]
    try:
        return build_meta.build_wheel(wheel_directory, settings, metadata_directory)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
